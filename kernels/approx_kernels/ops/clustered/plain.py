"""Plain clustered attention of heads without padding."""

from torch import Tensor

from approx_kernels.ops.clustering.means import flat_index, mean_queries
from approx_kernels.ops.exact.api import exact_attention


def plain_heads(
    q: Tensor, k: Tensor, v: Tensor, groups: Tensor, *, clusters: int, scale: float, dropout: float
) -> Tensor:
    """Attend with the mean query of each cluster and copy the result to its members.

    Args: q [G, n, D], k [G, S, D], v [G, S, E], groups [G, n] the cluster of each query. Returns [G, n, E].
    """
    means, _ = mean_queries(q, groups, clusters)
    shared = exact_attention(means.to(q.dtype)[None], k[None], v[None], causal=False, scale=scale, dropout=dropout)[0]
    rows = flat_index(groups, clusters)
    return shared.flatten(0, 1).index_select(0, rows).view(*q.shape[:2], v.shape[2])
