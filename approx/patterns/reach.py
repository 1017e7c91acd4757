"""Boolean products of patterns: who has heard of whom after some steps. 64 positions fit one word."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]


def reached(steps: Sequence[Mask]) -> Iterator[NDArray[np.int64]]:
    """How many positions each position has heard of after the first step, the first two, and so on.

    Position i hears of j if edges j -> k1 -> … -> i exist, one of each step, the first step's first: a row sum of the
    boolean product M_t ⋯ M_1.

    Args:
        steps: Each [n, n] bool, rows are those who hear.

    Yields:
        [n] counts, once a step.
    """
    heard = None
    for step in steps:
        heard = _packed(step) if heard is None else _after(step, heard)
        yield np.bitwise_count(heard).sum(1, dtype=np.int64)


def _packed(mask: Mask) -> NDArray[np.uint64]:
    rows, columns = mask.shape
    words = np.zeros((rows, -(-columns // 64) * 8), np.uint8)
    words[:, : -(-columns // 8)] = np.packbits(mask, axis=1)
    return words.view(np.uint64)


def _after(step: Mask, heard: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """What each position has heard of once this step brought together what its keys had heard of."""
    found = np.zeros_like(heard)
    # Many queries of a block see the same keys; their union is made once.
    first: dict[bytes, int] = {}
    for query, name in enumerate(map(bytes, _packed(step))):
        same = first.setdefault(name, query)
        found[query] = found[same] if same != query else np.bitwise_or.reduce(heard[step[query]], axis=0)
    return found
