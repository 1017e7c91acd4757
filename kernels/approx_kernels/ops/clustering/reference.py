"""Sign hashes and Hamming k-means as integer-valued matrix products."""

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.runtime.autocast import without_autocast
from approx_kernels.runtime.torch_internals import int8_product
from approx_kernels.tokens.shapes import check_draw, check_form

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
def cluster_heads(q: Tensor, planes: Tensor, draws: Tensor, clusters: int, iterations: int) -> Tensor:
    """Hash the queries and cluster the hashes, as many heads at a time as fit into a CPU's cache."""
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
