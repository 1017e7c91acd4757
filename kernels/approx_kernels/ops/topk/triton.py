"""Exact top-k attention on a GPU as two operators: the keys of each query are found once and saved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from approx_kernels.ops.topk.triton_launches import Launches
from approx_kernels.runtime.custom_op import custom_op
from approx_kernels.tokens import empty_gradients, empty_rows


def topk_gathered(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, topk: int, causal: bool, scale: float
) -> Tensor:
    """Attend without waiting for the device; see `topk_attention`."""
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k.to(q.dtype), v.to(q.dtype)))
    mask = None if key_mask is None else key_mask.contiguous().view(torch.uint8)
    return topk_forward(q, k, v, mask, min(topk, k.shape[2]), causal, scale)[0]


def _pairs(q: Sequence[int], k: Sequence[int], causal: bool) -> int:
    """Pairs of a query and a key that it sees if no key is masked."""
    seen = min(q[2], k[2])
    return q[0] * q[1] * (seen * k[2] - seen * (seen - 1) // 2 if causal else q[2] * k[2])


def _empty(q: Tensor, k: Any, v: Tensor, key_mask: Any, kept: int, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    lse, top = q.new_empty(q.shape[:3], dtype=torch.float32), q.new_empty(*q.shape[:3], kept, dtype=torch.int32)
    return empty_rows(q, v.shape[3]), lse, top


def _flops(q: Any, k: Any, v: Any, key_mask: Any, kept: int, causal: bool, scale: float, out_shape: Any = None) -> int:
    return 2 * (_pairs(q, k, causal) * q[3] + q[0] * q[1] * q[2] * kept * v[3])


def _flops_backward(
    grad: Any, lse: Any, top: Any, q: Any, k: Any, v: Any, causal: bool, scale: float, out_shape: Any = None
) -> int:
    # Scores and gradients of weights for kept keys and for all pairs, then one product each for dq, dk and dv.
    kept = q[0] * q[1] * q[2] * top[3]
    return 2 * (kept * (2 * q[3] + v[3]) + _pairs(q, k, causal) * 2 * (q[3] + v[3]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, _, _, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(*output[1:], q, k, v)
    ctx.mark_non_differentiable(*output[1:])


def _gradients(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return *topk_backward(grad, *ctx.saved_tensors, ctx.causal, ctx.scale), *[None] * 4


@custom_op(_empty, flops=_flops, backward=_gradients, save=_save)
def topk_forward(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, kept: int, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the keys of each query and attend to them.

    Args:
        q: Queries, [B, H, L, D], the last dimension contiguous, as in k and v.
        k: Keys, [B, H, S, D].
        v: Values, [B, H, S, E].
        key_mask: [B, S] uint8, 1 at real keys; None when all are real.
        kept: How many, K, at most S.
        causal: Whether a query sees only keys at or before its own position.
        scale: Factor of the scores.

    Returns:
        [B, H, L, E] in the dtype of q, 0 for a query without keys; the log-sum-exp of the scores that it keeps, to the
        base 2, [B, H, L] float32, -inf without keys; and their keys in ascending order, [B, H, L, K] int32, then -1.
    """
    out, lse, top = _empty(q, k, v, key_mask, kept)
    best, launches = lse.new_empty(top.shape), Launches(q, k, v, kept, causal, scale)
    launches.choose(key_mask, top, best)
    launches.outputs(top, best, out, lse)
    return out, lse, top


def _empty_gradients(
    grad: Any, lse: Any, top: Any, q: Tensor, k: Tensor, v: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_gradients(q, k, v)


@custom_op(_empty_gradients, flops=_flops_backward)
def topk_backward(
    grad: Tensor, lse: Tensor, top: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, each sum in a fixed order.

    Args:
        grad: Gradient of the outputs.
        lse: Returned by `topk_forward`, as is `top`.
        top: See there.
        q: This and all others as for `topk_forward`.
    """
    dq, dk, dv = _empty_gradients(grad, lse, top, q, k, v)
    grad = grad if grad.stride(3) == 1 else grad.contiguous()
    delta, launches = torch.empty_like(lse), Launches(q, k, v, top.shape[3], causal, scale)
    launches.query_gradients(grad, top, lse, delta, dq)
    launches.key_gradients(grad, lse, delta, launches.marks(top), dk, dv)
    return dq, dk, dv
