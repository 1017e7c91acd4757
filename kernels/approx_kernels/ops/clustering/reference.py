"""Sign hashes and Hamming k-means as integer-valued matrix products, and fixed centroids, in plain PyTorch."""

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.runtime.pytorch import int8_product, without_autocast
from approx_kernels.tokens import check_draw, check_form, check_least, check_part, check_tensor

# A prime, so that repeated draws of an empty cluster visit all queries.
STRIDE = 2_147_483_647
# Rows of 64 float32 bits in half a MiB, the working set of one block of heads on a CPU.
_CACHED_ROWS = 4096


def draw_planes(size: int, *, bits: int, bias: bool, clusters: int, seed: int) -> tuple[Tensor, Tensor]:
    """All random state of a clustering, drawn once from the seed.

    Returns:
        Hash planes with their biases in the last column, N(0, 1) or 0 without `bias`, [bits, size + 1], and
        the numbers that choose queries, [clusters], int64: integers survive conversion to a 16-bit dtype.
    """
    check_draw(seed, bits=bits, size=size, clusters=clusters)
    check_form(bias=bias)
    generator = torch.Generator("cpu").manual_seed(seed)
    planes = torch.randn(bits, size + 1, generator=generator, device="cpu", dtype=torch.float32)
    planes[:, -1] *= bias
    return planes, torch.randint(2**31, (clusters,), generator=generator, device="cpu")


@torch.no_grad()
def cluster_queries(q: Tensor, planes: Tensor, draws: Tensor, *, clusters: int, iterations: int) -> Tensor:
    """The op of this name in `api.py`, with as many heads at a time as fit into a CPU's cache."""
    heads = max(1, _CACHED_ROWS // q.shape[1]) if q.device.type == "cpu" else q.shape[0]
    with without_autocast(q.device.type):
        blocks = [hamming_kmeans(hash_bits(b, planes), draws, clusters, iterations) for b in q.split(heads)]
    return torch.cat(blocks)


def hash_heights(q: Tensor, planes: Tensor) -> Tensor:
    """Signed distances of q above each plane, and a last column of 1, [G, n, bits + 1], in at least float32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    normals, bias = planes[:, :-1].to(wide), planes[:, -1].to(wide)
    # The last column's plane has no normal and a bias below every product.
    return F.linear(q.to(wide), F.pad(normals, (0, 0, 0, 1)), F.pad(-bias, (0, 1), value=1.0))


def hash_bits(q: Tensor, planes: Tensor) -> Tensor:
    """The signs of q against the planes as +-1, and a last column of ones, [G, n, bits + 1], float32.

    The ones count the members of a cluster when bits are summed, and carry the index in `_nearest`.
    """
    return (hash_heights(q, planes) > 0).float().mul_(2).sub_(1)


def hamming_kmeans(bits: Tensor, draws: Tensor, clusters: int, iterations: int) -> Tensor:
    """Lloyd's algorithm on rows of +-1, [G, n, W] with a last column of ones -> cluster of each row, [G, n]."""
    groups, n, width = bits.shape
    products = bits.to(torch.int8) if _int8_is_exact_and_fast(bits, clusters) else bits
    rows = bits.reshape(groups * n, width)
    group = torch.arange(groups, device=bits.device)[:, None]
    draws = draws[:clusters]
    # One query from each of C equal stretches: distinct, and dependent only on the real queries.
    start = torch.arange(clusters + 1, device=bits.device) * n // clusters
    centroids = bits[:, start[:-1] + draws % start.diff()]
    assignment = _nearest(products, centroids)
    for iteration in range(1, iterations):
        target = (assignment + group * clusters).view(-1, 1).expand(-1, width)
        # scatter_add_ over an expanded index is several times faster than index_add_ on some CPUs.
        sums = rows.new_zeros(groups * clusters, width).scatter_add_(0, target, rows).view_as(centroids)
        # Sums are integers, so adding the old bit to the doubled sum affects only ties.
        empty = sums[..., -1:] == 0
        moved = sums.mul_(2).add_(centroids).sign_()
        # Real queries converge long before the last iteration; further ones would repeat this one.
        if torch.equal(moved, centroids) and not empty.any():
            break
        centroids = torch.where(empty, bits[:, (draws + iteration * STRIDE) % n], moved)
        assignment = _nearest(products, centroids)
    return assignment


def _nearest(products: Tensor, centroids: Tensor) -> Tensor:
    """Index of the centroid that shares most bits with each row, the lowest among equals, [G, n].

    The products become C (bits.c) + (C - 1 - index), where the last column of ones adds the index, so that a
    maximum, much faster than an arg-maximum, yields both. All numbers are integers below 2^24.
    """
    clusters = centroids.shape[1]
    keyed = centroids * clusters
    keyed[..., -1] = torch.arange(clusters - 1, -1, -1, device=keyed.device)
    if products.dtype == torch.int8:
        keyed = keyed.to(torch.int8)
        best = torch.stack([int8_product(p, c.t()).amax(-1) for p, c in zip(products, keyed, strict=True)])
    else:
        best = torch.bmm(keyed, products.transpose(1, 2)).amax(1)
    return (clusters - 1 - best.remainder(clusters)).long()


def _int8_is_exact_and_fast(bits: Tensor, clusters: int) -> bool:
    """Whether int8 products can replace float32 ones: with AVX2 alone they are several times slower.

    Without VNNI, oneDNN adds pairs of (bit + 128) * centroid in 16 bits: at most 2 * 129 * 127 = 32766 < 2^15.
    """
    return (
        bits.device.type == "cpu"
        and clusters <= 127
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    )


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
