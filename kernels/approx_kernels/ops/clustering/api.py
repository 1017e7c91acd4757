"""Groups of similar queries: k-means among sign hashes, or centroids that are fitted once."""

import torch
from torch import Tensor

from approx_kernels.dispatch.implementation import choose
from approx_kernels.gpu.language import ranked
from approx_kernels.ops.clustering.checks import check_clustering
from approx_kernels.ops.clustering.cpu import cluster_samples
from approx_kernels.ops.clustering.cpu import obstacle as cpu_obstacle
from approx_kernels.ops.clustering.reference import cluster_queries as cluster_plainly
from approx_kernels.ops.clustering.reference import draw_centroids, draw_planes, fit_centroids, nearest_centroids
from approx_kernels.ops.clustering.triton import cluster_samples as cluster_on_gpu
from approx_kernels.ops.clustering.triton import obstacle as triton_obstacle
from approx_kernels.tokens import DTYPES, check_tensor

__all__ = ["check_clustering", "cluster_queries", "draw_centroids", "draw_planes", "fit_centroids", "nearest_centroids"]


def cluster_queries(
    q: Tensor, planes: Tensor, draws: Tensor, *, clusters: int, iterations: int, impl: str = "auto"
) -> Tensor:
    """Put each query of a head into one of C clusters, in O(n C bits) an iteration.

    Queries are hashed to sign bits, bit_b = [q.a_b > bias_b], and clustered by k-means in Hamming space, with the
    majority bits as centroid. Ties go to the lowest cluster, and a tied majority keeps the previous bit. Initial
    centroids are drawn evenly along the sequence; an empty cluster draws again. Nothing is differentiated.

    Source: Vyas, Katharopoulos, Fleuret, 2020, Fast Transformers with Clustered Attention, arXiv 2007.04825;
    departs from it in the even draw, in redrawing empty clusters and in ties.

    Args:
        q: Real queries of one sample, [G, n, D], float, n > C; G is any number of heads.
        planes: Normals of the hash planes with their biases in the last column, [bits, D + 1].
        draws: Non-negative random int64 numbers, at least C of them, which select "random" queries.
        clusters: Number of clusters, C.
        iterations: Most assignments; centroids move between them, and iteration stops once none moves.
        impl: `reference`, `cpu` in C or `triton`, with the same clusters (see
            `approx_kernels.dispatch.implementation`).

    Returns:
        Cluster of each query, [G, n], int64.

    Raises:
        ValueError: if planes, draws, clusters or iterations do not fit q and each other, or `impl` cannot run.
    """
    check_tensor("q", q)
    if q.ndim != 3 or not q.numel() or q.dtype not in DTYPES:
        raise ValueError(f"q is {q.dtype} of shape {list(q.shape)}; expected floats [heads, queries, head size].")
    check_clustering(q, planes, draws, clusters, iterations)
    if not clusters < q.shape[1]:
        raise ValueError(f"{clusters} clusters for {q.shape[1]} queries; expected fewer clusters than queries.")
    ways = ranked(q, triton_obstacle(q, clusters, len(planes)), cpu=cpu_obstacle(q), reference=None)
    run = choose("cluster_queries", impl, ways, q)
    if run != "reference":
        q = (q if q.stride(-1) == 1 else q.contiguous()).detach()[None]
        counts = [torch.full((1,), number, device=q.device) for number in (q.shape[2], clusters)]
        if run == "triton":
            return cluster_on_gpu(q, None, *counts, planes, draws, clusters, iterations)[0].long()
        return cluster_samples(q, None, *counts, planes, draws, iterations)[0].long()
    return cluster_plainly(q, planes, draws, clusters=clusters, iterations=iterations)
