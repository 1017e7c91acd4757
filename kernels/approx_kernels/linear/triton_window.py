"""Linear attention with a window by kernels: those of flash attention for the keys in it, those of causal sums for the others.

With o the softmax of the keys in the window and t its sum relative to the largest score, and with the outputs and
normalisers of features of the keys before it (and, in reverse, behind it), which no window is subtracted from,

    out = (mix t o + sum_parts n_part o_part) / (mix t + sum_parts n_part).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.flash.samples import stretches
from approx_kernels.flash.triton import ENDLESS, flash_forward
from approx_kernels.linear.triton_heads import as_features, attend, inverted


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
    with torch.autocast(q.device.type, enabled=False):
        queries, keys, values, how = as_features(q, k, v, feature_map, maps, input_scale)
        left, right = (window - 1, 0) if causal else (window, window)
        near, total = _near(q, k.to(q.dtype), values, key_mask, left, right, scale)
        parts = [_before(queries, keys, values, key_mask, keys.shape[2] - left - 1, *how, eps)]
        if not causal:
            queries, keys, values = (x.flip(2) for x in (queries, keys, values))
            mask = None if key_mask is None else key_mask.flip(1)
            behind = _before(queries, keys, values, mask, q.shape[2] - right - 1, *how, eps)
            parts.append(None if behind is None else (behind[0].flip(2), behind[1].flip(2)))
        norm = mix.float()[:, None] * total
        joined = norm[..., None] * near
        for out, weight in filter(None, parts):
            # It has had eps added.
            joined, norm = joined + weight[..., None] * out, norm + (weight - eps)
        return (joined / norm.clamp(min=eps)[..., None]).to(q.dtype)


def _near(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, left: int, right: int, scale: float
) -> tuple[Tensor, Tensor]:
    """The softmax over the keys from `left` before to `right` behind the own, and the sum of exp(score - largest)."""
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    mask = None if key_mask is None else key_mask.contiguous().view(torch.uint8)
    bounds = stretches(key_mask, q.shape[2], False)
    left, right = min(left, ENDLESS), min(right, ENDLESS)
    out, _, total, _ = flash_forward(q, k, v, bounds, mask, None, [], left, right, 1, scale, 0, True)
    return out, total


def _before(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, count: int, feature_map: str, input_scale: float, eps: float
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """Causal sums over the first `count` keys, all of which the last query sees: outputs and normalisers."""
    if count <= 0:
        return None
    mask = None if key_mask is None else key_mask[:, :count]
    # More queries than keys: those that stand behind all keys see them all, which keys that do not count bring about.
    more = count - k.shape[2]
    if more > 0:
        mask = torch.ones_like(k[:, 0, :, 0], dtype=torch.bool) if mask is None else mask
        k, v, mask = F.pad(k, (0, 0, 0, more)), F.pad(v, (0, 0, 0, more)), F.pad(mask, (0, more))
    out, inverse, *_ = attend(q, k[:, :, :count], v[:, :, :count], mask, True, feature_map, input_scale, eps)
    return out, inverted(inverse)
