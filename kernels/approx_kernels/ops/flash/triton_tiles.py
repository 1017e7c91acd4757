"""One tile of queries and keys in the flash kernels: where it is, which of its pairs count, and their scores."""

from __future__ import annotations

from approx_kernels.gpu.language import jit, tl


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
def again(start, turn):
    """`start`, for rows that every iteration reads again: the compiler does not know that iterations are not negative.

    Products of float32 hold whole rows in registers. Rows that all iterations share would stay there for the whole
    loop.
    """
    return tl.minimum(start, start + turn)


@jit
def store_rows(base, start, stride, end, x, SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Write rows from `start` on, those before `end`."""
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at = base + tl.cast(start, tl.int64) * stride + row[:, None] * stride + column[None, :]
    tl.store(at, x.to(base.dtype.element_ty), mask=(start + row < end)[:, None] & (column < SIZE)[None, :])


@jit
def stretch(Bounds, sample, L, S):
    """The ranges of rows of the queries and of the keys of a sample, and whether some of these keys are masked."""
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
def walk(
    Bounds, Rows, Columns, at, low, high, left, right, whole_left, whole_right, begin, end, parted, TILE: tl.constexpr
):
    """The range of tiles that rows from low to high meet, and the range of those that they see whole, unless `parted`.

    A list has the tiles, from `at` on; otherwise they are in [begin, end), and in a window around each row.
    """
    if Rows is None:
        first, last = tl.maximum(begin, low - left), tl.minimum(end, high + right + 1)
        start = tl.maximum(first, 0) // TILE
        past = tl.where((last > first) & (low <= high), tl.maximum(tl.cdiv(last, TILE), start), start)
        first, last = tl.maximum(begin, high - whole_left), tl.minimum(end, low + whole_right + 1)
        whole = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(first, 0), TILE), start), past)
        after = tl.minimum(tl.maximum(tl.maximum(last, 0) // TILE, whole), past)
    else:
        whole, after, past = tl.load(Rows + at), tl.load(Rows + at + 1), tl.load(Rows + at + 2)
        start = whole
        if Bounds is not None:
            past = tl.where(low <= high, past, start)
            # A list says that the pattern has all pairs of a tile, not that the sample has its rows; its tiles ascend.
            some = after > whole
            lowest = tl.load(Columns + whole, mask=some, other=0)
            highest = tl.load(Columns + after - 1, mask=some, other=0)
            parted = parted | (low > high) | (lowest * TILE < begin) | ((highest + 1) * TILE > end)
    if parted:
        after = whole
    return start, past, whole, after


@jit
def real_keys(column, begin, end, KeyMask):
    """Which of these keys count for any query."""
    real = (column >= begin) & (column < end)
    if KeyMask is not None:
        real = real & (tl.load(KeyMask + column, mask=real, other=0) != 0)
    return real


@jit
def shown(row, column, shift, left, right, Bits, tile, place, bit, BANDED: tl.constexpr):
    """Which pairs of a tile count if all rows are real; `row` and `column` run along different axes, as do `place` and
    `bit`, their positions in the tile.
    """
    if BANDED:
        away = column - row - shift
        return (away <= right) & (away >= -left)
    else:
        # A word of 64 bits as two of 32, which shift in half the registers.
        at = Bits + (tl.cast(tl.maximum(tile, 0), tl.int64) * 64 + place) * 2
        word = tl.where(bit < 32, tl.load(at), tl.load(at + 1))
        return (tile < 0) | (((word >> (bit & 31)) & 1) != 0)


@jit
def mass(row, column, shift, span, ramp):
    """The mask of a span, min((R + z - x) / R, 1) at distance x; it may be below 0."""
    away = tl.abs(column - row - shift).to(tl.float32)
    return tl.minimum((ramp + span - away) / ramp, 1.0)


@jit
def with_mass(s, pairs, share):
    """Scores, as logarithms to the base 2, with those of the mask added; -inf where a pair does not count."""
    # A normal float32: Triton 3.6 makes a smaller constant a float64, and all results with it.
    weight = tl.log2(tl.maximum(share, 1.2e-38))
    return tl.where(pairs & (share > 0), s + weight, float("-inf"))
