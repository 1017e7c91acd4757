"""Tiles of tokens in the kernels of LSH attention, which are scattered in memory."""

from __future__ import annotations

from approx_kernels.gpu.language import jit, tl

# Kernels are not specialised on lengths, so that other lengths compile none.
LENGTHS = ("H", "L", "S", "M", "items", "round", "rounds", "times")


@jit
def gathered(X, row, inside, stride, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of X, [rows, WIDTH]; 0 where not inside, and beyond SIZE columns."""
    column = tl.arange(0, WIDTH)
    at = X + row.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(at, mask=inside[:, None] & (column < SIZE)[None, :], other=0.0)


@jit
def scattered(X, row, inside, stride, x, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Write rows of X, those inside."""
    column = tl.arange(0, WIDTH)
    at = X + row.to(tl.int64)[:, None] * stride + column[None, :]
    tl.store(at, x.to(X.dtype.element_ty), mask=inside[:, None] & (column < SIZE)[None, :])


@jit
def real_tokens(KeyMask, token, inside):
    """Which tokens exist and are not padding."""
    inside = inside & (token >= 0)
    if KeyMask is not None:
        inside = inside & (tl.load(KeyMask + token, mask=inside, other=0) != 0)
    return inside


@jit
def placed(Queries, Low, End, slot, L, M):
    """The queries at some places of their order, and the range of ranks that each sees."""
    query = tl.load(Queries + slot, mask=slot < L, other=0)
    return query, tl.load(Low + query, mask=slot < L, other=M), tl.load(End + query, mask=slot < L, other=0)


@jit
def least(x):
    """The smallest of some numbers."""
    return tl.min(x, 0)


@jit
def greatest(x):
    """The largest of some numbers."""
    return tl.max(x, 0)


@jit
def products(x, y):
    """The product of each pair of rows."""
    return tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)


@jit
def own_scores(q, k, factor, times):
    """Scores of queries and their own keys, which count `times` times."""
    return products(q, k) * factor + tl.log2(tl.cast(times, tl.float32))


@jit
def of_pairs(
    s,
    rank,
    token,
    entry,
    own,
    query,
    low,
    end,
    Ranks,
    Low,
    End,
    L,
    M,
    items,
    round,
    APART: tl.constexpr,
):
    """Scores of the pairs that count in a round, -inf for others; ranks and queries run along different axes."""
    s = tl.where((rank >= low) & (rank < end), s, float("-inf"))
    if APART:
        s = tl.where(token != own, s, float("-inf"))
    if Ranks is not None:
        for earlier in range(0, round):
            line = earlier * tl.cast(items, tl.int64)
            before = tl.load(Ranks + line * M + entry)
            first, last = tl.load(Low + line * L + query), tl.load(End + line * L + query)
            s = tl.where((before < first) | (before >= last), s, float("-inf"))
    return s
