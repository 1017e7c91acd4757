"""Exact top-k attention on a CPU, forward and backward in C."""

from typing import Any

import torch
from torch import Tensor

from approx_kernels.cpu.compile import call
from approx_kernels.cpu.compile import obstacle as c_obstacle
from approx_kernels.cpu.dropout import draw_seed, dropped
from approx_kernels.cpu.structs import TopK, TopKBackward, address, rows_of
from approx_kernels.runtime.custom_op import custom_op
from approx_kernels.runtime.pytorch import without_autocast
from approx_kernels.tokens import empty_gradients, empty_rows, summed


def obstacle(q: Tensor) -> str | None:
    """Why exact top-k attention cannot run in C, with the remedy; None if it can."""
    return c_obstacle("topk/forward.c", q) or c_obstacle("topk/backward.c", q)


def topk_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    *,
    topk: int,
    causal: bool,
    scale: float,
    dropout: float,
) -> Tensor:
    """Attend; only a block of a query's scores and the K largest are in memory at a time."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k.to(q.dtype), v.to(q.dtype)))
    mask = None if key_mask is None else key_mask.contiguous()
    with without_autocast("cpu"):
        return _attend(q, k, v, mask, min(topk, k.shape[2]), causal, scale, dropout, draw_seed(dropout))[0]


def _empty(q: Tensor, k: Tensor, v: Tensor, mask: Any, kept: int, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_rows(q, v.shape[3]), q.new_empty(*q.shape[:3], kept, dtype=torch.int32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, _, _, _, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, output[1])
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    # Read once: with activation recomputation a second read fails.
    saved = ctx.saved_tensors
    dq, dk, dv = _attend_backward(grad, *saved, *ctx.rest)
    groups = saved[1].shape[1]
    return dq, summed(dk, groups), summed(dv, groups), *[None] * 6


@custom_op(lambda grad, q, k, v, *_: empty_gradients(q, k, v))
def _attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, top: Tensor, scale: float, dropout: float, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    made = empty_gradients(q, k, v)
    problem = _problem(q, k, v, grad, None, top, False, scale, dropped(dropout, seed))
    call("topk/backward.c", "backward", TopKBackward(problem, *rows_of(grad, *made)))
    return made


@custom_op(_empty, backward=_gradients, save=_keep)
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    kept: int,
    causal: bool,
    scale: float,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor]:
    out, top = _empty(q, k, v, key_mask, kept)
    problem = _problem(q, k, v, out, key_mask, top, causal, scale, dropped(dropout, seed))
    call("topk/forward.c", "forward", problem)
    return out, top


def _problem(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, key_mask: Tensor | None, top: Tensor, causal: bool, *numbers: Any
) -> TopK:
    sizes = (*q.shape[:3], k.shape[2], q.shape[3], v.shape[3], top.shape[3], causal)
    mask = address(key_mask, torch.bool, q.shape[0], k.shape[2])
    top_address = address(top, torch.int32, *q.shape[:3], top.shape[3])
    how = q.dtype == torch.bfloat16, torch.get_num_threads()
    return TopK(*sizes, *how, *rows_of(q, k, v, out), mask, top_address, *numbers)
