"""Kernels of attention to the keys that each query keeps: gathered for each query, masked by bits for each key."""

from __future__ import annotations

from approx_kernels.gpu.language import jit, tl
from approx_kernels.ops.flash.triton_tiles import load_rows, store_rows
from approx_kernels.ops.lsh.triton_pairs import gathered
from approx_kernels.ops.topk.triton_choice import LENGTHS


@jit(do_not_specialize=LENGTHS)
def attend_kernel(
    V,
    Top,
    Best,
    Out,
    Lse,
    v_b,
    v_h,
    v_n,
    o_b,
    o_h,
    o_n,
    H,
    L,
    kept,
    E: tl.constexpr,
    WIDE_E: tl.constexpr,
    BK: tl.constexpr,
):
    """The output of one query, and the log-sum-exp of the scores that it keeps, to the base 2."""
    line = tl.cast(tl.program_id(0), tl.int64)
    item, row, value = line // L, line % L, tl.arange(0, WIDE_E)
    V += item // H * v_b + item % H * v_h
    Out += item // H * o_b + item % H * o_h
    top, total = tl.full([], float("-inf"), tl.float32), tl.zeros([], tl.float32)
    out = tl.zeros([WIDE_E], tl.float32)
    for begin in range(0, kept, BK):
        place = begin + tl.arange(0, BK)
        key = tl.load(Top + line * kept + place, mask=place < kept, other=-1)
        s = tl.load(Best + line * kept + place, mask=key >= 0, other=float("-inf")) * 1.4426950408889634
        new = tl.maximum(top, tl.max(s, 0))
        # A query that keeps nothing must not subtract infinity from infinity.
        safe = tl.where(new == float("-inf"), 0.0, new)
        p, share = tl.exp2(s - safe), tl.exp2(top - safe)
        total, top = total * share + tl.sum(p, 0), new
        v = gathered(V, key, key >= 0, v_n, E, WIDE_E)
        out = out * share + tl.sum(p[:, None] * v.to(tl.float32), 0)
    total = tl.where(total == 0, 1.0, total)
    tl.store(Out + row * o_n + value, (out / total).to(Out.dtype.element_ty), mask=value < E)
    tl.store(Lse + line, top + tl.log2(total))


@jit(do_not_specialize=LENGTHS)
def queries_kernel(
    Q,
    K,
    V,
    dOut,
    Top,
    Lse,
    Delta,
    dQ,
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
    dq_b,
    dq_h,
    dq_n,
    H,
    L,
    kept,
    scale,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDE_D: tl.constexpr,
    WIDE_E: tl.constexpr,
    BK: tl.constexpr,
):
    """The gradient of one query, and the product of its output and the output's gradient."""
    line = tl.cast(tl.program_id(0), tl.int64)
    item, row, size, value = line // L, line % L, tl.arange(0, WIDE_D), tl.arange(0, WIDE_E)
    K += item // H * k_b + item % H * k_h
    V += item // H * v_b + item % H * v_h
    at = Q + item // H * q_b + item % H * q_h + row * q_n + size
    q = tl.load(at, mask=size < D, other=0.0).to(tl.float32)
    at = dOut + item // H * g_b + item % H * g_h + row * g_n + value
    grad = tl.load(at, mask=value < E, other=0.0).to(tl.float32)
    lse, factor = tl.load(Lse + line), scale * 1.4426950408889634
    # With weights p and changes c: the sum of p c k, less that of p c times that of p k. Large scores are rounded, so
    # weights do not sum to exactly 1, and this difference remains.
    total, delta = tl.zeros([BK], tl.float32), tl.zeros([BK], tl.float32)
    changed, mean = tl.zeros([WIDE_D], tl.float32), tl.zeros([WIDE_D], tl.float32)
    for begin in range(0, kept, BK):
        place = begin + tl.arange(0, BK)
        key = tl.load(Top + line * kept + place, mask=place < kept, other=-1)
        k = gathered(K, key, key >= 0, k_n, D, WIDE_D).to(tl.float32)
        v = gathered(V, key, key >= 0, v_n, E, WIDE_E).to(tl.float32)
        p = tl.where(key >= 0, tl.exp2(tl.sum(k * q[None, :], 1) * factor - lse), 0.0)
        change = p * tl.sum(v * grad[None, :], 1)
        total += p
        delta += change
        changed += tl.sum(change[:, None] * k, 0)
        mean += tl.sum(p[:, None] * k, 0)
    whole = tl.sum(total, 0)
    whole = tl.where(whole == 0, 1.0, whole)
    share = tl.sum(delta, 0) / whole
    dq = (changed - share * mean) / whole * scale
    at = dQ + item // H * dq_b + item % H * dq_h + row * dq_n + size
    tl.store(at, dq.to(dQ.dtype.element_ty), mask=size < D)
    tl.store(Delta + line, share)


@jit(do_not_specialize=LENGTHS)
def bits_kernel(Top, Bits, kept, words, BW: tl.constexpr, BK: tl.constexpr):
    """BW words of one query, each with a bit for 32 keys that says whether it keeps them."""
    tiles = tl.cdiv(words, BW)
    line = tl.cast(tl.program_id(0) // tiles, tl.int64)
    word = tl.program_id(0) % tiles * BW + tl.arange(0, BW)
    bits = tl.zeros([BW], tl.int32)
    for begin in range(0, kept, BK):
        place = begin + tl.arange(0, BK)
        key = tl.load(Top + line * kept + place, mask=place < kept, other=-1)
        own = (tl.full([BK], 1, tl.int32) << (key & 31))[:, None]
        # Each bit occurs at most once, so the sum is their union.
        bits += tl.sum(tl.where((key >> 5)[:, None] == word[None, :], own, 0), 0)
    tl.store(Bits + line * words + word, bits, mask=word < words)


@jit(do_not_specialize=LENGTHS)
def keys_kernel(
    Q,
    K,
    V,
    dOut,
    Lse,
    Delta,
    Bits,
    dK,
    dV,
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
    dk_b,
    dk_h,
    dk_n,
    dv_b,
    dv_h,
    dv_n,
    H,
    L,
    S,
    shift,
    words,
    scale,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDE_D: tl.constexpr,
    WIDE_E: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Gradients of BN keys and values, 32 or 64; weights have keys as rows, as the products need them."""
    tiles = tl.cdiv(S, BN)
    item, first = tl.cast(tl.program_id(0) // tiles, tl.int64), tl.program_id(0) % tiles * BN
    Q += item // H * q_b + item % H * q_h
    dOut += item // H * g_b + item % H * g_h
    Bits += item * L * words + first // 32
    k = load_rows(K + item // H * k_b + item % H * k_h, first, k_n, 0, S, D, WIDE_D, BN, True)
    v = load_rows(V + item // H * v_b + item % H * v_h, first, v_n, 0, S, E, WIDE_E, BN, True)
    place, factor = tl.arange(0, BN), scale * 1.4426950408889634
    dk, dv = tl.zeros([BN, WIDE_D], tl.float32), tl.zeros([BN, WIDE_E], tl.float32)
    # The first query that sees the first of the keys.
    for start in range(tl.maximum(first - shift, 0), L, BM):
        row = start + tl.arange(0, BM)
        q = load_rows(Q, start, q_n, 0, L, D, WIDE_D, BM, True)
        grad = load_rows(dOut, start, g_n, 0, L, E, WIDE_E, BM, True)
        lse = tl.load(Lse + item * L + row, mask=row < L, other=0.0)
        delta = tl.load(Delta + item * L + row, mask=row < L, other=0.0)
        at = Bits + row.to(tl.int64) * words
        word = tl.load(at, mask=row < L, other=0)[None, :]
        if BN == 64:
            word = tl.where((place < 32)[:, None], word, tl.load(at + 1, mask=row < L, other=0)[None, :])
        chosen = ((word >> (place & 31)[:, None]) & 1) != 0
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * factor
        p = tl.where(chosen, tl.exp2(s - lse[None, :]), 0.0)
        dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision=PRECISION)
        change = tl.dot(v, tl.trans(grad), input_precision=PRECISION) - delta[None, :]
        # Unselected entries may be NaN.
        ds = tl.where(chosen, p * change, 0.0)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    store_rows(dK + item // H * dk_b + item % H * dk_h, first, dk_n, S, dk * scale, D, WIDE_D, BN)
    store_rows(dV + item // H * dv_b + item % H * dv_h, first, dv_n, S, dv, E, WIDE_E, BN)
