"""Improved clustered attention as operators: each query weighs the largest keys of its cluster itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from approx_kernels.gpu.launch import cut, kind, launch, precision, sizes, strides
from approx_kernels.ops.clustered.triton_improved import improved_kernel, improved_keys_kernel, improved_queries_kernel
from approx_kernels.ops.clustered.triton_members import sum_rows
from approx_kernels.runtime.custom_op import custom_op

# Few rows: clusters have some twenty members, and a tile never spans two of them.
IMPROVED = {
    "narrow": (cut(2, 1, BM=16, BK=32),),
    "wide": (cut(4, 1, BM=16, BK=32),),
    "float32": (cut(8, 1, BM=16, BK=16),),
    "float32 wide": (cut(8, 1, BM=16, BK=16),),
}
QUERIES = IMPROVED | {"float32": (cut(4, 1, BM=16, BK=32),), "float32 wide": (cut(4, 1, BM=16, BK=32),)}
# Clusters are split into parts once an average one has this many tiles.
_TILES = 4


def beside(x: Tensor, size: int, padded: bool) -> Tensor:
    """[B, H, n, size] with the heads of a token adjacent in memory, as models join them; 0 at padding."""
    make = x.new_zeros if padded else x.new_empty
    return make(x.shape[0], x.shape[2], x.shape[1], size).transpose(1, 2)


def _empty(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    means: Tensor,
    shared: Tensor,
    lse: Tensor,
    top: Tensor,
    order: Tensor,
    begins: Tensor,
    scale: float,
    padded: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return beside(q, v.shape[3], padded), lse.new_empty(q.shape[:3]), torch.empty_like(lse)


def _flops(
    q: Any, k: Any, v: Any, means: Any, shared: Any, lse: Any, top: Any, *others: Any, out_shape: Any = None
) -> int:
    return 2 * q[0] * q[1] * (q[2] + top[2]) * top[3] * (q[3] + v[3])


def _flops_backward(
    grad: Any,
    own_lse: Any,
    mass: Any,
    q: Any,
    k: Any,
    v: Any,
    means: Any,
    shared: Any,
    lse: Any,
    top: Any,
    *others: Any,
    out_shape: Any = None,
) -> int:
    # Three products each for own scores and their outputs, and one each for dq, dk and dv.
    return 2 * q[0] * q[1] * q[2] * top[3] * (5 * q[3] + 4 * v[3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.scale, ctx.padded = inputs
    ctx.save_for_backward(*output[1:], *tensors)
    ctx.mark_non_differentiable(*output[1:])


def _gradients(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    dq, *added, dmeans, dshared, dlse = improved_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.padded)
    k, top = ctx.saved_tensors[3], ctx.saved_tensors[8]
    # A key may be among the largest of many clusters, whose parts are summed in a fixed order.
    ranked, place = top.flatten(2).sort(dim=2, stable=True)
    key = torch.arange(k.shape[2] + 1, dtype=torch.int32, device=k.device).expand(*k.shape[:2], -1).contiguous()
    lists = place.int(), torch.searchsorted(ranked, key, out_int32=True)
    dk, dv = (sum_rows(rows, *lists, False).to(k.dtype) for rows in added)
    return dq, dk, dv, dmeans, dshared, dlse, *[None] * 5


@custom_op(_empty, flops=_flops, backward=_gradients, save=_save)
def improved_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    means: Tensor,
    shared: Tensor,
    lse: Tensor,
    top: Tensor,
    order: Tensor,
    begins: Tensor,
    scale: float,
    padded: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Reweigh the largest keys of each cluster for each of its queries, within the mass that the mean query gives them.

    Args:
        q: Queries, [B, H, L, D], the last dimension contiguous, as in k and v.
        k: Keys, [B, H, S, D].
        v: Values, [B, H, S, E].
        means: Mean query of each cluster, [B, H, C, D], contiguous.
        shared: Outputs of the mean queries, [B, H, C, E], the last dimension contiguous.
        lse: Log-sum-exp of their scores, [B, H, C] float32.
        top: What `largest_keys` returned.
        order: What `sort_queries` returned, as `begins`.
        begins: See there.
        scale: Factor of the scores.
        padded: Whether some rows of q are in no cluster; their outputs are 0.

    Returns:
        [B, H, L, E] in the dtype of q; for the gradients also, in the order of the clusters, the log-sum-exps of each
        query's own scores to the base 2, [B, H, L], and each cluster's mass, [B, H, C].
    """
    out, own_lse, mass = _empty(q, k, v, means, shared, lse, top, order, begins, scale, padded)
    launch(
        improved_kernel,
        lambda tiles: (mass.numel() * _parts(q, top, tiles),),
        IMPROVED[kind(q, v)],
        q,
        k,
        v,
        means,
        shared,
        lse,
        top,
        order,
        begins,
        out,
        own_lse,
        mass,
        *strides(q, k, v, shared, out),
        tiled=lambda tiles: {"parts": _parts(q, top, tiles)},
        **_shared(q, v, top, scale),
    )
    return out, own_lse, mass


def _parts(q: Tensor, top: Tensor, tiles: Mapping[str, int]) -> int:
    return 1 + q.shape[2] // (top.shape[2] * tiles["BM"] * _TILES)


def _shared(q: Tensor, v: Tensor, top: Tensor, scale: float) -> dict[str, Any]:
    """Arguments shared by all kernels."""
    _, heads, most, kept = top.shape
    told = {"H": heads, "L": q.shape[2], "most": most, "kept": kept, "scale": scale}
    return {**told, **sizes(q, v), "PRECISION": precision(q)}


def _empty_gradients(
    grad: Tensor,
    own_lse: Tensor,
    mass: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    means: Tensor,
    shared: Tensor,
    lse: Tensor,
    top: Tensor,
    order: Tensor,
    begins: Tensor,
    scale: float,
    padded: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, heads, most, kept = top.shape
    dk, dv = (lse.new_empty(batch, heads, most * kept, x.shape[3]) for x in (k, v))
    dshared = shared.new_empty(shared.shape)
    return beside(q, q.shape[3], padded), dk, dv, torch.empty_like(means), dshared, torch.empty_like(lse)


@custom_op(_empty_gradients, flops=_flops_backward)
def improved_backward(
    grad: Tensor,
    own_lse: Tensor,
    mass: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    means: Tensor,
    shared: Tensor,
    lse: Tensor,
    top: Tensor,
    order: Tensor,
    begins: Tensor,
    scale: float,
    padded: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, means, shared and lse, and each cluster's part of those of its keys and values, [B, H, C K, D or
    E].

    Args:
        grad: Gradient of the outputs.
        own_lse: What `improved_forward` returned.
        mass: The same.
        q: This and all others as for `improved_forward`.
    """
    given = grad, own_lse, mass, q, k, v, means, shared, lse, top, order, begins, scale, padded
    made = _empty_gradients(*given)
    grad = grad if grad.stride(3) == 1 else grad.contiguous()
    where, delta, told = kind(q, v), torch.empty_like(own_lse), _shared(q, v, top, scale)
    # The first kernel stores for each query what the second one reads.
    launch(
        improved_queries_kernel,
        lambda tiles: (mass.numel() * _parts(q, top, tiles),),
        QUERIES[where],
        q,
        k,
        v,
        grad,
        top,
        order,
        begins,
        own_lse,
        mass,
        made[0],
        delta,
        *strides(q, k, v, grad, made[0]),
        tiled=lambda tiles: {"parts": _parts(q, top, tiles)},
        **told,
    )
    launch(
        improved_keys_kernel,
        (mass.numel(),),
        IMPROVED[where],
        q,
        k,
        v,
        means,
        lse,
        grad,
        top,
        order,
        begins,
        own_lse,
        mass,
        delta,
        *made[1:],
        *strides(q, k, v, grad),
        **told,
    )
    return made
