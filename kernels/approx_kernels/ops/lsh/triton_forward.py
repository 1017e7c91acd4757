"""The forward kernel of LSH attention: queries that see from about the same rank on iterate over the keys by rank."""

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
    real_tokens,
    scattered,
)


@jit(do_not_specialize=LENGTHS)
def lsh_forward_kernel(
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
    Sum,
    Out,
    Lse,
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
    """Fold one round into the softmax of BM queries; the last round writes the outputs."""
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
    # Scores are logarithms to the base 2. A round continues the softmax of the one before.
    factor, later = scale * 1.4426950408889634, slot < tl.where(round > 0, L, 0)
    top = tl.load(Lse + item * L + query, mask=later, other=float("-inf"))
    total = tl.where(top > float("-inf"), 1.0, 0.0)
    out = gathered(Sum + item * L * E, query, later, E, E, WIDE_E)
    if ALWAYS:
        first = real_tokens(KeyMask, own, slot < tl.where(round > 0, 0, L))
        score = own_scores(q, gathered(K, own, first, k_n, D, WIDE_D), factor, times)
        top, total = tl.where(first, score, top), tl.where(first, 1.0, total)
        out += gathered(V, own, first, v_n, E, WIDE_E).to(tl.float32)

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
        new = tl.maximum(top, tl.max(s, 1))
        # A query that has seen nothing yet must not subtract infinity from infinity.
        safe = tl.where(new == float("-inf"), 0.0, new)
        p, share = tl.exp2(s - safe[:, None]), tl.exp2(top - safe)
        total, top = total * share + tl.sum(p, 1), new
        v = gathered(V, token, rank < M, v_n, E, WIDE_E)
        out = tl.dot(p.to(v.dtype), v, out * share[:, None], input_precision=PRECISION)

    seen = total > 0
    out = out / tl.where(seen, total, 1.0)[:, None]
    lse = tl.where(seen, top + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
    tl.store(Lse + item * L + query, lse, mask=inside)
    if round < rounds - 1:
        scattered(Sum + item * L * E, query, inside, E, out, E, WIDE_E)
    else:
        if LAST:
            alone = real_tokens(KeyMask, own, inside & (total == 0))
            out += gathered(V, own, alone, v_n, E, WIDE_E).to(tl.float32)
        scattered(Out + batch * o_b + head * o_h, query, inside, o_n, out, E, WIDE_E)
