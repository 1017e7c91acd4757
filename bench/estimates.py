"""The accuracy of the estimates of Performer and the rounds of LSH on real activations.

    OMP_NUM_THREADS=1 python bench/estimates.py -o reports/estimates --data DIR --checkpoints DIR

Texts, models and errors are those of `bench/defaults.py`, with fewer texts: half of them for calibration, the rest
measured, on all layers of MiniLM. Performer is compared with uniform attention, which weighs all keys alike, and with
the plain estimate with an eps added to features, 1e-6 as in the paper and 1e-4 as in a widely used implementation, both
as our own formulas. For LSH the rows show the share of the attention weight that rounds of hashing capture with shared
keys, by buckets per cluster, also with as many buckets as clusters, as in Reformer; and errors with and without
`dedup`. Times are CPU milliseconds of one thread for all layers of one text, the best of `PASSES`, with settings in
turns. Writes `record.json` and, from it, `report.md`; `--redraw` rebuilds only the page.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# In a checkout that is not installed, both packages lie beside this folder.
sys.path.extend(str(Path(__file__).resolve().parent.parent / name) for name in (".", "kernels"))

import torch
from torch import Tensor
from torch.nn import functional as F

from approx.evaluation.record import environment
from approx.evaluation.timing import Neighbours
from approx.mechanisms import MECHANISMS
from approx_kernels.ops.lsh.reference import unit_keys
from approx_kernels.ops.performer.api import draw_projection
from bench.defaults import SOURCES, Layer, activations
from bench.pages import main, table

TEXTS = {"SST-2": 16, "SQuAD": 8, "IMDb": 6, "long documents": 2}
SEEDS, PASSES, FEATURES = 2, 5, (64, 256, 1024)
# None is the default: fitted.
PERFORMERS = {
    "positive, floor 0": {"estimator": "positive", "floor": 0.0},
    "positive, floor 0.5": {"estimator": "positive", "floor": 0.5},
    "positive, fitted floor": {"estimator": "positive"},
    "oprf, fitted floor": {"estimator": "oprf"},
    "sderf, fitted floor": {"estimator": "sderf"},
    "aderf, floor 0": {"floor": 0.0},
    "**aderf, fitted floor**": {},
}
EPS = {"plain, eps 1e-6": 1e-6, "plain, eps 1e-4": 1e-4}
ROUNDS = ((4, 64), (8, 64), (8, 32))
BUCKETS = (1, 2, 4, 8)
# Lengths at which rounds of hashing choose among many tokens.
LONG = ("IMDb", "long documents")

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def with_eps(q: Tensor, k: Tensor, v: Tensor, *, rows: Tensor, eps: float) -> Tensor:
    """The plain estimate with an eps added to features; those of keys are relative to the largest of all."""
    queries, keys = (x * q.shape[3] ** -0.25 for x in (q, k))
    heights, logs = queries @ rows.T, keys @ rows.T
    heights = heights - heights.amax(-1, keepdim=True) - queries.square().sum(-1, keepdim=True) / 2
    logs = logs - logs.amax((-2, -1), keepdim=True) - keys.square().sum(-1, keepdim=True) / 2
    queries, keys = heights.exp() + eps, logs.exp() + eps
    return queries @ (keys.mT @ v) / (queries @ keys.sum(2).unsqueeze(-1))


def uniform(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Uniform attention."""
    return v.mean(2, keepdim=True).expand(*q.shape[:3], -1)


def error(attend: Attend, texts: list[Layer], wanted: list[Tensor]) -> float:
    """Relative error of the outputs of one layer."""
    wrong = sum(float((attend(*each) - exact).square().sum()) for each, exact in zip(texts, wanted, strict=True))
    return (wrong / sum(float(exact.square().sum()) for exact in wanted)) ** 0.5


def made(name: str, q: Tensor, **settings: Any) -> Any:
    """A mechanism for a layer with such queries."""
    heads, size = q.shape[1], q.shape[3]
    kind = MECHANISMS[name]
    return kind(heads, size, causal=False, scale=size**-0.5, **{**kind.published, **settings}).eval()


def errors(texts: list[list[Layer]]) -> dict[str, float]:
    """The error of each estimate, averaged over layers and draws."""
    half, by_name = len(texts) // 2, {}
    for layer in range(len(texts[0])):
        fit = tuple(torch.cat([text[layer][part] for text in texts[:half]], 2) for part in range(3))
        tested = [text[layer] for text in texts[half:]]
        wanted = [F.scaled_dot_product_attention(*each) for each in tested]
        by_name.setdefault("uniform", []).append(error(uniform, tested, wanted))
        for features in FEATURES:
            for seed in range(SEEDS):
                rows = draw_projection(fit[0].shape[3], features=features, orthogonal=True, seed=seed)
                estimates: dict[str, Attend] = {n: partial(with_eps, rows=rows, eps=eps) for n, eps in EPS.items()}
                for name, settings in PERFORMERS.items():
                    mechanism = made("performer", fit[0], features=features, seed=seed, **settings)
                    mechanism.calibrate(*fit)
                    estimates[name] = mechanism
                for name, attend in estimates.items():
                    by_name.setdefault(f"{name}|{features}", []).append(error(attend, tested, wanted))
    return {name: sum(values) / len(values) for name, values in by_name.items()}


def nearest(x: Tensor, directions: Tensor) -> Tensor:
    """The nearest of the directions and their opposites, as in Reformer: [H, n, D] and [D, b / 2] -> [H, n]."""
    return torch.cat([x @ directions, -x @ directions], -1).argmax(-1)


def captured(mechanism: Any, q: Tensor, k: Tensor) -> float:
    """The share of the exact weight on other tokens that falls on a mechanism's pairs, with shared keys."""
    weights = (q @ unit_keys(q, k).mT * q.shape[3] ** -0.5).masked_fill(_itself(q), -torch.inf).softmax(-1)
    return float((weights * (mechanism.weights(q, k) > 0)).sum(-1).mean())


def captured_by_reformer(q: Tensor, k: Tensor, *, rounds: int, cluster: int) -> float:
    """The same for as many buckets as clusters, sorted and cut as in Reformer, each looking back one."""
    tokens, size = q.shape[2:]
    weights = (q @ unit_keys(q, k).mT * size**-0.5).masked_fill(_itself(q), -torch.inf).softmax(-1)[0]
    count = max(tokens // cluster // 2 * 2, 2)
    generator, seen = torch.Generator().manual_seed(0), torch.zeros(weights.shape, dtype=torch.bool)
    for _ in range(rounds):
        order = nearest(q[0], torch.randn(size, count // 2, generator=generator)).argsort(dim=-1, stable=True)
        chunk = torch.empty_like(order).scatter_(-1, order, (torch.arange(tokens) // cluster).expand_as(order))
        back = chunk[:, :, None] - chunk[:, None]
        seen |= (back == 0) | (back == 1)
    return float((weights * seen).sum(-1).mean())


def _itself(q: Tensor) -> Tensor:
    return torch.eye(q.shape[2], dtype=torch.bool)


def in_turns(mechanisms: dict[Any, Any], text: list[Layer]) -> dict[Any, float]:
    """CPU milliseconds of all layers of a text, the best of several passes."""
    durations: dict[Any, list[float]] = {name: [] for name in mechanisms}
    for _ in range(PASSES):
        for name, mechanism in mechanisms.items():
            begun = time.process_time()
            for layer in text:
                mechanism(*layer)
            durations[name].append(1e3 * (time.process_time() - begun))
    return {name: min(times) for name, times in durations.items()}


def hashing(text: list[Layer]) -> list[dict[str, Any]]:
    """Rows of the share that shared keys capture by buckets, and of the errors of the asymmetric form by `dedup`."""
    rows = []
    # The weights of all pairs of all heads take much memory: use every third head of every other layer.
    some = [(q[:, ::3], k[:, ::3], v[:, ::3]) for q, k, v in text[::2]]
    for rounds, cluster in ROUNDS:
        form = {"rounds": rounds, "cluster": cluster}
        peer = [captured_by_reformer(q, k, **form) for q, k, _ in some]
        shared = {n: made("lsh", text[0][0], variant="shared", buckets=n, **form) for n in BUCKETS}
        few = {n: made("lsh", some[0][0], variant="shared", buckets=n, **form) for n in BUCKETS}
        times = in_turns(shared, text)
        mass = {n: sum(captured(each, q, k) for q, k, _ in some) / len(some) for n, each in few.items()}
        rows.append({"form": form, "peer": sum(peer) / len(peer), "mass": mass, "ms": times})
        for row in ("mass", "ms"):
            rows[-1][row] = {str(n): value for n, value in rows[-1][row].items()}
        once = {dedup: made("lsh", text[0][0], dedup=dedup, **form) for dedup in (False, True)}
        wanted = [F.scaled_dot_product_attention(*each) for each in text]
        rows[-1]["dedup"] = {
            "errors": [
                sum(error(m, [x], [w]) for x, w in zip(text, wanted, strict=True)) / len(text) for m in once.values()
            ],
            "ms": list(in_turns(once, text).values()),
        }
    return rows


@torch.inference_mode()
def record(data: Path, checkpoints: Path) -> dict[str, Any]:
    """Measure everything, one thread."""
    torch.set_num_threads(1)
    neighbours, measured = Neighbours(), []
    for source in SOURCES:
        texts = activations(source._replace(texts=TEXTS[source.name]), data, checkpoints)
        print(f"{source.name}: {len(texts)} texts", file=sys.stderr)
        longest = max(texts, key=lambda text: text[0][0].shape[2])
        rows = hashing(longest) if source.name in LONG else []
        tokens = longest[0][0].shape[2]
        measured.append({"name": source.name, "tokens": tokens, "errors": errors(texts), "hashing": rows})
    command = "OMP_NUM_THREADS=1 python bench/estimates.py -o reports/estimates"
    crowded = neighbours.crowded()
    return {"command": command, "seeds": SEEDS, "crowded": crowded, "sources": measured, "environment": environment(1)}


def report(measured: dict[str, Any], _: Path) -> str:
    """The page of a record, in Markdown."""
    sources, machine = measured["sources"], measured["environment"]
    estimates, mass, once = list[list[str]](), list[list[str]](), list[list[str]]()
    for name in sources[0]["errors"]:
        label, _, features = name.partition("|")
        estimates.append([label, features or "–", *(f"{source['errors'][name]:.3f}" for source in sources)])
    for source in sources:
        for row in source["hashing"]:
            begin = [f"{source['tokens']:,}", "{rounds} × {cluster}".format(**row["form"])]
            cells = [f"{row['mass'][str(n)]:.3f}, {row['ms'][str(n)]:.3g}" for n in BUCKETS]
            mass.append([*begin, f"{row['peer']:.3f}", *cells])
            dedup = row["dedup"]
            once.append([*begin, *(f"{e:.3f}" for e in dedup["errors"]), *(f"{ms:.3g}" for ms in dedup["ms"])])
    names, hashed = [source["name"] for source in sources], ["tokens", "rounds × cluster"]
    weights = [*hashed, "as Reformer", *(f"{n} buckets: weight, ms" for n in BUCKETS)]
    dedups = [*hashed, "error without dedup", "with dedup", "ms without", "ms with"]
    crowded = "\n\n**Other programs were using the cores: the times are rough.**" if measured["crowded"] else ""
    return (
        "# Estimates of attention on real activations\n\n"
        f"MiniLM on real texts, all layers, {measured['seeds']} draws, {machine['processor']}, torch {machine['torch']}, one thread. Made by "
        f"`{measured['command']}`, whose docstring says what the words mean.{crowded}\n\n"
        "## Performer: error of a layer's output relative to exact attention\n\n"
        f"The default is bold; without a calibration batch it is `positive, floor 0.5`.\n\n{table(['estimate', 'features', *names], estimates)}\n\n"
        "## LSH with shared keys: attention weight captured, by buckets for each cluster\n\n"
        f"The default is 4.\n\n{table(weights, mass)}\n\n"
        f"## LSH with the checkpoint's own keys: pairs that count once\n\n{table(dedups, once)}\n"
    )


if __name__ == "__main__":
    main(__doc__, record, report, on_real_texts=True)
