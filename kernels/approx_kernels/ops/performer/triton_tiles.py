"""Tiles of the kernels of Performer attention: logarithms of random features, the features, and the state."""

# Triton's type stubs mistake tensors for constants, and branches on constants for branches at run time.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false

from __future__ import annotations

from approx_kernels.gpu.language import jit, tl
from approx_kernels.ops.linear.triton_tiles import factor, read_rows

# Kernels are not specialised on lengths, so that other lengths compile none.
LENGTHS = ("H", "L", "S", "M", "shift", "rows", "segments", "slots", "tops", "skipped")


@jit
def inner(
    made,
    X,
    x_start,
    x_n,
    x_there,
    Y,
    y_start,
    y_n,
    y_there,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    NARROW: tl.constexpr,
    PRECISION: tl.constexpr,
    XS: tl.constexpr,
    YS: tl.constexpr,
):
    """Add the products of rows of X and rows of Y to `made`, [XS, YS]; NARROW is the dtype of factors, or None."""
    # Operands of all columns would take all registers; a loop that is not unrolled holds one slice of them.
    FULL: tl.constexpr = X.dtype.element_ty == tl.float32 if NARROW is None else not NARROW
    SLICE: tl.constexpr = min(WIDE, (16 if PRECISION == "ieee" else 32) if FULL else 64)
    for left in tl.range(0, SIZE, SLICE, num_stages=1):
        x = read_rows(X, x_start, x_n, x_there, left, SIZE, SLICE, XS)
        y = read_rows(Y, y_start, y_n, y_there, left, SIZE, SLICE, YS)
        if NARROW is not None:
            x, y = factor(x, NARROW), factor(y, NARROW)
        made = tl.dot(x, tl.trans(y), made, input_precision=PRECISION)
    return made


@jit
def dots(
    X, start, x_n, there, Rows, left, M, root, D: tl.constexpr, WIDE_D: tl.constexpr, BT: tl.constexpr, BM: tl.constexpr
):
    """w.x of BT scaled rows x of X and the BM rows w from `left` on, [BT, BM]; 0 beyond M."""
    known = left + tl.arange(0, BM) < M
    made = tl.zeros([BT, BM], tl.float32)
    made = inner(made, X, start, x_n, there, Rows, left, D, known, D, WIDE_D, None, "ieee", BT, BM)
    if X.dtype.element_ty != tl.float32:
        # The rounding errors of w in 16 bits follow it: exponents must be right to 1e-3, however large they are.
        made = inner(made, X, start, x_n, there, Rows, left + M, D, known, D, WIDE_D, None, "ieee", BT, BM)
    return made * root


@jit
def half_squares(K, start, k_n, there, root, D: tl.constexpr, WIDE_D: tl.constexpr, BT: tl.constexpr):
    """|k|^2 / 2 of BT scaled rows k of K."""
    SLICE: tl.constexpr = min(WIDE_D, 32)
    made = tl.zeros([BT], tl.float32)
    for left in tl.static_range(0, D, SLICE):
        k = read_rows(K, start, k_n, there, left, D, SLICE, BT).to(tl.float32) * root
        made += tl.sum(k * k, 1) * 0.5
    return made


@jit
def read_tops(Tops, feature, M, LOWEST: tl.constexpr):
    """The tops of features; `LOWEST` beyond M, and where there are none."""
    if Tops is None:
        return tl.full([feature.shape[0]], LOWEST, tl.float32)
    else:
        return tl.load(Tops + feature, mask=feature < M, other=LOWEST)


@jit
def weighed(heights, Offsets, feature, M):
    """Logarithms of features of queries, plus those of the weights of rows if there are any."""
    if Offsets is None:
        return heights
    else:
        return heights + tl.load(Offsets + feature, mask=feature < M, other=0.0)[None, :]


@jit
def query_features(heights, top, mu, there, MAP: tl.constexpr, FLOOR: tl.constexpr):
    """Features of queries, [n, BM], from w.q: relative to their largest where the map has tops; 0 where not `there`."""
    f = tl.exp(heights + top[None, :] - mu[:, None]) if MAP == "softmax" else tl.maximum(heights, 0.0) + FLOOR
    return tl.where(there, f, 0.0)


@jit
def key_features(logs, top, there, MAP: tl.constexpr, FLOOR: tl.constexpr, RISE: tl.constexpr):
    """Features of keys, [n, BM], from their logarithms: relative to the tops, at most exp(RISE) times as large."""
    f = tl.exp(tl.minimum(logs - top[None, :], RISE)) if MAP == "softmax" else tl.maximum(logs, 0.0) + FLOOR
    return tl.where(there, f, 0.0)


@jit
def raised_tops(top, logs, inside, bits, first, ROWS: tl.constexpr):
    """The tops of the queries of a chunk from `first` on: of all keys that rose above earlier tops up to there."""
    if first > 0:
        place = tl.arange(0, ROWS)
        risen = (((bits >> place.to(tl.int64)) & 1) > 0) & (place <= first) & inside
        top = tl.maximum(top, tl.max(tl.where(risen[:, None], logs, top[None, :]), 0))
    return top


@jit
def next_rise(bits, first, ROWS: tl.constexpr):
    """The next key after `first` whose bit is set, or the end of the chunk."""
    place = tl.arange(0, ROWS)
    behind = (((bits >> place.to(tl.int64)) & 1) > 0) & (place > first)
    return tl.min(tl.where(behind, place, ROWS), 0)


@jit
def read_state(Sums, Totals, left, begin, M, E: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr):
    """Sums of BM features from `left` on times WIDTH values from `begin` on, [BM, WIDTH], and of the features."""
    feature, column = left + tl.arange(0, BM), begin + tl.arange(0, WIDTH)
    known = feature < M
    at = Sums + tl.cast(left, tl.int64) * E + tl.arange(0, BM)[:, None] * E + column[None, :]
    state = tl.load(at, mask=known[:, None] & (column < E)[None, :], other=0.0)
    return state, tl.load(Totals + feature, mask=known, other=0.0)


@jit
def write_state(Sums, Totals, state, total, left, M, E: tl.constexpr, WIDE_E: tl.constexpr, BM: tl.constexpr):
    """Write sums, for all values, where `read_state` reads them."""
    feature, column = left + tl.arange(0, BM), tl.arange(0, WIDE_E)
    known = feature < M
    at = Sums + tl.cast(left, tl.int64) * E + tl.arange(0, BM)[:, None] * E + column[None, :]
    tl.store(at, state, mask=known[:, None] & (column < E)[None, :])
    tl.store(Totals + feature, total, mask=known)


@jit
def write_rows(base, start, stride, x, there, left, SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """WIDTH columns from `left` on of rows from `start` on, where there are such rows and columns."""
    row, column = tl.arange(0, ROWS), left + tl.arange(0, WIDTH)
    at = base + tl.cast(start, tl.int64) * stride + row[:, None] * stride + column[None, :]
    tl.store(at, x.to(base.dtype.element_ty), mask=there[:, None] & (column < SIZE)[None, :])
