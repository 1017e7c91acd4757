"""Linear attention with a window by kernels: flash attention for the keys in it, causal sums for the others."""

from __future__ import annotations

import torch
from torch import Tensor

from approx_kernels.ops.flash.samples import stretches
from approx_kernels.ops.flash.triton import ENDLESS, flash_forward
from approx_kernels.ops.linear.triton_heads import as_features, attend, inverted
from approx_kernels.ops.linear.window_parts import joined_parts, reach
from approx_kernels.runtime.pytorch import without_autocast


def windowed_kernels(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    *,
    causal: bool,
    feature_map: str,
    maps: tuple[Tensor, Tensor] | None,
    window: int,
    mix: Tensor,
    scale: float,
    input_scale: float,
    eps: float,
) -> Tensor:
    """As `attend_windowed`; where several keys have the largest score, its gradient is that of one."""
    with without_autocast(q.device.type):
        queries, keys, values, how = as_features(q, k, v, feature_map, maps, input_scale)
        left, right = reach(window, causal)
        near, total = _near(q, k.to(q.dtype), values, key_mask, left, right, scale)

        def sums(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
            out, inverse, *_ = attend(q, k, v, key_mask, True, *how, eps)
            return out, inverted(inverse)

        ways = {"causal": causal, "window": window, "mix": mix, "eps": eps}
        return joined_parts(near, total, queries, keys, values, key_mask, sums, **ways).to(q.dtype)


def _near(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, left: int, right: int, scale: float
) -> tuple[Tensor, Tensor]:
    """The softmax over keys from `left` before to `right` after the query, and the sum of exp(score - largest)."""
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    mask = None if key_mask is None else key_mask.contiguous().view(torch.uint8)
    bounds = stretches(key_mask, q.shape[2], False)
    left, right = min(left, ENDLESS), min(right, ENDLESS)
    out, _, total, _ = flash_forward(q, k, v, bounds, mask, None, [], left, right, 1, scale, 0, True)
    return out, total
