"""The figures of a pattern: edges, in-degree, density, information flow, and load."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from approx.patterns.pattern import Pattern
from approx.patterns.reach import Mask, reached


def figures(pattern: Pattern, block: int = 64) -> dict[str, Any]:
    """Count the edges and tiles of a pattern, for each step and merged, and measure its information flow.

    An edge j -> i means that query i sees key j. A pattern has *full information* if, after its steps in order, every
    position has received from every other one (every earlier one, if causal). The load of position k between two
    steps is in(k) out(k) / n^2: the share of all pairs with a path through k. Densities are shares of all n^2 pairs, or
    of all tiles of `block` x `block` pairs; exact causal attention has about half of them.

    Source: Daras, Odena, Zhang, Dimakis, 2019, Your Local GAN, arXiv 1911.12287 (information flow graphs).

    Args:
        pattern: The pattern.
        block: Side of a tile, 1 or more.

    Returns:
        Plain data: the pattern and its settings, `steps` and `merged` (edges, in-degree, densities), `edges` (the sum
        over the steps), `flow` (coverage in order and reversed, and by layer in the mode of the settings) and `load`,
        with `ways`: the mean number of paths of a pair, at least 1 for full information.
    """
    steps = list(pattern.steps)
    allowed = pattern.length * (pattern.length + 1) // 2 if pattern.causal else pattern.length**2
    counted = [_counts(step, block, pattern.stride) for step in steps]
    merged = counted[0] if len(steps) == 1 else _counts(pattern.merged, block, pattern.stride)
    apart = sum(step["rewritten"]["block_density"] for step in counted)
    if apart < merged["rewritten"]["block_density"]:
        # Each step can have its own layout: their outputs are combined by the log-sum-exp of the scores.
        merged["rewritten"] = {"by": "each step apart", "block_density": apart}
    coverage = [int(counts.sum()) / allowed for counts in reached(steps)][-1]
    backwards = [int(counts.sum()) / allowed for counts in reached(steps[::-1])][-1] if len(steps) > 1 else None
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
            "coverage_by_layer": [int(counts.sum()) / allowed for counts in reached(pattern.layers)],
        },
        "load": _load(steps, allowed),
    }


def _counts(mask: Mask, block: int, stride: int | None) -> dict[str, Any]:
    degrees = mask.sum(1, dtype=np.int64)
    edges = int(degrees.sum())
    tiles = {"as it is": _touched(mask, block), "gathered": _gathered(mask, block)}
    if stride is not None:
        # Sort tokens by their place within the stride: those a stride apart become neighbours.
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
    """Share of the tiles with an edge."""
    starts = np.arange(0, len(mask), block)
    return float(np.logical_or.reduceat(np.logical_or.reduceat(mask, starts, axis=0), starts, axis=1).mean())


def _gathered(mask: Mask, block: int) -> float:
    """Share of the tiles if each block of queries first gathers the keys that it sees."""
    starts = np.arange(0, len(mask), block)
    keys = np.logical_or.reduceat(mask, starts, axis=0).sum(1)
    return float((-(-keys // block)).sum() / len(starts) ** 2)


def _load(steps: Sequence[Mask], allowed: int) -> list[dict[str, Any]]:
    """The load between consecutive steps, or between two layers for a pattern of one step."""
    steps = list(steps) * 2 if len(steps) == 1 else list(steps)
    into = list(reached(steps[:-1]))
    out = list(reached([step.T for step in steps[:0:-1]]))[::-1]
    loads = []
    for number, (before, after) in enumerate(zip(into, out, strict=True), start=1):
        load = before * after / len(before) ** 2
        ways = int((before * after).sum()) / allowed
        loads.append({"after_step": number, **_spread(load), "at": int(load.argmax()), "ways": ways})
    return loads


def _spread(values: NDArray[Any]) -> dict[str, Any]:
    return {"min": values.min().item(), "mean": float(values.mean()), "max": values.max().item()}
