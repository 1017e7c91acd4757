"""The kernels that sum features times values over keys, or times gradients over queries, and scan over chunks.

With tops T_c of each feature, the largest logarithm among the keys before chunk c and the first real key,

    P_c = sum_(j before c) exp(l_j - T_c) [v_j, 1]         P_(c+1) = exp(T_c - T_(c+1)) P_c + S_c
    R_c = sum_(i behind c) exp(h_i + T_(c+1) - mu_i) [c_i, s_i]   R_(c-1) = exp(T_c - T_(c+1)) R_c + Q_c

where S_c are the sums of the keys of chunk c, and Q_c those of its queries, which are relative to T_c. No factor
exceeds 1.
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
    key_features,
    query_features,
    read_state,
    read_tops,
    weighed,
    write_state,
)


@jit(do_not_specialize=LENGTHS)
def performer_sums_kernel(
    X,
    Z,
    Rows,
    Offsets,
    KeyMask,
    Mu,
    Share,
    Tops,
    Sums,
    Totals,
    x_b,
    x_h,
    x_n,
    z_b,
    z_h,
    z_n,
    r_h,
    H,
    L,
    M,
    shift,
    rows,
    segments,
    slots,
    tops,
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
):
    """BM features of a segment of keys, relative to their largest; with Share of queries, relative to the tops."""
    segment, line = tl.program_id(0) % segments, tl.cast(tl.program_id(0) // segments, tl.int64)
    left = tl.program_id(1) * BM
    feature = left + tl.arange(0, BM)
    known = (feature < M)[None, :]
    if APART:
        Rows += line % H * r_h
    X += line // H * x_b + line % H * x_h
    Z += line // H * z_b + line % H * z_h
    if KeyMask is not None:
        KeyMask += line // H * L
    if Tops is not None:
        # Keys write the tops of their segment; queries read those of their chunk, or the last, which are of all keys.
        Tops += (line * tops + (segment if CAUSAL or Share is None else tops - 1)) * M
    top = tl.full([BM], LOWEST, tl.float32)
    if Offsets is not None:
        Offsets += line % H * M
    if Share is not None:
        top = read_tops(Tops, feature, M, LOWEST)
    state, total = tl.zeros([BM, WIDE_E], tl.float32), tl.zeros([BM], tl.float32)
    begin = segment * rows - shift
    for first in range(begin, tl.minimum(begin + rows, L), BT):
        inside = real(KeyMask, first, L, BT)
        there = inside[:, None] & known
        z = read_rows(Z, first, z_n, inside, 0, E, WIDE_E, BT)
        logs = dots(X, first, x_n, inside, Rows, left, M, root, D, WIDE_D, BT, BM)
        if Share is not None:
            logs = weighed(logs, Offsets, feature, M)
            own = line * L + first + tl.arange(0, BT)
            mu = tl.zeros([BT], tl.float32)
            if MAP == "softmax":
                mu = tl.load(Mu + own, mask=inside, other=0.0)
            f = factor(query_features(logs, top, mu, there, MAP, FLOOR), NARROW)
            total += tl.sum(f.to(tl.float32) * tl.load(Share + own, mask=inside, other=0.0)[:, None], 0)
        else:
            if MAP == "softmax":
                logs -= half_squares(X, first, x_n, inside, root, D, WIDE_D, BT)[:, None]
                raised = tl.maximum(top, tl.max(tl.where(there, logs, LOWEST), 0))
                shrink = tl.exp(top - raised)
                state *= shrink[:, None]
                total *= shrink
                top = raised
            f = factor(key_features(logs, top, there, MAP, FLOOR, RISE), NARROW)
            total += tl.sum(f.to(tl.float32), 0)
        state = tl.dot(tl.trans(f), factor(z, NARROW), state, input_precision=PRECISION)
    place = line * slots + segment
    write_state(Sums + place * M * E, Totals + place * M, state, total, left, M, E, WIDE_E, BM)
    if Share is None:
        if Tops is not None:
            tl.store(Tops + feature, top, mask=feature < M)


@jit(do_not_specialize=LENGTHS)
def performer_carry_kernel(
    Sums,
    Totals,
    Tops,
    First,
    M,
    slots,
    E: tl.constexpr,
    WIDE_E: tl.constexpr,
    CAUSAL: tl.constexpr,
    BACK: tl.constexpr,
    LOWEST: tl.constexpr,
    BM: tl.constexpr,
):
    """Turn sums of segments into sums of all segments before each, after each if BACK, in place; the last one has all.

    Only the last one is written unless CAUSAL. First, [G, M], has the logarithms that tops begin with.
    """
    line, left = tl.cast(tl.program_id(0), tl.int64), tl.program_id(1) * BM
    feature = left + tl.arange(0, BM)
    known = feature < M
    Sums += line * slots * M * E
    Totals += line * slots * M
    if Tops is not None:
        Tops += line * slots * M
    top = tl.full([BM], LOWEST, tl.float32)
    if First is not None:
        top = tl.load(First + line * M + feature, mask=known, other=LOWEST)
    state, total = tl.zeros([BM, WIDE_E], tl.float32), tl.zeros([BM], tl.float32)
    for step in range(0, slots - 1):
        each = tl.cast(slots - 2 - step if BACK else step, tl.int64)
        added, more = read_state(Sums + each * M * E, Totals + each * M, left, 0, M, E, WIDE_E, BM)
        if CAUSAL:
            write_state(Sums + each * M * E, Totals + each * M, state, total, left, M, E, WIDE_E, BM)
        if Tops is not None:
            if BACK:
                if CAUSAL:
                    here = read_tops(Tops + each * M, feature, M, LOWEST)
                    shrink = tl.exp(here - read_tops(Tops + (each + 1) * M, feature, M, LOWEST))
                    state *= shrink[:, None]
                    total *= shrink
            else:
                here = read_tops(Tops + each * M, feature, M, LOWEST)
                if CAUSAL:
                    # Every warp must read this before any of them overwrites it.
                    tl.debug_barrier()
                    tl.store(Tops + each * M + feature, top, mask=known)
                raised = tl.maximum(top, here)
                shrink, grown = tl.exp(top - raised), tl.exp(here - raised)
                state, total = state * shrink[:, None], total * shrink
                added, more = added * grown[:, None], more * grown
                top = raised
        state += added
        total += more
    last = tl.cast(slots - 1, tl.int64)
    if not (BACK and CAUSAL):
        write_state(Sums + last * M * E, Totals + last * M, state, total, left, M, E, WIDE_E, BM)
        if not BACK:
            if Tops is not None:
                tl.store(Tops + last * M + feature, top, mask=known)
