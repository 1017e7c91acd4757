"""Strided attention: a window, and every l-th token by a transposition to l columns of S / l tokens."""

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.global_tokens.reference import window_blocks

# Numbers in a working set: 1 MiB of float32, about what a core's own cache holds.
_CACHED = 2**18


def strided_heads(
    q: Tensor, k: Tensor, v: Tensor, *, stride: int, causal: bool, step: int | None, scale: float, dropout: float
) -> Tensor:
    """One step through fused kernels, or both under one softmax, on a CPU a few heads at a time."""
    right = 0 if causal else stride - 1
    if step == 1:
        return window_blocks(q, k, v, left=stride - 1, right=right, causal=causal, scale=scale, dropout=dropout)
    length, keys = q.shape[2], k.shape[2]
    stride = min(stride, keys)
    # The grid of the queries begins with the row of the first one.
    first = (keys - length) // stride
    q, offset = _grid(q, stride, keys - length - first * stride), keys - length - first * stride
    k, v = _grid(k, stride, 0), _grid(v, stride, 0)
    if step == 2:
        out = _columns(q, k, v, keys, causal, scale, dropout)
    else:
        pairs = q.shape[0] * q.shape[2] * stride * (3 * stride + k.shape[2])
        heads = max(1, _CACHED // pairs) if q.device.type == "cpu" else q.shape[1]
        groups = zip(q.split(heads, 1), k.split(heads, 1), v.split(heads, 1), strict=True)
        out = torch.cat([_both(*group, keys, causal, scale, dropout) for group in groups], 1)
    return out.flatten(2, 3)[:, :, offset : offset + length]


def _grid(x: Tensor, stride: int, before: int) -> Tensor:
    """[B, H, n, D] in rows of l tokens, [B, H, rows, l, D], after `before` tokens of nothing."""
    rows = -(-(before + x.shape[2]) // stride)
    return F.pad(x, (0, 0, before, rows * stride - before - x.shape[2])).unflatten(2, (rows, stride))


def _past(queries: int, keys: int, device: torch.device) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def _inside(rows: int, stride: int, keys: int, device: torch.device) -> Tensor:
    """Which cells of a grid hold a key, [rows, l]."""
    return (torch.arange(rows * stride, device=device) < keys).view(rows, stride)


def _columns(q: Tensor, k: Tensor, v: Tensor, keys: int, causal: bool, scale: float, dropout: float) -> Tensor:
    """Exact attention inside each column of the grid: step 2 alone."""
    batch, stride, rows = q.shape[0], q.shape[3], k.shape[2]
    # What fills the last row up comes after all queries, so a causal mask hides it.
    if causal:
        allowed = _past(q.shape[2], rows, q.device)
    elif keys % stride:
        allowed = _inside(rows, stride, keys, q.device).T[:, None, None].repeat(batch, 1, 1, 1)
    else:
        allowed = None
    q, k, v = (x.permute(0, 3, 1, 2, 4).flatten(0, 1) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, dropout_p=dropout, scale=scale)
    return out.unflatten(0, (batch, stride)).permute(0, 2, 3, 1, 4)


def _both(q: Tensor, k: Tensor, v: Tensor, keys: int, causal: bool, scale: float, dropout: float) -> Tensor:
    """One softmax over the window of each query and the rest of its column; they share the query's own key."""
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    q, k, v = q.to(wide) * scale, k.to(wide), v.to(wide)
    near, column = _pairs(q, k.shape[2], keys, causal)
    lowest = torch.finfo(wide).min
    window = (q @ _rows_around(k, q.shape[2], causal).transpose(-2, -1)).masked_fill(~near, lowest)
    far = torch.einsum("bhtrd,bhsrd->bhtrs", q, k).masked_fill(~column, lowest)
    weights = F.dropout(torch.cat([window, far], -1).softmax(-1), dropout)
    window, far = weights.split([window.shape[-1], far.shape[-1]], -1)
    out = window @ _rows_around(v, q.shape[2], causal) + torch.einsum("bhtrs,bhsre->bhtre", far, v)
    return out.to(dtype)


def _rows_around(x: Tensor, rows: int, causal: bool) -> Tensor:
    """The last `rows` rows, each between its neighbours, [B, H, rows, 2 l or 3 l, D]; 0 outside of the grid."""
    first = x.shape[2] - rows
    x = F.pad(x, (0, 0, 0, 0, 1, 0 if causal else 1))
    return torch.cat([x[:, :, first + n : first + n + rows] for n in range(2 if causal else 3)], 3)


def _pairs(q: Tensor, rows: int, keys: int, causal: bool) -> tuple[Tensor, Tensor]:
    """Who sees whom: in the rows around, [rows, l, 2 l or 3 l], and in the column, [rows, l, all rows]."""
    queries, stride = q.shape[2:4]
    token = torch.arange((rows - queries) * stride, rows * stride, device=q.device).view(queries, stride, 1)
    start = token[:, :1] - stride
    other = start + torch.arange(stride * (2 if causal else 3), device=q.device)
    near = ((other - token).abs() < stride) & (other >= 0) & (other < keys)
    row, column = token // stride, torch.arange(rows, device=q.device)
    inside = _inside(rows, stride, keys, q.device).T
    if causal:
        return near & (other <= token), (column < row) & inside
    return near, (column != row) & inside
