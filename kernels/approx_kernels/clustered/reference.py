"""Clustered and improved clustered attention of one sample after another, each without its padding."""

import torch
from torch import Tensor

from approx_kernels.clustered.improved import improved_heads
from approx_kernels.clustered.plain import plain_heads
from approx_kernels.clustering import cluster_queries
from approx_kernels.exact import exact_attention

MOST_DEFAULT_CLUSTERS = 100


def default_clusters(queries: int) -> int:
    """Clusters for a sample of so many real queries: 25 up to 512, 100 beyond."""
    return 25 if queries <= 512 else MOST_DEFAULT_CLUSTERS


def clustered_samples(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    *,
    planes: Tensor,
    draws: Tensor,
    clusters: int | None,
    iterations: int,
    topk: int | None,
    scale: float,
    dropout: float,
) -> Tensor:
    """Take each sample's real queries and keys, attend among them, put the outputs back."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        queries = q.shape[1]
        count = clusters or default_clusters(queries)
        if queries <= count:
            return exact_attention(q[None], k[None], v[None], causal=False, scale=scale, dropout=dropout)[0]
        groups = cluster_queries(q.detach(), planes, draws, clusters=count, iterations=iterations)
        if topk is None:
            return plain_heads(q, k, v, groups, clusters=count, scale=scale, dropout=dropout)
        return improved_heads(q, k, v, groups, clusters=count, topk=topk, scale=scale, dropout=dropout)

    def without_padding(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        real = mask.nonzero().squeeze(1)
        if not real.numel():
            return exact_attention(q[None], k[None], v[None], mask[None], causal=False, scale=scale)[0]
        if real.numel() == mask.numel():
            return attend(q, k, v)
        padded_queries = q.shape[1] == k.shape[1]
        inner = q.index_select(1, real) if padded_queries else q
        out = attend(inner, k.index_select(1, real), v.index_select(1, real))
        return out.new_zeros(*q.shape[:2], v.shape[2]).index_copy(1, real, out) if padded_queries else out

    k, v = k.to(q.dtype), v.to(q.dtype)
    with torch.autocast(q.device.type, enabled=False):
        if key_mask is None:
            return torch.stack([attend(*sample) for sample in zip(q, k, v, strict=True)])
        return torch.stack([without_padding(*sample) for sample in zip(q, k, v, key_mask, strict=True)])
