"""The kernels of linear attention: sums over segments of rows, and the scan that reads them, forward and backward.

With features f of queries and g of keys, normalisers n, gradients c of outputs over n, and s = c.o less the gradient of
n,

    o_i = sum_j (f_i.g_j) v_j / n_i             df_i = sum_j (c_i.v_j - s_i) g_j
    dv_j = sum_i (g_j.f_i) c_i                  dg_j = sum_i (v_j.c_i - s_i) f_i

are all sums of (x.y) z, over earlier rows or over later ones. Pairs are computed chunk by chunk, and a state holds the
sum of y z before the chunk. Several programs share a head: each has a segment of rows and some of the columns of z.
Positions are those of keys; the query at position p is number p - shift.
"""

# Triton's type stubs mistake tensors for constants, and branches on constants for branches at run time.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from approx_kernels.gpu.language import jit, tl
from approx_kernels.ops.linear.triton_tiles import factor, features, read_rows, read_sums, real, sloped, within

# Kernels are not specialised on lengths, so that other lengths compile none.
LENGTHS = ("H", "L", "S", "shift", "rows", "segments", "sums")


@jit(do_not_specialize=LENGTHS)
def linear_sums_kernel(
    X,
    Z,
    KeyMask,
    Inverse,
    Share,
    Sums,
    Totals,
    x_b,
    x_h,
    x_n,
    z_b,
    z_h,
    z_n,
    H,
    L,
    shift,
    rows,
    segments,
    scale,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDE_D: tl.constexpr,
    WIDE_E: tl.constexpr,
    MAP: tl.constexpr,
    NARROW: tl.constexpr,
    PRECISION: tl.constexpr,
    BT: tl.constexpr,
):
    """Sums of g v and of g over one segment of keys of one head; with Inverse those of f c and of -s f over queries."""
    segment, line = tl.program_id(0) % segments, tl.program_id(0) // segments
    sample, head = tl.cast(line // H, tl.int64), tl.cast(line % H, tl.int64)
    X += sample * x_b + head * x_h
    Z += sample * z_b + head * z_h
    if KeyMask is not None:
        KeyMask += sample * L
    if Inverse is not None:
        Inverse += tl.cast(line, tl.int64) * L
        Share += tl.cast(line, tl.int64) * L
    state = tl.zeros([WIDE_D, WIDE_E], tl.float32)
    total = tl.zeros([WIDE_D], tl.float32)
    begin = segment * rows - shift
    for first in range(begin, tl.minimum(begin + rows, L), BT):
        inside = real(KeyMask, first, L, BT)
        y = features(read_rows(X, first, x_n, inside, 0, D, WIDE_D, BT), inside, scale, 0, MAP, D, WIDE_D, NARROW)
        z = read_rows(Z, first, z_n, inside, 0, E, WIDE_E, BT)
        if Inverse is not None:
            own = first + tl.arange(0, BT)
            z = z.to(tl.float32) * tl.load(Inverse + own, mask=inside, other=0.0)[:, None]
            share = tl.load(Share + own, mask=inside, other=0.0)
            total -= tl.sum(y.to(tl.float32) * share[:, None], 0)
        else:
            total += tl.sum(y.to(tl.float32), 0)
        state = tl.dot(tl.trans(y), factor(z, NARROW), state, input_precision=PRECISION)
    row, column = tl.arange(0, WIDE_D), tl.arange(0, WIDE_E)
    place = tl.cast(tl.program_id(0), tl.int64) * D
    at = Sums + place * E + row[:, None] * E + column[None, :]
    tl.store(at, state, mask=(row < D)[:, None] & (column < E)[None, :])
    tl.store(Totals + place + row, total, mask=row < D)


@jit(do_not_specialize=LENGTHS)
def linear_scan_kernel(
    Q,
    K,
    V,
    Grad,
    Out,
    KeyMask,
    Sums,
    Totals,
    Inverse,
    dInverse,
    Share,
    Made,
    q_b,
    q_h,
    q_n,
    k_b,
    k_h,
    k_n,
    v_b,
    v_h,
    v_n,
    g_b,
    g_h,
    g_n,
    o_b,
    o_h,
    o_n,
    m_b,
    m_h,
    m_n,
    H,
    L,
    S,
    shift,
    rows,
    segments,
    sums,
    scale,
    eps,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDE_D: tl.constexpr,
    WIDE_E: tl.constexpr,
    WHAT: tl.constexpr,
    CAUSAL: tl.constexpr,
    MAP: tl.constexpr,
    NARROW: tl.constexpr,
    PRECISION: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    """WHAT is `out`, `dq`, `dk` or `dv`: BC columns of it in one segment of one head; with `out` also 1 / n, with `dq`
    also s.
    """
    OF_QUERIES: tl.constexpr = WHAT == "out" or WHAT == "dq"
    FLIPPED: tl.constexpr = WHAT == "dq" or WHAT == "dk"
    ACROSS: tl.constexpr = WIDE_E if FLIPPED else WIDE_D
    WIDTH: tl.constexpr = D if FLIPPED else E
    segment, line = tl.program_id(0) % segments, tl.program_id(0) // segments
    begin = segment * rows
    end = tl.minimum(begin + rows, L + shift if OF_QUERIES else S)
    if OF_QUERIES:
        if end <= shift:
            return
    sample, head = tl.cast(line // H, tl.int64), tl.cast(line % H, tl.int64)
    Q += sample * q_b + head * q_h
    K += sample * k_b + head * k_h
    V += sample * v_b + head * v_h
    Made += sample * m_b + head * m_h
    Inverse += tl.cast(line, tl.int64) * L
    if WHAT != "out":
        Grad += sample * g_b + head * g_h
        Share += tl.cast(line, tl.int64) * L
    if WHAT == "dq":
        Out += sample * o_b + head * o_h
    if KeyMask is not None:
        KeyMask += sample * S
    place, left = tl.arange(0, BT), tl.program_id(1) * BC
    column = left + tl.arange(0, BC)

    low, high = line * sums, line * sums + sums
    if CAUSAL:
        if OF_QUERIES:
            high = low + segment
        else:
            # Segments before all queries have no sums to read.
            low += tl.maximum(segment + 1, shift // rows)
    state, total = read_sums(Sums, Totals, low, high, left, D, E, ACROSS, BC, FLIPPED)

    blocks = tl.cdiv(end - begin, BT)
    for each in range(0, blocks):
        first = begin + (each if OF_QUERIES else blocks - 1 - each) * BT
        own = first - shift + place
        asked = (own >= 0) & (own < L)
        inside = real(KeyMask, first, S, BT)
        if WHAT == "out":
            x = features(
                read_rows(Q, first - shift, q_n, asked, 0, D, WIDE_D, BT), asked, scale, 0, MAP, D, WIDE_D, NARROW
            )
        if WHAT == "dv":
            x = features(read_rows(K, first, k_n, inside, 0, D, WIDE_D, BT), inside, scale, 0, MAP, D, WIDE_D, NARROW)
        if WHAT == "dk":
            x = factor(read_rows(V, first, v_n, inside, 0, E, WIDE_E, BT), NARROW)
        if WHAT != "out":
            inverse = tl.load(Inverse + own, mask=asked, other=0.0)
        if WHAT == "dq":
            c = read_rows(Grad, first - shift, g_n, asked, 0, E, WIDE_E, BT).to(tl.float32) * inverse[:, None]
            share = tl.sum(read_rows(Out, first - shift, o_n, asked, 0, E, WIDE_E, BT).to(tl.float32) * c, 1)
            if dInverse is not None:
                dinverse = tl.load(dInverse + tl.cast(line, tl.int64) * L + own, mask=asked, other=0.0)
                share += dinverse * inverse * inverse
            if left == 0:
                tl.store(Share + own, share, mask=asked)
            x = factor(c, NARROW)

        made = tl.dot(x, factor(state, NARROW), input_precision=PRECISION)
        if WHAT == "out":
            norm = tl.sum(x.to(tl.float32) * total[None, :], 1) + eps
        if WHAT == "dq":
            made -= share[:, None] * total[None, :]
        if WHAT == "dk":
            made += total[None, :]
        if CAUSAL:
            if WHAT == "out":
                y = features(
                    read_rows(K, first, k_n, inside, 0, D, WIDE_D, BT), inside, scale, 0, MAP, D, WIDE_D, NARROW
                )
                z = factor(read_rows(V, first, v_n, inside, left, E, BC, BT), NARROW)
                total += tl.sum(y.to(tl.float32), 0)
            if WHAT == "dq":
                # Summed before the values are read, so that these take no registers yet.
                z = features(read_rows(K, first, k_n, inside, left, D, BC, BT), inside, scale, left, MAP, D, BC, NARROW)
                total += tl.sum(z.to(tl.float32), 0)
                y = factor(read_rows(V, first, v_n, inside, 0, E, WIDE_E, BT), NARROW)
            if WHAT == "dv":
                y = read_rows(Q, first - shift, q_n, asked, 0, D, WIDE_D, BT)
                y = features(y, asked, scale, 0, MAP, D, WIDE_D, NARROW)
                z = read_rows(Grad, first - shift, g_n, asked, left, E, BC, BT).to(tl.float32) * inverse[:, None]
                z = factor(z, NARROW)
            if WHAT == "dk":
                y = read_rows(Grad, first - shift, g_n, asked, 0, E, WIDE_E, BT).to(tl.float32) * inverse[:, None]
                y = factor(y, NARROW)
                z = read_rows(Q, first - shift, q_n, asked, left, D, BC, BT)
                z = features(z, asked, scale, left, MAP, D, BC, NARROW)
                share = tl.load(Share + own, mask=asked, other=0.0)
                total -= tl.sum(z.to(tl.float32) * share[:, None], 0)
            pairs = tl.dot(x, tl.trans(y), input_precision=PRECISION)
            if WHAT == "dq":
                pairs -= share[:, None]
            if WHAT == "dk":
                pairs -= share[None, :]
            if OF_QUERIES:
                pairs = tl.where(place[:, None] >= place[None, :], pairs, 0.0)
            else:
                pairs = tl.where(place[:, None] <= place[None, :], pairs, 0.0)
            if WHAT == "out":
                norm += tl.sum(pairs, 1)
            made = tl.dot(factor(pairs, NARROW), z, made, input_precision=PRECISION)
            state = tl.dot(tl.trans(y), z, state, input_precision=PRECISION)

        if WHAT == "out":
            inverse = tl.where(norm != 0, 1.0 / tl.where(norm != 0, norm, 1.0), 0.0)
            if left == 0:
                tl.store(Inverse + own, inverse, mask=asked)
            made *= inverse[:, None]
        if WHAT == "dq":
            f = read_rows(Q, first - shift, q_n, asked, left, D, BC, BT)
            made = sloped(made, features(f, asked, scale, left, MAP, D, BC, False), scale, MAP)
        if WHAT == "dk":
            g = read_rows(K, first, k_n, inside, left, D, BC, BT)
            made = sloped(made, features(g, inside, scale, left, MAP, D, BC, False), scale, MAP)
            made = tl.where(inside[:, None], made, 0.0)
        start, present = (first - shift, asked) if OF_QUERIES else (first, first + place < end)
        at = Made + tl.cast(start, tl.int64) * m_n + place[:, None] * m_n + column[None, :]
        tl.store(at, made.to(Made.dtype.element_ty), mask=within(present, column, WIDTH, BC))
