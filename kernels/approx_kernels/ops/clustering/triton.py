"""Clusters of all samples and heads on a GPU, and their queries in the order of their clusters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from approx_kernels.gpu.language import obstacle as triton_obstacle
from approx_kernels.gpu.launch import Configuration, cut, first_that_fits, launch, power, strides
from approx_kernels.ops.clustering.checks import DRAWS_END
from approx_kernels.ops.clustering.reference import STRIDE
from approx_kernels.ops.clustering.triton_lloyd import (
    count_kernel,
    hash_kernel,
    lloyd_kernel,
    place_kernel,
    sweep_kernel,
)
from approx_kernels.runtime.custom_op import custom_op

# The most clusters whose iteration fits into registers; twice as many spill.
MOST_CLUSTERS, MOST_BITS = 128, 63
# Fewer clusters are padded to this number. With 32 the second product of k-means is too small for Hopper's wgmma, and
# the kernel would be the only one to mix it with mma.sync, whose loop old assemblers get wrong.
LEAST_CLUSTERS = 64
# With fewer programs than this, which fill an H100 once, heads are split into parts.
FULL = 132

# The default, then configurations that need less.
HASH = (cut(8, 2, BM=64), cut(8, 1, BM=32))
# By the number of clusters, rounded up to a power of two.
LLOYD = {
    64: (cut(4, 3, BN=128), cut(4, 1, BN=64)),
    128: (cut(8, 3, BN=128), cut(8, 1, BN=64)),
}
# It uses no shared memory.
SORT = (cut(4, 1, BN=64),)


def obstacle(q: Tensor, clusters: int, bits: int) -> str | None:
    """Why the clusters of these queries cannot be found by kernels, with the remedy; None where they can."""
    if clusters > MOST_CLUSTERS:
        return f"it has at most {MOST_CLUSTERS} clusters, and {clusters} were asked for. Take fewer, or ask for 'auto'."
    if bits > MOST_BITS:
        return f"its hashes have at most {MOST_BITS} bits, and {bits} were asked for. Take fewer, or ask for 'auto'."
    return triton_obstacle(q)


def _empty(
    q: Tensor,
    tokens: Tensor | None,
    counts: Tensor,
    clusters: Tensor,
    planes: Tensor,
    draws: Tensor,
    most: int,
    iterations: int,
) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.int32)


def _flops(
    q: Any,
    tokens: Any,
    counts: Any,
    clusters: Any,
    planes: Any,
    draws: Any,
    most: int,
    iterations: int,
    *,
    out_shape: Any = None,
) -> int:
    # A sweep compares all queries with all centroids, and adds them to the sums by one more product.
    return 2 * q[0] * q[1] * q[2] * planes[0] * (q[3] + 2 * iterations * most)


@custom_op(_empty, flops=_flops)
def cluster_samples(
    q: Tensor,
    tokens: Tensor | None,
    counts: Tensor,
    clusters: Tensor,
    planes: Tensor,
    draws: Tensor,
    most: int,
    iterations: int,
) -> Tensor:
    """Cluster the real queries of each sample as `cluster_queries` does; in a sample of at most C queries each is a
    cluster.

    Args:
        q: Queries, [B, H, L, D], the last dimension contiguous.
        tokens: Positions of the real queries of each sample, in order and before all others, [B, L] int32; None where
            all are real.
        counts: Number of real queries, [B] int64.
        clusters: Number of clusters of each sample, [B] int64; 0 skips the sample.
        planes: As for `cluster_queries`.
        draws: As for `cluster_queries`.
        most: The most clusters that a sample has.
        iterations: As for `cluster_queries`.

    Returns:
        Cluster of each real query, in order, [B, H, L] int32; undefined after the last one.
    """
    batch, heads, length, size = q.shape
    width, wide = power(planes.shape[0] + 1, 32), power(most, LEAST_CLUSTERS)
    groups = _empty(q, tokens, counts, clusters, planes, draws, most, iterations)
    bits = q.new_empty(batch, heads, length, width, dtype=torch.int8)
    # Checking the draws would wait for the device, so any values are mapped to valid places.
    planes, draws = planes.contiguous(), draws.contiguous().bitwise_and(DRAWS_END - 1)
    shapes: dict[str, Any] = {"H": heads, "L": length, "bits": planes.shape[0], "WIDTH": width}
    launch(
        hash_kernel,
        lambda tiles: (-(-length // tiles["BM"]) * batch * heads,),
        HASH,
        q,
        tokens,
        counts,
        clusters,
        planes,
        bits,
        *strides(q),
        D=size,
        STRETCH=16 if size % 32 else 32,
        **shapes,
    )
    cuts, shapes = LLOYD[power(most, 64)], {**shapes, "stride": STRIDE, "WIDE_C": wide}
    if parts_of(batch * heads, length, cuts[0].tiles["BN"]) == 1:
        launch(
            lloyd_kernel, (batch * heads,), cuts, bits, counts, clusters, draws, groups, iterations=iterations, **shapes
        )
        return groups

    # Its launches add to each other's sums, so all have one configuration.
    def sweeps(one: Configuration) -> None:
        parts = parts_of(batch * heads, length, one.tiles["BN"])
        centroids = bits.new_empty(iterations, batch * heads, wide, width)
        sums = centroids.new_zeros(centroids.shape, dtype=torch.int32)
        changed = sums.new_zeros(centroids.shape[:2])
        for step in range(iterations):
            sweep_kernel[(batch * heads * parts,)](
                bits,
                counts,
                clusters,
                draws,
                groups,
                centroids,
                sums,
                changed,
                step=step,
                parts=parts,
                **shapes,
                **one.options,
            )

    first_that_fits(sweeps, cuts, f"k-means, {wide}, {width}", q.device)
    return groups


def parts_of(heads: int, length: int, tile: int) -> int:
    """Parts of the queries of a head with which few heads fill a card; 1 where the extra launches cost more."""
    # A launch for every iteration pays off where it saves a program several tiles.
    return min(FULL // heads, length // (4 * tile)) if 2 * heads <= FULL and length >= 16 * tile else 1


def _empty_order(
    groups: Tensor, tokens: Tensor | None, counts: Tensor, clusters: Tensor, most: int
) -> tuple[Tensor, Tensor]:
    batch, heads, _ = groups.shape
    return torch.empty_like(groups), groups.new_empty(batch, heads, most + 1)


@custom_op(_empty_order)
def sort_queries(
    groups: Tensor, tokens: Tensor | None, counts: Tensor, clusters: Tensor, most: int
) -> tuple[Tensor, Tensor]:
    """Sort the real queries of each head by cluster, stably.

    Args:
        groups: What `cluster_samples` returned, [B, H, L] int32.
        tokens: This and all others as there.

    Returns:
        Positions of the real queries in their sample, [B, H, L] int32, undefined after the last one; and the number of
        queries before each cluster, the last entry being that of all, [B, H, most + 1] int32.
    """
    batch, heads, length = groups.shape
    order, begins = _empty_order(groups, tokens, counts, clusters, most)
    if most == length:
        # Each query is a cluster.
        place = torch.arange(length, dtype=torch.int32, device=groups.device)
        order.copy_(place if tokens is None else tokens[:, None])
        shown = torch.where(clusters > 0, counts, 0).int()[:, None, None]
        begins.copy_(torch.minimum(torch.arange(most + 1, dtype=torch.int32, device=groups.device), shown))
        return order, begins
    shapes: dict[str, Any] = {"H": heads, "L": length, "most": most, "WIDE_C": power(most, 32)}
    (one,) = SORT
    tiles = -(-length // one.tiles["BN"])
    members = groups.new_empty(batch, heads, tiles, most)
    launch(count_kernel, (tiles * batch * heads,), SORT, groups, counts, clusters, members, **shapes)
    begins[..., 0] = 0
    torch.cumsum(members.sum(2, dtype=torch.int32), 2, dtype=torch.int32, out=begins[..., 1:])
    before = members.cumsum(2, dtype=torch.int32).sub_(members).add_(begins[:, :, None, :-1])
    launch(place_kernel, (tiles * batch * heads,), SORT, groups, tokens, counts, clusters, before, order, **shapes)
    return order, begins
