"""Kernels of the attention of fixed centroids to a growing past: their largest keys, and sums over all others.

Boundary i follows chunk i. There the K largest keys of a row compete with those of the chunk; a key that loses joins
the others for good. So a key is among the largest from its own boundary up to the one in `Until`, which counts from 1,
0 for never; and the others at a boundary are those at the boundary before, those of the chunk, and those that have just
lost. Logarithms are to the base 2. Rows have others at every boundary, since a chunk is longer than K.
"""

# Triton's type stubs mistake tensors for constants, and branches on constants for branches at run time.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from approx_kernels.gpu.language import jit, tl
from approx_kernels.ops.clustered.triton_improved import gathered

# Kernels are not specialised on lengths, so that other lengths compile none.
LENGTHS = ("H", "S", "rows", "kept", "chunk", "chunks", "boundaries")


@jit
def _ordered(x):
    """Map floats to integers in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit(do_not_specialize=LENGTHS)
def select_kernel(Scores, Top, Best, Until, rows, kept, chunk, boundaries, WIDE_K: tl.constexpr, WIDE: tl.constexpr):
    """The largest keys of one row at every boundary, and how long each key is among them."""
    item, row = tl.cast(tl.program_id(0) // rows, tl.int64), tl.program_id(0) % rows
    keys = tl.cast(boundaries, tl.int64) * chunk
    Scores += (item * rows + row) * keys
    Until += (item * rows + row) * keys
    Top += (item * boundaries * rows + row) * kept
    Best += (item * boundaries * rows + row) * kept
    slot, column = tl.arange(0, WIDE_K), tl.arange(0, WIDE)
    lowest = tl.full([], -(2**31), tl.int32)
    for i in range(0, boundaries):
        before = tl.cast(i - 1, tl.int64) * rows * kept + slot
        there, inside = (slot < kept) & (i > 0), column < chunk
        key = tl.load(Top + before, mask=there, other=0)
        score = tl.load(Best + before, mask=there, other=0.0)
        rival = tl.load(Scores + tl.cast(i, tl.int64) * chunk + column, mask=inside, other=0.0)
        old, new = tl.where(there, _ordered(score), lowest), tl.where(inside, _ordered(rival), lowest)
        # Find the K-th largest of all bit by bit: the largest number that K of them reach.
        least = lowest
        for step in range(32):
            higher = least ^ (tl.full([], 1, tl.int32) << (31 - step))
            reach = tl.sum((old >= higher).to(tl.int32), 0) + tl.sum((new >= higher).to(tl.int32), 0)
            least = tl.where(reach >= kept, higher, least)
        spare = kept - tl.sum((old > least).to(tl.int32), 0) - tl.sum((new > least).to(tl.int32), 0)
        tied = there & (old == least)
        stays = there & ((old > least) | (tied & (tl.cumsum(tied.to(tl.int32), 0) <= spare)))
        spare -= tl.sum((tied & stays).to(tl.int32), 0)
        tied = inside & (new == least)
        enters = inside & ((new > least) | (tied & (tl.cumsum(tied.to(tl.int32), 0) <= spare)))
        now = tl.cast(i, tl.int64) * rows * kept
        place = now + tl.cumsum(stays.to(tl.int32), 0) - 1
        tl.store(Top + place, key, mask=stays)
        tl.store(Best + place, score, mask=stays)
        place = now + tl.sum(stays.to(tl.int32), 0) + tl.cumsum(enters.to(tl.int32), 0) - 1
        tl.store(Top + place, i * chunk + column, mask=enters)
        tl.store(Best + place, rival, mask=enters)
        until = tl.where(enters, boundaries + 1, 0).to(tl.int16)
        tl.store(Until + tl.cast(i, tl.int64) * chunk + column, until, mask=inside)
        tl.store(Until + key, (tl.zeros([WIDE_K], tl.int32) + i + 1).to(tl.int16), mask=there & ~stays)
        # Values that other threads of the program have written are read next.
        tl.debug_barrier()


@jit
def row_tile(Rows, c, rows, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Contiguous rows of these numbers; zeros where there are none."""
    column = tl.arange(0, WIDTH)
    return tl.load(
        Rows + c[:, None] * SIZE + column[None, :], mask=(c < rows)[:, None] & (column < SIZE)[None, :], other=0.0
    )


@jit(do_not_specialize=LENGTHS)
def chunk_sums_kernel(
    Rows,
    K,
    V,
    Until,
    Mass,
    MeanK,
    MeanV,
    k_b,
    k_h,
    k_n,
    v_b,
    v_h,
    v_n,
    H,
    rows,
    chunk,
    boundaries,
    scale,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDE_D: tl.constexpr,
    WIDE_E: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Mass, mean key and mean value of the keys of one chunk that are not among the largest, for BM rows."""
    blocks = tl.cdiv(rows, BM)
    item = tl.cast(tl.program_id(0) // blocks // boundaries, tl.int64)
    i, c = tl.program_id(0) // blocks % boundaries, tl.program_id(0) % blocks * BM + tl.arange(0, BM)
    K += item // H * k_b + item % H * k_h
    V += item // H * v_b + item % H * v_h
    own = row_tile(Rows + item * rows * D, c, rows, D, WIDE_D)
    factor = scale * 1.4426950408889634
    top, total = tl.full([BM], float("-inf"), tl.float32), tl.zeros([BM], tl.float32)
    mean_k, mean_v = tl.zeros([BM, WIDE_D], tl.float32), tl.zeros([BM, WIDE_E], tl.float32)
    for begin in range(0, chunk, BN):
        inside = begin + tl.arange(0, BN) < chunk
        key = tl.where(inside, i * chunk + begin + tl.arange(0, BN), -1)
        k, v = gathered(K, key, k_n, D, WIDE_D), gathered(V, key, v_n, E, WIDE_E)
        s = tl.dot(own, tl.trans(k), input_precision=PRECISION) * factor
        s = tl.where(inside[None, :], s, float("-inf"))
        if Until is not None:
            at = Until + (item * rows + c)[:, None] * boundaries * chunk + key[None, :]
            until = tl.load(at, mask=(c < rows)[:, None] & inside[None, :], other=0)
            s = tl.where(until == 0, s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        # All keys of a tile may be among the largest of a row.
        safe = tl.where(new == float("-inf"), 0.0, new)
        p, share = tl.exp2(s - safe[:, None]), tl.exp2(top - safe)
        total, top = total * share + tl.sum(p, 1), new
        mean_k = tl.dot(p.to(k.dtype), k, mean_k * share[:, None], input_precision=PRECISION)
        mean_v = tl.dot(p.to(v.dtype), v, mean_v * share[:, None], input_precision=PRECISION)
    slot, size, value = (item * boundaries + i) * rows + c, tl.arange(0, WIDE_D), tl.arange(0, WIDE_E)
    tl.store(Mass + slot, top + tl.log2(total), mask=c < rows)
    at, inside = MeanK + slot[:, None] * D + size[None, :], (c < rows)[:, None] & (size < D)[None, :]
    tl.store(at, mean_k / total[:, None], mask=inside)
    at, inside = MeanV + slot[:, None] * E + value[None, :], (c < rows)[:, None] & (value < E)[None, :]
    tl.store(at, mean_v / total[:, None], mask=inside)


@jit(do_not_specialize=LENGTHS)
def carry_kernel(
    K,
    V,
    Top,
    Best,
    Until,
    Mass,
    MeanK,
    MeanV,
    k_b,
    k_h,
    k_n,
    v_b,
    v_h,
    v_n,
    H,
    rows,
    kept,
    chunk,
    boundaries,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDE_D: tl.constexpr,
    WIDE_E: tl.constexpr,
    BK: tl.constexpr,
):
    """Turn sums of chunks into sums of all keys before each boundary, for one row, in place."""
    item, row = tl.cast(tl.program_id(0) // rows, tl.int64), tl.program_id(0) % rows
    size, value = tl.arange(0, WIDE_D), tl.arange(0, WIDE_E)
    K += item // H * k_b + item % H * k_h
    V += item // H * v_b + item % H * v_h
    slot = item * boundaries * rows + row
    mass = tl.load(Mass + slot)
    mean_k = tl.load(MeanK + slot * D + size, mask=size < D, other=0.0)
    mean_v = tl.load(MeanV + slot * E + value, mask=value < E, other=0.0)
    for i in range(1, boundaries):
        slot += rows
        added = tl.load(Mass + slot)
        top = tl.maximum(mass, added)
        share, more = tl.exp2(mass - top), tl.exp2(added - top)
        total = share + more
        mean_k = mean_k * share + tl.load(MeanK + slot * D + size, mask=size < D, other=0.0) * more
        mean_v = mean_v * share + tl.load(MeanV + slot * E + value, mask=value < E, other=0.0) * more
        if Best is not None:
            for begin in range(0, kept, BK):
                place = begin + tl.arange(0, BK)
                at = (slot - rows) * kept + place
                key = tl.load(Top + at, mask=place < kept, other=0)
                until = tl.load(Until + (item * rows + row) * boundaries * chunk + key, mask=place < kept, other=0)
                lost = until.to(tl.int32) == i + 1
                if tl.max(lost.to(tl.int32), 0) > 0:
                    s = tl.load(Best + at, mask=lost, other=float("-inf")) * 1.4426950408889634
                    new = tl.maximum(top, tl.max(s, 0))
                    p, share = tl.exp2(s - new), tl.exp2(top - new)
                    key = tl.where(lost, key, -1)
                    k, v = gathered(K, key, k_n, D, WIDE_D), gathered(V, key, v_n, E, WIDE_E)
                    total, top = total * share + tl.sum(p, 0), new
                    mean_k = mean_k * share + tl.sum(p[:, None] * k.to(tl.float32), 0)
                    mean_v = mean_v * share + tl.sum(p[:, None] * v.to(tl.float32), 0)
        mass, mean_k, mean_v = top + tl.log2(total), mean_k / total, mean_v / total
        # Every warp must read this before any of them overwrites it.
        tl.debug_barrier()
        tl.store(Mass + slot, mass)
        tl.store(MeanK + slot * D + size, mean_k, mask=size < D)
        tl.store(MeanV + slot * E + value, mean_v, mask=value < E)
