"""Means of the queries of each cluster."""

import torch
from torch import Tensor


def mean_queries(q: Tensor, groups: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """Mean query and number of members of each cluster, [G, C, D] in at least float32 and [G, C] int64."""
    heads, n, size = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    rows = flat_index(groups, clusters)
    members = torch.bincount(rows, minlength=heads * clusters)
    sums = q.new_zeros(heads * clusters, size, dtype=wide)
    sums = sums.scatter_add(0, rows[:, None].expand(-1, size), q.to(wide).reshape(heads * n, size))
    means = sums / members.clamp(min=1)[:, None]
    return means.view(heads, clusters, size), members.view(heads, clusters)


def flat_index(index: Tensor, rows: int) -> Tensor:
    """Convert an index [G, ...] into each head's rows to a flat index into the rows of all heads."""
    head = torch.arange(index.shape[0], device=index.device).view(-1, *[1] * (index.ndim - 1))
    return (index + head * rows).flatten()
