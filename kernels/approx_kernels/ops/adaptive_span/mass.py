"""The distribution of exact attention over distances."""

import torch
from torch import Tensor

from approx_kernels.runtime.autocast import without_autocast
from approx_kernels.tokens.grouped import beside
from approx_kernels.tokens.shapes import check_form, check_shapes

_BLOCK = 64


def mass_by_distance(q: Tensor, k: Tensor, key_mask: Tensor | None = None, *, causal: bool, scale: float) -> Tensor:
    """Mean weight that the queries of each head give to all keys at distance x, in O(L S D) and blocks of queries.

    Args:
        q: Queries, [B, H, L, D], float; query i is at position S - L + i.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        key_mask: [B, S] bool, True at real keys; None when all are real. When L == S it also marks the real queries,
            which alone are counted.
        causal: Whether a query sees only keys at or before its own position.
        scale: Factor of the scores.

    Returns:
        [H, x], float64, x from 0 to the longest distance. Each row sums to 1, or to 0 without real queries.

    Raises:
        ValueError: if shapes or dtypes do not match.
    """
    check_shapes(q, k, k, key_mask)
    check_form(scale, causal=causal)
    length, keys = q.shape[2], k.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    mass = q.new_zeros(q.shape[1], max(length, keys), dtype=torch.float64)
    place = torch.arange(keys, device=q.device)
    with without_autocast(q.device.type):
        for first in range(0, length, _BLOCK):
            rows = slice(first, min(first + _BLOCK, length))
            away = torch.arange(keys - length, keys, device=q.device)[rows, None] - place
            seen = away >= 0 if causal else torch.ones_like(away, dtype=torch.bool)
            if key_mask is not None:
                seen = seen & key_mask[:, None, None, :]
                if length == keys:
                    seen = seen & key_mask[:, None, rows, None]
            scores = beside(q[:, :, rows].to(wide) * scale, k) @ k.to(wide).transpose(-2, -1)
            scores = scores.view(*q.shape[:2], -1, keys)
            weights = scores.masked_fill(~seen, torch.finfo(wide).min).softmax(-1).masked_fill(~seen, 0.0)
            mass.index_add_(1, away.abs().flatten(), weights.double().sum(0).flatten(1))
    return mass / mass.sum(1, keepdim=True).clamp(min=1.0)
