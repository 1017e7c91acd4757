"""Causal clustered attention on a CPU, forward and backward in C: head by head, carrying the past along."""

from typing import Any

import torch
from torch import Tensor

from approx_kernels.cpu.compile import call
from approx_kernels.cpu.compile import obstacle as c_obstacle
from approx_kernels.cpu.dropout import draw_seed, dropped
from approx_kernels.cpu.structs import CausalClustered, CausalClusteredBackward, address, rows_of
from approx_kernels.ops.clustering.cpu import nearest_of_heads
from approx_kernels.ops.clustering.cpu import obstacle as clustering_obstacle
from approx_kernels.runtime.custom_op import custom_op
from approx_kernels.runtime.pytorch import without_autocast
from approx_kernels.tokens import empty_gradients, empty_rows, summed


def obstacle(q: Tensor) -> str | None:
    """Why causal clustered attention cannot run in C, with the remedy; None if it can."""
    return (
        clustering_obstacle(q)
        or c_obstacle("clustered/causal_forward.c", q)
        or c_obstacle("clustered/causal_backward.c", q)
    )


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
    """The same as `causal_samples`."""
    batch, _, length, size = q.shape
    with without_autocast("cpu"):
        rows = centroids.detach().float().expand(batch, -1, -1, -1)
        groups = nearest_of_heads(q.detach(), selectors)
        if length < rows.shape[2]:
            # The few queries of a decoding step each take their centroid's row, so no other row is computed.
            rows = rows.gather(2, groups[..., None].long().expand(-1, -1, -1, size))
            groups = torch.arange(length, dtype=torch.int32).expand_as(groups)
        q, k, v, rows = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k.to(q.dtype), v.to(q.dtype), rows))
        # At least one key is left to the sums, so that they are never empty.
        settings = max(chunk, topk + 1), topk, scale, dropout, draw_seed(dropout)
        learning = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        return _attend(q, k, v, rows, groups.contiguous(), *settings, learning)[0]


def _empty(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, groups: Tensor, chunk: int, topk: int, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, heads, length, _ = q.shape
    # What the backward pass needs, and nothing else does.
    kept = (batch, heads) if rest[-1] else (0, heads)
    most = rows.new_empty(*kept, length)
    peak, mass = (rows.new_empty(*kept, (k.shape[2] - 1) // chunk, rows.shape[2]) for _ in range(2))
    return empty_rows(q, v.shape[3]), most, peak, mass, groups.new_empty(*peak.shape, topk)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:5], *output[1:])
    ctx.settings = inputs[5:-1]
    ctx.mark_non_differentiable(*output[1:])


def _gradients(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    # Read once: with activation recomputation a second read fails.
    saved = ctx.saved_tensors
    dq, dk, dv = _attend_backward(grad, *saved, *ctx.settings)
    groups = saved[1].shape[1]
    return dq, summed(dk, groups), summed(dv, groups), *[None] * 8


@custom_op(lambda grad, q, k, v, *_: empty_gradients(q, k, v))
def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    groups: Tensor,
    most: Tensor,
    peak: Tensor,
    mass: Tensor,
    top: Tensor,
    chunk: int,
    topk: int,
    scale: float,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor]:
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    made = empty_gradients(q, k, v)
    state = groups, most, peak, mass, top
    problem = _problem(q, k, v, rows, grad, *state, chunk, topk, scale, dropped(dropout, seed))
    call("clustered/causal_backward.c", "backward", CausalClusteredBackward(problem, *rows_of(grad, *made)))
    return made


@custom_op(_empty, backward=_gradients, save=_keep)
def _attend(
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
    learning: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    made = _empty(q, k, v, rows, groups, chunk, topk, learning)
    state = made[1:] if learning else [None] * 4
    problem = _problem(q, k, v, rows, made[0], groups, *state, chunk, topk, scale, dropped(dropout, seed))
    call("clustered/causal_forward.c", "forward", problem)
    return made


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
