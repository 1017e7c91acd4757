"""Strided attention on a CPU, by lists of keys: the window, and the columns of a grid with l tokens per row."""

import torch
from torch import Tensor

from approx_kernels.ops.key_lists.cpu import FAR, MOST_ROWS, Entry, attend_lists, cut


def strided_lists(
    q: Tensor, k: Tensor, v: Tensor, *, stride: int, causal: bool, step: int | None, scale: float, dropout: float
) -> Tensor:
    """The same as `strided_heads`; both steps are two parts of one softmax."""
    length, keys = q.shape[2], k.shape[2]
    before, stride = keys - length, min(stride, keys)
    how = {"before": before, "scale": scale, "dropout": dropout}
    starts: list[int] = []
    entries: list[list[Entry]] = []
    if step != 2:
        starts = cut(0, length)
        entries = [[(0, keys, 1 - stride, 0 if causal else stride - 1)]] * len(starts)
    if step == 1:
        return attend_lists(q, k, v, None, **how, starts=[*starts, length], entries=entries)
    # The window already contains its own cell.
    seen = [(-FAR, 0 if causal else FAR)] if step == 2 else [(-FAR, -1)] if causal else [(-FAR, -1), (1, FAR)]
    offset = length if step is None else 0
    row, end = offset, 0
    for column in range(stride):
        begin, end = end, end + len(range(column, keys, stride))
        rows = len(range((column - before) % stride, length, stride))
        # Offset from the rank of a query to that of its own key.
        ahead = end - rows - (row - offset) - before
        blocks = cut(row, row + rows, MOST_ROWS)
        starts += blocks
        entries += [[(begin, end, low + ahead, high + ahead) for low, high in seen]] * len(blocks)
        row += rows
    queries, order = ((x % stride).argsort(stable=True) for x in (torch.arange(before, keys), torch.arange(keys)))
    orders = queries[None], order[None]
    if step is None:
        orders = torch.stack([torch.arange(length), queries]), torch.stack([torch.arange(keys), order])
    return attend_lists(q, k, v, None, **how, starts=[*starts, row], entries=entries, orders=orders)
