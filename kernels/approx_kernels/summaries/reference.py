"""Attention of each block of queries to its own keys and to the summary columns of the other blocks."""

import math
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Inside = Literal["all", "past", "future"]


def root_below(length: int) -> int:
    """The default stride for so many tokens: the root of their number, rounded down."""
    return math.isqrt(length)


def summary_blocks(
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
    """One fused product a block: its keys beside the summaries, which are gathered once for all blocks."""
    keys, before = k.shape[2], k.shape[2] - q.shape[2]
    key_blocks, value_blocks = k.split(stride, 2), v.split(stride, 2)
    columns, ends = _columns(keys, stride, summary, last=inside != "future")
    columns = torch.tensor(columns, device=q.device)
    key_summaries, value_summaries = k.index_select(2, columns), v.index_select(2, columns)
    first = before // stride
    edges = [max(b * stride, before) for b in range(first, len(key_blocks))] + [keys]
    out = []
    for block, queries in enumerate(q.split([b - a for a, b in pairwise(edges)], 2), first):
        begin, size = block * stride, key_blocks[block].shape[2]
        rows = torch.arange(edges[block - first], edges[block - first + 1], device=q.device)[:, None] - begin
        # What one column summarises must not change as the sequence grows: causal blocks are taken as complete.
        last = stride if causal else size
        allowed = _own_pairs(rows, size, last, summary, inside, causal, step)
        own = [key_blocks[block], value_blocks[block]]
        if step != 1:
            past, future = slice(0, ends[block]), slice(keys if causal else ends[block + 1], None)
            own = [
                torch.cat([x[:, :, past], y, x[:, :, future]], 2)
                for x, y in zip((key_summaries, value_summaries), own, strict=True)
            ]
            if allowed is not None:
                allowed = F.pad(allowed, (ends[block], own[0].shape[2] - ends[block] - size), value=True)
        out.append(F.scaled_dot_product_attention(queries, *own, attn_mask=allowed, dropout_p=dropout, scale=scale))
    return torch.cat(out, 2)


def _columns(keys: int, stride: int, summary: int, *, last: bool) -> tuple[list[int], list[int]]:
    """Positions of the summaries of all blocks, a partial one too, and how many there are before each block."""
    columns: list[int] = []
    ends = [0]
    for begin in range(0, keys, stride):
        end = min(begin + stride, keys)
        columns += range(max(end - summary, begin), end) if last else range(begin, min(begin + summary, end))
        ends.append(len(columns))
    return columns, ends


def _own_pairs(
    rows: Tensor, size: int, last: int, summary: int, inside: Inside, causal: bool, step: int | None
) -> Tensor | None:
    """Which query sees which key of its own block, both counted from the block's begin; None is all."""
    if inside == "all" and step != 2:
        return None
    columns = torch.arange(size, device=rows.device)
    allowed = columns == rows
    if step != 2:
        allowed = allowed | (columns <= rows if inside == "past" else columns >= rows)
    if step != 1:
        allowed = allowed | (columns < summary if inside == "future" else columns >= last - summary)
    return allowed & (columns <= rows) if causal else allowed
