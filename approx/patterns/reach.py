"""Boolean products of patterns: which positions information reaches after some steps. A word holds 64 positions."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]


def reached(steps: Sequence[Mask]) -> Iterator[NDArray[np.int64]]:
    """Count the positions that each position has received from after the first step, the first two, and so on.

    Position i receives from j if there is a path j -> k1 -> … -> i with one edge of each step, in order. The counts are
    the row sums of the boolean product M_t ⋯ M_1.

    Args:
        steps: Each [n, n] bool, rows are queries.

    Yields:
        Counts [n] after each step.
    """
    sources = None
    for step in steps:
        sources = _packed(step) if sources is None else _after(step, sources)
        yield np.bitwise_count(sources).sum(1, dtype=np.int64)


def _packed(mask: Mask) -> NDArray[np.uint64]:
    rows, columns = mask.shape
    words = np.zeros((rows, -(-columns // 64) * 8), np.uint8)
    words[:, : -(-columns // 8)] = np.packbits(mask, axis=1)
    return words.view(np.uint64)


def _after(step: Mask, sources: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The sources of each position after one more step: the union of the sources of its keys."""
    merged = np.zeros_like(sources)
    # Many queries see the same keys, so each union is computed once.
    first: dict[bytes, int] = {}
    for query, name in enumerate(map(bytes, _packed(step))):
        same = first.setdefault(name, query)
        merged[query] = merged[same] if same != query else np.bitwise_or.reduce(sources[step[query]], axis=0)
    return merged
