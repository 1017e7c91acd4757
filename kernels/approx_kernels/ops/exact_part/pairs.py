"""Exact keys and estimates of random features for the others, by the weights of all pairs: for gradients of short inputs.

C has no gradient of random rows, and sums over keys in plain PyTorch take twice as long."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from approx_kernels.ops.exact_part.reference import PerformerFar
from approx_kernels.ops.linear.reference import scaled
from approx_kernels.ops.near_keys.reference import Exactly, lowest, per_query_head, reach
from approx_kernels.ops.performer.reference import FLOOR
from approx_kernels.runtime.pytorch import drop_keys, without_autocast
from approx_kernels.tokens import blank_padding

# Longer inputs have fewer products by sums over keys.
LONGEST = 1024
# Smaller logarithms of weights do not count next to the largest, and their exponentials take many times as long.
_LEAST = -80.0
# Pairs of tokens computed together, whose weights then stay in a processor's cache.
_TOGETHER = 2**20


def performer_of_pairs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    mapped: tuple[Tensor, Tensor],
    exactly: Exactly,
    far: PerformerFar,
    dropout: float = 0.0,
) -> Tensor:
    """`performer_and_exact` by the weights of all pairs, of some samples at a time."""
    q, k, v = blank_padding(q, k, v, key_mask)
    wide = far.logs.dtype

    def attend(*parts: Tensor) -> Tensor:
        q, k, v, near, beyond, queries, keys, factors = (x.to(wide) for x in parts)
        k, v = per_query_head(q, k), per_query_head(q, v)
        scores = (q @ k.mT * exactly.scale).masked_fill(near == 0, lowest(wide))
        of_queries, of_keys, logs = _features(queries, keys, beyond, factors, far)
        most = torch.maximum(scores.detach().amax(-1, keepdim=True), logs.detach())
        estimates = (of_queries * (logs - most).exp()) @ of_keys.mT * beyond
        if far.share is not None:
            even = estimates.sum(-1, keepdim=True) / beyond.sum(-1, keepdim=True).clamp(min=1)
            estimates = estimates + far.share.to(wide)[:, None, None] * (even - estimates) * beyond
        weights = (scores - most).clamp(min=_LEAST).exp() * near + estimates
        total = weights.sum(-1, keepdim=True)
        return weights @ v / total.masked_fill(total == 0, 1.0)

    with without_autocast(q.device.type):
        inputs = q, k, drop_keys(v, dropout), *_masks(q, k, key_mask, exactly), *mapped, far.factors()
        some = max(_TOGETHER // max(q.shape[1] * q.shape[2] * k.shape[2], 1), 1)
        parts = zip(*(x.expand(q.shape[0], *x.shape[1:]).split(some) for x in inputs), strict=True)
        # Weights are computed again for gradients: of all samples and layers they would fill the memory.
        again: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        return torch.cat([checkpoint(attend, *part, **again) for part in parts]).to(q.dtype)


def _features(
    queries: Tensor, keys: Tensor, beyond: Tensor, factors: Tensor, far: PerformerFar
) -> tuple[Tensor, Tensor, Tensor]:
    """Features of queries and keys, at most 1, and the logarithms of what their products are relative to, [B, H, L, 1]."""
    rows = far.projection.to(factors.dtype).mT
    queries, keys = (scaled(x, far.scale**0.5) for x in (queries, keys))
    if far.kernel == "relu":
        return (queries @ rows).relu() + FLOOR, (keys @ rows).relu() + FLOOR, factors[..., None]
    of_keys = keys @ rows - keys.square().sum(-1, keepdim=True) / 2
    # Keys that no query estimates may have more, and count nowhere.
    counted = beyond.bool().any(-2)[..., None]
    top = of_keys.detach().masked_fill(~counted, lowest(of_keys.dtype)).amax(-2, keepdim=True)
    of_queries = queries @ rows + top
    of_queries = of_queries if far.offsets is None else of_queries + far.offsets.to(rows.dtype)[:, None]
    base = of_queries.detach().amax(-1, keepdim=True)
    return (of_queries - base).exp(), (of_keys - top).clamp(max=0.0).exp(), factors[..., None] + base


def _masks(q: Tensor, k: Tensor, key_mask: Tensor | None, exactly: Exactly) -> tuple[Tensor, Tensor]:
    """The pairs whose keys are near, and those of other keys, [B or 1, 1, L, S] bool."""
    length, keys = q.shape[2], k.shape[2]
    distance = torch.arange(keys, device=q.device) - torch.arange(keys - length, keys, device=q.device)[:, None]
    left, right = reach(exactly.window, exactly.causal)
    near = ((distance >= -left) & (distance <= right) & (exactly.window > 0))[None, None]
    seen = ((distance <= 0) if exactly.causal else torch.ones_like(distance, dtype=torch.bool))[None, None]
    near = near if exactly.chosen is None else near | exactly.chosen[:, None, None]
    seen = seen if key_mask is None else seen & key_mask[:, None, None]
    return near & seen, seen & ~near
