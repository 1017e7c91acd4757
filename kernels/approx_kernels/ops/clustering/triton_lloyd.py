"""Kernels of the clustering: hash signs, k-means on rows of +-1 by products of int8, and a counting sort."""

from __future__ import annotations

from approx_kernels.gpu.language import jit, tl

# Kernels are not specialised on lengths, so that other lengths compile none.
LENGTHS = ("H", "L", "most", "bits", "iterations", "step", "stride", "parts")


@jit
def sample_counts(Counts, Clusters, item, H):
    """Numbers of real queries and of clusters in a head's sample; 0 where the sample is skipped."""
    clusters = tl.load(Clusters + item // H).to(tl.int32)
    count = tl.load(Counts + item // H).to(tl.int32)
    return tl.where(clusters > 0, count, 0), clusters


@jit
def real_places(Tokens, item, H, L, row, count):
    """The positions of the real queries of these numbers in their sample."""
    if Tokens is None:
        return row
    else:
        return tl.load(Tokens + tl.cast(item // H, tl.int64) * L + row, mask=row < count, other=0)


@jit(do_not_specialize=LENGTHS)
def hash_kernel(
    Q,
    Tokens,
    Counts,
    Clusters,
    Planes,
    Bits,
    q_b,
    q_h,
    q_n,
    H,
    L,
    bits,
    D: tl.constexpr,
    STRETCH: tl.constexpr,
    WIDTH: tl.constexpr,
    BM: tl.constexpr,
):
    """The sides of the planes on which BM real queries of a head are, as +-1, then a 1, then zeros."""
    tiles = tl.cdiv(L, BM)
    item, first = tl.program_id(0) // tiles, tl.program_id(0) % tiles * BM
    count, _ = sample_counts(Counts, Clusters, item, H)
    if first >= count:
        return
    row, bit = first + tl.arange(0, BM), tl.arange(0, WIDTH)
    place = real_places(Tokens, item, H, L, row, count).to(tl.int64)
    Q += tl.cast(item // H, tl.int64) * q_b + tl.cast(item % H, tl.int64) * q_h
    bias = tl.load(Planes + bit * (D + 1) + D, mask=bit < bits, other=0.0).to(tl.float32)
    heights = tl.zeros([BM, WIDTH], tl.float32)
    for begin in range(0, D, STRETCH):
        size = begin + tl.arange(0, STRETCH)
        q = tl.load(Q + place[:, None] * q_n + size[None, :], mask=(row < count)[:, None], other=0.0)
        normals = tl.load(Planes + bit[None, :] * (D + 1) + size[:, None], mask=(bit < bits)[None, :], other=0.0)
        # Products in three parts on tensor cores are as exact as float32; 16-bit queries need only the first part.
        heights = tl.dot(q.to(tl.float32), normals.to(tl.float32), heights, input_precision="tf32x3")
    sign = tl.where(heights > bias[None, :], 1, -1)
    sign = tl.where((bit < bits)[None, :], sign, tl.where(bit == bits, 1, 0)[None, :])
    at = Bits + (tl.cast(item, tl.int64) * L + row)[:, None] * WIDTH + bit[None, :]
    tl.store(at, sign.to(tl.int8), mask=(row < count)[:, None])


@jit
def _rows(Bits, row, wanted, WIDTH: tl.constexpr):
    at = Bits + tl.cast(row, tl.int64)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    return tl.load(at, mask=wanted[:, None], other=0)


@jit
def _first_centroids(Bits, Draws, count, clusters, WIDE_C: tl.constexpr, WIDTH: tl.constexpr):
    """One query from each of C equal ranges."""
    c = tl.arange(0, WIDE_C).to(tl.int64)
    low, high = c * count // clusters, (c + 1) * count // clusters
    draw = tl.load(Draws + c, mask=c < clusters, other=0)
    return _rows(Bits, low + draw % tl.maximum(high - low, 1), c < clusters, WIDTH)


@jit
def _moved(Bits, Draws, sums, old, count, clusters, bits, step, stride, WIDE_C: tl.constexpr, WIDTH: tl.constexpr):
    """The majority bits of each cluster's members, a new query for an empty one, and whether any centroid moved."""
    c = tl.arange(0, WIDE_C)
    members = tl.sum(tl.where((tl.arange(0, WIDTH) == bits)[None, :], sums, 0), 1)
    empty = (members == 0) & (c < clusters)
    # Sums are integers, so adding the old bit to the doubled sum decides ties and nothing else.
    twice = 2 * sums + old.to(tl.int32)
    new = ((twice > 0).to(tl.int32) - (twice < 0).to(tl.int32)).to(tl.int8)
    draw = tl.load(Draws + c, mask=empty, other=0)
    again = _rows(Bits, (draw + tl.cast(step, tl.int64) * stride) % count, empty, WIDTH)
    new = tl.where(empty[:, None], again, new)
    changed = tl.max(tl.max((new != old).to(tl.int32), 1), 0)
    return new, tl.maximum(changed, tl.max(empty.to(tl.int32), 0))


@jit
def _assign(
    Bits, Groups, centroids, sums, first, count, clusters, WIDE_C: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr
):
    """Assign each of BN queries to the cluster that shares most bits with it, and add it to the cluster's sums."""
    row, c = first + tl.arange(0, BN), tl.arange(0, WIDE_C)
    x = _rows(Bits, row, row < count, WIDTH)
    shared = tl.dot(x, tl.trans(centroids), out_dtype=tl.int32)
    # One maximum finds both the most bits and, among ties, the lowest cluster.
    key = tl.where((c < clusters)[None, :], shared * WIDE_C + (WIDE_C - 1 - c)[None, :], -(2**30))
    best = tl.max(key, 1)
    tl.store(Groups + row, WIDE_C - 1 - (best & (WIDE_C - 1)), mask=row < count)  # pyright: ignore[reportOperatorIssue]  # a maximum is a tensor
    # Rows after the last one are zeros and add nothing.
    own = (key == best[:, None]).to(tl.int8)  # pyright: ignore[reportCallIssue, reportArgumentType]  # as above
    return tl.dot(tl.trans(own), x, sums, out_dtype=tl.int32)


@jit(do_not_specialize=LENGTHS)
def lloyd_kernel(
    Bits,
    Counts,
    Clusters,
    Draws,
    Groups,
    H,
    L,
    bits,
    iterations,
    stride,
    WIDE_C: tl.constexpr,
    WIDTH: tl.constexpr,
    BN: tl.constexpr,
):
    """All iterations of the clustering of one head."""
    item = tl.program_id(0)
    count, clusters = sample_counts(Counts, Clusters, item, H)
    Groups += tl.cast(item, tl.int64) * L
    if count <= clusters:
        for first in range(0, count, BN):
            row = first + tl.arange(0, BN)
            tl.store(Groups + row, row, mask=row < count)
        return
    Bits += tl.cast(item, tl.int64) * L * WIDTH
    centroids = _first_centroids(Bits, Draws, count, clusters, WIDE_C, WIDTH)
    step, changed = 0, 1
    while (step < iterations) & (changed > 0):
        sums = tl.zeros([WIDE_C, WIDTH], tl.int32)
        for first in range(0, count, BN):
            sums = _assign(Bits, Groups, centroids, sums, first, count, clusters, WIDE_C, WIDTH, BN)
        step += 1
        centroids, changed = _moved(Bits, Draws, sums, centroids, count, clusters, bits, step, stride, WIDE_C, WIDTH)


@jit(do_not_specialize=LENGTHS)
def sweep_kernel(
    Bits,
    Counts,
    Clusters,
    Draws,
    Groups,
    Centroids,
    Sums,
    Changed,
    H,
    L,
    bits,
    step,
    stride,
    parts,
    WIDE_C: tl.constexpr,
    WIDTH: tl.constexpr,
    BN: tl.constexpr,
):
    """One iteration for one part of a head, where heads are too few to fill a card.

    Each program computes the centroids from the sums of the previous iteration; the first one of a head stores them.
    """
    item, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    count, clusters = sample_counts(Counts, Clusters, item, H)
    Groups += tl.cast(item, tl.int64) * L
    if count <= clusters:
        for first in range(part * BN, count, parts * BN):
            row = first + tl.arange(0, BN)
            tl.store(Groups + row, row, mask=row < count)
        return
    Bits += tl.cast(item, tl.int64) * L * WIDTH
    items = tl.num_programs(0) // parts
    at = tl.arange(0, WIDE_C)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    here = tl.cast(step * items + item, tl.int64) * WIDE_C * WIDTH + at
    before = here - tl.cast(items, tl.int64) * WIDE_C * WIDTH
    if step == 0:
        centroids, changed = _first_centroids(Bits, Draws, count, clusters, WIDE_C, WIDTH), 1
    else:
        if tl.load(Changed + (step - 1) * items + item) == 0:
            return
        centroids, changed = _moved(
            Bits,
            Draws,
            tl.load(Sums + before),
            tl.load(Centroids + before),
            count,
            clusters,
            bits,
            step,
            stride,
            WIDE_C,
            WIDTH,
        )
    if changed > 0:
        sums = tl.zeros([WIDE_C, WIDTH], tl.int32)
        for first in range(part * BN, count, parts * BN):  # pyright: ignore[reportArgumentType]  # a tile is a number
            sums = _assign(Bits, Groups, centroids, sums, first, count, clusters, WIDE_C, WIDTH, BN)
        # Sums of integers do not depend on the order of additions.
        tl.atomic_add(Sums + here, sums)
    # Stored last: before the sweep, Triton 3.6 would spill.
    if part == 0:
        tl.store(Centroids + here, centroids)
        tl.store(Changed + step * items + item, changed)


@jit(do_not_specialize=LENGTHS)
def count_kernel(Groups, Counts, Clusters, Members, H, L, most, WIDE_C: tl.constexpr, BN: tl.constexpr):
    """Count how many of BN queries of a head are in each cluster."""
    tiles = tl.cdiv(L, BN)
    item, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    count, _ = sample_counts(Counts, Clusters, item, H)
    row, c = tile * BN + tl.arange(0, BN), tl.arange(0, WIDE_C)
    group = tl.load(Groups + tl.cast(item, tl.int64) * L + row, mask=row < count, other=-1)
    members = tl.sum((group[:, None] == c[None, :]).to(tl.int32), 0)
    tl.store(Members + tl.cast(tl.program_id(0), tl.int64) * most + c, members, mask=c < most)


@jit(do_not_specialize=LENGTHS)
def place_kernel(Groups, Tokens, Counts, Clusters, Begins, Order, H, L, most, WIDE_C: tl.constexpr, BN: tl.constexpr):
    """Counting sort: write each of BN queries of a head at its cluster's offset."""
    tiles = tl.cdiv(L, BN)
    item, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    count, _ = sample_counts(Counts, Clusters, item, H)
    row, c = tile * BN + tl.arange(0, BN), tl.arange(0, WIDE_C)
    group = tl.load(Groups + tl.cast(item, tl.int64) * L + row, mask=row < count, other=-1)
    own = (group[:, None] == c[None, :]).to(tl.int32)
    begin = tl.load(Begins + tl.cast(tl.program_id(0), tl.int64) * most + c, mask=c < most, other=0)
    place = tl.sum(own * (begin[None, :] + tl.cumsum(own, 0) - 1), 1)
    token = real_places(Tokens, item, H, L, row, count)
    tl.store(Order + tl.cast(item, tl.int64) * L + place, token, mask=row < count)
