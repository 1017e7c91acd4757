"""Clustered attention: queries that are alike share one row of attention weights."""

from torch import Tensor

from approx_kernels.clustered.reference import MOST_DEFAULT_CLUSTERS, clustered_samples, default_clusters
from approx_kernels.shapes import check_shapes

__all__ = ["MOST_DEFAULT_CLUSTERS", "clustered_attention", "default_clusters"]


def clustered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    planes: Tensor,
    draws: Tensor,
    clusters: int | None,
    iterations: int,
    topk: int | None,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """Attend with the mean query of each cluster, in O(n C D); with `topk`, mend its largest weights too.

    Plain: every member of a cluster receives what the cluster's mean query attends to. Improved (`topk`): the
    K keys that the mean query weighs most are weighed anew by each member, within the mass that the mean query
    gave to them, in O(n K D) more. Gradients pass through the means and the masses, not through the choices.

    Each sample is computed without its padding, so nothing depends on padding or neighbours. A sample with at
    most C real queries is exact: each query is its own cluster. Padded queries and samples without a key give 0.

    Source: Vyas, Katharopoulos, Fleuret, 2020, Fast Transformers with Clustered Attention, arXiv 2007.04825;
    departs from it in the clustering (see `cluster_queries`) and in differentiating the mass.

    Args:
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, H, S, D].
        v: Values, [B, H, S, E].
        key_mask: [B, S] bool, True at real keys, and when L == S at real queries; None when all are real.
        planes: Hash planes, [bits, D + 1], the biases last.
        draws: Random numbers for the clustering, int64, at least C.
        clusters: Number of clusters, C; None takes `default_clusters` of the real queries of each sample.
        iterations: Assignments of the clustering.
        topk: Keys each member weighs itself, K, at most all; None for plain clustered attention.
        scale: Factor of the scores.
        dropout: Probability with which a weight is dropped: one of a cluster's, or one a member weighed itself.

    Returns:
        [B, H, L, E] in the dtype of q.

    Raises:
        ValueError: if the shapes or dtypes do not fit together.
    """
    check_shapes(q, k, v, key_mask)
    return clustered_samples(
        q,
        k,
        v,
        key_mask,
        planes=planes,
        draws=draws,
        clusters=clusters,
        iterations=iterations,
        topk=topk,
        scale=scale,
        dropout=dropout,
    )
