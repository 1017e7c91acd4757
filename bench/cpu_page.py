"""The page and the plots made from a record of `bench/cpu.py`."""

import json
import re
from pathlib import Path
from typing import Any

from bench.cpu_cases import REFERENCES
from bench.cpu_record import processor
from bench.cpu_sections import PEERS_BASE, dagger, floors, half_products, memory, peers, products
from bench.cpu_targets import LENGTHS, THREADS, judged, other_targets
from bench.pages import draw, ratio, table
from bench.parts import find, names, row

_SUITES = {
    "attention": "One layer's attention by itself",
    "attention-causal": "One layer's causal attention by itself",
    "attention-grouped-64": "One token of a layer by itself, 32 heads of 64 that share the keys of 8",
    "attention-grouped-128": "One token of a layer by itself, 32 heads of 128 that share the keys of 8",
    "roberta": "RoBERTa-base-sized encoder",
    "gpt2": "GPT-2-small-sized decoder, prefill",
    "decode": "GPT-2-small-sized decoder, one token on top of so many",
    "wav2vec2": "Wav2Vec2-base-sized encoder, frames of 10, 30 and 60 s",
}
_BASE = (
    "PyTorch's own products of bfloat16, which a model with default SDPA took, are slow on this processor, so it is a poor base: "
    "what attention itself gains is the second figure."
)
# Implementations that run on a CPU without a C compiler, or on request.
_ELSEWHERE = ("reference", "triton")
_MODES = {"forward": "forward", "train": "forward and backward"}


def write(source: Path, output: Path) -> str:
    """Write `report.md` and the plots into a folder from its own `record.json` or another's; returns the text."""
    made = json.loads((source / "record.json").read_text(encoding="utf-8"))
    output.mkdir(parents=True, exist_ok=True)
    pictures = [(suite, dtype) for suite in ("attention", "roberta") for dtype in ("float32", "bfloat16")]
    drawn = [name for suite, dtype in pictures if (name := _draw(made, suite, dtype, output))]
    text = report(made, drawn)
    (output / "report.md").write_text(text, encoding="utf-8")
    return text


def report(made: dict[str, Any], drawn: list[str]) -> str:
    """The record in Markdown."""
    if not made["parts"]:
        return "\n\n".join(["# Attention on a CPU", *_about(made), "Nothing was measured."]) + "\n"
    head = ["where", "attention", "precision", "against", *(f"{length:,}" for length in LENGTHS), "why not"]
    text = [
        "## Numbers to reach",
        f"Forward on {THREADS} threads: what was asked, then what was found; and, of what was not reached, what the record says why.",
        table(head, judged(made), words=4, remarks=1),
        *filter(None, [products(made)]),
        table(["what", "found"], other_targets(made), words=2),
        *(f"![speed-up against length]({name})" for name in drawn),
        "## What the machine can do",
        table(
            ["products of", "threads", "products, GF/s", "copy, GB/s"],
            [
                [
                    one["dtype"],
                    str(one["threads"]),
                    *(f"{one[key] / 1e9:.0f}" if one[key] else "–" for key in ("flops", "bytes")),
                ]
                for one in made["rates"]
            ],
        ),
    ]
    text += [piece for dtype in ("float32", "bfloat16") for piece in floors(made, dtype)]
    text += [piece for suite in _SUITES for piece in _suite(made, suite)]
    text += [*peers(made, _MODES), *memory(made), *_left(made)]
    titles = [piece.removeprefix("## ") for piece in text if piece.startswith("## ")]
    contents = "\n".join(f"- [{title}](#{_anchor(title)})" for title in titles)
    return "\n\n".join(["# Attention on a CPU", contents, *_about(made), *text]) + "\n"


def _about(made: dict[str, Any]) -> list[str]:
    """The setup, time and method of the measurements, and the meaning of the marks."""
    machine, parts = made["environment"], made["parts"]
    crowded = sum(part["crowded"] for part in parts)
    accepted, rejected = (
        sum(one.get(key, 0) for part in parts for one in part["contenders"]) for key in ("accepted", "rejected")
    )
    torch, transformers = (
        " and ".join(sorted({part.get(name, machine[name]) for part in parts} or {machine[name]}))
        for name in ("torch", "transformers")
    )
    text = [
        f"{processor(machine)}, {machine['cores']} cores, "
        f"torch {torch}, transformers {transformers}; batch 1 where nothing else is said, 12 heads of 64. Models have "
        f"{_layers(parts)} with random weights, their word and position tables looked up but not trained; the encoder of "
        "Wav2Vec2 is timed without its convolutions, GPT-2 without its head. Inputs of attention alone are random, on which "
        "clustering needs all its iterations.",
        "Each column is one run, in which all took turns. Columns may be of different commits, which the last row of each "
        "table names, and an older one does not show what has changed in a kernel since; of parts that did not keep their "
        "commit it is that at which their record was put together. On one thread time is the processor's; on more it "
        "is the wall clock's, without the repetitions in which a contender got less than 0.85 of the share of the cores that "
        f"it gets at its best: {accepted:,} repetitions were kept, {rejected:,} rejected.",
        "Ratios are how many times as fast. **Bold** is what is faster beyond the noise: its 95 % interval lies above 1, above "
        "what SDPA differs from itself in that column, and above what any mechanism gains there over no attention at all. That "
        "does strictly less, but when decoding, where it still copies a cache: what is faster than it is so by noise. † marks "
        "the columns whose noise exceeds 4 %, or in which other programs used the cores, as they did in "
        f"{crowded} of {len(parts)} parts.",
        f"Made by `{made['command']}`, the last of several runs; `--only PART --again` measures one part again.",
    ]
    if made["left"]:
        text.append(f"{len(made['left'])} parts of the plan were not measured; they stand at the end.")
    ran = sorted(
        {f"`{op}` as {way}" for part in parts for op, way in part.get("chosen", {}).items() if way in _ELSEWHERE}
    )
    if ran:
        text.append(f"Not compiled for this processor ran {', '.join(ran)}.")
    return text


def _layers(parts: list[dict[str, Any]]) -> str:
    layers = sorted({part["layers"] for part in parts if not part["suite"].startswith("attention")})
    return f"{' or '.join(map(str, layers)) or 'no'} layers"


def _anchor(title: str) -> str:
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _left(made: dict[str, Any]) -> list[str]:
    lengths: dict[str, list[str]] = {}
    for name in made["left"]:
        part, _, length = name.rpartition("/")
        lengths.setdefault(part, []).append(length)
    lines = []
    for part, measured_lengths in lengths.items():
        if part == "longest":
            where = ", ".join(f"`{name}`" for name in measured_lengths)
        else:
            where = ", ".join(
                sorted(measured_lengths, key=lambda length: [int(number) for number in f"{length}x1".split("x")[1::-1]])
            )
        lines.append(f"- `{part}` {'of' if part == 'longest' else 'at'} {where}")
    return ["## Not measured", "\n".join(lines)] if lines else []


def processor_table(made: dict[str, Any]) -> str:
    """The table of docs/speed.md: the encoder end to end, both precisions, on all threads, without references and second settings."""
    rows, lengths = [], [length for length in LENGTHS if length <= 8192]
    for dtype in ("float32", "bfloat16"):
        parts = {
            n: find(made, suite="roberta", mode="forward", dtype=dtype, threads=THREADS, length=n) for n in lengths
        }
        for name in names([part for part in parts.values() if part]):
            if name in REFERENCES or name.endswith("iterations=10"):
                continue
            label = {"sdpa": "default SDPA", "no attention": "*no attention: the ceiling*"}.get(name, f"`{name}`")
            rows.append([label, dtype, *(ratio(parts[n], name, "against_best") for n in lengths)])
    machine = made["environment"]
    layers = sorted({part["layers"] for part in made["parts"] if part["suite"] == "roberta"})
    return (
        table(["attention", "precision", *(f"×, {n:,} tokens" for n in lengths)], rows, words=2)
        + f"\n\nForward time of "
        f"{' or '.join(map(str, layers))} RoBERTa-base-sized layers relative to the best exact attention in the same precision; batch 1, "
        f"{processor(machine)}, {THREADS} threads, torch {machine['torch']}. Bold where it is faster beyond the noise. "
        f"{products(made)}".rstrip()
    )


def _suite(made: dict[str, Any], suite: str) -> list[str]:
    keys = ("mode", "dtype", "threads", "batch")
    chosen = [part for part in made["parts"] if part["suite"] == suite]
    groups = sorted({tuple(part[key] for key in keys) for part in chosen})
    whole = "" if suite.startswith("attention") else f", {_layers(chosen)}"
    text = [f"## {_SUITES[suite]}{whole}"] if groups else []
    for mode, dtype, threads, batch in groups:
        same = dict(zip(keys, (mode, dtype, threads, batch), strict=True))
        parts = sorted(
            (part for part in chosen if all(part[key] == value for key, value in same.items())),
            key=lambda part: part["length"],
        )
        title = f"{_MODES[mode]}, {dtype}, {threads} thread{'s' * (threads > 1)}" + f", batch {batch}" * (batch > 1)
        lines = []
        for name in names(parts):
            if name == "sdpa":
                cells = ["–" if one is None else _ms(one["median_ms"]) for one in (row(part, name) for part in parts)]
            else:
                cells = [
                    " / ".join(ratio(part, name, key) for key in ("against_sdpa", "against_best")) for part in parts
                ]
            lines.append([f"`{name}`", *cells])
        lines += [
            ["best exact attention", *(part["best_exact"] or "–" for part in parts)],
            ["SDPA against itself", *(f"{part['spread']:.2f}" for part in parts)],
            ["commit", *(_commit(part) for part in parts)],
        ]
        text += [
            f"### {title[0].upper()}{title[1:]}",
            "Against default SDPA / against the best exact.",
            table(["attention", *(f"{part['length']:,}{dagger(part)}" for part in parts)], lines),
        ]
        if dtype == "bfloat16" and half_products(made):
            text.append(PEERS_BASE if suite.startswith("attention") else _BASE)
    return text


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:,.0f} ms" if milliseconds >= 100 else f"{milliseconds:.3g} ms"


def _commit(part: dict[str, Any]) -> str:
    """The short name of a commit, with a plus for uncommitted changes."""
    commit, changes, _ = (part.get("git_commit") or "unknown").partition("+")
    return commit[:7] + changes


def _draw(made: dict[str, Any], suite: str, dtype: str, output: Path) -> str | None:
    """Speed-up over the best exact attention against length, one line per contender; returns the file name."""
    place = {"suite": suite, "mode": "forward", "dtype": dtype, "threads": THREADS}
    parts = [part for length in LENGTHS if (part := find(made, **place, length=length))]
    if len(parts) < 2:
        return None
    name = f"{suite}-{dtype}.svg"
    lines = {
        one: [(part["length"], contender["against_best"][0]) for part in parts if (contender := row(part, one))]
        for one in names(parts)
    }
    label = f"{_SUITES[suite]}, {dtype}: times as fast as the best exact attention"
    draw({one: points for one, points in lines.items() if points}, label, output / name)
    return name
