"""Sections of the page of `bench/cpu.py` that span its tables: time over floor, peers, memory."""

from typing import Any

from bench.cpu_cases import cases
from bench.cpu_floor import SIGNS, floor_ms, limit
from bench.cpu_peers import COUNTERPARTS
from bench.cpu_record import LONGEST
from bench.cpu_targets import LENGTHS, LONGEST_GB, THREADS, against_peers, exponents, fits
from bench.pages import table
from bench.parts import find, names, noise, row

PEERS_BASE = "PyTorch's own products of bfloat16, which the peers took, are slow on this processor, so in it they are a poor base."
# A column whose noise exceeds this is marked.
_NOISY = 1.04


def dagger(part: dict[str, Any] | None) -> str:
    """The mark of a column disturbed by other programs or noise."""
    return " †" if part and (part["crowded"] or noise(part) > _NOISY) else ""


# Older versions gave converted models these besides their attention; the parts say which.
_HALF = "bfloat16 products"
_REPLACED = {
    "float32 products": "products of float32 by another library",
    "float32 layers on tiles": "layers of float32 on tiles for bfloat16",
    _HALF: "products of bfloat16 computed in float32",
}


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


def peers(made: dict[str, Any], modes: dict[str, str]) -> list[str]:
    """The speed of our counterpart relative to each peer."""
    lines: dict[tuple[str, ...], dict[int, str]] = {}
    for one in against_peers(made, dict(COUNTERPARTS)):
        case = (one["peer"], f"`{one['ours']}`", modes[one["mode"]], one["dtype"], str(one["threads"]))
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
