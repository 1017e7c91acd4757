"""Strided attention: a window, and every l-th token by transposing to l columns of S / l tokens."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.ops.exact.reference import window_blocks
from approx_kernels.runtime.pytorch import sdpa, without_functions
from approx_kernels.tokens import by_step, in_turns, stretches, without_padding

# Numbers in a working set: 1 MiB of float32, about the size of a core's own cache.
_CACHED = 2**18
# Queries that share their window's keys.
_BLOCK = 64

Part = tuple[Tensor, Tensor, Tensor]


def strided_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    stride: Callable[[int], int],
    causal: bool,
    steps: Sequence[int | None] = (None,),
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """The op of this name in `api.py`, which explains the arguments and checks them."""

    def attend(q: Tensor, k: Tensor, v: Tensor, step: int | None) -> Tensor:
        how: dict[str, Any] = {"causal": causal, "step": step, "scale": scale, "dropout": dropout}
        return in_turns(partial(strided_heads, stride=stride(k.shape[2]), **how), q, k, v)

    return without_padding(lambda q, k, v: by_step(attend, q, k, v, steps), q, k, v, key_mask)


def strided_heads(
    q: Tensor, k: Tensor, v: Tensor, *, stride: int, causal: bool, step: int | None, scale: float, dropout: float
) -> Tensor:
    """One step through fused kernels, or both under one softmax."""
    if step == 1:
        right = 0 if causal else stride - 1
        return window_blocks(q, k, v, left=stride - 1, right=right, causal=causal, scale=scale, dropout=dropout)
    length, keys = q.shape[2], k.shape[2]
    stride = min(stride, keys)
    # The grid of the queries begins with the row of the first one.
    before = (keys - length) % stride
    rows = slice(before, before + length)
    if step == 2:
        grids = _grid(q, stride, before), _grid(k, stride, 0), _grid(v, stride, 0)
        return _columns(*grids, keys, causal, scale, dropout).flatten(2, 3)[:, :, rows]
    wide = torch.promote_types(q.dtype, torch.float32)
    queries, k, v = q.to(wide) * scale, k.to(wide), v.to(wide)
    near = _near(queries, k, v, stride, causal, dropout)
    grids = _grid(queries, stride, before), _grid(k, stride, 0), _grid(v, stride, 0)
    top, total, out = (x.flatten(2, 3)[:, :, rows] for x in _far(*grids, keys, causal, dropout))
    return _joined(near, (top, total, out)).to(q.dtype)


def _grid(x: Tensor, stride: int, before: int) -> Tensor:
    """[B, H, n, D] in rows of l tokens, [B, H, rows, l, D], after `before` empty cells."""
    rows = -(-(before + x.shape[2]) // stride)
    after = rows * stride - before - x.shape[2]
    return (F.pad(x, (0, 0, before, after)) if before or after else x).unflatten(2, (rows, stride))


def _past(queries: int, keys: int, device: torch.device) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def _inside(rows: int, stride: int, keys: int, device: torch.device) -> Tensor:
    """Which cells of a grid hold a key, [rows, l]."""
    return (torch.arange(rows * stride, device=device) < keys).view(rows, stride)


def _columns(q: Tensor, k: Tensor, v: Tensor, keys: int, causal: bool, scale: float, dropout: float) -> Tensor:
    """Exact attention inside each column of the grid: step 2 alone."""
    batch, stride, rows = q.shape[0], q.shape[3], k.shape[2]
    # The cells that fill up the last row follow all queries, so a causal mask hides them.
    if causal:
        allowed = _past(q.shape[2], rows, q.device)
    elif keys % stride:
        allowed = _inside(rows, stride, keys, q.device).T[:, None, None].repeat(batch, 1, 1, 1)
    else:
        allowed = None
    q, k, v = (x.permute(0, 3, 1, 2, 4).flatten(0, 1) for x in (q, k, v))
    out = sdpa(q, k, v, attn_mask=allowed, dropout_p=dropout, scale=scale)
    return out.unflatten(0, (batch, stride)).permute(0, 2, 3, 1, 4)


def _near(q: Tensor, k: Tensor, v: Tensor, stride: int, causal: bool, dropout: float) -> Part:
    """The window of each query, block by block; q is scaled."""
    length, keys = q.shape[2], k.shape[2]
    starts = range(keys - length, keys, _BLOCK)
    after = 0 if causal else stride - 1
    bounds = [(max(first - stride + 1, 0), min(first + _BLOCK + after, keys)) for first in starts]
    row = torch.arange(_BLOCK, device=q.device)[:, None]
    column = torch.arange(_BLOCK + stride - 1 + after, device=q.device)
    band = (column >= row) & (column < row + stride + after)
    parts = []
    blocks = zip(starts, bounds, q.split(_BLOCK, 2), stretches(k, bounds), stretches(v, bounds), strict=True)
    for first, (begin, end), queries, own, values in blocks:
        cut = begin - (first - stride + 1)
        shown = band[: queries.shape[2], cut : cut + end - begin]
        parts.append(_part(queries, own, values, shown, dropout))
    return _side_by_side(parts, 2)


def _far(q: Tensor, k: Tensor, v: Tensor, keys: int, causal: bool, dropout: float) -> Part:
    """The column of each cell of the grid without the cell itself, on a CPU some columns at a time; q is scaled."""
    rows, stride = k.shape[2:4]
    # One matrix per column: [B, H, l, rows, D].
    q, k, v = (x.transpose(2, 3) for x in (q, k, v))
    row = torch.arange(rows, device=q.device)
    own = row[rows - q.shape[3] :, None]
    shown = row < own if causal else row != own
    pairs = q.shape[0] * q.shape[1] * q.shape[3] * rows
    width = max(1, _CACHED // pairs) if q.device.type == "cpu" else stride
    parts = []
    # Columns that end with the last row, and those one cell shorter; causal queries do not see that far.
    whole = stride if causal else keys - (rows - 1) * stride
    for first, last, cells in ((0, whole, rows), (whole, stride, rows - 1)):
        for begin in range(first, last, width):
            columns = slice(begin, min(begin + width, last))
            own_keys, values = k[:, :, columns, :cells], v[:, :, columns, :cells]
            parts.append(_part(q[:, :, columns], own_keys, values, shown[:, :cells], dropout))
    top, total, out = _side_by_side(parts, 2)
    return top.transpose(2, 3), total.transpose(2, 3), out.transpose(2, 3)


def _part(q: Tensor, k: Tensor, v: Tensor, shown: Tensor, dropout: float) -> Part:
    """An unnormalised softmax: the largest score, the sum of weights relative to it, and the weighted sum of values."""
    shape = q.shape[:-1]
    q, k, v = (x.reshape(-1, *x.shape[-2:]) for x in (q, k, v))
    hide = q.new_zeros(shown.shape).masked_fill(~shown, torch.finfo(q.dtype).min)
    scores = torch.baddbmm(hide, q, k.transpose(1, 2))
    # It cancels in the end, so it needs no gradient.
    top = scores.detach().amax(-1, keepdim=True)
    if without_functions():
        weights = _weights(scores, top, shown)
    else:
        weights: Tensor = _Weights.apply(scores, top, shown)  # pyright: ignore[reportAssignmentType]  # what forward returns
    out = F.dropout(weights, dropout) @ v
    return top.view(*shape, 1), weights.sum(-1).view(*shape, 1), out.view(*shape, -1)


def _weights(scores: Tensor, top: Tensor, shown: Tensor) -> Tensor:
    """`exp(scores - top)` where shown, else 0."""
    # Exponentials below the normal range are slow. If all keys are hidden, they are 1 without the mask.
    lowest = math.log(torch.finfo(scores.dtype).tiny) + 1.0
    weights = (scores - top).clamp_(min=lowest).exp_()
    # Its derivative reads the exponentials.
    return weights * shown if torch.is_grad_enabled() else weights.mul_(shown)


class _Weights(torch.autograd.Function):
    """`_weights`, whose backward pass stores only the result."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, top: Tensor, shown: Tensor) -> Tensor:
        weights = _weights(scores, top, shown)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]  # named arguments there
        (weights,) = ctx.saved_tensors
        return grad * weights, None, None


def _side_by_side(parts: list[Part], dim: int) -> Part:
    top, total, out = (torch.cat(each, dim) for each in zip(*parts, strict=True))
    return top, total, out


def _joined(one: Part, two: Part) -> Tensor:
    """One softmax over the keys of both parts."""
    top = torch.maximum(one[0], two[0])
    share, other = (one[0] - top).exp(), (two[0] - top).exp()
    return (one[2] * share + two[2] * other) / (one[1] * share + two[1] * other)
