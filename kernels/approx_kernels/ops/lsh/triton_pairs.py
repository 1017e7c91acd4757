"""What the kernels of LSH attention do with tiles of tokens that do not lie beside each other in memory."""

from __future__ import annotations

from approx_kernels.gpu.language import jit, tl

# Lengths that differ must not make kernels that differ.
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
    """Which tokens there are, and no padding."""
    inside = inside & (token >= 0)
    if KeyMask is not None:
        inside = inside & (tl.load(KeyMask + token, mask=inside, other=0) != 0)
    return inside


@jit
def placed(Queries, Low, End, slot, L, M):
    """The queries at some places of their order, and from where to where they see."""
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
    """One number for each row."""
    return tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)


@jit
def own_scores(q, k, factor, times):
    """Scores of queries and their own keys, which count so many times."""
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
    """Scores of the pairs that count in a round, -inf in place of others; ranks and queries lie along different axes."""
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
