"""The kernels of the gradients of Performer attention.

With c gradients of outputs over normalisers, s = c.o, and psi and phi features of keys and of queries,

    dphi_i = sum_j psi_j (c_i.v_j - s_i)     dpsi_j = sum_i phi_i (c_i.v_j - s_i)     dv_j = sum_i (phi_i.psi_j) c_i.

What features are relative to cancels, so it has no gradient.
"""

# Triton's type stubs mistake tensors for constants, and branches on constants for branches at run time.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from approx_kernels.gpu.language import jit, tl
from approx_kernels.ops.linear.triton_tiles import factor, read_rows, real
from approx_kernels.ops.performer.triton_tiles import (
    LENGTHS,
    dots,
    half_squares,
    inner,
    key_features,
    next_rise,
    query_features,
    raised_tops,
    read_tops,
    weighed,
    write_rows,
)


@jit(do_not_specialize=LENGTHS)
def performer_shares_kernel(
    Grad,
    Out,
    Inverse,
    C,
    Share,
    g_b,
    g_h,
    g_n,
    o_b,
    o_h,
    o_n,
    H,
    L,
    segments,
    E: tl.constexpr,
    WIDE_E: tl.constexpr,
    BT: tl.constexpr,
):
    """c of BT queries, [L, E], and s."""
    start, line = tl.program_id(0) % segments * BT, tl.cast(tl.program_id(0) // segments, tl.int64)
    own = start + tl.arange(0, BT)
    asked = own < L
    c = read_rows(Grad + line // H * g_b + line % H * g_h, start, g_n, asked, 0, E, WIDE_E, BT).to(tl.float32)
    c *= tl.load(Inverse + line * L + own, mask=asked, other=0.0)[:, None]
    out = read_rows(Out + line // H * o_b + line % H * o_h, start, o_n, asked, 0, E, WIDE_E, BT)
    write_rows(C + line * L * E, start, E, c, asked, 0, E, WIDE_E, BT)
    tl.store(Share + line * L + own, tl.sum(out.to(tl.float32) * c, 1), mask=asked)


@jit(do_not_specialize=LENGTHS)
def performer_dq_kernel(
    Q,
    K,
    V,
    C,
    Rows,
    Offsets,
    KeyMask,
    Sums,
    Totals,
    Tops,
    Mu,
    Rises,
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
    m_b,
    m_h,
    m_n,
    r_h,
    H,
    L,
    S,
    M,
    shift,
    skipped,
    segments,
    slots,
    root,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDE_D: tl.constexpr,
    WIDE_E: tl.constexpr,
    CAUSAL: tl.constexpr,
    APART: tl.constexpr,
    MAP: tl.constexpr,
    NARROW: tl.constexpr,
    PRECISION: tl.constexpr,
    LOWEST: tl.constexpr,
    FLOOR: tl.constexpr,
    RISE: tl.constexpr,
    BT: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    """BC columns of the gradients of BT queries, laid out as in `performer_out_kernel`."""
    chunk, line = tl.program_id(0) % segments + skipped, tl.cast(tl.program_id(0) // segments, tl.int64)
    place = tl.arange(0, BT)
    start = chunk * BT - shift
    own = start + place
    asked = (own >= 0) & (own < L)
    if APART:
        Rows += line % H * r_h
    if Offsets is not None:
        Offsets += line % H * M
    slot = line * slots + (chunk if CAUSAL else slots - 1)
    Sums += slot * M * E
    Totals += slot * M
    mu = tl.zeros([BT], tl.float32)
    if Tops is not None:
        Tops += slot * M
        # Where there is no query, features are 0.
        mu = tl.load(Mu + line * L + own, mask=asked, other=-LOWEST)
    share = tl.load(Share + line * L + own, mask=asked, other=0.0)
    Q += line // H * q_b + line % H * q_h
    C += line * L * E
    begin = tl.program_id(1) * BC
    dq = tl.zeros([BT, BC], tl.float32)
    if CAUSAL:
        K += line // H * k_b + line % H * k_h
        V += line // H * v_b + line % H * v_h
        if KeyMask is not None:
            KeyMask += line // H * S
        inside = real(KeyMask, chunk * BT, S, BT)
        half = half_squares(K, chunk * BT, k_n, inside, root, D, WIDE_D, BT)
        bits = tl.zeros([], tl.int64)
        if MAP == "softmax":
            bits = tl.load(Rises + line * segments + chunk - skipped)
        pairs = tl.zeros([BT, BT], tl.float32)
        pairs = (
            inner(pairs, C, start, E, asked, V, chunk * BT, v_n, inside, E, WIDE_E, NARROW, PRECISION, BT, BT)
            - share[:, None]
        )
        pairs = factor(tl.where(place[:, None] >= place[None, :], pairs, 0.0), NARROW)
    first = 0
    while first < BT:
        behind = BT
        if CAUSAL:
            if MAP == "softmax":
                behind = next_rise(bits, first, BT)
        now = asked & (place >= first) & (place < behind)
        for left in range(0, M, BM):
            feature = left + tl.arange(0, BM)
            known = (feature < M)[None, :]
            before = read_tops(Tops, feature, M, LOWEST)
            top = before
            total = tl.load(Totals + feature, mask=feature < M, other=0.0)
            slopes = 0.0 - share[:, None] * total[None, :]
            slopes = inner(slopes, C, start, E, asked, Sums, left, E, feature < M, E, WIDE_E, NARROW, PRECISION, BT, BM)
            if CAUSAL:
                logs = dots(K, chunk * BT, k_n, inside, Rows, left, M, root, D, WIDE_D, BT, BM)
                if MAP == "softmax":
                    logs -= half[:, None]
                    top = raised_tops(top, logs, inside, bits, first, BT)
                    slopes *= tl.exp(before - top)[None, :]
                g = factor(key_features(logs, top, inside[:, None] & known, MAP, FLOOR, RISE), NARROW)
                slopes = tl.dot(pairs, g, slopes, input_precision=PRECISION)
            heights = weighed(dots(Q, start, q_n, asked, Rows, left, M, root, D, WIDE_D, BT, BM), Offsets, feature, M)
            if MAP == "softmax":
                slopes *= query_features(heights, top, mu, now[:, None] & known, MAP, FLOOR)
            else:
                slopes = tl.where(heights > 0, slopes, 0.0)
            w = factor(read_rows(Rows, left, D, feature < M, begin, D, BC, BM), NARROW)
            dq = tl.dot(factor(slopes, NARROW), w, dq, input_precision=PRECISION)
        first = behind
    Made += line // H * m_b + line % H * m_h
    write_rows(Made, start, m_n, dq * root, asked, begin, D, BC, BT)


@jit(do_not_specialize=LENGTHS)
def performer_keys_kernel(
    Q,
    K,
    V,
    C,
    Rows,
    Offsets,
    KeyMask,
    Sums,
    Totals,
    Tops,
    Mu,
    Rises,
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
    m_b,
    m_h,
    m_n,
    r_h,
    H,
    L,
    S,
    M,
    shift,
    skipped,
    segments,
    slots,
    tops,
    root,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDE_D: tl.constexpr,
    WIDE_E: tl.constexpr,
    WHAT: tl.constexpr,
    CAUSAL: tl.constexpr,
    APART: tl.constexpr,
    MAP: tl.constexpr,
    NARROW: tl.constexpr,
    PRECISION: tl.constexpr,
    LOWEST: tl.constexpr,
    FLOOR: tl.constexpr,
    RISE: tl.constexpr,
    BT: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    """BC columns of `dk` or `dv`, see WHAT, of BT keys: from sums over later queries and, if CAUSAL, their chunk."""
    begin = tl.program_id(1) * BC
    chunk, line = tl.program_id(0) % segments, tl.cast(tl.program_id(0) // segments, tl.int64)
    place = tl.arange(0, BT)
    if APART:
        Rows += line % H * r_h
    if Offsets is not None:
        Offsets += line % H * M
    slot = line * slots + (chunk if CAUSAL else slots - 1)
    Sums += slot * M * E
    Totals += slot * M
    if Tops is not None:
        Tops += (line * tops + (chunk if CAUSAL else tops - 1)) * M
    if KeyMask is not None:
        KeyMask += line // H * S
    inside = real(KeyMask, chunk * BT, S, BT)
    K += line // H * k_b + line % H * k_h
    V += line // H * v_b + line % H * v_h
    half = half_squares(K, chunk * BT, k_n, inside, root, D, WIDE_D, BT)
    made, slope = tl.zeros([BT, BC], tl.float32), tl.zeros([BT], tl.float32)
    if CAUSAL:
        start = chunk * BT - shift
        own = start + place
        asked = (own >= 0) & (own < L)
        C += line * L * E
        mu, bits = tl.zeros([BT], tl.float32), tl.zeros([], tl.int64)
        if MAP == "softmax":
            # Where there is no query, features are 0.
            mu = tl.load(Mu + line * L + own, mask=asked, other=-LOWEST)
            # Chunks before the first query have no gradient.
            bits = tl.load(Rises + line * (segments - skipped) + chunk - skipped, mask=chunk >= skipped, other=0)
        Q += line // H * q_b + line % H * q_h
        # Indexed by key and query.
        pairs = tl.zeros([BT, BT], tl.float32)
        together = place[:, None] <= place[None, :]
        if WHAT == "dk":
            pairs = (
                inner(pairs, V, chunk * BT, v_n, inside, C, start, E, asked, E, WIDE_E, NARROW, PRECISION, BT, BT)
                - tl.load(Share + line * L + own, mask=asked, other=0.0)[None, :]
            )
            pairs = factor(tl.where(together, pairs, 0.0), NARROW)
    first = 0
    while first < BT:
        behind = BT
        if CAUSAL:
            if MAP == "softmax":
                behind = next_rise(bits, first, BT)
            now = asked & (place >= first) & (place < behind)
        for left in range(0, M, BM):
            feature = left + tl.arange(0, BM)
            known = (feature < M)[None, :]
            there = inside[:, None] & known
            logs = dots(K, chunk * BT, k_n, inside, Rows, left, M, root, D, WIDE_D, BT, BM)
            if MAP == "softmax":
                logs -= half[:, None]
            top = read_tops(Tops, feature, M, LOWEST)
            later = top
            if CAUSAL:
                if MAP == "softmax":
                    later = read_tops(Tops + M, feature, M, LOWEST)
            # Queries of later chunks count once, however often those of this one are read.
            g = key_features(logs, later, there & (first == 0), MAP, FLOOR, RISE)
            if WHAT == "dv":
                state = read_rows(Sums, left, E, feature < M, begin, E, BC, BM)
                made = tl.dot(factor(g, NARROW), factor(state, NARROW), made, input_precision=PRECISION)
            else:
                total = tl.load(Totals + feature, mask=feature < M, other=0.0)
                slopes = tl.zeros([BT, BM], tl.float32) - total[None, :]
                slopes = inner(
                    slopes, V, chunk * BT, v_n, inside, Sums, left, E, feature < M, E, WIDE_E, NARROW, PRECISION, BT, BM
                )
                if MAP == "softmax":
                    slopes *= g
            if CAUSAL:
                heights = weighed(
                    dots(Q, start, q_n, asked, Rows, left, M, root, D, WIDE_D, BT, BM), Offsets, feature, M
                )
                if MAP == "softmax":
                    top = raised_tops(top, logs, inside, bits, first, BT)
                    g = key_features(logs, top, there, MAP, FLOOR, RISE)
                f = factor(query_features(heights, top, mu, now[:, None] & known, MAP, FLOOR), NARROW)
                if WHAT == "dv":
                    pairs = tl.dot(factor(g, NARROW), tl.trans(f), pairs, input_precision=PRECISION)
                else:
                    near = tl.dot(pairs, f, input_precision=PRECISION)
                    slopes += near * g if MAP == "softmax" else near
            if WHAT == "dk":
                if MAP != "softmax":
                    slopes = tl.where(there & (logs > 0), slopes, 0.0)
                slope += tl.sum(slopes, 1)
                w = factor(read_rows(Rows, left, D, feature < M, begin, D, BC, BM), NARROW)
                made = tl.dot(factor(slopes, NARROW), w, made, input_precision=PRECISION)
        first = behind
    if CAUSAL:
        if WHAT == "dv":
            pairs = tl.where(together, pairs, 0.0)
            c = factor(read_rows(C, start, E, asked, begin, E, BC, BT), NARROW)
            made = tl.dot(factor(pairs, NARROW), c, made, input_precision=PRECISION)
    present = chunk * BT + place < S
    Made += line // H * m_b + line % H * m_h
    if WHAT == "dk":
        made *= root
        if MAP == "softmax":
            k = read_rows(K, chunk * BT, k_n, inside, begin, D, BC, BT)
            made -= k.to(tl.float32) * (slope * root * root)[:, None]
        write_rows(Made, chunk * BT, m_n, made, present, begin, D, BC, BT)
    else:
        write_rows(Made, chunk * BT, m_n, made, present, begin, E, BC, BT)
