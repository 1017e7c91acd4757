"""The figures of a pattern: edges, in-degree, density, how far information gets, and through whom."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from approx.patterns.pattern import Pattern
from approx.patterns.reach import Mask, reached


def figures(pattern: Pattern, block: int = 64) -> dict[str, Any]:
    """Count a pattern, step by step and merged.

    An edge j -> i says that query i sees key j. A pattern has *full information* if, after its steps in their order,
    every position has heard of every other (of every earlier one, when causal). The load of position k between two
    steps is in(k) out(k) / n^2: the share of all pairs that may meet there. Densities are shares of all n^2 pairs, or
    of all tiles of `block` x `block` pairs, of which exact causal attention has about a half.

    Source: Daras, Odena, Zhang, Dimakis, 2019, Your Local GAN, arXiv 1911.12287 (information flow graphs).

    Args:
        pattern: What is counted.
        block: Side of a tile, 1 or more.

    Returns:
        Plain data: what the pattern is, `steps` and `merged` (edges, in-degree, densities), `edges` (the sum over
        the steps), `flow` (coverage in order and reversed, by layer in the mode of the settings) and `load`, whose
        `ways` are the paths of a pair on average: 1 is the least that full information takes.
    """
    steps = list(pattern.steps)
    allowed = pattern.length * (pattern.length + 1) // 2 if pattern.causal else pattern.length**2
    counted = [_counts(step, block, pattern.stride) for step in steps]
    merged = counted[0] if len(steps) == 1 else _counts(pattern.merged, block, pattern.stride)
    apart = sum(step["rewritten"]["block_density"] for step in counted)
    if apart < merged["rewritten"]["block_density"]:
        # Each step in its own layout, joined by the log-sum-exp of their scores.
        merged["rewritten"] = {"by": "each step apart", "block_density": apart}
    coverage = [int(heard.sum()) / allowed for heard in reached(steps)][-1]
    backwards = [int(heard.sum()) / allowed for heard in reached(steps[::-1])][-1] if len(steps) > 1 else None
    return {
        "pattern": pattern.name,
        "length": pattern.length,
        "causal": pattern.causal,
        "settings": pattern.settings,
        "stride": pattern.stride,
        "block": block,
        "edges": sum(step["edges"] for step in counted),
        "exact_edges": allowed,
        "steps": counted,
        "merged": merged,
        "flow": {
            "coverage": coverage,
            "coverage_reversed": backwards,
            "full_information": coverage == 1,
            "coverage_by_layer": [int(heard.sum()) / allowed for heard in reached(pattern.layers)],
        },
        "load": _load(steps, allowed),
    }


def _counts(mask: Mask, block: int, stride: int | None) -> dict[str, Any]:
    degrees = mask.sum(1, dtype=np.int64)
    edges = int(degrees.sum())
    tiles = {"as it is": _touched(mask, block), "gathered": _gathered(mask, block)}
    if stride is not None:
        # All first tokens of a stride, then all second ones: what is l apart becomes neighbours.
        order = np.argsort(np.arange(len(mask)) % stride, kind="stable")
        tiles["permuted"] = _touched(mask[order][:, order], block)
    best = min(tiles, key=lambda name: tiles[name])
    return {
        "edges": edges,
        "in_degree": _spread(degrees),
        "density": edges / mask.size,
        "block_density": tiles["as it is"],
        "rewritten": {"by": best, "block_density": tiles[best]},
    }


def _touched(mask: Mask, block: int) -> float:
    """Share of the tiles that hold an edge."""
    starts = np.arange(0, len(mask), block)
    return float(np.logical_or.reduceat(np.logical_or.reduceat(mask, starts, axis=0), starts, axis=1).mean())


def _gathered(mask: Mask, block: int) -> float:
    """Share of the tiles when each block of queries first lays the keys that it sees side by side."""
    starts = np.arange(0, len(mask), block)
    keys = np.logical_or.reduceat(mask, starts, axis=0).sum(1)
    return float((-(-keys // block)).sum() / len(starts) ** 2)


def _load(steps: Sequence[Mask], allowed: int) -> list[dict[str, Any]]:
    """The load between each two steps; of a pattern with a single step, between two layers of it."""
    steps = list(steps) * 2 if len(steps) == 1 else list(steps)
    into = list(reached(steps[:-1]))
    out = list(reached([step.T for step in steps[:0:-1]]))[::-1]
    found = []
    for number, (before, after) in enumerate(zip(into, out, strict=True), start=1):
        load = before * after / len(before) ** 2
        ways = int((before * after).sum()) / allowed
        found.append({"after_step": number, **_spread(load), "at": int(load.argmax()), "ways": ways})
    return found


def _spread(values: NDArray[Any]) -> dict[str, Any]:
    return {"min": values.min().item(), "mean": float(values.mean()), "max": values.max().item()}
