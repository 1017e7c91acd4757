"""The own block and the summary columns of the others on a CPU, by lists of keys."""

import torch
from torch import Tensor

from approx_kernels.ops.key_lists.cpu import FAR, Entry, attend_lists, cut
from approx_kernels.ops.summaries.reference import Inside


def summary_lists(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    stride: int,
    summary: int,
    inside: Inside,
    causal: bool,
    step: int | None,
    scale: float,
    dropout: float,
) -> Tensor:
    """The same as `summary_blocks`; copies of the summaries of all blocks follow the keys, contiguously.

    For blocks before that of the first query, only the summaries are seen.
    """
    keys, before = k.shape[2], k.shape[2] - q.shape[2]
    block = before // stride
    gone = block * stride
    edges = [(first, min(first + stride, keys)) for first in range(0, keys, stride)]
    # The columns of a summary must not change as a causal sequence grows.
    columns = [_columns(first, end, first + stride if causal else end, summary, inside) for first, end in edges]
    counts = [sum(end - begin for begin, end in own) for own in columns]
    behind = [keys - gone]
    for count in counts:
        behind.append(behind[-1] + count)
    if step != 1:
        places = torch.tensor(
            [j for own in columns for begin, end in own for j in range(begin, end)], dtype=torch.int64
        )
        k, v = (torch.cat([x[:, :, gone:], x.index_select(2, places)], 2) for x in (k, v))
    else:
        k, v = k[:, :, gone:], v[:, :, gone:]
    starts, entries = [], []
    for number in range(block, len(edges)):
        first, end = edges[number]
        own = [
            (begin - gone, last - gone, low, high)
            for begin, last, low, high in _own(first, end, columns[number], inside, causal, step)
        ]
        if step != 1:
            own.append((behind[0], behind[number], -FAR, FAR))
            own += [] if causal else [(behind[number + 1], behind[-1], -FAR, FAR)]
        rows = cut(max(first - before, 0), end - before)
        starts += rows
        entries += [own] * len(rows)
    lists = {"before": before - gone, "starts": [*starts, q.shape[2]], "entries": entries}
    return attend_lists(q, k, v, None, **lists, scale=scale, dropout=dropout)


def _columns(first: int, end: int, whole: int, summary: int, inside: Inside) -> list[tuple[int, int]]:
    """The stretches of a block that form its summary; the block will end at `whole`."""
    early = (first, min(first + summary, end)) if inside in ("future", "both") else (first, first)
    late = (max(whole - summary, early[1]), end) if inside != "future" else (end, end)
    return [(begin, last) for begin, last in (early, late) if begin < last]


def _own(
    first: int, end: int, columns: list[tuple[int, int]], inside: Inside, causal: bool, step: int | None
) -> list[Entry]:
    """Which query of a block sees which of its keys."""
    if step != 2 and inside in ("all", "both"):
        return [(first, end, -FAR, 0 if causal else FAR)]
    low, high = (0, 0) if step == 2 else (0, FAR) if inside == "future" else (-FAR, 0)
    if step == 1:
        return [(first, end, low, high)]
    rest = [first, *(edge for column in columns for edge in column), end]
    others = [(begin, last, low, high) for begin, last in zip(rest[::2], rest[1::2], strict=True) if begin < last]
    return others + [(begin, last, -FAR, 0 if causal else FAR) for begin, last in columns]
