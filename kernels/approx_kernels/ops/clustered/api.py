"""Clustered attention: similar queries share one row of attention weights."""

from functools import partial

from torch import Tensor

from approx_kernels.dispatch.implementation import choose
from approx_kernels.gpu.language import ranked
from approx_kernels.ops.clustered.causal_cpu import causal_samples_in_c
from approx_kernels.ops.clustered.causal_cpu import obstacle as causal_obstacle
from approx_kernels.ops.clustered.cpu import clustered_batch
from approx_kernels.ops.clustered.cpu import obstacle as cpu_obstacle
from approx_kernels.ops.clustered.reference import (
    MOST_DEFAULT_CLUSTERS,
    Clusters,
    clustered_parts,
    default_clusters,
)
from approx_kernels.ops.clustered.reference import causal_clustered_attention as plain_causal_attention
from approx_kernels.ops.clustered.reference import clustered_attention as plain_attention
from approx_kernels.ops.clustered.triton import clustered_on_gpu
from approx_kernels.ops.clustered.triton import obstacle as triton_obstacle
from approx_kernels.ops.clustered.triton_causal import causal_on_gpu
from approx_kernels.ops.clustered.triton_causal import obstacle as causal_triton_obstacle
from approx_kernels.ops.clustering.api import check_clustering, cluster_queries
from approx_kernels.tokens import (
    check_form,
    check_least,
    check_part,
    check_shapes,
    check_word,
    in_turns,
    without_padding,
)

__all__ = [
    "MOST_DEFAULT_CLUSTERS",
    "Clusters",
    "causal_clustered_attention",
    "clustered_attention",
    "clustered_parts",
    "default_clusters",
]


def clustered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    planes: Tensor | None = None,
    draws: Tensor | None = None,
    selectors: Tensor | None = None,
    clusters: Clusters,
    iterations: int,
    topk: int | None,
    scale: float,
    dropout: float = 0.0,
    impl: str = "auto",
) -> Tensor:
    """Attend with the mean query of each cluster, in O(n C D); with `topk`, correct its largest weights too.

    Plain: every member of a cluster receives the output of the cluster's mean query. Improved (`topk`): each member
    recomputes the weights of the K keys that the mean query weighs most, within the mass that the mean query gave
    them, in O(n K D) more. Gradients pass through the means and the masses, not through the choices.

    Each sample is computed without its padding, so nothing depends on padding or on other samples. A sample with at
    most C real queries is exact: each query is its own cluster. Padded queries and samples without keys give 0.

    Source: Vyas, Katharopoulos, Fleuret, 2020, Fast Transformers with Clustered Attention, arXiv 2007.04825;
    departs from it in the clustering (see `cluster_queries`) and in differentiating the mass.

    Args:
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
        key_mask: [B, S] bool, True at real keys, and when L == S at real queries; None when all are real.
        planes: Hash planes, [bits, D + 1], the biases last, to cluster queries by their hashes.
        draws: Random numbers for the clustering, int64, at least C; needed with `planes`.
        selectors: Selectors of frozen centroids, [H, C, D + 1], instead of planes; k-means is then skipped.
        clusters: Number of clusters, C; `auto` takes half the real queries of each sample, from 25 to 100; None takes 25 for
            up to 512 of them and 100 beyond.
        iterations: Iterations of the clustering.
        topk: Keys each member weighs itself, K, at most all; None for plain clustered attention.
        scale: Factor of the scores.
        dropout: Probability of dropping a weight, of a cluster or a member's own.
        impl: `reference`, `cpu` in C on float32 and bfloat16, or `triton` (see
            `approx_kernels.dispatch.implementation`).

    Returns:
        [B, H, L, E] in the dtype of q.

    Raises:
        ValueError: if shapes or dtypes do not match, not exactly one way to cluster is given, or `impl` cannot run.
    """
    check_shapes(q, k, v, key_mask)
    check_form(scale, dropout)
    if (planes is None or draws is None) == (selectors is None):
        raise ValueError("Either planes and draws or selectors say which queries are alike; expected one of the two.")
    if isinstance(clusters, str):
        check_word("clusters", clusters, ("auto",))
    elif clusters is not None:
        check_least("clusters", clusters, 1)
    if topk is not None:
        check_least("topk", topk, 1)
    if selectors is not None:
        if not isinstance(clusters, int):
            raise ValueError(f"clusters is {clusters} beside selectors; expected their number.")
        check_least("iterations", iterations, 1)
        check_part("selectors", selectors, q, q.shape[1], clusters, q.shape[3] + 1)
    elif planes is not None and draws is not None:
        most = clusters if isinstance(clusters, int) else default_clusters(q.shape[2], clusters)
        check_clustering(q, planes, draws, most, iterations)
    settings = {"clusters": clusters, "iterations": iterations, "topk": topk, "scale": scale}
    ways = {"planes": planes, "draws": draws}
    why = triton_obstacle(q, v, clusters, 0 if planes is None else len(planes), dropout)
    run = choose("clustered_attention", impl, ranked(q, why, cpu=cpu_obstacle(q), reference=None), q)
    if run == "cpu":
        return clustered_batch(q, k, v, key_mask, **ways, selectors=selectors, **settings, dropout=dropout)

    if run == "triton":

        def attend(q: Tensor, k: Tensor, v: Tensor, selectors: Tensor | None) -> Tensor:
            return clustered_on_gpu(q, k, v, key_mask, **ways, selectors=selectors, **settings)

        return in_turns(attend, q, k, v, selectors)
    cluster = partial(cluster_queries, impl=impl)
    parts = {**ways, "selectors": selectors, **settings}
    return plain_attention(q, k, v, key_mask, **parts, dropout=dropout, cluster=cluster)


def causal_clustered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    centroids: Tensor,
    selectors: Tensor,
    chunk: int,
    topk: int | None,
    scale: float,
    dropout: float = 0.0,
    impl: str = "auto",
) -> Tensor:
    """Attend exactly inside chunks and through fixed centroids to the keys before, in O(n (chunk + C + K) D).

    The real tokens of a sample are cut into chunks. A query weighs the keys of its own chunk itself, up to its
    own. Of the keys before the chunk it weighs itself the K that its nearest centroid weighs most; the others it
    shares with all queries of the centroid: their mean key and mean value under the centroid's weights, and their
    mass, which the mean key corrects to first order for the query's distance from the centroid. All parts share
    one normaliser, joined by log-sum-exp. `topk` of None shares all keys before the chunk.

    The centroids are constants, so a query depends only on itself and the keys up to its own: nothing sees the
    future, and decoding with a cache gives the same as the whole sequence, up to rounding (which may rarely swap
    two keys that a centroid weighs alike). The centroids' rows are carried from chunk to chunk instead of being
    recomputed. Query i is at position S - L + i. Padded queries, and those without a key, give 0.

    Source: built on Vyas, Katharopoulos, Fleuret, 2020, Fast Transformers with Clustered Attention, arXiv
    2007.04825, which has no strictly causal form; departs from it in all of the above.

    Args:
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
        key_mask: [B, S] bool, True at real keys; None when all are real.
        centroids: Fixed centroids of queries, [H, C, D].
        selectors: Selectors of the nearest centroid, [H, C, D + 1] (see `fit_centroids`).
        chunk: Real tokens of a chunk, raised to `topk` + 1 if smaller.
        topk: Keys before the chunk that each query weighs itself, K; None for plain clustered attention.
        scale: Factor of the scores.
        dropout: Probability of dropping a weight, a query's own or a shared one.
        impl: `reference`, `cpu` in C on float32 and bfloat16, or `triton` (see
            `approx_kernels.dispatch.implementation`).

    Returns:
        [B, H, L, E] in the dtype of q.

    Raises:
        ValueError: if shapes or dtypes do not match, or `impl` cannot run.
    """
    check_shapes(q, k, v, key_mask)
    check_form(scale, dropout)
    check_part("centroids", centroids, q, q.shape[1], "clusters", q.shape[3])
    check_part("selectors", selectors, q, q.shape[1], centroids.shape[1], q.shape[3] + 1)
    check_least("chunk", chunk, 1)
    if topk is not None:
        check_least("topk", topk, 1)
    why = causal_triton_obstacle(q, v, chunk, topk or 0, dropout)
    run = choose("causal_clustered_attention", impl, ranked(q, why, cpu=causal_obstacle(q), reference=None), q)
    settings = {"chunk": chunk, "topk": topk or 0, "scale": scale}
    if run == "cpu":
        attend = partial(causal_samples_in_c, centroids=centroids, selectors=selectors, **settings, dropout=dropout)
        return without_padding(attend, q, k, v, key_mask)

    fitted = {"centroids": centroids, "selectors": selectors}
    if run == "triton":

        def attend_turn(q: Tensor, k: Tensor, v: Tensor, centroids: Tensor, selectors: Tensor) -> Tensor:
            return causal_on_gpu(q, k, v, key_mask, centroids=centroids, selectors=selectors, **settings)

        return in_turns(attend_turn, q, k, v, centroids, selectors)
    return plain_causal_attention(q, k, v, key_mask, **fitted, **settings, dropout=dropout)
