"""The backward kernels of LSH attention: weights are recomputed, for the queries and for the keys at each rank."""

from __future__ import annotations

from approx_kernels.gpu.language import jit, tl
from approx_kernels.ops.lsh.triton_pairs import (
    LENGTHS,
    gathered,
    greatest,
    least,
    of_pairs,
    own_scores,
    placed,
    products,
    real_tokens,
    scattered,
)


@jit
def _logarithms(Lse, query, inside):
    """Log-sum-exps to the base 2; +inf where there is none, which makes weights 0."""
    lse = tl.load(Lse + query, mask=inside, other=float("-inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse)


@jit(do_not_specialize=LENGTHS)
def lsh_queries_kernel(
    Q,
    K,
    V,
    KeyMask,
    Tokens,
    Entries,
    Queries,
    Low,
    End,
    Ranks,
    Out,
    dOut,
    Lse,
    Delta,
    Sum,
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
    o_b,
    o_h,
    o_n,
    g_b,
    g_h,
    g_n,
    dq_b,
    dq_h,
    dq_n,
    H,
    L,
    S,
    M,
    items,
    round,
    rounds,
    times,
    scale,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDE_D: tl.constexpr,
    WIDE_E: tl.constexpr,
    PRECISION: tl.constexpr,
    ALWAYS: tl.constexpr,
    LAST: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Add one round to the gradients of BM queries, and store what the kernels for the keys read of them."""
    tiles = tl.cdiv(L, BM)
    item = tl.cast(tl.program_id(0) // tiles, tl.int64)
    batch, head, line = item // H, item % H, round * tl.cast(items, tl.int64) + item
    K += batch * k_b + head * k_h
    V += batch * v_b + head * v_h
    if KeyMask is not None:
        KeyMask += batch * S
    Tokens += line * M
    if Ranks is not None:
        Entries += line * M
        Ranks += item * M
    slot = tl.program_id(0) % tiles * BM + tl.arange(0, BM)
    inside = slot < L
    query, low, end = placed(Queries + line * L, Low + line * L, End + line * L, slot, L, M)
    Low += item * L
    End += item * L
    own = query + S - L
    q = gathered(Q + batch * q_b + head * q_h, query, inside, q_n, D, WIDE_D)
    grad = gathered(dOut + batch * g_b + head * g_h, query, inside, g_n, E, WIDE_E)
    out = gathered(Out + batch * o_b + head * o_h, query, inside, o_n, E, WIDE_E)
    lse = _logarithms(Lse + item * L, query, inside)
    delta = products(out, grad)
    tl.store(Delta + item * L + query, delta, mask=inside)
    factor = scale * 1.4426950408889634
    dq = gathered(Sum + item * L * D, query, slot < tl.where(round > 0, L, 0), D, D, WIDE_D)
    if ALWAYS:
        first = real_tokens(KeyMask, own, slot < tl.where(round > 0, 0, L))
        key = gathered(K, own, first, k_n, D, WIDE_D)
        value = gathered(V, own, first, v_n, E, WIDE_E)
        weight = tl.exp2(tl.where(first, own_scores(q, key, factor, times) - lse, float("-inf")))
        dq += (weight * (products(grad, value) - delta))[:, None] * key.to(tl.float32)

    # A query that sees nothing has M for both bounds, which must not widen the range of the tile.
    for start in range(least(low), greatest(tl.where(low < M, end, 0)), BN):
        rank = start + tl.arange(0, BN)
        token = tl.load(Tokens + rank, mask=rank < M, other=0)
        entry = token
        if Ranks is not None:
            entry = tl.load(Entries + rank, mask=rank < M, other=0)
        k = gathered(K, token, rank < M, k_n, D, WIDE_D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * factor
        s = of_pairs(
            s,
            rank[None, :],
            token[None, :],
            entry[None, :],
            own[:, None],
            query[:, None],
            low[:, None],
            end[:, None],
            Ranks,
            Low,
            End,
            L,
            M,
            items,
            round,
            ALWAYS or LAST,
        )
        p = tl.exp2(s - lse[:, None])
        v = gathered(V, token, rank < M, v_n, E, WIDE_E)
        ds = p * (tl.dot(grad, tl.trans(v), input_precision=PRECISION) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)

    if round < rounds - 1:
        scattered(Sum + item * L * D, query, inside, D, dq, D, WIDE_D)
    else:
        scattered(dQ + batch * dq_b + head * dq_h, query, inside, dq_n, dq * scale, D, WIDE_D)


@jit(do_not_specialize=LENGTHS)
def lsh_keys_kernel(
    Q,
    K,
    V,
    Tokens,
    Entries,
    Queries,
    Low,
    End,
    Ranks,
    First,
    Past,
    dOut,
    Lse,
    Delta,
    dKeys,
    dValues,
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
    H,
    L,
    S,
    M,
    items,
    round,
    rounds,
    times,
    scale,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDE_D: tl.constexpr,
    WIDE_E: tl.constexpr,
    PRECISION: tl.constexpr,
    ALWAYS: tl.constexpr,
    LAST: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Add one round to the gradients of BN consecutive entries; weights have these as rows."""
    tiles = tl.cdiv(M, BN)
    item, tile = tl.cast(tl.program_id(0) // tiles, tl.int64), tl.program_id(0) % tiles
    batch, head, line = item // H, item % H, round * tl.cast(items, tl.int64) + item
    Q += batch * q_b + head * q_h
    dOut += batch * g_b + head * g_h
    Queries += line * L
    if Ranks is not None:
        Ranks += item * M
    rank = tile * BN + tl.arange(0, BN)
    token = tl.load(Tokens + line * M + rank, mask=rank < M, other=0)
    entry = tl.load(Entries + line * M + rank, mask=rank < M, other=0)
    k = gathered(K + batch * k_b + head * k_h, token, rank < M, k_n, D, WIDE_D)
    v = gathered(V + batch * v_b + head * v_h, token, rank < M, v_n, E, WIDE_E)
    later = rank < tl.where(round > 0, M, 0)
    dk = gathered(dKeys + item * M * D, entry, later, D, D, WIDE_D)
    dv = gathered(dValues + item * M * E, entry, later, E, E, WIDE_E)
    factor = scale * 1.4426950408889634

    for start in range(tl.load(First + line * tiles + tile), tl.load(Past + line * tiles + tile), BM):
        slot = start + tl.arange(0, BM)
        inside = slot < L
        query, low, end = placed(Queries, Low + line * L, End + line * L, slot, L, M)
        q = gathered(Q, query, inside, q_n, D, WIDE_D)
        grad = gathered(dOut, query, inside, g_n, E, WIDE_E)
        lse = _logarithms(Lse + item * L, query, inside)
        delta = tl.load(Delta + item * L + query, mask=inside, other=0.0)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * factor
        s = of_pairs(
            s,
            rank[:, None],
            token[:, None],
            entry[:, None],
            (query + S - L)[None, :],
            query[None, :],
            low[None, :],
            end[None, :],
            Ranks,
            Low + item * L,
            End + item * L,
            L,
            M,
            items,
            round,
            ALWAYS or LAST,
        )
        p = tl.exp2(s - lse[None, :])
        dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision=PRECISION)
        ds = p * (tl.dot(v, tl.trans(grad), input_precision=PRECISION) - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)

    scattered(dKeys + item * M * D, entry, rank < M, D, dk, D, WIDE_D)
    scattered(dValues + item * M * E, entry, rank < M, E, dv, E, WIDE_E)
