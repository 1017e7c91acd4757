# Travels with a checkpoint converted by approx (Apache-2.0); it needs torch and transformers, and nothing else.
"""Clusters of queries: hashes, and k-means on their bits."""

import torch
from torch import Tensor
from torch.nn import functional as F

from .approx_runtime import int8_product, without_autocast
from .approx_tokens import check_least, check_part

# Bits of the words that hashes are kept in.
MOST_BITS = 64


def check_clustering(q: Tensor, planes: Tensor, draws: Tensor, clusters: int, iterations: int) -> None:
    """Refuse planes and draws that do not fit the queries and the number of clusters.

    Args:
        q: Queries, [..., n, D].
        planes: Hash planes, [bits, D + 1].
        draws: Random int64 numbers, at least C. Their range is checked where they are read: see `check_draws`.
        clusters: C.
        iterations: Assignments.

    Raises:
        ValueError: naming what was found and what is expected.
    """
    check_part("planes", planes, q, "bits", q.shape[-1] + 1)
    if len(planes) > MOST_BITS:
        raise ValueError(f"planes has {len(planes)} rows; expected {MOST_BITS} at most.")
    check_least("clusters", clusters, 1)
    check_least("iterations", iterations, 1)
    check_part("draws", draws, q, "numbers", dtype=torch.int64)
    if len(draws) < clusters:
        raise ValueError(f"draws has shape {list(draws.shape)}; expected at least {clusters} numbers.")


# Sign hashes and Hamming k-means as integer-valued matrix products.


# A prime, so that the draws of an empty cluster in successive iterations walk through the queries.
STRIDE = 2_147_483_647
# Rows of 64 float32 bits that fit into half a MiB, the working set of one block of heads on a CPU.
_CACHED_ROWS = 4096


def draw_planes(size: int, *, bits: int, bias: bool, clusters: int, seed: int) -> tuple[Tensor, Tensor]:
    """Everything random about a clustering, drawn once from the seed.

    Returns:
        Hash planes with their biases in the last column, N(0, 1) or 0 without `bias`, [bits, size + 1], and
        the numbers that choose queries, [clusters], int64: integers stay what they are in a 16-bit model.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    planes = torch.randn(bits, size + 1, generator=generator, device="cpu", dtype=torch.float32)
    planes[:, -1] *= bias
    return planes, torch.randint(2**31, (clusters,), generator=generator, device="cpu")


@torch.no_grad()
def cluster_heads(q: Tensor, planes: Tensor, draws: Tensor, clusters: int, iterations: int) -> Tensor:
    """Hash the queries and cluster the hashes, as many heads at a time as a CPU's cache holds."""
    heads = max(1, _CACHED_ROWS // q.shape[1]) if q.device.type == "cpu" else q.shape[0]
    with without_autocast(q.device.type):
        blocks = [hamming_kmeans(hash_bits(b, planes), draws, clusters, iterations) for b in q.split(heads)]
    return torch.cat(blocks)


def hash_heights(q: Tensor, planes: Tensor) -> Tensor:
    """How far q lies above each plane, and in a last column 1, [G, n, bits + 1], float32 at least."""
    wide = torch.promote_types(q.dtype, torch.float32)
    normals, bias = planes[:, :-1].to(wide), planes[:, -1].to(wide)
    # The plane of the last column has no normal and a bias below every product.
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
    # One query of each of C equal stretches: distinct, and a function of the real queries alone.
    start = torch.arange(clusters + 1, device=bits.device) * n // clusters
    centroids = bits[:, start[:-1] + draws % start.diff()]
    assignment = _nearest(products, centroids)
    for iteration in range(1, iterations):
        target = (assignment + group * clusters).view(-1, 1).expand(-1, width)
        # scatter_add_ over an expanded index is several times faster than index_add_ on some CPUs.
        sums = rows.new_zeros(groups * clusters, width).scatter_add_(0, target, rows).view_as(centroids)
        # Sums are integers, so adding the old bit once to the doubled sum decides exactly the ties.
        empty = sums[..., -1:] == 0
        moved = sums.mul_(2).add_(centroids).sign_()
        # Real queries settle well before the last iteration; from here on every one would repeat this one.
        if torch.equal(moved, centroids) and not empty.any():
            break
        centroids = torch.where(empty, bits[:, (draws + iteration * STRIDE) % n], moved)
        assignment = _nearest(products, centroids)
    return assignment


def _nearest(products: Tensor, centroids: Tensor) -> Tensor:
    """Index of the centroid that shares most bits with each row, the lowest among equals, [G, n].

    The products become C (bits.c) + (C - 1 - index), where the ones of the last column bring the index in:
    a maximum, much faster than an arg-maximum, then holds both. All numbers are integers below 2^24.
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
    """Whether products of int8 may stand in for those of float32: with AVX2 alone they are several times slower.

    Without VNNI, oneDNN adds pairs of (bit + 128) * centroid in 16 bits: at most 2 * 129 * 127 = 32766 < 2^15.
    """
    return (
        bits.device.type == "cpu"
        and clusters <= 127
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    )


# Centroids that are fitted once: k-means of calibration queries, measured by what they score differently.


def draw_centroids(heads: int, size: int, *, clusters: int, seed: int) -> tuple[Tensor, Tensor]:
    """Centroids and selectors before anything was fitted: N(0, 1) from the seed and their Euclidean selectors.

    Returns:
        As `fit_centroids`.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    centroids = torch.randn(heads, clusters, size, generator=generator, device="cpu", dtype=torch.float32)
    return centroids, _selectors(
        centroids, torch.eye(size, dtype=centroids.dtype, device="cpu").expand(heads, size, size)
    )


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


def mean_queries(q: Tensor, groups: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """Mean query and number of members of each cluster, [G, C, D] in float32 at least and [G, C] int64."""
    heads, n, size = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    rows = flat_index(groups, clusters)
    members = torch.bincount(rows, minlength=heads * clusters)
    sums = q.new_zeros(heads * clusters, size, dtype=wide)
    sums = sums.scatter_add(0, rows[:, None].expand(-1, size), q.to(wide).reshape(heads * n, size))
    means = sums / members.clamp(min=1)[:, None]
    return means.view(heads, clusters, size), members.view(heads, clusters)


def flat_index(index: Tensor, rows: int) -> Tensor:
    """The index [G, ...] into rows of each head as one into the rows of all heads, flat."""
    head = torch.arange(index.shape[0], device=index.device).view(-1, *[1] * (index.ndim - 1))
    return (index + head * rows).flatten()


def cluster_queries(
    q: Tensor, planes: Tensor, draws: Tensor, *, clusters: int, iterations: int
) -> Tensor:
    """Put each query of a head into one of C clusters, in O(n C bits) an iteration.

    A query becomes sign bits, bit_b = [q.a_b > bias_b]; k-means in Hamming space follows, with the majority
    bit as centroid. Ties go to the lowest cluster, and a tied majority keeps the bit it had. First centroids
    are drawn evenly along the sequence; an empty cluster draws again. Nothing is differentiated.

    Source: Vyas, Katharopoulos, Fleuret, 2020, Fast Transformers with Clustered Attention, arXiv 2007.04825;
    departs from it in the even draw, in the second draw of empty clusters and in ties.

    Args:
        q: Real queries of one sample, [G, n, D], float, n > C; G is any number of heads.
        planes: Normals of the hash planes with their biases in the last column, [bits, D + 1].
        draws: Non-negative random int64 numbers, at least C of them: what a "random" query is.
        clusters: Number of clusters, C.
        iterations: Assignments; between two of them the centroids move, and once none does the rest is left out.

    Returns:
        Cluster of each query, [G, n], int64.

    Raises:
        ValueError: if planes, draws, clusters or iterations do not fit q and each other.
    """
    if q.ndim != 3 or not (q.numel() and q.is_floating_point()):
        raise ValueError(f"q is {q.dtype} of shape {list(q.shape)}; expected floats [heads, queries, head size].")
    check_clustering(q, planes, draws, clusters, iterations)
    if not clusters < q.shape[1]:
        raise ValueError(f"{clusters} clusters for {q.shape[1]} queries; expected fewer clusters than queries.")
    return cluster_heads(q, planes, draws, clusters, iterations)
