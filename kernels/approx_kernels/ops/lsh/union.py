"""The union of the rounds' pairs by tiles, plus the own key, which no round is sure to contain."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.ops.lsh.plan import Plan
from approx_kernels.ops.lsh.tiles import tile_attention


def tile_union(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, own: str, scale: float, dedup: bool, dropout: float
) -> Tensor:
    """Tiles of all samples and heads, then the own key where `own` is `always` or the `last resort`.

    Args: q [B, H, L, D], k [B, H, S, D], v [B, H, S, E]. Returns [B, H, L, E].
    """
    q = q * scale
    queries, keys, values = (x.reshape(-1, x.shape[-1]) for x in (q, k, v))
    out, lse = tile_attention(queries, keys, values, plan, dropout=dropout, dedup=dedup)
    out, lse = out.view(*q.shape[:3], -1), lse.view(*q.shape[:3], 1)
    if own == "as any other":
        return out
    key, value = (_of_queries(x, q.shape[2]) for x in (k, v))
    if own == "last resort":
        return torch.where(lse == -torch.inf, F.dropout(torch.ones_like(lse), dropout) * value, out)
    score = (q * key).sum(-1, keepdim=True) + (0.0 if dedup else math.log(len(plan.rounds)))
    weight = (score - lse).sigmoid()
    return out * (1 - weight) + F.dropout(weight, dropout) * value


def _of_queries(x: Tensor, queries: int) -> Tensor:
    """Rows of the tokens of the last L queries; 0 if a query has no token (L > S)."""
    before = x.shape[2] - queries
    return x[:, :, before:] if before >= 0 else F.pad(x, (0, 0, -before, 0))
