"""Performer attention on a CPU: linear attention in C, which computes the random features tile by tile."""

import torch
from torch import Tensor

from approx_kernels.ops.linear.cpu import features_obstacle, linear_batch, linear_continue
from approx_kernels.ops.performer.reference import EPS, FLOOR, lowest
from approx_kernels.tokens import State, blank_for_gradients


def obstacle(q: Tensor, *rows: Tensor | None) -> str | None:
    """Why random features cannot be computed in C, with the remedy; None if they can."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in rows):
        return "it has no gradient of the projection. Detach it, or ask for 'auto'."
    return features_obstacle(q)


def random_features(
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend: outputs, normalisers [B, H, L] and the logarithms of what these are relative to; see `linear_batch`."""
    q, k, v = blank_for_gradients(q, k, v, key_mask)
    return linear_batch(q, k, v, key_mask, causal=causal, **_form(projection, offsets, kernel, scale))


def performer_continue(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    state: State | None,
    *,
    projection: Tensor,
    offsets: Tensor | None,
    kernel: str,
    scale: float,
) -> tuple[Tensor, State]:
    """Like `performer_heads` with a state, whose tensors are overwritten, not copied."""
    if state is None:
        features = *k.shape[:2], projection.shape[-2]
        state = {"sums": q.new_zeros(*features, v.shape[3] + 1, dtype=torch.float32)}
        if kernel == "softmax":
            start = lowest(torch.float32)
            state["top"] = q.new_full((*features[:2], 1, features[2]), start, dtype=torch.float32)
    state = {name: x.contiguous() for name, x in state.items()}
    form = _form(projection, offsets, kernel, scale)
    out, _ = linear_continue(
        q, k, v, key_mask, state["sums"], tops=None if kernel == "relu" else state["top"].squeeze(2), **form
    )
    return out, state


def _form(projection: Tensor, offsets: Tensor | None, kernel: str, scale: float) -> dict:
    way = {"feature_map": "relu", "floor": FLOOR} if kernel == "relu" else {"feature_map": "exp"}
    return {**way, "rows": projection, "offsets": offsets, "input_scale": scale**0.5, "eps": EPS}
