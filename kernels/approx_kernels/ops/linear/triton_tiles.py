"""One tile in the kernels of linear attention: features of its rows, their derivatives, and sums of other programs."""

# Triton's type stubs mistake tensors for constants, and branches on constants for branches at run time.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from approx_kernels.gpu.language import jit, tl


@jit
def within(inside, column, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """The mask of a tile: rows that are inside, and columns below SIZE."""
    # Tiles that columns fill need no mask, which would take registers.
    if SIZE % WIDTH == 0:
        return inside[:, None]
    else:
        return inside[:, None] & (column < SIZE)[None, :]


@jit
def read_rows(base, start, stride, inside, left, SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """WIDTH columns from `left` on of rows from `start` on; 0 where not inside and beyond SIZE columns."""
    row, column = tl.arange(0, ROWS), left + tl.arange(0, WIDTH)
    at = base + tl.cast(start, tl.int64) * stride + row[:, None] * stride + column[None, :]
    return tl.load(at, mask=within(inside, column, SIZE, WIDTH), other=0.0)


@jit
def real(KeyMask, start, end, ROWS: tl.constexpr):
    """Which rows from `start` on are keys that count."""
    row = start + tl.arange(0, ROWS)
    inside = (row >= 0) & (row < end)
    if KeyMask is not None:
        inside = inside & (tl.load(KeyMask + row, mask=inside, other=0) != 0)
    return inside


@jit
def factor(x, NARROW: tl.constexpr):
    """x as a factor of a product: bfloat16, or float32, since sums may be greater than a float16."""
    if NARROW:
        return x.to(tl.bfloat16)
    else:
        return x.to(tl.float32)


@jit
def features(x, inside, scale, left, MAP: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, NARROW: tl.constexpr):
    """Features of rows x from `read_rows`: elu(x) + 1, relu(x), or x itself; 0 outside the tile."""
    if MAP != "given":
        x = x.to(tl.float32) * scale
        if MAP == "elu":
            x = tl.where(x > 0, x + 1.0, tl.exp(tl.minimum(x, 0.0)))
            x = tl.where(within(inside, left + tl.arange(0, WIDTH), SIZE, WIDTH), x, 0.0)
        else:
            x = tl.maximum(x, 0.0)
    return factor(x, NARROW)


@jit
def sloped(x, f, scale, MAP: tl.constexpr):
    """The gradient of rows from that of their features, x."""
    if MAP == "elu":
        x = x * tl.minimum(f.to(tl.float32), 1.0) * scale
    elif MAP == "relu":
        x = tl.where(f > 0, x * scale, 0.0)
    return x


@jit
def read_sums(
    Sums,
    Totals,
    begin,
    end,
    start,
    D: tl.constexpr,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FLIPPED: tl.constexpr,
):
    """Columns from `start` on of the sums of segments, or FLIPPED of their transposes, added in order; and totals.

    Totals are as many as there are features: one for each row, FLIPPED one for each column.
    """
    row, column = tl.arange(0, ROWS), start + tl.arange(0, COLUMNS)
    state = tl.zeros([ROWS, COLUMNS], tl.float32)
    if FLIPPED:
        at, inside, each_total = column[None, :] * E + row[:, None], (row < E)[:, None] & (column < D)[None, :], column
        total = tl.zeros([COLUMNS], tl.float32)
    else:
        at, inside, each_total = row[:, None] * E + column[None, :], (row < D)[:, None] & (column < E)[None, :], row
        total = tl.zeros([ROWS], tl.float32)
    for each in tl.range(begin, end, num_stages=1):
        state += tl.load(Sums + tl.cast(each, tl.int64) * D * E + at, mask=inside, other=0.0)
        total += tl.load(Totals + tl.cast(each, tl.int64) * D + each_total, mask=each_total < D, other=0.0)
    return state, total
