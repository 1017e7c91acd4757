"""The reference: softmax over all pairs, each weighed by the number of rounds that show it."""

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.ops.lsh.plan import Plan


def pair_counts(plan: Plan, keys: int) -> Tensor:
    """Number of rounds in which each query sees each key, without its own if the plan says so, [B·H·L, S]."""
    counts = torch.zeros(plan.rounds[0].low.numel(), keys, device=plan.keys.device)
    steps = torch.arange(plan.width, device=plan.keys.device)
    for each in plan.rounds:
        seen = steps < each.room[:, None]
        entries = each.order[(each.low[:, None] + steps).where(seen, torch.zeros_like(steps))]
        seen = seen if plan.own is None else seen & (entries != plan.own[:, None])
        counts.scatter_add_(1, plan.keys[entries] % keys, seen.to(counts))
    return counts


def dense_union(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, own: str, scale: float, dedup: bool, dropout: float
) -> Tensor:
    """`softmax(s_ij + log C_ij) V`, 0 for a query without keys.

    Args: q [B, H, L, D], k [B, H, S, D], v [B, H, S, E]. Returns [B, H, L, E].
    """
    length, keys = q.shape[2], k.shape[2]
    counts = pair_counts(plan, keys).view(*q.shape[:3], keys)
    if own != "as any other":
        position = torch.arange(keys - length, keys, device=q.device)
        diagonal = (position[:, None] == torch.arange(keys, device=q.device)).to(counts)
        alone = (counts == 0).all(-1, keepdim=True) if own == "last resort" else torch.ones_like(counts[..., :1])
        counts = counts + diagonal * alone * len(plan.rounds)
    counts = counts.clamp(max=1) if dedup else counts
    reached = (counts > 0).any(-1, keepdim=True)
    scores = (q @ k.transpose(-2, -1)) * scale + counts.to(q).log()
    weights = scores.masked_fill(~reached, 0.0).softmax(-1).masked_fill(~reached, 0.0)
    return F.dropout(weights, dropout) @ v
