"""Clusters of all samples and heads at once on a CPU, in C."""

import torch
from torch import Tensor

from approx_kernels.cpu.compile import call
from approx_kernels.cpu.compile import obstacle as c_obstacle
from approx_kernels.cpu.structs import address, rows_of
from approx_kernels.ops.clustering.checks import check_clustering, check_draws
from approx_kernels.ops.clustering.reference import STRIDE
from approx_kernels.runtime.custom_op import custom_op
from approx_kernels.tokens import check_part


def obstacle(*tensors: Tensor) -> str | None:
    """Why these tensors cannot be clustered in C, with the remedy; None if they can."""
    return c_obstacle("clustering/hamming.c", *tensors) or c_obstacle("clustering/selectors.c", *tensors)


def _empty(
    q: Tensor, tokens: Tensor | None, counts: Tensor, clusters: Tensor, planes: Tensor, draws: Tensor, iterations: int
) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.int32)


@custom_op(_empty)
def cluster_samples(
    q: Tensor, tokens: Tensor | None, counts: Tensor, clusters: Tensor, planes: Tensor, draws: Tensor, iterations: int
) -> Tensor:
    """Cluster the real queries of each sample like `cluster_queries`; with at most C queries, each is its own cluster.

    Args:
        q: Queries, [B, H, L, D], float32 or bfloat16.
        tokens: Positions of the real queries of each sample, in order and before all others, [B, L] int32; None when
            all are real.
        counts: Number of real queries, [B] int64.
        clusters: Number of clusters of each sample, [B] int64; 0 skips the sample.
        planes: As for `cluster_queries`.
        draws: As for `cluster_queries`.
        iterations: As for `cluster_queries`.

    Returns:
        Cluster of each real query, in order, [B, H, L] int32; entries after them are undefined.
    """
    most = int(clusters.max())
    check_clustering(q, planes, draws, max(most, 1), iterations)
    check_draws(draws)
    q, planes, draws = q if q.stride(-1) == 1 else q.contiguous(), planes.float().contiguous(), draws.contiguous()
    groups = _empty(q, tokens, counts, clusters, planes, draws, iterations)
    batch, heads, length, size = q.shape
    places = (
        address(planes, torch.float32, len(planes), size + 1),
        address(tokens, torch.int32, batch, length),
        *(address(each, torch.int64, batch) for each in (counts, clusters)),
        address(draws, torch.int64, len(draws)),
    )
    numbers = (q.dtype == torch.bfloat16, *q.shape, len(planes), iterations, STRIDE, torch.get_num_threads())
    written = address(groups, torch.int32, batch, heads, length)
    call("clustering/hamming.c", "cluster", *rows_of(q), *places, *numbers, written)
    return groups


def _no_groups(q: Tensor, selectors: Tensor) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.int32)


@custom_op(_no_groups)
def nearest_of_heads(q: Tensor, selectors: Tensor) -> Tensor:
    """Like `nearest_centroids`: q [B, H, L, D], selectors [H, C, D + 1] -> [B, H, L] int32."""
    check_part("selectors", selectors, q, q.shape[1], "clusters", q.shape[3] + 1)
    q = q if q.stride(-1) == 1 else q.contiguous()
    groups = _no_groups(q, selectors)
    selectors = selectors.detach().float().contiguous()
    numbers = (q.dtype == torch.bfloat16, *q.shape, selectors.shape[1], torch.get_num_threads())
    batch, heads, length, size = q.shape
    given = address(selectors, torch.float32, heads, selectors.shape[1], size + 1)
    written = address(groups, torch.int32, batch, heads, length)
    call("clustering/selectors.c", "nearest", *rows_of(q), given, *numbers, written)
    return groups
