"""The effect of the approximations' settings on real activations: the error of attention's output, and the time.

    python bench/defaults.py -o reports/defaults --data DIR --checkpoints DIR

Queries, keys and values come from all layers of MiniLM, fine-tuned on SST-2 (for sentences, reviews and long documents)
and on SQuAD, on texts of each data set; calibration uses half of the texts, and errors are measured on the rest. Long
documents have 2,048 tokens, beyond 512 on a repeated position table. The error is that of a layer's output, relative to
exact attention and before the output projection, as a root mean square over its tokens, averaged over layers and
`SEEDS` draws. Time is the CPU time of one thread, the best of `PASSES` passes, with that of exact attention for
comparison.

Two rules choose a default. Settings that only cost time (iterations, bits): the smallest value whose error exceeds that
of the largest by at most `FREE` on every data set. Settings that trade quality for time: unchanged, unless another
value is cheaper and more accurate by more than `FREE`, to ignore noise, on every data set. Frozen centroids are never a
default: they need a calibration text. Writes `record.json` and, from it, `report.md` and `defaults.svg`; `--redraw`
rebuilds only these two.
"""

import csv
import gzip
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

# In a checkout that is not installed, both packages lie beside this folder.
sys.path.extend(str(Path(__file__).resolve().parent.parent / name) for name in (".", "kernels"))

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AutoModel, AutoTokenizer

from approx.evaluation.record import environment
from approx.evaluation.timing import Neighbours
from approx.mechanisms import MECHANISMS
from approx.planning.positions import resize
from bench.pages import figure, line, main, table

SEEDS, PASSES, FREE = 3, 3, 0.02
_CLUSTERS: dict[str, tuple[Any, ...]] = {
    "iterations": (1, 2, 3, 5, 10),
    "bits": (16, 32, 48, 63),
    "clusters": ("auto", None, 25, 50, 100, 200),
    "hash_bias": (True, False),
    "frozen": (False, True),
}
SWEEPS = {
    "clustered": _CLUSTERS,
    "improved-clustered": _CLUSTERS | {"topk": (8, 16, 32, 64, 128)},
    "local": {"left": (32, 64, 128, 256)},
}
# Other settings of a sweep, by mechanism or swept setting; unnamed ones keep their defaults.
START: dict[str, dict[str, Any]] = {
    "frozen": {"clusters": 100},
    "clustered": {"iterations": 10, "bits": 63},
    "improved-clustered": {"iterations": 10, "bits": 63, "topk": 32},
}
ONLY_TIME = ("iterations", "bits")

Layer = tuple[Tensor, Tensor, Tensor]


class Source(NamedTuple):
    """A data set: the checkpoint for it, its maximum input length in tokens, the number of texts, and their location."""

    name: str
    checkpoint: str
    longest: int
    texts: int
    read: Callable[[Path], Iterator[Any]]


def sentences(data: Path) -> Iterator[str]:
    """Sentences of SST-2 dev."""
    with (data / "glue" / "SST-2" / "dev.tsv").open(encoding="utf-8", newline="") as file:
        yield from (row["sentence"] for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def questions(data: Path) -> Iterator[tuple[str, str]]:
    """One question of each paragraph of SQuAD dev, with the paragraph."""
    for article in json.loads((data / "squad" / "dev-v1.1.a.json").read_text(encoding="utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            yield paragraph["qas"][0]["question"], paragraph["context"]


def documents(path: str) -> Callable[[Path], Iterator[str]]:
    """Texts of a file of JSON lines."""

    def read(data: Path) -> Iterator[str]:
        with gzip.open(data / path, "rt", encoding="utf-8") as file:
            yield from (json.loads(line)["text"] for line in file)

    return read


SOURCES = (
    Source("SST-2", "minilm-sst2", 512, 48, sentences),
    Source("SQuAD", "minilm-squad", 512, 16, questions),
    Source("IMDb", "minilm-sst2", 512, 12, documents("imdb/test_a5k.jsonl.gz")),
    Source("long documents", "minilm-sst2", 2048, 4, documents("longdocs/state_union/docs_a.jsonl.gz")),
)


def activations(source: Source, data: Path, checkpoints: Path) -> list[list[Layer]]:
    """Queries, keys and values of each layer, [1, H, n, D], for texts spread evenly over the data set."""
    batches: list[list[Layer]] = []

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
        batches[-1].append((q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2), None

    AttentionInterface.register("recorded", attend)
    folder = checkpoints / source.checkpoint
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, attn_implementation="recorded").eval()
    resize(model, source.longest)
    texts = list(source.read(data))
    for number in range(source.texts):
        text = texts[number * len(texts) // source.texts]
        inputs = tokenizer(*([text] if isinstance(text, str) else text), truncation=True, max_length=source.longest)
        batches.append([])
        with torch.inference_mode():
            model(torch.tensor([inputs["input_ids"]]))
    return batches


def cases() -> list[dict[str, Any]]:
    """Every mechanism with every value of each swept setting."""
    made = []
    for mechanism, sweeps in SWEEPS.items():
        for swept, values in sweeps.items():
            for value in values:
                settings = START.get(mechanism, {}) | START.get(swept, {}) | {swept: value}
                settings |= {"right": value} if mechanism == "local" else {}
                made.append({"mechanism": mechanism, "swept": swept, "value": value, "settings": settings})
    return made


def measure(case: dict[str, Any], texts: list[list[Layer]], exact: list[list[Tensor]]) -> dict[str, float]:
    """Relative error of the outputs on the second half of the texts, and milliseconds for all layers."""
    layers, heads, size = len(texts[0]), texts[0][0][0].shape[1], texts[0][0][0].shape[3]
    half, errors, passes = len(texts) // 2, [], []
    kind = MECHANISMS[case["mechanism"]]
    seeded = "seed" in kind.defaults()
    for seed in range(SEEDS if seeded else 1):
        settings = kind.published | case["settings"] | ({"seed": seed} if seeded else {})
        made = [kind(heads, size, causal=False, scale=size**-0.5, **settings).eval() for _ in range(layers)]
        for layer, mechanism in enumerate(made):
            if mechanism.takes_calibration:
                mechanism.calibrate(*(torch.cat([text[layer][part] for text in texts[:half]], 2) for part in range(3)))
        for layer, mechanism in enumerate(made):
            outputs = [mechanism(*text[layer]) for text in texts[half:]]
            wrong = sum(float((o - e[layer]).square().sum()) for o, e in zip(outputs, exact[half:], strict=True))
            errors.append((wrong / sum(float(e[layer].square().sum()) for e in exact[half:])) ** 0.5)
        if seed == 0:
            passes = [timed(lambda x, i, made=made: made[i](*x), texts[half:]) for _ in range(PASSES)]
    return {"error": sum(errors) / len(errors), "ms": min(passes)}


def timed(attend: Callable[[Layer, int], object], texts: list[list[Layer]]) -> float:
    """CPU milliseconds of the attention of all layers on all texts."""
    begun = time.process_time()
    for text in texts:
        for number, layer in enumerate(text):
            attend(layer, number)
    return 1e3 * (time.process_time() - begun)


def record(data: Path, checkpoints: Path) -> dict[str, Any]:
    """Measure all cases on all data sets, one thread."""
    torch.set_num_threads(1)
    neighbours, made, sources = Neighbours(), cases(), []
    for source in SOURCES:
        texts = activations(source, data, checkpoints)
        with torch.inference_mode():
            exact = [[F.scaled_dot_product_attention(*layer) for layer in text] for text in texts]
            half = texts[len(texts) // 2 :]
            sdpa = min(timed(lambda x, _: F.scaled_dot_product_attention(*x), half) for _ in range(PASSES))
            for case in track(made, source.name, console=Console(stderr=True)):
                case.setdefault("found", {})[source.name] = measure(case, texts, exact)
        tokens = sorted(text[0][0].shape[2] for text in half)
        sources.append({"name": source.name, "texts": len(half), "tokens": [tokens[0], tokens[-1]], "sdpa_ms": sdpa})
    return {
        "command": "python bench/defaults.py -o reports/defaults",
        "seeds": SEEDS,
        "crowded": neighbours.crowded(),
        "sources": sources,
        "cases": made,
        "environment": environment(1),
    }


def best(made: dict[str, Any], mechanism: str, swept: str, now: Any) -> Any:
    """The value that the rules choose for a swept setting whose default is `now`."""
    cases = [case for case in made["cases"] if (case["mechanism"], case["swept"]) == (mechanism, swept)]
    sweep = {case["value"]: case["found"] for case in cases}
    if swept in ONLY_TIME:
        full = sweep[max(sweep)]
        return min(v for v, f in sweep.items() if all(f[n]["error"] <= (1 + FREE) * full[n]["error"] for n in full))
    if swept == "frozen":
        return now
    here = [(n, what, (1 - FREE) * figures[what]) for n, figures in sweep[now].items() for what in ("error", "ms")]
    return next((v for v, f in sweep.items() if all(f[n][what] < most for n, what, most in here)), now)


def report(made: dict[str, Any], output: Path) -> str:
    """The page of a record, in Markdown; its plot is written into a folder."""
    draw(made, output / "defaults.svg")
    sources, machine = made["sources"], made["environment"]
    head = ["setting", "value", *(f"{s['name']}: error" for s in sources), *(f"{s['name']}: ms" for s in sources)]
    about = "; ".join(
        f"{s['name']}: {s['texts']} texts of {s['tokens'][0]:,} to {s['tokens'][1]:,} tokens, exact attention {s['sdpa_ms']:.3g} ms"
        for s in sources
    )
    parts = [
        "# What settings buy on real activations",
        f"Error of a layer's attention output relative to exact attention, and CPU milliseconds of one thread for all six layers of "
        f"MiniLM on all texts, {machine['processor']}, torch {machine['torch']}, {made['seeds']} draws. {about}. Beside the value "
        f"that is swept, iterations are 10, bits 63, topk 32, clusters 100 for `frozen`, and the rest at its default; clusters auto "
        f"and None follow the length. Made by `{made['command']}`, which says by which rules values are chosen.",
    ]
    if made["crowded"]:
        parts.append("**Other programs were using the cores: the times are rough, the errors are not touched by it.**")
    parts.append("![error against time](defaults.svg)")
    for mechanism, sweeps in SWEEPS.items():
        rows, chosen = [], []
        for swept in sweeps:
            now = MECHANISMS[mechanism].defaults()[swept]
            values = [c["value"] for c in made["cases"] if (c["mechanism"], c["swept"]) == (mechanism, swept)]
            if now in values:
                rule = best(made, mechanism, swept, now)
                chosen.append(f"`{swept}` {rule}" + ("" if rule == now else f" (the default is {now})"))
            else:
                chosen.append(f"`{swept}` nothing, since the default, {now}, was not measured")
            for case in made["cases"]:
                if (case["mechanism"], case["swept"]) != (mechanism, swept):
                    continue
                figures = [case["found"][s["name"]] for s in sources]
                value = f"**{case['value']}**" if case["value"] == now else str(case["value"])
                cells = [*(f"{f['error']:.3f}" for f in figures), *(f"{f['ms']:.3g}" for f in figures)]
                rows.append([f"`{swept}`", value, *cells])
        parts += [f"## {mechanism}", table(head, rows)]
        parts.append(f"Defaults are bold. The rules choose: {', '.join(chosen)}.")
    return "\n\n".join(parts) + "\n"


def draw(made: dict[str, Any], path: Path) -> None:
    """Error against time on the longest texts, one line per swept setting."""
    last = made["sources"][-1]["name"]
    with figure(path, (8, 5)) as axes:
        axes.set(xscale="log", yscale="log", xlabel=f"CPU ms, {last}", ylabel="relative error")
        for number, key in enumerate((mechanism, swept) for mechanism, sweeps in SWEEPS.items() for swept in sweeps):
            # A setting that depends on the length is one of the numbers here.
            swept = [c for c in made["cases"] if (c["mechanism"], c["swept"]) == key and isinstance(c["value"], int)]
            found = [case["found"][last] for case in swept]
            line(axes, number, ": ".join(key), [(one["ms"], one["error"]) for one in found])
        axes.axvline(made["sources"][-1]["sdpa_ms"], color="black", linewidth=0.8, label="exact attention")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set(major_formatter="{x:g}", minor_formatter=lambda x, _: f"{x:g}" if f"{x:e}"[0] in "2346" else "")
        axes.grid(alpha=0.3, which="both")


if __name__ == "__main__":
    main(__doc__, record, report, on_real_texts=True)
