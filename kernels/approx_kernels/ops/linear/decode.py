"""Linear attention of tokens that follow others, from sums and the keys of the window."""

from typing import Any

import torch
from torch import Tensor

from approx_kernels.cpu.compile import obstacle as c_obstacle
from approx_kernels.ops.linear.step_cpu import attend_newest
from approx_kernels.ops.linear.window_cpu import linear_parts, obstacle
from approx_kernels.tokens import State, content, extended, newest


def decode_obstacle(q: Tensor, k: Tensor) -> str | None:
    """Why tokens cannot be continued in C, with the remedy; None if they can."""
    if q.shape[2] > k.shape[2]:
        return f"there are {q.shape[2]} queries and {k.shape[2]} keys; it has a key for each query. Ask for 'auto'."
    return c_obstacle("linear/step.c", q) or (obstacle(q) if k.shape[2] > 1 else None)


def state_obstacle(*tensors: Tensor) -> str | None:
    """Why sums cannot be overwritten in place, with the remedy; None if they can."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return "gradients need sums that nothing overwrites. Decode under torch.no_grad(), or ask for 'auto'."
    return None


def continue_in_place(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, state: State | None, *, window: int, **ways: Any
) -> tuple[Tensor, State]:
    """Like `continue_heads`, in C; the sums of the state are overwritten, not copied."""
    features = q.shape[3] * (2 if ways["feature_map"] == "hedgehog" else 1)
    # With learned maps each query head has its own features of the keys.
    heads = (k if ways["maps"] is None else q).shape[1]
    sums = q.new_zeros(q.shape[0], heads, features, v.shape[3] + 1, dtype=torch.float32)
    sums = sums if state is None else state["sums"].contiguous()
    ring = extended(state, k, v, key_mask) if window else {}
    if window:
        k, v, key_mask = content(ring)
    if q.shape[2] == 1 and k.shape[2] <= max(window, 1):
        out = attend_newest(q, k, v, key_mask, sums, window=window, **ways)
    else:
        out = linear_parts(q, k, v, key_mask, causal=True, window=window, **ways, sums=sums)
    return out, {"sums": sums, **(newest(ring, window - 1) if window else {})}
