"""The page and the pictures that are made from a record of `bench/cpu.py`."""

import json
from pathlib import Path
from typing import Any

from bench.cpu_cases import REFERENCES
from bench.cpu_floor import floor_ms
from bench.cpu_peers import COUNTERPARTS
from bench.cpu_targets import LENGTHS, THREADS, against_peers, exponents, fits, judged, other_targets
from bench.pages import draw, ratio, table
from bench.parts import find, names, row

_SUITES = {
    "attention": "One layer's attention by itself",
    "attention-causal": "One layer's causal attention by itself",
    "roberta": "RoBERTa-base-sized encoder",
    "gpt2": "GPT-2-small-sized decoder, prefill",
    "decode": "GPT-2-small-sized decoder, one token on top of so many",
    "wav2vec2": "Wav2Vec2-base-sized encoder, frames of 10, 30 and 60 s",
}
_MODES = {"forward": "forward", "train": "forward and backward"}


def write(source: Path, output: Path) -> str:
    """Make `report.md` and the pictures in a folder from the `record.json` of another, or its own; returns the text."""
    made = json.loads((source / "record.json").read_text(encoding="utf-8"))
    output.mkdir(parents=True, exist_ok=True)
    pictures = [(suite, dtype) for suite in ("attention", "roberta") for dtype in ("float32", "bfloat16")]
    drawn = [name for suite, dtype in pictures if (name := _draw(made, suite, dtype, output))]
    text = report(made, drawn)
    (output / "report.md").write_text(text, encoding="utf-8")
    return text


def report(made: dict[str, Any], drawn: list[str]) -> str:
    """The record in Markdown."""
    machine, parts = made["environment"], made["parts"]
    crowded = sum(part["crowded"] for part in parts)
    accepted, rejected = (
        sum(one.get(key, 0) for part in parts for one in part["contenders"]) for key in ("accepted", "rejected")
    )
    layers = sorted({part["layers"] for part in parts if not part["suite"].startswith("attention")})
    text = [
        "# Attention on a CPU",
        f"{machine['processor']}, {machine['cores']} cores, torch {machine['torch']}, transformers {machine['transformers']}; "
        f"batch 1 where nothing else is said, 12 heads of 64. Models have {' or '.join(map(str, layers)) or 'no'} layers with random "
        "weights, their word and position tables looked up but not trained; the encoder of Wav2Vec2 is timed without "
        "its convolutions, GPT-2 without its head. Everything in one table was timed in one run, in turns. On one thread time is "
        "the processor's; on more it is the wall clock's, without the repetitions in which a contender got less than 0.85 "
        f"of the share of the cores that it gets at its best: {accepted:,} repetitions were kept, {rejected:,} rejected. In "
        f"{crowded} of {len(parts)} parts other programs used the cores. Ratios are how many times as fast; bold where the "
        "95 % interval lies above 1. Inputs of attention alone are random, on which clustering needs all its iterations. "
        f"Made by `{made['command']}`.",
    ]
    if made["left"]:
        text.append(f"{len(made['left'])} parts of the plan were not measured; they stand at the end.")
    if not parts:
        return "\n\n".join([*text, "Nothing was measured."]) + "\n"
    head = ["where", "attention", "precision", "against", *(f"{length:,}" for length in LENGTHS)]
    text += [
        "## Numbers to reach",
        f"Forward on {THREADS} threads: what was asked, then what was found.",
        table(head, judged(made), words=4),
        table(["what", "found"], other_targets(made), words=2),
        *(f"![speed-up against length]({name})" for name in drawn),
        "## What the machine can do",
        table(
            ["precision", "threads", "products, GF/s", "copy, GB/s"],
            [
                [one["dtype"], str(one["threads"]), f"{one['flops'] / 1e9:.0f}", f"{one['bytes'] / 1e9:.0f}"]
                for one in made["rates"]
            ],
        ),
        *filter(None, [_half_products(made)]),
    ]
    text += [piece for dtype in ("float32", "bfloat16") for piece in _floors(made, dtype)]
    text += [piece for suite in _SUITES for piece in _suite(made, suite)]
    text += [*_peers(made), *_memory(made)]
    if made["left"]:
        lengths: dict[str, list[str]] = {}
        for name in made["left"]:
            part, _, length = name.rpartition("/")
            lengths.setdefault(part, []).append(length)
        text += ["## Not measured", "\n".join(f"- `{part}` at {', '.join(found)}" for part, found in lengths.items())]
    return "\n\n".join(text) + "\n"


def readme_table(made: dict[str, Any]) -> str:
    """The README's table: the encoder end to end, both precisions, on all threads, without references and second settings."""
    rows, lengths = [], [length for length in LENGTHS if length <= 8192]
    for dtype in ("float32", "bfloat16"):
        parts = {
            n: find(made, suite="roberta", mode="forward", dtype=dtype, threads=THREADS, length=n) for n in lengths
        }
        for name in names([part for part in parts.values() if part]):
            if name in REFERENCES or name.endswith("iterations=10"):
                continue
            told = {"sdpa": "default SDPA", "no attention": "*no attention: the ceiling*"}.get(name, f"`{name}`")
            rows.append([told, dtype, *(ratio(row(parts[n], name), "against_best") for n in lengths)])
    machine = made["environment"]
    layers = sorted({part["layers"] for part in made["parts"] if part["suite"] == "roberta"})
    return (
        table(["attention", "precision", *(f"×, {n:,} tokens" for n in lengths)], rows, words=2)
        + f"\n\nForward time of "
        f"{' or '.join(map(str, layers))} RoBERTa-base-sized layers relative to the best exact attention in the same precision; batch 1, "
        f"{machine['processor']}, {THREADS} threads, torch {machine['torch']}. Bold where the interval lies above 1. "
        f"{_half_products(made)}".rstrip()
    )


def _half_products(made: dict[str, Any]) -> str:
    """What converted models have besides their attention where the processor has no products of 16 bits; else nothing."""
    rates = next(
        (one for one in made["rates"] if (one["dtype"], one["threads"]) == ("bfloat16", THREADS)), {"by_precision": {}}
    )
    plain, wide = (rates["by_precision"].get(way, 0.0) / 1e9 for way in ("highest", "float32"))
    if wide <= plain:
        return ""
    return (
        f"This processor has no instructions for bfloat16: PyTorch's products run at {plain:.0f} GF/s, far slower still "
        f"with weights that lie as GPT-2's do, in float32 and rounded at {wide:.0f}. Converted models and the ceiling take the latter, default SDPA and the peers the former, so in bfloat16 most of every "
        "gain over it is that of the row `exact`, and only what exceeds it is the attention's."
    )


def _suite(made: dict[str, Any], suite: str) -> list[str]:
    keys = ("mode", "dtype", "threads", "batch")
    groups = sorted({tuple(part[key] for key in keys) for part in made["parts"] if part["suite"] == suite})
    text = [f"## {_SUITES[suite]}"] if groups else []
    for mode, dtype, threads, batch in groups:
        same = {"suite": suite, "mode": mode, "dtype": dtype, "threads": threads, "batch": batch}
        parts = sorted(
            (part for part in made["parts"] if all(part[key] == value for key, value in same.items())),
            key=lambda part: part["length"],
        )
        told = f"{_MODES[mode]}, {dtype}, {threads} thread{'s' * (threads > 1)}" + f", batch {batch}" * (batch > 1)
        lines = []
        for name in names(parts):
            found = [row(part, name) for part in parts]
            if name == "sdpa":
                cells = ["–" if one is None else f"{one['median_ms']:.3g} ms" for one in found]
            else:
                cells = [f"{ratio(one, 'against_sdpa')} / {ratio(one, 'against_best')}" for one in found]
            lines.append([f"`{name}`", *cells])
        best = ["best exact attention", *(part["best_exact"] or "–" for part in parts)]
        spread = ["SDPA against itself", *(f"{part['spread']:.2f}" for part in parts)]
        text += [
            f"### {told[0].upper()}{told[1:]}",
            "Against default SDPA / against the best exact.",
            table(["attention", *(f"{part['length']:,}" for part in parts)], [*lines, best, spread]),
        ]
    return text


def _floors(made: dict[str, Any], dtype: str) -> list[str]:
    rates = next((one for one in made["rates"] if (one["dtype"], one["threads"]) == (dtype, THREADS)), None)
    place = {"mode": "forward", "dtype": dtype, "threads": THREADS}
    parts = {
        (suite, n): find(made, suite=suite, length=n, **place)
        for suite in ("attention", "attention-causal")
        for n in LENGTHS
    }
    lines = []
    for suite, told in (("attention", ""), ("attention-causal", ", causal")):
        here = [part for (of, _), part in parts.items() if of == suite and part]
        for name in names(here):
            cells = []
            for length in LENGTHS:
                found = row(parts[suite, length], name)
                least = None if rates is None else floor_ms(name, length, bool(told), rates)
                cells.append("–" if found is None or least is None else f"{found['median_ms'] / least:.1f}")
            if set(cells) != {"–"}:
                lines.append([f"`{name}`{told}", *cells])
    if not lines:
        return []
    return [
        f"## Time ÷ floor, {dtype}",
        f"Forward of attention by itself on {THREADS} threads, over the least time that its counted products take at the rate above, "
        "or its inputs and outputs at the rate of the copy, whichever is longer. Exponentials, sorting and choosing are not counted.",
        table(["attention", *(f"{length:,}" for length in LENGTHS)], lines),
    ]


def _peers(made: dict[str, Any]) -> list[str]:
    found = against_peers(made, dict(COUNTERPARTS))
    lines: dict[tuple[str, ...], dict[int, str]] = {}
    for one in found:
        told = (one["peer"], f"`{one['ours']}`", _MODES[one["mode"]], one["dtype"], str(one["threads"]))
        lines.setdefault(told, {})[one["length"]] = f"{one['ratio']:.2f}"
    if not lines:
        return []
    head = ["peer", "ours", "mode", "precision", "threads", *(f"{length:,}" for length in LENGTHS)]
    rows = [[*told, *(cells.get(length, "–") for length in LENGTHS)] for told, cells in sorted(lines.items())]
    return [
        "## Peers",
        "Attention alone, projections exchanged for copies: how many times as fast as the peer ours is.",
        table(head, rows, words=4),
    ]


def _memory(made: dict[str, Any]) -> list[str]:
    text, grown = [], exponents(made)
    if grown:
        place = {"suite": "attention", "mode": "forward", "dtype": "float32", "threads": THREADS}
        lines = []
        for name, slope in grown.items():
            found = [row(find(made, **place, length=length), name) for length in LENGTHS]
            lines.append(
                [f"`{name}`", f"n^{slope:.2f}", *("–" if one is None else f"{one['peak_mb']:.1f}" for one in found)]
            )
        text += [
            "## Peak memory",
            "Megabytes that a forward of one layer's attention needs beyond its inputs, float32, and the exponent fitted from 1,024 on.",
            table(["attention", "grows as", *(f"{length:,}" for length in LENGTHS)], lines),
        ]
    if made["longest"]:
        lines = [
            [
                f"`{one['name']}`",
                *(
                    [f"{one['ms'] / 1e3:.0f}", f"{one['peak_mb'] / 1e3:.2f}"]
                    if one["status"] == "ok"
                    else [one["status"], "–"]
                ),
                "yes" if fits(one) else "**no**",
            ]
            for one in made["longest"]
        ]
        text += [
            "## 65,536 tokens through twelve layers",
            "One forward, batch 1, float32; memory beyond model and input.",
            table(["attention", "seconds", "GB", "within 24 GB with the weights"], lines),
        ]
    return text


def _draw(made: dict[str, Any], suite: str, dtype: str, output: Path) -> str | None:
    """Speed-up over the best exact attention against length, a line a contender; the name of the file."""
    place = {"suite": suite, "mode": "forward", "dtype": dtype, "threads": THREADS}
    parts = [part for length in LENGTHS if (part := find(made, **place, length=length))]
    if len(parts) < 2:
        return None
    name = f"{suite}-{dtype}.svg"
    lines = {
        one: [(part["length"], found["against_best"][0]) for part in parts if (found := row(part, one))]
        for one in names(parts)
    }
    told = f"{_SUITES[suite]}, {dtype}: times as fast as the best exact attention"
    draw({one: points for one, points in lines.items() if points}, told, output / name)
    return name
