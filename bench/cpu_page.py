"""The page of `bench/cpu.py`, its plots, and the targets of the CPU work with what a record says of them."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.cpu_cases import CEILING, COUNTERPARTS, EXACT, LENGTHS, LONGEST, REFERENCES, cases
from bench.cpu_floor import SIGNS, floor_ms, limit
from bench.pages import MODES, asked_and_found, draw, find, names, noise, ratio, row, table

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
PEERS_BASE = "PyTorch's own products of bfloat16, which the peers took, are slow on this processor, so in it they are a poor base."
# A column whose noise exceeds this is marked.
_NOISY = 1.04
# Older versions gave converted models these besides their attention; the parts say which.
_HALF = "bfloat16 products"
_REPLACED = {
    "float32 products": "products of float32 by another library",
    "float32 layers on tiles": "layers of float32 on tiles for bfloat16",
    _HALF: "products of bfloat16 computed in float32",
}
# Implementations that run on a CPU without a C compiler, or on request.
_ELSEWHERE = ("reference", "triton")


def report(made: dict[str, Any], output: Path) -> str:
    """The page of a record, in Markdown; its plots are written into a folder."""
    if not made["parts"]:
        return "\n\n".join(["# Attention on a CPU", *_about(made), "Nothing was measured."]) + "\n"
    pictures = [(suite, dtype) for suite in ("attention", "roberta") for dtype in ("float32", "bfloat16")]
    drawn = [name for suite, dtype in pictures if (name := _draw(made, suite, dtype, output))]
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
    text += [*_peers(made), *memory(made), *_left(made)]
    titles = [piece.removeprefix("## ") for piece in text if piece.startswith("## ")]
    contents = "\n".join(f"- [{title}](#{_anchor(title)})" for title in titles)
    return "\n\n".join(["# Attention on a CPU", contents, *_about(made), *text]) + "\n"


def processor(machine: dict[str, Any]) -> str:
    """A processor's name, instruction set and, if known, family and model numbers."""
    numbers = ", ".join(f"{name} {machine[name]}" for name in ("family", "model") if name in machine)
    known = f" with {machine['instructions']}" if "instructions" in machine else ""
    return machine["processor"] + known + f" ({numbers})" * bool(numbers)


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
        title = f"{MODES[mode]}, {dtype}, {threads} thread{'s' * (threads > 1)}" + f", batch {batch}" * (batch > 1)
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


def dagger(part: dict[str, Any] | None) -> str:
    """The mark of a column disturbed by other programs or noise."""
    return " †" if part and (part["crowded"] or noise(part) > _NOISY) else ""


def products(made: dict[str, Any]) -> str:
    """The extras of converted models besides attention in older parts; empty if there are none."""
    had = [what for asked, what in _REPLACED.items() if _was_replaced(made, asked)]
    if not had:
        return ""
    return (
        "Parts of this record were measured with an older version, in which converted models and the ceiling also had faster layers "
        f"around attention ({', '.join(had)}), unlike default SDPA and the peers. In that precision the row `exact` shows the gain that "
        "comes from these layers; only what exceeds it comes from the attention."
    )


def half_products(made: dict[str, Any]) -> bool:
    """Whether default SDPA and the peers used PyTorch's bfloat16 products where those are slow, and the others did not."""
    return _was_replaced(made, _HALF)


def _was_replaced(made: dict[str, Any], asked: str) -> bool:
    """Whether any part gives the smallest number of rows: a number, or one per layout of the weights, [1, 0] for never."""
    products = [part.get("products", {}).get(asked) for part in made["parts"]]
    each = [one for by in products for one in (by.values() if isinstance(by, dict) else [by])]
    return any(one is not None and one != [1, 0] for one in each)


def floors(made: dict[str, Any], dtype: str) -> list[str]:
    """Time over floor of attention alone."""
    rates = {(one["dtype"], one["threads"]): one for one in made["rates"]}
    rate, signs = rates.get((dtype, THREADS)), rates.get((SIGNS, THREADS), {"flops": None})["flops"]
    place = {"mode": "forward", "dtype": dtype, "threads": THREADS}
    suites = {"attention": "", "attention-causal": ", causal"}
    parts = {(suite, n): find(made, suite=suite, length=n, **place) for suite in suites for n in LENGTHS}
    lengths = [n for n in LENGTHS if any(parts[suite, n] for suite in suites)]
    if rate is None or not lengths:
        return []
    lines, unknown = [], False
    for suite, suffix in suites.items():
        for name in names([part for n in lengths if (part := parts[suite, n])]):
            most, cells = limit(name), []
            for length in lengths:
                contender = row(parts[suite, length], name)
                least = floor_ms(name, length, bool(suffix), rate, signs)
                unknown |= contender is not None and least is None and name.startswith(("clustered", "improved"))
                times = None if contender is None or least is None else round(contender["median_ms"] / least, 1)
                cells.append("–" if times is None else f"{times:.1f}" + ", over" * (most is not None and times > most))
            if set(cells) != {"–"}:
                lines.append([f"`{name}`{suffix}", "–" if most is None else f"{most:g}", *cells])
    text = (
        f"Forward of attention by itself on {THREADS} threads, over the least time that its counted products take at the rate above, "
        "or its inputs and outputs at the rate of the copy, whichever is longer. Exponentials, sorting and choosing are not "
        "counted; the ±1 products that find the nearest centroids are, at the rate of our own code for them. *At most* is what "
        "was set out for, and *over* what exceeds it."
    )
    if unknown:
        text += " The rate of ±1 products was not measured, so clustering has no figure."
    head = ["attention", "at most", *(f"{n:,}{max(dagger(parts[suite, n]) for suite in suites)}" for n in lengths)]
    return [f"## Time ÷ floor, {dtype}", text, table(head, lines)]


def _peers(made: dict[str, Any]) -> list[str]:
    """The speed of our counterpart relative to each peer."""
    lines: dict[tuple[str, ...], dict[int, str]] = {}
    for one in against_peers(made):
        case = (one["peer"], f"`{one['ours']}`", MODES[one["mode"]], one["dtype"], str(one["threads"]))
        lines.setdefault(case, {})[one["length"]] = f"{one['ratio']:.2f}{dagger(one)}"
    if not lines:
        return []
    lengths = [n for n in LENGTHS if any(n in cells for cells in lines.values())]
    head = ["peer", "ours", "mode", "precision", "threads", *(f"{length:,}" for length in lengths)]
    rows = [[*case, *(cells.get(length, "–") for length in lengths)] for case, cells in sorted(lines.items())]
    return [
        "## Peers",
        "Attention alone, projections exchanged for copies: how many times as fast as the peer ours is.",
        table(head, rows, words=4),
        *([PEERS_BASE] if half_products(made) else []),
    ]


def memory(made: dict[str, Any]) -> list[str]:
    """The memory of attention, its growth, and the longest input."""
    text, grown = [], exponents(made)
    if grown:
        place = {"suite": "attention", "mode": "forward", "dtype": "float32", "threads": THREADS}
        parts = {n: part for n in LENGTHS if (part := find(made, **place, length=n))}
        lines = []
        for name, slope in grown.items():
            contenders = [row(part, name) for part in parts.values()]
            lines.append(
                [
                    f"`{name}`",
                    f"n^{slope:.2f}",
                    *("–" if one is None else f"{one['peak_mb']:.1f}" for one in contenders),
                ]
            )
        text += [
            "## Peak memory",
            "Megabytes that a forward of one layer's attention needs beyond its inputs, float32, and the exponent fitted from 1,024 on. "
            "How time and memory of causal attention grow, and both to greater lengths, has [a page of its own](../growth/report.md).",
            table(["attention", "grows as", *(f"{length:,}" for length in parts)], lines),
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
                "yes" if fits(one) else "no",
            ]
            for one in made["longest"]
        ]
        ran = {one["name"] for one in made["longest"]}
        others = [f"`{case.name}`" for case in cases(False, LONGEST) if case.name not in ran]
        text += [
            f"## {LONGEST:,} tokens through {made['longest'][0]['layers']} layers",
            "One forward, batch 1, float32; memory beyond model and input."
            + f" Not run: {', '.join(others)}." * bool(others),
            table(["attention", "seconds", "GB", f"within {LONGEST_GB} GB with the weights"], lines),
        ]
    return text


class Target(NamedTuple):
    """Smallest end-to-end speed-up by length, over default SDPA and over the best exact attention."""

    suite: str
    name: str
    dtype: str
    against_sdpa: tuple[float, ...]
    against_best: tuple[float, ...] = ()
    batch: int = 1


TARGETS = (
    Target("roberta", "exact", "bfloat16", (1.25, 1.35, 1.6, 2.1, 2.2)),
    Target("roberta", "linear", "bfloat16", (1.45, 1.75, 2.6, 4.6, 8.3), (1.17, 1.33, 1.65, 2.15, 3.9)),
    Target("roberta", "local left=128 right=128", "bfloat16", (1.3, 1.55, 2.25, 3.8, 7.0), (1.05, 1.2, 1.4, 1.75, 3.2)),
    Target("roberta", "clustered iterations=3", "bfloat16", (1.38, 1.6, 2.35, 4.0, 7.4), (1.1, 1.2, 1.45, 1.85, 3.4)),
    Target(
        "roberta", "improved-clustered iterations=3", "bfloat16", (1.2, 1.3, 2.0, 3.7, 6.6), (0.95, 1.0, 1.2, 1.7, 3.0)
    ),
    Target("gpt2", "linear", "bfloat16", (1.4, 1.45, 1.8, 2.45, 4.0)),
    Target("decode", "linear", "float32", (1.25, 2.5, 4.0, 7.0), batch=8),
)
# Share of the speed-up without any attention, at 4,096 tokens.
SHARES = {
    "linear": 0.9,
    "local left=128 right=128": 0.75,
    "clustered iterations=3": 0.75,
    "improved-clustered iterations=3": 0.7,
}
THREADS, SHARED_AT, LONGEST_GB, EXPONENT = 2, 4096, 24, 1.1
RACED_IDIAP = (512, 1024, 2048, 4096)


def share(part: dict[str, Any] | None, name: str) -> float | None:
    """The speed-up of a contender over that without attention."""
    timed, free = row(part, name), row(part, CEILING)
    return None if timed is None or free is None else timed["against_sdpa"][0] / free["against_sdpa"][0]


def judged(made: dict[str, Any]) -> list[list[str]]:
    """One row per target: its name; for each length the target, the result and whether it was reached; and why not."""
    lines = []
    for target in TARGETS:
        for key, asked in (("against_sdpa", target.against_sdpa), ("against_best", target.against_best)):
            cells: list[str] = []
            reasons: dict[str, list[str]] = {}
            for length, least in zip(LENGTHS, asked, strict=False):
                place = {"suite": target.suite, "mode": "forward", "dtype": target.dtype, "threads": THREADS}
                part = find(made, **place, length=length, batch=target.batch)
                contender = row(part, target.name)
                cells.append(asked_and_found(None if contender is None else contender[key][0], least))
                if part and contender and contender[key][0] < least:
                    reason, figure = _why(part, contender, key, least)
                    reasons.setdefault(reason, []).append(f"{figure} ({length:,})")
            if cells:
                where = {"roberta": "encoder", "gpt2": "GPT-2 prefill", "decode": f"GPT-2 decode, batch {target.batch}"}
                against = "default SDPA" if key == "against_sdpa" else "best exact"
                cells += ["–"] * (len(LENGTHS) - len(cells))
                why = "; ".join(f"{reason} {', '.join(figures)}" for reason, figures in reasons.items())
                lines.append([where[target.suite], f"`{target.name}`", target.dtype, against, *cells, why or "–"])
    return lines


def _why(part: dict[str, Any], contender: dict[str, Any], key: str, least: float) -> tuple[str, str]:
    """The reason why a contender misses its target (noise, the rest of the model, or itself), and the figure that shows it."""
    if contender[key][0] * noise(part) >= least:
        return "within the noise of", f"{noise(part) - 1:.1%}"
    free = row(part, CEILING)
    if free is None:
        return "no attention at all", "not measured"
    subject = "no attention at all" + ", its cache still copied," * (part["suite"] == "decode")
    if free[key][0] < least:
        return f"{subject} reaches", f"{free[key][0]:.2f}"
    return f"share of what {subject} reaches:", f"{contender[key][0] / free[key][0]:.2f}"


def other_targets(made: dict[str, Any]) -> list[list[str]]:
    """The other targets: share of the ceiling, peers, growth of memory, the longest input."""
    lines = []
    for name, least in SHARES.items():
        for dtype in ("float32", "bfloat16"):
            place = {"suite": "roberta", "mode": "forward", "dtype": dtype, "threads": THREADS, "length": SHARED_AT}
            what = f"share of the ceiling at {SHARED_AT:,} tokens, `{name}`, {dtype}"
            ratio = share(find(made, **place), name)
            alone = row(find(made, **{**place, "suite": "attention"}), name)
            why = f": by itself it is {alone['against_sdpa'][0]:.1f} times as fast as default SDPA" if alone else ""
            lines.append([what, asked_and_found(ratio, least) + why * (ratio is not None and ratio < least)])
    raced, outcome = _idiap(made)
    what = "faster than idiap's fast-transformers, attention only, one thread, 512 to 4,096 tokens"
    lines.append([f"{what}: {', '.join(raced)}" if raced else what, outcome])
    grown = exponents(made)
    over = [f"`{name}` n^{slope:.2f}" for name, slope in grown.items() if slope > EXPONENT]
    outcome = "not measured" if not grown else f"not reached: {', '.join(over)}" if over else "reached"
    lines.append([f"peak memory of an approximation grows as n^{EXPONENT} at most", outcome])
    failed = [one["name"] for one in made["longest"] if not fits(one)]
    outcome = (
        "not measured" if not made["longest"] else "reached" if not failed else f"not reached: {', '.join(failed)}"
    )
    lines.append([f"65,536 tokens through twelve layers in {LONGEST_GB} GB, of what was run", outcome])
    return lines


def fits(one: dict[str, Any]) -> bool:
    """Whether a run of the longest input, including weights, stayed within the memory."""
    return one["status"] == "ok" and one["peak_mb"] + one["weights_mb"] <= 1e3 * LONGEST_GB


def exponents(made: dict[str, Any]) -> dict[str, float]:
    """The slope of log memory over log length of one layer's attention, for each approximation."""
    points: dict[str, list[tuple[int, float]]] = {}
    for part in made["parts"]:
        if (part["suite"], part["mode"], part["dtype"], part["threads"]) == (
            "attention",
            "forward",
            "float32",
            THREADS,
        ):
            for one in part["contenders"]:
                exact = one["name"] in (*EXACT, *REFERENCES)
                # Below this, buffers of a fixed size dominate.
                if one["role"] == "variant" and one["status"] == "ok" and not exact and part["length"] >= 1024:
                    points.setdefault(one["name"], []).append((part["length"], one["peak_mb"]))
    enough = {name: np.log2(seen) for name, seen in points.items() if len(seen) >= 3 and min(seen)[1] > 0}
    return {name: float(np.polyfit(seen[:, 0], seen[:, 1], 1)[0]) for name, seen in enough.items()}


def against_peers(made: dict[str, Any]) -> list[dict[str, Any]]:
    """Each peer in each part, and the relative speed of our counterpart."""
    races = []
    for part in made["parts"]:
        for one in part["contenders"]:
            ours = row(part, COUNTERPARTS.get(one["name"], ""))
            if one["role"] == "peer" and one["status"] == "ok" and ours:
                ratio = one["median_ms"] / ours["median_ms"]
                races.append({**part, "peer": one["name"], "ours": ours["name"], "ratio": ratio})
    return races


def _idiap(made: dict[str, Any]) -> tuple[list[str], str]:
    """The mechanisms of idiap that ran against ours, and whether ours was faster than each."""
    races = [
        one
        for one in against_peers(made)
        if one["peer"].startswith("idiap") and one["threads"] == 1 and one["mode"] == "forward"
    ]
    if not races:
        return [], "not measured: it is not installed here"
    raced = list(dict.fromkeys(one["peer"].removeprefix("idiap ") for one in races))
    slower = [f"{one['peer']} at {one['length']:,}: {one['ratio']:.2f}" for one in races if one["ratio"] <= 1]
    missing = sorted(set(RACED_IDIAP) - {one["length"] for one in races})
    if missing:
        slower.append(f"not measured at {', '.join(f'{length:,}' for length in missing)}")
    return raced, f"not reached: {'; '.join(slower)}" if slower else "reached"
