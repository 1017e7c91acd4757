"""Attention between whole blocks on a CPU, by lists of keys."""

from collections.abc import Sequence

from torch import Tensor

from approx_kernels.ops.key_lists.cpu import FAR, MOST_ROWS, attend_lists, cut


def neighbour_lists(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    size: int,
    neighbours: int,
    shift: int,
    causal: bool,
    scale: float,
    dropout: float,
) -> Tensor:
    """The same as `neighbour_blocks`."""
    keys, before = k.shape[2], k.shape[2] - q.shape[2]

    def edge(block: int) -> int:
        return min(max(block * size - shift, 0), keys)

    starts, entries = [], []
    for block in range((before + shift) // size, (keys - 1 + shift) // size + 1):
        rows = cut(max(edge(block) - before, 0), edge(block + 1) - before, MOST_ROWS)
        own = edge(block - neighbours), edge(block + 1 + (0 if causal else neighbours)), -FAR, 0 if causal else FAR
        starts += rows
        entries += [[own]] * len(rows)
    listed = {"before": before, "starts": [*starts, q.shape[2]], "entries": entries}
    return attend_lists(q, k, v, None, **listed, scale=scale, dropout=dropout)


def block_lists(
    q: Tensor, k: Tensor, v: Tensor, *, size: int, lists: Sequence[Sequence[int]], scale: float, dropout: float
) -> Tensor:
    """The same as `listed_blocks`."""
    keys, before = k.shape[2], k.shape[2] - q.shape[2]
    starts, entries = [], []
    for block in range(before // size, len(lists)):
        rows = cut(max(block * size - before, 0), min((block + 1) * size, keys) - before, MOST_ROWS)
        own = [(b * size, min((b + 1) * size, keys), -FAR, FAR) for b in lists[block]] or [(0, keys, -FAR, FAR)]
        starts += rows
        entries += [own] * len(rows)
    listed = {"before": before, "starts": [*starts, q.shape[2]], "entries": entries}
    return attend_lists(q, k, v, None, **listed, scale=scale, dropout=dropout)
