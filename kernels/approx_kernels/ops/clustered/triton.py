"""Clustered attention of a batch on a GPU: hash, k-means, sort, and the flash kernels for the mean queries."""

from __future__ import annotations

import torch
from torch import Tensor

from approx_kernels.ops.clustered.reference import Clusters, default_clusters, wanted_clusters
from approx_kernels.ops.clustered.triton_members import spread_rows, sum_rows
from approx_kernels.ops.clustered.triton_own import improved_forward
from approx_kernels.ops.clustered.triton_top import largest_keys
from approx_kernels.ops.clustering.reference import nearest_centroids
from approx_kernels.ops.clustering.triton import FULL, cluster_samples, sort_queries
from approx_kernels.ops.clustering.triton import obstacle as clustering_obstacle
from approx_kernels.ops.flash.api import flash, flash_obstacle
from approx_kernels.runtime.pytorch import without_autocast


def obstacle(q: Tensor, v: Tensor, clusters: Clusters, bits: int, dropout: float) -> str | None:
    """Why clustered attention cannot run by kernels, with the remedy; None where it can."""
    if not isinstance(clusters, int) or clusters >= q.shape[2]:
        # A rule gives few enough; with a cluster for each query there is no k-means.
        clusters = 0
    return flash_obstacle(q, v, dropout) or clustering_obstacle(q, clusters, bits)


def clustered_on_gpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    *,
    planes: Tensor | None,
    draws: Tensor | None,
    selectors: Tensor | None,
    clusters: Clusters,
    iterations: int,
    topk: int | None,
    scale: float,
) -> Tensor:
    """Attend without waiting for the device; in a sample of at most C real queries each is a cluster."""
    batch, _, length, _ = q.shape
    k, v = k.to(q.dtype), v.to(q.dtype)
    with without_autocast(q.device.type):
        q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
        tokens = None
        queries = keys = torch.full((batch,), length, device=q.device)
        if key_mask is not None:
            keys = key_mask.sum(1)
            if length == k.shape[2]:
                queries, tokens = keys, key_mask.logical_not().byte().argsort(stable=True, dim=1).int()
        most = min(length, clusters if isinstance(clusters, int) else default_clusters(length, clusters))
        own = torch.where(keys > 0, torch.minimum(queries, wanted_clusters(queries, clusters)), 0)
        groups = _groups(q, tokens, queries, own, planes, draws, selectors, most, iterations)
        order, begins = sort_queries(groups, tokens, queries, own, most)
        means = sum_rows(q, order, begins, True)
        shared, lse = _attended(means, k, v, key_mask, scale)
        if topk is None:
            return spread_rows(shared, order, begins, length, False)
        mask = None if key_mask is None else key_mask.contiguous().view(torch.uint8)
        top = largest_keys(means.detach(), k.detach(), mask, min(topk, k.shape[2]), scale)
        return improved_forward(q, k, v, means, shared, lse, top, order, begins, scale, key_mask is not None)[0]


def _attended(means: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Outputs of the mean queries and log-sum-exps of their scores; with few heads the keys are split into parts."""
    batch, heads, most, _ = means.shape
    keys = k.shape[2]
    parts = _parts(batch * heads * -(-most // 128), keys)
    if parts == 1:
        return flash(means, k, v, key_mask, scale=scale, both=False, impl="triton")
    rows = means[:, None].expand(-1, parts, -1, -1, -1).flatten(0, 1)
    # All parts are as wide as the last one, which has the remaining keys: the last keys of the others count in the next
    # part. The parts of one sample are views where its tokens are contiguous, as in models.
    step = keys // parts
    width = keys - (parts - 1) * step
    k, v = (x.unfold(2, width, step).permute(0, 2, 1, 4, 3).flatten(0, 1) for x in (k, v))
    mask = None if key_mask is None else key_mask.unfold(1, width, step).flatten(0, 1)
    if width > step:
        last = torch.arange(batch * parts, device=k.device)[:, None] % parts == parts - 1
        own = (torch.arange(width, device=k.device) < step) | last
        mask = own if mask is None else mask & own
    outputs = flash(rows, k, v, mask, scale=scale, both=False, impl="triton")
    shared, lse = (x.unflatten(0, (batch, parts)) for x in outputs)
    # A part without a real key has weight 0, and its gradient must not be NaN.
    lse = lse.masked_fill(lse == float("-inf"), -1e30)
    whole = lse.logsumexp(1)
    weights = (lse - whole[:, None]).exp()
    return (weights[..., None] * shared.float()).sum(1).to(means.dtype), whole


def _parts(programs: int, keys: int) -> int:
    """The number of parts with which programs fill a card; each has enough keys, and if possible none overlap."""
    most = max(min(FULL // programs, keys // 512), 1)
    return next((parts for parts in range(most, most // 2, -1) if keys % parts == 0), most)


def _groups(
    q: Tensor,
    tokens: Tensor | None,
    queries: Tensor,
    own: Tensor,
    planes: Tensor | None,
    draws: Tensor | None,
    selectors: Tensor | None,
    most: int,
    iterations: int,
) -> Tensor:
    """Cluster of each real query, in order, [B, H, L] int32; undefined where each query is a cluster."""
    if most == q.shape[2]:
        return q.new_zeros(q.shape[:3], dtype=torch.int32)
    if selectors is None:
        assert planes is not None, "checked by the op"
        assert draws is not None, "checked by the op"
        return cluster_samples(q.detach(), tokens, queries, own, planes, draws, most, iterations)
    groups = nearest_centroids(q, selectors).int()
    if tokens is not None:
        groups = groups.gather(2, tokens[:, None].expand_as(groups).long())
    apart = torch.arange(q.shape[2], dtype=torch.int32, device=q.device)
    return torch.where((own == queries)[:, None, None], apart, groups).contiguous()
