"""Strided attention by the flash kernels: a window, and columns that are dense once the sequence is laid out in rows of l."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.flash import flash
from approx_kernels.flash.listed import joined, listed_attention


def strided_tiles(
    q: Tensor, k: Tensor, v: Tensor, *, stride: int, causal: bool, step: int | None, scale: float
) -> Tensor:
    """One step, or both under one softmax, joined by their log-sum-exps."""
    keys = k.shape[2]
    stride = min(stride, keys)
    near = None
    if step != 2:
        near = flash(q, k, v, scale=scale, left=stride - 1, right=0 if causal else stride - 1, impl="triton")
        if step == 1:
            return near[0]
    before = (keys - q.shape[2]) % stride
    columns = _columns(q, stride, before), _columns(k, stride, 0), _columns(v, stride, 0)
    # Cells behind the last key; a causal query stands before them anyway.
    real = None if causal or keys % stride == 0 else _real(keys, stride, q)
    if near is None:
        far = flash(*columns, real, scale=scale, right=0 if causal else None, impl="triton")
        return _rows(far[0], q, stride, before)
    if causal:
        far = flash(*columns, scale=scale, right=-1, impl="triton")
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


def _real(keys: int, stride: int, q: Tensor) -> Tensor:
    """Which cells of each column hold a key, [B l, rows]."""
    rows = -(-keys // stride)
    inside = keys > torch.arange(rows * stride, device=q.device).view(rows, stride).T
    return inside.repeat(q.shape[0], 1)
