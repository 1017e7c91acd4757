"""Kernels that choose keys: scores of some queries in float32, and exactly the K largest of each row."""

from __future__ import annotations

from approx_kernels.gpu.language import jit, tl
from approx_kernels.ops.flash.triton_tiles import load_rows

# Kernels are not specialised on lengths, so that other lengths compile none.
LENGTHS = ("H", "L", "S", "first", "rows", "shift", "kept", "words")


@jit(do_not_specialize=LENGTHS)
def score_kernel(
    Q,
    K,
    Scores,
    q_b,
    q_h,
    q_n,
    k_b,
    k_h,
    k_n,
    pitch,
    H,
    L,
    S,
    first,
    rows,
    shift,
    scale,
    D: tl.constexpr,
    WIDE_D: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Scores of BN keys at BM of the queries from `first` on; nothing is written if no query sees any of the keys."""
    columns, tiles = tl.cdiv(S, BN), tl.cdiv(rows, BM)
    item = tl.cast(tl.program_id(0) // columns // tiles, tl.int64)
    start, begin = tl.program_id(0) // columns % tiles * BM, tl.program_id(0) % columns * BN
    if begin >= first + start + BM + shift:
        return
    q = load_rows(Q + item // H * q_b + item % H * q_h, first + start, q_n, 0, L, D, WIDE_D, BM, True)
    k = load_rows(K + item // H * k_b + item % H * k_h, begin, k_n, 0, S, D, WIDE_D, BN, True)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    row, key = start + tl.arange(0, BM), begin + tl.arange(0, BN)
    at = Scores + (item * rows + row)[:, None] * pitch + key[None, :]
    tl.store(at, s, mask=(row < rows)[:, None] & (key < S)[None, :])


@jit
def _turned(x):
    """Map the bits of floats to integers in the same order, and back."""
    return x ^ ((x >> 31) & 0x7FFFFFFF)


@jit
def _ranked(Scores, KeyMask, begin, until, SIZE: tl.constexpr):
    """Map floats to order-preserving int32: NaN highest, masked keys lowest."""
    key = begin + tl.arange(0, SIZE)
    allowed = key < until
    if KeyMask is not None:
        allowed = allowed & (tl.load(KeyMask + key, mask=allowed, other=0) != 0)
    score = tl.load(Scores + key, mask=allowed, other=0.0)
    number = tl.where(score == score, _turned(score.to(tl.int32, bitcast=True)), 0x7FFFFFFF)
    return tl.where(allowed, number, tl.full([SIZE], -(2**31), tl.int32))


@jit
def _count(x):
    """How many of these are true."""
    return tl.sum(x.to(tl.int32), 0)


@jit
def _reach(Scores, KeyMask, held, until, least, BS: tl.constexpr, BW: tl.constexpr):
    """Count entries >= threshold; the first tile stays in registers, later tiles are reloaded."""
    reached = _count(held >= least)
    for begin in range(BS, until, BW):
        reached += _count(_ranked(Scores, KeyMask, begin, until, BW) >= least)
    return reached


@jit(do_not_specialize=LENGTHS)
def select_kernel(
    Scores, KeyMask, Top, Best, pitch, H, L, S, first, rows, shift, kept, BS: tl.constexpr, BW: tl.constexpr
):
    """The largest scores of one query and their keys in ascending order, then -1; among ties the last keys."""
    item, row = tl.cast(tl.program_id(0) // rows, tl.int64), tl.program_id(0) % rows
    until = tl.minimum(first + row + shift + 1, S)
    Scores += (item * rows + row) * pitch
    Top += (item * L + first + row) * kept
    Best += (item * L + first + row) * kept
    if KeyMask is not None:
        KeyMask += item // H * S
    held, lowest = _ranked(Scores, KeyMask, 0, until, BS), tl.full([], -(2**31), tl.int32)
    reach, least, bit = _reach(Scores, KeyMask, held, until, lowest + 1, BS, BW), lowest, 31
    # Find, bit by bit, the largest threshold that K entries reach, until exactly K do.
    while (reach > kept) & (bit >= 0):
        higher = least ^ (tl.full([], 1, tl.int32) << bit)
        reached = _reach(Scores, KeyMask, held, until, higher, BS, BW)
        least, reach = tl.where(reached >= kept, higher, least), tl.where(reached >= kept, reached, reach)
        bit -= 1
    surplus, taken = tl.maximum(reach - kept, 0), tl.zeros([], tl.int32)
    for begin in range(0, until, BW):
        number = _ranked(Scores, KeyMask, begin, until, BW)
        tied = number == least
        spare = tied & (tl.cumsum(tied.to(tl.int32), 0) <= surplus)
        chosen = (number > lowest) & (number >= least) & ~spare
        place = taken + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(Top + place, begin + tl.arange(0, BW), mask=chosen)
        tl.store(Best + place, _turned(number).to(tl.float32, bitcast=True), mask=chosen)
        surplus -= _count(spare)
        taken += _count(chosen)
    for begin in range(taken, kept, BW):
        slot = begin + tl.arange(0, BW)
        tl.store(Top + slot, tl.full([BW], -1, tl.int32), mask=slot < kept)
