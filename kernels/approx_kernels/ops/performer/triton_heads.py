"""Performer attention by kernels: which inputs they take, and how they are called."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.gpu.language import obstacle
from approx_kernels.ops.performer.triton import performer_forward
from approx_kernels.runtime.pytorch import without_autocast
from approx_kernels.tokens import State


def performer_obstacle(q: Tensor, v: Tensor, projection: Tensor, dropout: float = 0.0) -> str | None:
    """Why the kernels cannot run, with the remedy; None where they can."""
    if dropout:
        return "they drop no keys. Set the dropout of attention to 0, or ask for 'auto'."
    if projection.requires_grad and torch.is_grad_enabled():
        return "they have no gradient of the projection. Detach it, or ask for 'auto'."
    return obstacle(q, v)


def prompt_obstacle(q: Tensor, k: Tensor, state: State | None) -> str | None:
    """Why kernels cannot begin a state, with the remedy; None where they can."""
    if state is not None:
        return "keys follow those of a state; the kernels begin one. Ask for 'auto'."
    if q.shape[2] > k.shape[2]:
        return (
            f"there are {q.shape[2]} queries and {k.shape[2]} keys; a prompt has a key for each query. Ask for 'auto'."
        )
    return None


def performer_kernels(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    *,
    projection: Tensor,
    offsets: Tensor | None,
    kernel: str,
    causal: bool,
    scale: float,
) -> Tensor:
    """Attend; the backward pass keeps the inputs, the outputs and two numbers of each query."""
    return _attend(q, k, v, key_mask, projection, offsets, kernel, causal, scale)[0]


def performer_prompt(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    *,
    projection: Tensor,
    offsets: Tensor | None,
    kernel: str,
    scale: float,
) -> tuple[Tensor, State]:
    """Attend causally to the first keys, and return the state after them; see `performer_decode`."""
    out, _, _, _, sums, top = _attend(q, k, v, key_mask, projection, offsets, kernel, True, scale, whole=True)
    return out, {"top": top, "sums": sums} if kernel == "softmax" else {"sums": sums}


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    projection: Tensor,
    offsets: Tensor | None,
    kernel: str,
    causal: bool,
    scale: float,
    *,
    whole: bool = False,
) -> tuple[Tensor, ...]:
    with without_autocast(q.device.type):
        q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k.to(q.dtype), v.to(q.dtype)))
        mask = None if key_mask is None else key_mask.contiguous().view(torch.uint8)
        # Aligned at the last key: with L > S the first L - S queries precede all keys and see none.
        blind = max(q.shape[2] - k.shape[2], 0) if causal else 0
        out, *others = performer_forward(q[:, :, blind:], k, v, projection, offsets, mask, causal, whole, kernel, scale)
        return F.pad(out, (0, 0, blind, 0)) if blind else out, *others
