"""A window joined with sums, each computed by itself: the softmax of the keys in it, and causal sums over the others.

With o the softmax of the keys in the window and t its sum relative to the largest score, and with the outputs and
normalisers of features of the keys before it (and, in reverse, after it), summed without subtracting a window,

    out = (mix t o + sum_parts n_part o_part) / (mix t + sum_parts n_part).
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

# From features of queries and keys, values and a mask to causal outputs and normalisers, which include eps.
Sums = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]


def reach(window: int, causal: bool) -> tuple[int, int]:
    """Keys of a window before the query's position and after it."""
    return (window - 1, 0) if causal else (window, window)


def joined_parts(
    near: Tensor,
    total: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    key_mask: Tensor | None,
    attend: Sums,
    *,
    causal: bool,
    window: int,
    mix: Tensor,
    eps: float,
) -> Tensor:
    """Join the softmax `near` of the window, with its sum `total`, and the sums over other keys, in float32 or more."""
    left, right = reach(window, causal)
    parts = [_before(queries, keys, values, key_mask, keys.shape[2] - left - 1, attend)]
    if not causal:
        queries, keys, values = (x.flip(2) for x in (queries, keys, values))
        mask = None if key_mask is None else key_mask.flip(1)
        behind = _before(queries, keys, values, mask, queries.shape[2] - right - 1, attend)
        parts.append(None if behind is None else (behind[0].flip(2), behind[1].flip(2)))
    norm = mix.float()[:, None] * total
    joined = norm[..., None] * near
    for out, weight in filter(None, parts):
        # The weight includes eps.
        joined, norm = joined + weight[..., None] * out, norm + (weight - eps)
    return joined / norm.clamp(min=eps)[..., None]


def _before(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, count: int, attend: Sums
) -> tuple[Tensor, Tensor] | None:
    """Causal sums over the first `count` keys, all of which the last query sees: outputs and normalisers."""
    if count <= 0:
        return None
    mask = None if key_mask is None else key_mask[:, :count]
    # More queries than keys: those after all keys see them all, so masked keys are appended for them.
    more = count - k.shape[2]
    if more > 0:
        mask = torch.ones_like(k[:, 0, :, 0], dtype=torch.bool) if mask is None else mask
        k, v, mask = F.pad(k, (0, 0, 0, more)), F.pad(v, (0, 0, 0, more)), F.pad(mask, (0, more))
    return attend(q, k[:, :, :count], v[:, :, :count], mask)
