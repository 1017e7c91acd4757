"""Strided attention by the flash kernels: a window, and columns that are dense in a layout with rows of l."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.ops.flash.api import flash
from approx_kernels.ops.flash.listed import joined, listed_attention


def strided_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    *,
    stride: int,
    causal: bool,
    step: int | None,
    scale: float,
) -> Tensor:
    """One step, or both under one softmax, joined by their log-sum-exps; real keys come first."""
    keys = k.shape[2]
    stride = min(stride, keys)
    near = None
    if step != 2:
        right = 0 if causal else stride - 1
        near = flash(q, k, v, key_mask, scale=scale, left=stride - 1, right=right, impl="triton")
        if step == 1:
            return near[0]
    before = (keys - q.shape[2]) % stride
    columns = _columns(q, stride, before), _columns(k, stride, 0), _columns(v, stride, 0)
    # Cells after the last key; a causal query precedes them anyway.
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
    """[B, H, n, D] as l columns after `before` empty tokens, [B l, H, rows, D]."""
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
