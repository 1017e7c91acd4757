"""What the kernels of LSH attention do with tiles of tokens that do not lie beside each other in memory."""

from __future__ import annotations

from approx_kernels.triton_language import jit, tl

# Lengths that differ must not make kernels that differ.
LENGTHS = ("H", "L", "S", "M", "items", "round", "rounds")


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
def own_scores(q, k, factor, rounds, Ranks):
    """Scores of queries and their own keys, which are seen in every round, so often that all rounds are in them."""
    s = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * factor
    if Ranks is None:
        s += tl.log2(tl.cast(rounds, tl.float32))
    return s


@jit
def shown(
    rank, token, entry, own, query, low, end, Ranks, Low, End, L, M, items, round, APART: tl.constexpr,
):  # fmt: skip
    """Which pairs count in a round; what belongs to ranks and what belongs to queries lie along different axes."""
    pairs = (rank >= low) & (rank < end)
    if APART:
        pairs = pairs & (token != own)
    if Ranks is not None:
        for earlier in range(0, round):
            line = earlier * tl.cast(items, tl.int64)
            before = tl.load(Ranks + line * M + entry)
            first, last = tl.load(Low + line * L + query), tl.load(End + line * L + query)
            pairs = pairs & ((before < first) | (before >= last))
    return pairs
