"""What the flash kernels do with one tile of queries and keys: where it lies, which of its pairs count, what they weigh."""

from __future__ import annotations

from approx_kernels.triton_language import jit, tl


@jit
def load_rows(
    base, start, stride, begin, end, SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, GUARD: tl.constexpr
):
    """Rows from `start` on, [ROWS, WIDTH]; with GUARD 0 outside of [begin, end), and 0 beyond SIZE columns."""
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at = base + tl.cast(start, tl.int64) * stride + row[:, None] * stride + column[None, :]
    if GUARD:
        inside = (start + row >= begin) & (start + row < end)
        return tl.load(at, mask=inside[:, None] & (column < SIZE)[None, :], other=0.0)
    elif WIDTH != SIZE:
        return tl.load(at, mask=(column < SIZE)[None, :], other=0.0)
    else:
        return tl.load(at)


@jit
def store_rows(base, start, stride, end, x, SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Write rows from `start` on, those before `end`."""
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at = base + tl.cast(start, tl.int64) * stride + row[:, None] * stride + column[None, :]
    tl.store(at, x.to(base.dtype.element_ty), mask=(start + row < end)[:, None] & (column < SIZE)[None, :])


@jit
def stretch(Bounds, sample, L, S):
    """First and last row of queries and of keys of a sample, and whether keys between them are masked."""
    if Bounds is None:
        return 0, L, 0, S, 0
    else:
        at = Bounds + sample * 5
        return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)


@jit
def window(Spans, head, left, right, ramp):
    """How far a head sees to both sides, how far it sees with weight 1, and its span."""
    if Spans is None:
        return left, right, left, right, 0.0
    else:
        # No span is longer than an int32 holds.
        span = tl.minimum(tl.load(Spans + head), 1.0e9)
        longest = tl.ceil(span).to(tl.int32)
        reach, whole = longest + ramp, longest - 1
        return (
            tl.minimum(left, reach),
            tl.minimum(right, reach),
            tl.minimum(left, whole),
            tl.minimum(right, whole),
            span,
        )


@jit
def spread(first, last, whole_first, whole_last, TILE: tl.constexpr):
    """Tiles that meet [first, last): from, to; and those of them within [whole_first, whole_last): from, to."""
    low = tl.maximum(first, 0) // TILE
    high = tl.maximum(tl.cdiv(last, TILE), low)
    high = tl.where(last > first, high, low)
    whole_low = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(whole_first, 0), TILE), low), high)
    whole_high = tl.minimum(tl.maximum(tl.maximum(whole_last, 0) // TILE, whole_low), high)
    return low, high, whole_low, whole_high


@jit
def shown(
    row,
    column,
    shift,
    left,
    right,
    q_begin,
    q_end,
    k_begin,
    k_end,
    KeyMask,
    Bits,
    tile,
    place,
    bit,
    BANDED: tl.constexpr,
):
    """Which pairs of a tile count; `row` and `column` lie along different axes, so do `place` and `bit`, their places in it."""
    pairs = (row >= q_begin) & (row < q_end) & (column >= k_begin) & (column < k_end)
    if BANDED:
        away = column - row - shift
        pairs = pairs & (away <= right) & (away >= -left)
    else:
        # A word of 64 bits as two of 32, which shift in half the registers.
        at = Bits + (tl.cast(tl.maximum(tile, 0), tl.int64) * 64 + place) * 2
        word = tl.where(bit < 32, tl.load(at), tl.load(at + 1))
        pairs = pairs & ((tile < 0) | (((word >> (bit & 31)) & 1) != 0))
    if KeyMask is not None:
        real = tl.load(KeyMask + column, mask=(column >= k_begin) & (column < k_end), other=1)
        pairs = pairs & (real != 0)
    return pairs


@jit
def mass(row, column, shift, span, ramp):
    """The mask of a span, min((R + z - x) / R, 1) at distance x; it may be below 0."""
    away = tl.abs(column - row - shift).to(tl.float32)
    return tl.minimum((ramp + span - away) / ramp, 1.0)


@jit
def with_mass(s, pairs, share):
    """Scores, as logarithms to the base 2, with those of the mask added; -inf where a pair does not count."""
    # A normal float32: Triton 3.6 makes a smaller constant a float64, and all that it meets.
    weight = tl.log2(tl.maximum(share, 1.2e-38))
    return tl.where(pairs & (share > 0), s + weight, float("-inf"))
