"""Sparse patterns by the flash kernels: windows, and lists of blocks made from the pairs of a pattern."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.ops.flash.api import flash
from approx_kernels.ops.flash.listed import joined, kept, listed_attention
from approx_kernels.ops.patterns.reference import Pattern, Strided, Summaries


def pattern_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: int | None,
    key_mask: Tensor | None,
    *,
    pattern: Callable[[int], Pattern],
    scale: float,
) -> Tensor:
    """Attention of the last tokens to keys [B, G, S, D] in a step of the pattern of S tokens; real keys are at the front."""
    own = pattern(k.shape[2])
    if isinstance(own, Strided):
        return _strided_tiles(q, k, v, key_mask, own, step=step, scale=scale)
    if isinstance(own, Summaries):
        return _summary_tiles(q, k, v, key_mask, own, step=step, scale=scale)
    pairs = partial(own.allowed, n=k.shape[2], step=step)
    return listed_attention(q, k, v, own, pairs, key_mask=key_mask, scale=scale)[0]


def _summary_tiles(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, pattern: Summaries, *, step: int | None, scale: float
) -> Tensor:
    """The own block of each query, and the summaries of the others, which are gathered into tiles behind all keys."""
    length, keys, stride = q.shape[2], k.shape[2], pattern.stride

    def gathered() -> Tensor:
        return pattern.gathered(keys, step).to(q.device)

    def pairs(i: Tensor, j: Tensor) -> Tensor:
        token = torch.cat([torch.arange(keys, device=i.device), columns])[j]
        # Each key counts at one of its places.
        here = (i // stride == token // stride) == (j < keys)
        return here & pattern.allowed(i, token, keys, step)

    columns = kept((pattern, step, keys, "columns", q.device), gathered)
    real = key_mask
    if len(columns):
        k, v = (torch.cat([x, x.index_select(2, columns)], 2) for x in (k, v))
        real = None if key_mask is None else torch.cat([key_mask, key_mask.index_select(1, columns)], 1)
    named = pattern, step, keys
    out = listed_attention(q, k, v, named, pairs, key_mask=real, scale=scale, first=keys - length)[0]
    # Beside summaries there are more keys than queries, whose mask this is then not taken for.
    return out if key_mask is None else out.masked_fill(~key_mask[:, None, keys - length :, None], 0.0)


def _strided_tiles(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, pattern: Strided, *, step: int | None, scale: float
) -> Tensor:
    """A window, and columns that are dense once the sequence is laid out in rows of l; both under one softmax if merged."""
    keys, causal = k.shape[2], pattern.causal
    stride = min(pattern.stride, keys)
    near = None
    if step != 2:
        right = 0 if causal else stride - 1
        near = flash(q, k, v, key_mask, scale=scale, left=stride - 1, right=right, impl="triton")
        if step == 1:
            return near[0]
    before = (keys - q.shape[2]) % stride
    columns = _columns(q, stride, before), _columns(k, stride, 0), _columns(v, stride, 0)
    # Cells behind the last key; a causal query stands before them anyway.
    if key_mask is None and not causal and keys % stride:
        key_mask = k.new_ones(k.shape[0], keys, dtype=torch.bool)
    real = None if key_mask is None else _cells(key_mask, stride)
    if near is None:
        far = flash(*columns, real, scale=scale, right=0 if causal else None, impl="triton")
        return _rows(far[0], q, stride, before)
    if causal:
        far = flash(*columns, real, scale=scale, right=-1, impl="triton")
    else:
        # Its own cell is in the window already.
        far = listed_attention(*columns, "others", lambda i, j: i != j, key_mask=real, scale=scale, diagonal=False)
    return joined(near, (_rows(far[0], q, stride, before), _rows(far[1][..., None], q, stride, before)[..., 0]))


def _columns(x: Tensor, stride: int, before: int) -> Tensor:
    """[B, H, n, D] as l columns after `before` tokens of nothing, [B l, H, rows, D]."""
    rows = -(-(before + x.shape[2]) // stride)
    grid = F.pad(x, (0, 0, before, rows * stride - before - x.shape[2])).unflatten(2, (rows, stride))
    return grid.permute(0, 3, 1, 2, 4).flatten(0, 1)


def _rows(x: Tensor, q: Tensor, stride: int, before: int) -> Tensor:
    """The inverse of `_columns` for outputs of q."""
    grid = x.unflatten(0, (q.shape[0], stride)).permute(0, 2, 3, 1, 4)
    return grid.flatten(2, 3)[:, :, before : before + q.shape[2]]


def _cells(mask: Tensor, stride: int) -> Tensor:
    """A mask of keys, [B, S], for the cells of each column, [B l, rows]."""
    grid = F.pad(mask, (0, -mask.shape[1] % stride)).unflatten(1, (-1, stride))
    return grid.transpose(1, 2).flatten(0, 1)
