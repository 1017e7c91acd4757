"""The flash kernels as two operators, and their configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from approx_kernels.gpu.launch import cut, launch, precision, sizes, strides
from approx_kernels.ops.flash.triton_backward import flash_keys_kernel, flash_queries_kernel
from approx_kernels.ops.flash.triton_forward import flash_forward_kernel
from approx_kernels.runtime.custom_op import custom_op
from approx_kernels.tokens import empty_gradients, empty_rows, sharing, summed

# The reach of a window without an end.
ENDLESS = 2**30

# By kind of input, see `kind`: the default, then configurations that need less. `bounded` are inputs with bounds of
# samples, or with largest scores apart, which take registers; most kinds have enough of them.
FORWARD = {
    "small": (cut(4, 3, BM=64, BN=64), cut(4, 2, BM=64, BN=32)),
    "narrow": (cut(8, 3, BM=128, BN=64), cut(8, 2, BM=64, BN=64)),
    "wide": (cut(8, 2, BM=64, BN=64), cut(4, 2, BM=64, BN=32)),
    "spans": (cut(8, 2, BM=64, BN=64),),
    "spans wide": (cut(8, 2, BM=64, BN=64),),
    "float32": (cut(4, 2, BM=32, BN=32),),
    "float32 wide": (cut(8, 1, BM=32, BN=32),),
    "listed": (cut(8, 2, BM=64, BN=64),),
    "listed wide": (cut(4, 2, BM=32, BN=32),),
}
QUERIES = {
    "small": (cut(8, 2, BM=128, BN=64),),
    "narrow": (cut(8, 2, BM=128, BN=64),),
    "wide": (cut(8, 2, BM=64, BN=64),),
    "spans": (cut(4, 2, BM=64, BN=32),),
    "spans wide": (cut(8, 2, BM=64, BN=32),),
    "float32": (cut(8, 2, BM=32, BN=32),),
    "float32 wide": (cut(8, 1, BM=16, BN=32),),
    "listed": (cut(8, 2, BM=64, BN=64),),
    "listed wide": (cut(4, 2, BM=32, BN=32),),
}
KEYS = {
    "small": (cut(8, 2, BM=64, BN=64),),
    "small bounded": (cut(8, 2, BM=32, BN=64),),
    "narrow": (cut(8, 2, BM=64, BN=64),),
    "narrow bounded": (cut(8, 2, BM=32, BN=64),),
    "wide": (cut(8, 2, BM=32, BN=64),),
    "spans": (cut(4, 2, BM=32, BN=64),),
    "spans wide": (cut(8, 2, BM=32, BN=64),),
    "float32": (cut(8, 1, BM=16, BN=32),),
    "float32 wide": (cut(8, 1, BM=16, BN=32),),
    "listed": (cut(8, 2, BM=64, BN=64),),
    "listed bounded": (cut(8, 2, BM=32, BN=64),),
    "listed wide": (cut(4, 2, BM=32, BN=32),),
}


def list_tile(q: Tensor, v: Tensor) -> int:
    """The numbers of queries and keys in a tile of a block list, for inputs of this dtype and head size."""
    return FORWARD[kind(q, v, None, True)][0].tiles["BM"]


def kind(q: Tensor, v: Tensor, spans: Tensor | None, listed: bool) -> str:
    """Key of the configurations for these inputs."""
    size = max(q.shape[3], v.shape[3])
    wide = size > 64
    if q.dtype == torch.float32 or listed or spans is not None:
        name = "float32" if q.dtype == torch.float32 else "listed" if listed else "spans"
        return f"{name} wide" if wide else name
    return "small" if size <= 32 else "wide" if wide else "narrow"


def _fake_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Any,
    key_mask: Any,
    spans: Any,
    blocks: Any,
    left: Any,
    right: Any,
    ramp: Any,
    scale: Any,
    longest: Any,
    apart: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, heads, length = q.shape[:3]
    lse = q.new_empty(batch, heads, length, dtype=torch.float32)
    total = lse.new_empty(batch, heads, length if apart else 0)
    return empty_rows(q, v.shape[3]), lse, total, total.new_empty(total.shape, dtype=torch.int32)


def _pairs(
    q_shape: Sequence[int], k_shape: Sequence[int], blocks: Sequence[Sequence[int]], left: int, right: int
) -> int:
    """Pairs of one head of one sample that are computed, without any mask of keys."""
    length, keys = q_shape[2], k_shape[2]
    if blocks:
        heads, entries = blocks[0][0], blocks[1][0]
        tile = 32 if blocks[0][1] > -(-length // 64) else 64
        return min(entries // heads * tile * tile, length * keys)
    # [L, S] less the triangles of keys left and right of the window.
    before, after = max(keys - 1 - left, 0), max(keys - 1 - right, 0)
    return max(length * keys - before * (before + 1) // 2 - after * (after + 1) // 2, length)


def _flops_forward(
    q: Sequence[int],
    k: Sequence[int],
    v: Sequence[int],
    bounds: Any,
    key_mask: Any,
    spans: Any,
    blocks: Any,
    left: int,
    right: int,
    *others: Any,
    out_shape: Any = None,
) -> int:
    return 2 * q[0] * q[1] * _pairs(q, k, blocks, left, right) * (q[3] + v[3])


def _flops_backward(
    grad: Any,
    grad_lse: Any,
    less: Any,
    out: Any,
    lse: Any,
    place: Any,
    q: Sequence[int],
    k: Sequence[int],
    v: Sequence[int],
    bounds: Any,
    key_mask: Any,
    spans: Any,
    blocks: Any,
    left: int,
    right: int,
    *others: Any,
    out_shape: Any = None,
) -> int:
    # Two products each for scores and gradients of weights, and one each for dq, dk and dv.
    return 2 * q[0] * q[1] * _pairs(q, k, blocks, left, right) * (4 * q[3] + 3 * v[3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, bounds, key_mask, spans, blocks, *numbers, ctx.apart = inputs
    ctx.save_for_backward(q, k, v, bounds, key_mask, spans, *blocks, *output)
    ctx.numbers = numbers
    ctx.mark_non_differentiable(output[3])


def _gradients(ctx: Any, grad: Tensor, grad_lse: Tensor, grad_total: Tensor, _: Any) -> tuple[Any, ...]:
    q, k, v, bounds, key_mask, spans, *blocks, out, lse, total, place = ctx.saved_tensors
    less = None
    if ctx.apart:
        # The sum is exp(lse - largest), so its gradient is added to all scores of a query and subtracted from the
        # largest.
        less = grad_total * total
        grad_lse = grad_lse + less
    dq, dk, dv, dspans = flash_backward(
        grad, grad_lse, less, out, lse, place, q, k, v, bounds, key_mask, spans, blocks, *ctx.numbers
    )
    none = [None] * (len(ctx.numbers) + 1)
    dk, dv = summed(dk, k.shape[1]), summed(dv, v.shape[1])
    return dq, dk, dv, None, None, None if spans is None else dspans, [None] * len(blocks), *none


@custom_op(_fake_forward, flops=_flops_forward, backward=_gradients, save=_save)
def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor | None,
    key_mask: Tensor | None,
    spans: Tensor | None,
    blocks: Sequence[Tensor],
    left: int,
    right: int,
    ramp: int,
    scale: float,
    longest: int,
    apart: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the forward kernel.

    Args:
        q: [B, H, L, D], the last dimension contiguous, as in k and v.
        k: [B, G, S, D], where H is a multiple of G.
        v: [B, G, S, E].
        bounds: [N, 5] int32: the ranges of rows of the queries and of the keys of each sample, and whether some of
            these keys are masked; None for all rows.
        key_mask: [B, S] uint8, 1 at real keys; None when no bounds say that some are masked.
        spans: [H] float32, the spans of `adaptive_span_attention`.
        blocks: The tensors of a `BlockList`; empty for a window.
        left: Keys seen before the own position.
        right: Keys seen after it.
        ramp: Ramp of the spans, in tokens.
        scale: Factor of the scores.
        longest: 0, or the length of the longest of N samples that are packed one after the other, where B = 1.
        apart: Whether to return the largest score of each query separately from the sum.

    Returns:
        [B, H, L, E] in the dtype of q, and the log-sum-exp of the scores of each query, [B, H, L] float32; with `apart`
        also the sum of exp(score - largest), [B, H, L] float32, and a key whose score is the largest, int32, -1 without
        any.
    """
    given = q, k, v, bounds, key_mask, spans, blocks, left, right, ramp, scale, longest, apart
    out, lse, total, largest = _fake_forward(*given)
    where = kind(q, v, spans, bool(blocks))

    rows = longest or q.shape[2]
    launch(
        flash_forward_kernel,
        lambda tiles: _programs(q, bounds, longest, rows, tiles["BM"]),
        FORWARD[where],
        q,
        k,
        v,
        out,
        lse,
        *((total, largest) if apart else (None, None)),
        bounds,
        key_mask,
        spans,
        *_lists(blocks, 0),
        *strides(q, k, v, out),
        **_shared(q, k, v, blocks, left, right, ramp, scale, longest, rows),
    )
    return out, lse, total, largest


def _fake_backward(
    grad: Tensor,
    grad_lse: Tensor,
    less: Any,
    out: Tensor,
    lse: Tensor,
    place: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *empty_gradients(q, k, v), lse.new_empty(q.shape[1])


@custom_op(_fake_backward, flops=_flops_backward)
def flash_backward(
    grad: Tensor,
    grad_lse: Tensor,
    less: Tensor | None,
    out: Tensor,
    lse: Tensor,
    place: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor | None,
    key_mask: Tensor | None,
    spans: Tensor | None,
    blocks: Sequence[Tensor],
    left: int,
    right: int,
    ramp: int,
    scale: float,
    longest: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the backward kernels: gradients of q, of k and v for each query head, and of spans, in a fixed order.

    Args:
        grad: Gradient of the outputs.
        grad_lse: Gradient of the log-sum-exps.
        less: Subtracted from the gradient of the score at `place`, [B, H, L] float32, or None.
        out: Returned by `flash_forward`, as are `lse` and `place`.
        q: This and all others as for `flash_forward`.
    """
    dq, dk, dv, dspans = _fake_backward(grad, grad_lse, less, out, lse, place, q, k, v)
    grad = grad if grad.stride(3) == 1 else grad.contiguous()
    grad_lse, delta = grad_lse.contiguous(), torch.empty_like(lse)
    taken = (None, None) if less is None else (place, less.contiguous())
    by_row = torch.zeros_like(lse) if spans is not None else None
    where = kind(q, v, spans, bool(blocks))
    bounded = f"{where} bounded" if bounds is not None or less is not None else where
    told = q, k, v, blocks, left, right, ramp, scale, longest

    def parts(tiles: Mapping[str, int]) -> dict[str, int]:
        return {"PARTS": list_tile(q, v) // tiles["BM"] if blocks else 1}

    # The first kernel stores for each query what the second one reads.
    rows = longest or q.shape[2]
    launch(
        flash_queries_kernel,
        lambda tiles: _programs(q, bounds, longest, rows, tiles["BM"]),
        QUERIES[where],
        q,
        k,
        v,
        out,
        grad,
        lse,
        grad_lse,
        *taken,
        delta,
        dq,
        by_row,
        bounds,
        key_mask,
        spans,
        *_lists(blocks, 0),
        *strides(q, k, v, out, grad, dq),
        tiled=parts,
        **_shared(*told, rows),
    )
    keys = longest or k.shape[2]
    launch(
        flash_keys_kernel,
        lambda tiles: _programs(q, bounds, longest, keys, tiles["BN"]),
        KEYS.get(bounded, KEYS[where]),
        q,
        k,
        v,
        grad,
        lse,
        *taken,
        delta,
        dk,
        dv,
        bounds,
        key_mask,
        spans,
        *_lists(blocks, 3),
        *strides(q, k, v, grad, dk, dv),
        tiled=parts,
        **_shared(*told, keys),
    )
    dspans.copy_(by_row.sum((0, 2)) if by_row is not None else torch.zeros_like(dspans))
    return dq, dk, dv, dspans


def _programs(q: Tensor, bounds: Tensor | None, longest: int, rows: int, tile: int) -> tuple[int]:
    samples = q.shape[0] if bounds is None or not longest else bounds.shape[0]
    return (-(-rows // tile) * samples * q.shape[1],)


def _lists(blocks: Sequence[Tensor], first: int) -> Sequence[Tensor | None]:
    """Rows, columns, tiles and bits of a block list: by query from its first tensor on, by key from its fourth."""
    return (*blocks[first : first + 3], blocks[6].view(torch.int32)) if blocks else (None,) * 4


def _shared(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Sequence[Tensor],
    left: int,
    right: int,
    ramp: int,
    scale: float,
    packed: int,
    longest: int,
) -> dict[str, Any]:
    """Arguments shared by all kernels."""
    return {
        "rows_h": blocks[0].stride(0) if blocks and blocks[0].shape[0] > 1 else 0,
        "H": q.shape[1],
        "shared": sharing(q, k),
        "L": q.shape[2],
        "S": k.shape[2],
        "longest": longest,
        "shift": 0 if packed else k.shape[2] - q.shape[2],
        "left": left,
        "right": right,
        "ramp": ramp,
        "scale": scale,
        **sizes(q, v),
        "PRECISION": precision(q),
        "PACKED": packed > 0,
    }
