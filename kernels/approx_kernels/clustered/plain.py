"""Plain clustered attention of the heads of one sample."""

import torch
from torch import Tensor

from approx_kernels.exact import exact_attention


def plain_heads(
    q: Tensor, k: Tensor, v: Tensor, groups: Tensor, *, clusters: int, scale: float, dropout: float
) -> Tensor:
    """Attend with the mean query of each cluster and hand the result to its members.

    Args: q [G, n, D], k [G, S, D], v [G, S, E], groups [G, n] the cluster of each query. Returns [G, n, E].
    """
    means, _ = mean_queries(q, groups, clusters)
    shared = exact_attention(means.to(q.dtype)[None], k[None], v[None], causal=False, scale=scale, dropout=dropout)[0]
    rows = flat_index(groups, clusters)
    return shared.flatten(0, 1).index_select(0, rows).view(*q.shape[:2], v.shape[2])


def mean_queries(q: Tensor, groups: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """Mean query and number of members of each cluster, [G, C, D] in float32 at least and [G, C] int64."""
    heads, n, size = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    rows = flat_index(groups, clusters)
    members = torch.bincount(rows, minlength=heads * clusters)
    sums = q.new_zeros(heads * clusters, size, dtype=wide)
    sums = sums.scatter_add(0, rows[:, None].expand(-1, size), q.to(wide).reshape(heads * n, size))
    means = sums / members.clamp(min=1)[:, None]
    return means.view(heads, clusters, size), members.view(heads, clusters)


def flat_index(index: Tensor, rows: int) -> Tensor:
    """The index [G, ...] into rows of each head as one into the rows of all heads, flat."""
    head = torch.arange(index.shape[0], device=index.device).view(-1, *[1] * (index.ndim - 1))
    return (index + head * rows).flatten()
