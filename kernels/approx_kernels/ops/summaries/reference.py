"""Attention of each block of queries to its own keys and to the summary columns of the other blocks."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.runtime.pytorch import sdpa
from approx_kernels.tokens import by_step, in_turns, without_padding

Inside = Literal["all", "past", "future", "both"]


def summary_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    stride: Callable[[int], int],
    summary: int,
    inside: Inside,
    causal: bool,
    steps: Sequence[int | None] = (None,),
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """The op of this name in `api.py`, which explains the arguments and checks them."""

    def attend(q: Tensor, k: Tensor, v: Tensor, step: int | None) -> Tensor:
        side, step = side_and_step(inside, step)
        form: dict[str, Any] = {"stride": stride(k.shape[2]), "summary": summary, "inside": side, "step": step}
        return in_turns(partial(summary_blocks, **form, causal=causal, scale=scale, dropout=dropout), q, k, v)

    return without_padding(lambda q, k, v: by_step(attend, q, k, v, steps), q, k, v, key_mask)


def side_and_step(inside: Inside, step: int | None) -> tuple[Inside, int | None]:
    """The side that a step sees, and its number there: with `both`, steps 1 and 2 are of the past, 3 and 4 future."""
    if inside != "both" or step is None:
        return inside, step
    return ("past", step) if step < 3 else ("future", step - 2)


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
    """One fused product per block: its keys and the summaries, which are gathered once for all blocks."""
    keys, before = k.shape[2], k.shape[2] - q.shape[2]
    place = torch.arange(keys, device=q.device)
    sizes = (keys - place // stride * stride).clamp(max=stride)
    columns = summary_columns(place % stride, sizes, summary, inside).nonzero().squeeze(1)
    key_summaries, value_summaries = k.index_select(2, columns), v.index_select(2, columns)
    # Columns in the summary of a complete block; only the last block may have fewer.
    each = min((2 if inside == "both" else 1) * summary, stride)
    key_blocks, value_blocks = k.split(stride, 2), v.split(stride, 2)
    masks = {
        size: _pairs(q, size, len(columns), stride if causal else size, summary, inside, causal, step)
        for size in {block.shape[2] for block in key_blocks[before // stride :]}
    }
    numbers = range(before // stride, len(key_blocks))
    counts = [min((block + 1) * stride, keys) - max(block * stride, before) for block in numbers]
    out = []
    for block, queries in zip(numbers, q.split(counts, 2), strict=True):
        own = [key_blocks[block], value_blocks[block]]
        mask = masks[own[0].shape[2]]
        if step != 1:
            past, future = slice(block * each), slice(keys if causal else (block + 1) * each, None)
            own = [
                torch.cat([x, others[:, :, past], others[:, :, future]], 2)
                for x, others in zip(own, (key_summaries, value_summaries), strict=True)
            ]
        allowed = None if mask is None else mask[-queries.shape[2] :, : own[0].shape[2]]
        out.append(sdpa(queries, *own, attn_mask=allowed, dropout_p=dropout, scale=scale))
    return torch.cat(out, 2)


def summary_columns(column: Tensor, size: Tensor | int, summary: int, inside: Inside) -> Tensor:
    """Which columns of blocks of that size form their summaries."""
    first, last = column < summary, column >= size - summary
    return first | last if inside == "both" else first if inside == "future" else last


def _pairs(
    q: Tensor, size: int, others: int, whole: int, summary: int, inside: Inside, causal: bool, step: int | None
) -> Tensor | None:
    """Which query sees which key of its own block, and all `others` in addition; None means all.

    The columns of a summary must not change as the sequence grows: `whole` is the final size of the block.
    """
    column = torch.arange(size, device=q.device)
    allowed = own_pairs(column[:, None], column, whole, summary, inside, causal, step)
    return None if allowed is None else F.pad(allowed, (0, others), value=True)


def own_pairs(
    row: Tensor, column: Tensor, size: Tensor | int, summary: int, inside: Inside, causal: bool, step: int | None
) -> Tensor | None:
    """Which query sees which key of its own block, by their columns in blocks of that size; None is all."""
    if inside in ("all", "both") and step != 2:
        return None
    allowed = column == row
    if step != 2:
        allowed = allowed | (column >= row if inside == "future" else column <= row)
    if step != 1:
        allowed = allowed | summary_columns(column, size, summary, inside)
    return allowed & (column <= row) if causal else allowed
