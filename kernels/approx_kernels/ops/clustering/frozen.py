"""Centroids fitted once: k-means of calibration queries, under a metric from the keys' scores."""

import torch
from torch import Tensor

from approx_kernels.ops.clustering.means import mean_queries
from approx_kernels.tokens.shapes import check_draw, check_least, check_part, check_tensor


def draw_centroids(heads: int, size: int, *, clusters: int, seed: int) -> tuple[Tensor, Tensor]:
    """Centroids and selectors before fitting: N(0, 1) from the seed, and their Euclidean selectors.

    Returns:
        As `fit_centroids`.
    """
    check_draw(seed, heads=heads, clusters=clusters, size=size)
    generator = torch.Generator("cpu").manual_seed(seed)
    centroids = torch.randn(heads, clusters, size, generator=generator, device="cpu", dtype=torch.float32)
    return centroids, _selectors(
        centroids, torch.eye(size, dtype=centroids.dtype, device="cpu").expand(heads, size, size)
    )


@torch.no_grad()
def fit_centroids(q: Tensor, k: Tensor, *, clusters: int, iterations: int, seed: int) -> tuple[Tensor, Tensor]:
    """Lloyd's algorithm on float queries, in O(n C D) per iteration.

    The distance of two queries is the variance, over the keys, of the difference of their scores, which is all that
    the softmax sees. A query is nearest to the centroid mu with the largest q.(Cov mu) - mu.(Cov mu) / 2, an affine
    function of q, so choosing takes one product.

    Args:
        q: Calibration queries, [G, n, D], float; fewer than C leave some centroids unused.
        k: Calibration keys, [G, m, D].
        clusters: Number of centroids, C.
        iterations: Iterations of k-means.
        seed: Seed of the initial queries.

    Returns:
        Centroids [G, C, D] and their selectors [G, C, D + 1], the constants last, float32.
    """
    check_least("clusters", clusters, 1)
    check_least("iterations", iterations, 0)
    check_draw(seed)
    check_tensor("q", q)
    for name, x in (("q", q), ("k", k)):
        check_part(name, x, q, q.shape[0], "tokens", q.shape[-1])
    q, k = q.float(), k.float()
    n, size = q.shape[1:]
    centred = k - k.mean(1, keepdim=True)
    metric = centred.transpose(1, 2) @ centred / k.shape[1]
    # The overall scale has no effect, but might overflow 16 bits.
    metric = metric / metric.diagonal(dim1=1, dim2=2).mean(1).clamp(min=1e-20)[:, None, None]
    # Regularised, so that queries stay distinct even if keys vary in few directions or none.
    metric = metric + 1e-3 * torch.eye(size, device=q.device)
    generator = torch.Generator("cpu").manual_seed(seed)
    start = torch.randperm(n, generator=generator, device="cpu").to(q.device)
    centroids = q[:, start[torch.arange(clusters, device=q.device) % n]]
    for _ in range(iterations):
        means, members = mean_queries(q, nearest_centroids(q, _selectors(centroids, metric)), clusters)
        centroids = torch.where(members[..., None] > 0, means, centroids)
    return centroids, _selectors(centroids, metric)


@torch.no_grad()
def nearest_centroids(q: Tensor, selectors: Tensor) -> Tensor:
    """The centroid whose selector is largest at each query; q [..., n, D], selectors [..., C, D + 1] -> [..., n]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    selectors = selectors.to(wide)
    heights = q.to(wide) @ selectors[..., :-1].transpose(-2, -1)
    return (heights + selectors[..., None, :, -1]).argmax(-1)


def _selectors(centroids: Tensor, metric: Tensor) -> Tensor:
    normals = centroids @ metric
    return torch.cat([normals, (normals * centroids).sum(-1, keepdim=True) / -2], -1)
