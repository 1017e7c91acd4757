"""Linear attention of tokens that follow others, from sums and the keys of the window."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.cpu.compile import obstacle as c_obstacle
from approx_kernels.ops.linear.features import features
from approx_kernels.ops.linear.reference import joined_sums, linear_heads, own_parts, scaled
from approx_kernels.ops.linear.step_cpu import attend_newest
from approx_kernels.ops.linear.window import divided, near_weights
from approx_kernels.ops.linear.window_cpu import linear_parts, obstacle
from approx_kernels.runtime.autocast import without_autocast
from approx_kernels.tokens.grouped import in_order, sharing
from approx_kernels.tokens.ring import State, content, extended, newest


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


def continue_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    state: State | None,
    *,
    window: int,
    mix: Tensor | None,
    **ways: Any,
) -> tuple[Tensor, State]:
    """Causal linear attention after the keys of a state, and the state with the new ones.

    The state holds `sums` of features times values and a one, [B, G, F, E + 1], with learned maps [B, H, F, E + 1]; with
    a window, only of keys that it no longer reaches, and the others as a ring.
    """
    sums = None if state is None else state["sums"]
    ways = {"window": window, "mix": mix, **ways}
    ring = extended(state, k, v, key_mask) if window else {}
    if window:
        k, v, key_mask = content(ring)
    if window and sums is not None and q.shape[2] == 1 and k.shape[2] <= window:
        out, sums = _newest_query(q, k, v, key_mask, sums, **ways)
    else:
        out, sums = linear_heads(q, k, v, key_mask, causal=True, sums=sums, **ways)
    assert sums is not None, "causal sums always are"
    return out, {"sums": sums, **(newest(ring, window - 1) if window else {})}


def _newest_query(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    sums: Tensor,
    *,
    feature_map: str,
    maps: tuple[Tensor, Tensor] | None,
    window: int,
    mix: Tensor,
    scale: float,
    input_scale: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """A single query whose window holds all stored keys: pairs with these, and the sums of all others."""
    if sharing(q, k) > 1:
        form = {"feature_map": feature_map, "window": window, "scale": scale, "input_scale": input_scale, "eps": eps}
        results = [
            _newest_query(q[:, turn], k, v, key_mask, own, **parts, **form)
            for turn, own, parts in own_parts(q, k, sums, maps, mix)
        ]
        return in_order([out for out, _ in results]), joined_sums([each for _, each in results], maps)
    query_map, key_map = maps or (None, None)
    near = None if key_mask is None else key_mask[:, None, None]
    with without_autocast(q.device.type):
        query, keys, values = (x.to(sums.dtype) for x in (q, k, v))
        values = F.pad(values, (0, 1), value=1.0)
        weights = near_weights(query @ keys.transpose(2, 3) * scale, near, mix)
        read = features(scaled(query, input_scale), feature_map, query_map) @ sums
        out = divided(weights @ values + read, eps)
        if k.shape[2] == window:
            oldest = features(scaled(keys[:, :, :1], input_scale), feature_map, key_map)
            oldest = oldest if key_mask is None else oldest * key_mask[:, None, :1, None]
            sums = sums + oldest.transpose(2, 3) @ values[:, :, :1]
    return out.to(q.dtype), sums
