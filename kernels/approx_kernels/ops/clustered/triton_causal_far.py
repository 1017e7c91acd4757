"""Causal clustered attention as operators, which join attention inside a chunk with that of fixed rows before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from approx_kernels.ops.clustered.triton_causal_launches import Launches, boundaries_of
from approx_kernels.ops.clustered.triton_own import beside
from approx_kernels.runtime.custom_op import custom_op


def _empty(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    near: Tensor,
    near_lse: Tensor,
    rows: Tensor,
    order: Tensor,
    begins: Tensor,
    chunk: int,
    kept: int,
    scale: float,
    padded: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    count = rows.shape[2]
    boundaries = boundaries_of(rows.shape, begins.shape)
    mass = near_lse.new_empty(*q.shape[:2], boundaries, count)
    until = mass.new_empty(*q.shape[:2], count, boundaries * chunk if kept else 0, dtype=torch.int16)
    top = mass.new_empty(*mass.shape, kept, dtype=torch.int32)
    mean_k, mean_v = (mass.new_empty(*mass.shape, x.shape[3]) for x in (k, v))
    return beside(q, v.shape[3], padded), torch.empty_like(near_lse), top, until, mass, mean_k, mean_v


def _flops(
    q: Any,
    k: Any,
    v: Any,
    near: Any,
    near_lse: Any,
    rows: Any,
    order: Any,
    begins: Any,
    chunk: int,
    kept: int,
    *_: Any,
    out_shape: Any = None,
) -> int:
    past = rows[2] * boundaries_of(rows, begins) * chunk * (q[3] * (3 if kept else 2) + v[3])
    return 2 * q[0] * q[1] * (past + q[2] * kept * (q[3] + v[3]))


def _flops_backward(
    grad: Any,
    out: Any,
    lse: Any,
    top: Any,
    until: Any,
    mass: Any,
    mean_k: Any,
    mean_v: Any,
    q: Any,
    k: Any,
    v: Any,
    near: Any,
    near_lse: Any,
    rows: Any,
    order: Any,
    begins: Any,
    chunk: int,
    kept: int,
    *_: Any,
    out_shape: Any = None,
) -> int:
    past = rows[2] * boundaries_of(rows, begins) * chunk * (4 * q[3] + 2 * v[3])
    # Two products each for own scores and their outputs, and one each for dq, dk and dv.
    return 2 * q[0] * q[1] * (past + q[2] * kept * (4 * q[3] + 3 * v[3]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.numbers = inputs[8:]
    ctx.save_for_backward(*output, *inputs[:8])
    ctx.mark_non_differentiable(*output[1:])


def _gradients(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    return *far_backward(grad, *ctx.saved_tensors, *ctx.numbers), *[None] * 7


@custom_op(_empty, flops=_flops, backward=_gradients, save=_save)
def far_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    near: Tensor,
    near_lse: Tensor,
    rows: Tensor,
    order: Tensor,
    begins: Tensor,
    chunk: int,
    kept: int,
    scale: float,
    padded: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Join attention inside chunks with the keys before them, most of which are weighed by fixed rows.

    Args:
        q: Queries, [B, H, L, D], the last dimension contiguous, as in k, v and near.
        k: Keys, [B, H, S, D], chunk after chunk.
        v: Values, [B, H, S, E].
        near: Output of each query inside its chunk, [B, H, L, E].
        near_lse: Log-sum-exps of the scores there, [B, H, L] float32, contiguous.
        rows: Fixed queries, [B, H, R, D] float32, contiguous; rounded to the dtype of q for the sums.
        order: Queries sorted by row and then by chunk, [B, H, L] int32.
        begins: Where the queries of each row and chunk begin in `order`, and where the last ones end, [B, H, R N + 1]
            int32.
        chunk: Keys of each of the first N - 1 chunks.
        kept: Number of a row's largest keys, which each query weighs itself; less than `chunk`.
        scale: Factor of the scores.
        padded: Whether some queries are in no list; their outputs are 0.

    Returns:
        [B, H, L, E] in the dtype of q; for the backward pass also the log-sum-exps of all scores of each query, in
        `order` and to the base 2, [B, H, L]; the largest keys of each row at each boundary, [B, H, N - 1, R, K]; the
        boundary from which on each key is no longer one of them, [B, H, R, S]; and the mass, mean key and mean value of
        the other keys.
    """
    made = _empty(q, k, v, near, near_lse, rows, order, begins, chunk, kept, scale, padded)
    out, lse, top, until, *past = made
    launches = Launches(q, k, v, rows, order, begins, chunk, kept, scale)
    best = launches.select(top, until) if kept else None
    known = until if kept else None
    launches.sums(known, past)
    launches.carry(top, best, known, past)
    launches.outputs((near, near_lse), top, past, out, lse)
    return made


def _empty_gradients(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    top: Tensor,
    until: Tensor,
    mass: Tensor,
    mean_k: Tensor,
    mean_v: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    near: Tensor,
    near_lse: Tensor,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    padded: bool = others[-1]
    of_near = beside(q, near.shape[3], padded), torch.zeros_like(near_lse)
    return beside(q, q.shape[3], padded), beside(k, k.shape[3], False), beside(v, v.shape[3], False), *of_near


@custom_op(_empty_gradients, flops=_flops_backward)
def far_backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    top: Tensor,
    until: Tensor,
    mass: Tensor,
    mean_k: Tensor,
    mean_v: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    near: Tensor,
    near_lse: Tensor,
    rows: Tensor,
    order: Tensor,
    begins: Tensor,
    chunk: int,
    kept: int,
    scale: float,
    padded: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, near and near_lse.

    Args:
        grad: Gradient of the outputs.
        out: This and all up to `mean_v` as `far_forward` returned them.
        q: This and all others as for `far_forward`.
    """
    made = _empty_gradients(grad, out, lse, top, until, mass, mean_k, mean_v, q, k, v, near, near_lse, padded)
    dq, dk, dv, *dnear = made
    grad = grad if grad.stride(3) == 1 else grad.contiguous()
    launches = Launches(q, k, v, rows, order, begins, chunk, kept, scale)
    past, delta, added = (mass, mean_k, mean_v), torch.empty_like(lse), None
    dpast = [torch.empty_like(x) for x in past]
    # No later query sees the last chunk.
    for x in (dk, dv):
        x[:, :, launches.keys :].zero_()
    launches.query_gradients((near, near_lse), top, past, out, lse, grad, dq, dnear, dpast, delta)
    launches.carry_back(past, dpast)
    if kept:
        added = launches.own_key_gradients(until, mass, dpast, lse, delta, grad)
    launches.key_gradients(until if kept else None, mass, dpast, added, dk, dv)
    return made
