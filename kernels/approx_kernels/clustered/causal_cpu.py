"""Causal clustered attention on a CPU, forward and backward in C: one head at a time, its past carried along."""

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from approx_kernels.autocast import without_autocast
from approx_kernels.c_dropout import draw_seed, dropped
from approx_kernels.c_language import check, library
from approx_kernels.c_language import obstacle as c_obstacle
from approx_kernels.c_structs import CausalClustered, CausalClusteredBackward, address, rows_of
from approx_kernels.clustered.causal_backward_c import BACKWARD
from approx_kernels.clustered.causal_forward_c import FORWARD
from approx_kernels.clustering.cpu import nearest_of_heads
from approx_kernels.clustering.cpu import obstacle as clustering_obstacle
from approx_kernels.grouped import empty_gradients, summed


def obstacle(q: Tensor) -> str | None:
    """Why causal clustered attention cannot run in C, with the remedy; None where it can."""
    return clustering_obstacle(q) or c_obstacle(FORWARD, q) or c_obstacle(BACKWARD, q)


def causal_samples_in_c(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    centroids: Tensor,
    selectors: Tensor,
    chunk: int,
    topk: int,
    scale: float,
    dropout: float,
) -> Tensor:
    """As `causal_samples`."""
    batch, _, length, size = q.shape
    with without_autocast("cpu"):
        rows = centroids.detach().float().expand(batch, -1, -1, -1)
        groups = nearest_of_heads(q.detach(), selectors)
        if length < rows.shape[2]:
            # The few queries of a decoding step each bring the row of their centroid, and no other is computed.
            rows = rows.gather(2, groups[..., None].long().expand(-1, -1, -1, size))
            groups = torch.arange(length, dtype=torch.int32).expand_as(groups)
        q, k, v, rows = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k.to(q.dtype), v.to(q.dtype), rows))
        # One key at least is left to the sums, so that they are never empty.
        settings = max(chunk, topk + 1), topk, scale, dropout, draw_seed(dropout)
        return _Causal.apply(q, k, v, rows, groups.contiguous(), *settings)  # pyright: ignore[reportReturnType]  # what forward returns


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: Tensor,
        groups: Tensor,
        chunk: int,
        topk: int,
        scale: float,
        dropout: float,
        seed: int,
    ) -> Tensor:
        batch, heads, length, _ = q.shape
        # As models want it next, tokens before heads.
        out = q.new_empty(batch, length, heads, v.shape[3]).transpose(1, 2)
        most = peak = mass = top = None
        if any(ctx.needs_input_grad):
            most = rows.new_empty(batch, heads, length)
            peak, mass = rows.new_empty(2, batch, heads, (k.shape[2] - 1) // chunk, rows.shape[2])
            top = groups.new_empty(*peak.shape, topk)
            ctx.save_for_backward(q, k, v, rows, groups, most, peak, mass, top)
            ctx.settings = chunk, topk, scale, dropped(dropout, seed)
        problem = _problem(
            q, k, v, rows, out, groups, most, peak, mass, top, chunk, topk, scale, dropped(dropout, seed)
        )
        found = library(FORWARD)
        assert not isinstance(found, str), f"checked by the op: {found}"
        check(found.forward(ctypes.byref(problem)))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]  # named arguments there
        q, k, v, rows, *state = ctx.saved_tensors
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        made = empty_gradients(q, k, v)
        problem = _problem(q, k, v, rows, grad, *state, *ctx.settings)
        found = library(BACKWARD)
        assert not isinstance(found, str), f"checked by the op: {found}"
        check(found.backward(ctypes.byref(CausalClusteredBackward(problem, *rows_of(grad, *made)))))
        dq, dk, dv = made
        return dq, summed(dk, k.shape[1]), summed(dv, k.shape[1]), *[None] * 7


def _problem(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, out: Tensor, *state: Any) -> CausalClustered:
    groups, most, peak, mass, top, chunk, topk, *numbers = state
    batch, heads, length, _ = q.shape
    boundaries = (batch, heads, (k.shape[2] - 1) // chunk, rows.shape[2])
    places = (
        address(groups, torch.int32, batch, heads, length),
        address(most, torch.float32, batch, heads, length),
        *(address(each, torch.float32, *boundaries) for each in (peak, mass)),
        address(top, torch.int32, *boundaries, topk),
    )
    sizes = (batch, heads, length, k.shape[2], q.shape[3], v.shape[3], rows.shape[2], chunk, topk)
    how = q.dtype == torch.bfloat16, torch.get_num_threads()
    return CausalClustered(*sizes, *how, *rows_of(q, k, v), *rows_of(rows), *rows_of(out), *places, *numbers)
