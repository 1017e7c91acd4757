"""The kernel of the outputs of Performer attention."""

# Triton's type stubs mistake tensors for constants, and branches on constants for branches at run time.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

from approx_kernels.gpu.language import jit, tl
from approx_kernels.ops.linear.triton_tiles import factor, read_rows, real
from approx_kernels.ops.performer.triton_tiles import (
    LENGTHS,
    dots,
    half_squares,
    key_features,
    query_features,
    raised_tops,
    read_state,
    read_tops,
    weighed,
    write_rows,
)


@jit(do_not_specialize=LENGTHS)
def performer_out_kernel(
    Q,
    K,
    V,
    Rows,
    Offsets,
    KeyMask,
    Sums,
    Totals,
    Tops,
    Out,
    Mu,
    Inverse,
    Rises,
    q_b,
    q_h,
    q_n,
    k_b,
    k_h,
    k_n,
    v_b,
    v_h,
    v_n,
    o_b,
    o_h,
    o_n,
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
    """BC columns of BT outputs of one head, the logarithms that their features are relative to, and 1 / n.

    If CAUSAL, they are at the positions of one chunk of keys: sums hold the keys before it, and those in it are paired
    with the queries. A query must not depend on later keys, so features of keys are relative to the tops of earlier
    chunks. A key that rises more than RISE above them in one feature raises them, and queries from it on are computed
    again; `Rises`, [G, chunks], has the bits of such keys.
    """
    chunk, line = tl.program_id(0) % segments + skipped, tl.cast(tl.program_id(0) // segments, tl.int64)
    place = tl.arange(0, BT)
    start = chunk * BT - shift
    own = start + place
    asked = (own >= 0) & (own < L)
    Q += line // H * q_b + line % H * q_h
    Out += line // H * o_b + line % H * o_h
    if APART:
        Rows += line % H * r_h
    if Offsets is not None:
        Offsets += line % H * M
    slot = line * slots + (chunk if CAUSAL else slots - 1)
    Sums += slot * M * E
    Totals += slot * M
    if Tops is not None:
        Tops += slot * M
    mu, norm = tl.full([BT], LOWEST, tl.float32), tl.zeros([BT], tl.float32)
    begin = tl.program_id(1) * BC
    out = tl.zeros([BT, BC], tl.float32)
    if CAUSAL:
        K += line // H * k_b + line % H * k_h
        V += line // H * v_b + line % H * v_h
        if KeyMask is not None:
            KeyMask += line // H * S
        inside = real(KeyMask, chunk * BT, S, BT)
        half = half_squares(K, chunk * BT, k_n, inside, root, D, WIDE_D, BT)
        pairs = tl.zeros([BT, BT], tl.float32)
        bits = tl.zeros([], tl.int64)
    first = 0
    while first < BT:
        behind = BT
        now = place >= first
        if CAUSAL:
            rises = tl.full([BT, BM], LOWEST, tl.float32)
        for left in range(0, M, BM):
            feature = left + tl.arange(0, BM)
            known = (feature < M)[None, :]
            there = now[:, None] & known
            before = read_tops(Tops, feature, M, LOWEST)
            top = before
            if CAUSAL:
                logs = dots(K, chunk * BT, k_n, inside, Rows, left, M, root, D, WIDE_D, BT, BM)
                if MAP == "softmax":
                    logs -= half[:, None]
                    top = raised_tops(top, logs, inside, bits, first, BT)
                    rises = tl.maximum(rises, tl.where(inside[:, None] & known, logs - top[None, :], LOWEST))
                g = factor(key_features(logs, top, inside[:, None] & known, MAP, FLOOR, RISE), NARROW)
            heights = weighed(dots(Q, start, q_n, asked, Rows, left, M, root, D, WIDE_D, BT, BM), Offsets, feature, M)
            if MAP == "softmax":
                largest = tl.maximum(mu, tl.max(tl.where(there, heights + top[None, :], LOWEST), 1))
                shrink = tl.exp(mu - largest)
                mu = largest
                norm *= shrink
                out *= shrink[:, None]
            f = factor(query_features(heights, top, mu, there, MAP, FLOOR), NARROW)
            state, total = read_state(Sums, Totals, left, begin, M, E, BC, BM)
            if CAUSAL:
                if MAP == "softmax":
                    lowered = tl.exp(before - top)
                    state, total = state * lowered[:, None], total * lowered
                    pairs *= shrink[:, None]
                pairs = tl.dot(f, tl.trans(g), pairs, input_precision=PRECISION)
            out = tl.dot(f, factor(state, NARROW), out, input_precision=PRECISION)
            norm += tl.sum(f.to(tl.float32) * total[None, :], 1)
        if CAUSAL:
            if MAP == "softmax":
                behind = tl.min(tl.where(now & (tl.max(rises, 1) > RISE), place, BT), 0)
                if behind < BT:
                    bits |= tl.full([], 1, tl.int64) << behind.to(tl.int64)
                    again = place >= behind
                    mu, norm = tl.where(again, LOWEST, mu), tl.where(again, 0.0, norm)
                    out = tl.where(again[:, None], 0.0, out)
                    pairs = tl.where(again[:, None], 0.0, pairs)
        first = behind

    if CAUSAL:
        if MAP == "softmax":
            if begin == 0:
                tl.store(Rises + line * segments + chunk - skipped, bits)
        pairs = tl.where(place[:, None] >= place[None, :], pairs, 0.0)
        norm += tl.sum(pairs, 1)
        v = factor(read_rows(V, chunk * BT, v_n, inside, begin, E, BC, BT), NARROW)
        out = tl.dot(factor(pairs, NARROW), v, out, input_precision=PRECISION)
    inverse = tl.where(norm > 0, 1.0 / tl.where(norm > 0, norm, 1.0), 0.0)
    if begin == 0:
        if MAP == "softmax":
            tl.store(Mu + line * L + own, mu, mask=asked)
        tl.store(Inverse + line * L + own, inverse, mask=asked)
    write_rows(Out, start, o_n, out * inverse[:, None], asked, begin, E, BC, BT)
