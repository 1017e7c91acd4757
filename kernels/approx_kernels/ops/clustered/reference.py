"""Clustered and improved clustered attention without padding, for samples of equal length at a time."""

import torch
from torch import Tensor

from approx_kernels.ops.clustered.improved import improved_heads
from approx_kernels.ops.clustered.plain import plain_heads
from approx_kernels.ops.clustering.api import cluster_queries, nearest_centroids
from approx_kernels.ops.exact.api import exact_attention
from approx_kernels.runtime.autocast import without_autocast
from approx_kernels.tokens.padding import attend_to_nothing

# Limit of real queries for fewer default clusters, and their number.
SHORT = (512, 25)
MOST_DEFAULT_CLUSTERS = 100


def default_clusters(queries: int) -> int:
    """Clusters for a sample with this many real queries: 25 up to 512, 100 beyond."""
    return SHORT[1] if queries <= SHORT[0] else MOST_DEFAULT_CLUSTERS


def clustered_samples(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    *,
    planes: Tensor | None,
    draws: Tensor | None,
    selectors: Tensor | None,
    clusters: int | None,
    iterations: int,
    topk: int | None,
    scale: float,
    dropout: float,
    impl: str,
) -> Tensor:
    """Gather the real queries and keys of each sample, attend among them, and scatter the outputs."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        queries = q.shape[2]
        count = clusters or default_clusters(queries)
        if queries <= count:
            return exact_attention(q, k, v, causal=False, scale=scale, dropout=dropout)
        shape = q.shape
        if selectors is not None:
            groups = nearest_centroids(q, selectors).flatten(0, 1)
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        if selectors is None:
            assert planes is not None, "checked by the op"
            assert draws is not None, "checked by the op"
            groups = cluster_queries(q.detach(), planes, draws, clusters=count, iterations=iterations, impl=impl)
        if topk is None:
            out = plain_heads(q, k, v, groups, clusters=count, scale=scale, dropout=dropout)
        else:
            out = improved_heads(q, k, v, groups, clusters=count, topk=topk, scale=scale, dropout=dropout)
        return out.view(*shape[:3], -1)

    k, v = k.to(q.dtype), v.to(q.dtype)
    with without_autocast(q.device.type):
        if key_mask is None or key_mask.all():
            return attend(q, k, v)
        padded_queries = q.shape[2] == k.shape[2]
        out = list(q.new_zeros(*q.shape[:3], v.shape[3]))
        lengths = key_mask.sum(1)
        for length in lengths.unique().tolist():
            samples = (lengths == length).nonzero().squeeze(1).tolist()
            real = [key_mask[sample].nonzero().squeeze(1) for sample in samples]
            if length:
                inner = _at(q, samples, real) if padded_queries else q[samples]
                some = attend(inner, _at(k, samples, real), _at(v, samples, real))
            else:
                some = attend_to_nothing(q[samples], k[samples], v[samples])
            for sample, tokens, sample_out in zip(samples, real, some, strict=True):
                place = length and padded_queries
                out[sample] = out[sample].index_copy(1, tokens, sample_out) if place else sample_out
        return torch.stack(out)


def _at(x: Tensor, samples: list[int], tokens: list[Tensor]) -> Tensor:
    """The tokens [m] of some samples of x [B, H, n, D], [b, H, m, D]; a view for a single sample."""

    def chosen(x: Tensor, index: Tensor) -> Tensor:
        first, count = int(index[0]), index.numel()
        return x[:, first : first + count] if int(index[-1]) == first + count - 1 else x.index_select(1, index)

    parts = [chosen(x[sample], index) for sample, index in zip(samples, tokens, strict=True)]
    return torch.stack(parts) if len(parts) > 1 else parts[0][None]
