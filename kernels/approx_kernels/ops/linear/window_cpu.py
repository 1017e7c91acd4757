"""Linear attention with learned maps or a window on a CPU: each of its parts in C."""

import torch
from torch import Tensor

from approx_kernels.cpu.compile import obstacle as c_obstacle
from approx_kernels.ops.key_lists.cpu import obstacle as lists_obstacle
from approx_kernels.ops.linear.cpu import FUSED, features_obstacle, linear_batch, linear_continue
from approx_kernels.ops.linear.features_cpu import map_features
from approx_kernels.ops.linear.window_parts import joined_parts, reach
from approx_kernels.ops.patterns.cpu import pattern_lists
from approx_kernels.ops.patterns.reference import Window
from approx_kernels.runtime.pytorch import without_autocast
from approx_kernels.tokens import blank_for_gradients, blank_padding


def obstacle(q: Tensor) -> str | None:
    """Why linear attention cannot run in C, with the remedy; None if it can."""
    return features_obstacle(q) or c_obstacle("linear/maps.c", q) or lists_obstacle(q)


def linear_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    *,
    causal: bool,
    feature_map: str,
    maps: tuple[Tensor, Tensor] | None,
    window: int,
    mix: Tensor | None,
    scale: float,
    input_scale: float,
    eps: float,
    sums: Tensor | None = None,
) -> Tensor:
    """Like `linear_heads`; if several keys of a window have the largest score, only one of them gets its gradient.

    Keys that no later window reaches are added to the sums of earlier keys, float32, in place; without gradients.
    """
    learning = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *(maps or ()), mix) if x is not None)
    # Gradients are small differences between those of features and of parts, which 16 bits cannot represent.
    parts = torch.float32 if learning and (window or feature_map not in FUSED) else q.dtype
    q, k, v = blank_padding(q, k, v, key_mask) if learning else (q, k, v)
    dtype, (q, k, v) = q.dtype, (x.to(parts) for x in (q, k, v))
    queries, keys, how = q, k, {"feature_map": feature_map, "input_scale": input_scale, "eps": eps}
    with without_autocast("cpu"):
        if feature_map not in FUSED:
            query_map, key_map = maps or (None, None)
            queries = map_features(q, query_map, feature_map, input_scale)
            keys = map_features(k, key_map, feature_map, input_scale)
            # Features are at least 0, and relu leaves them unchanged.
            how |= {"feature_map": "relu", "input_scale": 1.0}

        def attend(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
            if sums is not None:
                return linear_continue(q, k, v, key_mask, sums, **how)
            return linear_batch(q, k, v, key_mask, causal=causal or window > 0, **how)[:2]

        if not window:
            return attend(queries, keys, v, key_mask)[0].to(dtype)
        assert mix is not None, "checked by the op"
        left, right = reach(window, causal)
        near = pattern_lists(
            *blank_for_gradients(q, k, v, key_mask),
            None,
            key_mask,
            pattern=lambda keys: Window(left=left, right=right),
            scale=scale,
            totals=True,
        )
        out = joined_parts(*near, queries, keys, v, key_mask, attend, causal=causal, window=window, mix=mix, eps=eps)
        if sums is not None and keys.shape[2] >= window:
            # The window of the last query ends with it, that of the next query one later.
            last = slice(keys.shape[2] - window, keys.shape[2] - left)
            mask = None if key_mask is None else key_mask[:, last]
            attend(keys[:, :, last], keys[:, :, last], v[:, :, last], mask)
        return out.to(dtype)
