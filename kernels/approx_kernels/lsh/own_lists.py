"""Attention of each head to lists of keys of its own, and the lists that sorted rounds make."""

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.key_lists.cpu import FAR, MOST_ROWS, attend
from approx_kernels.lsh.sorted_rounds import sorted_rounds


def round_lists(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    *,
    projections: Tensor,
    variant: str,
    cluster: int,
    causal: bool,
    dedup: bool,
    scale: float,
    dropout: float,
) -> Tensor:
    """Any variant and form, with or without dedup; rounds are parts of one softmax. What padded queries get has no meaning.

    Args: q [B, H, L, D], k [B, H, S, D], for the shared variant what `unit_keys` gives, v [B, H, S, E], key_mask [B, S].
    """
    shared = variant == "shared"
    with torch.no_grad():
        how = {"projections": projections, "variant": variant, "cluster": cluster, "causal": causal, "dedup": dedup}
        found = sorted_rounds(q, k, key_mask, **how)
        blocks, starts, entries = _blocks(found.queries, found.low, found.end, causal)
    stretches = places = None
    if found.ranks is not None:
        stretches, places = torch.stack([found.low, found.end]), torch.stack([found.entries, found.ranks])
    out = attend_own_lists(
        q,
        k,
        v,
        before=k.shape[2] - q.shape[2],
        blocks=blocks,
        starts=starts,
        entries=entries,
        scale=scale,
        orders=(found.queries, found.tokens),
        # In the past nobody finds the own key in a list.
        itself=(-1.0 if shared and not causal else 0.0 if shared or not causal else 1.0),
        dropout=dropout,
        stretches=stretches,
        places=places,
    )
    if not shared:
        return out
    # Who finds at most the own key.
    alone = (found.end - found.low <= 1).all(0)[..., None]
    return torch.where(alone, F.dropout(torch.ones_like(out[..., :1]), dropout) * v, out) if alone.any() else out


def _blocks(queries: Tensor, low: Tensor, end: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Queries that see from one rank on, at most `MOST_ROWS`; if not causal also up to one rank. As `attend_own_lists` takes them.

    Args: queries, low and end as those of `SortedRounds`, [R, B, H, L].
    """
    _, batch, heads, length = queries.shape
    # The rounds of a head one after another.
    begin, end = (x.gather(3, queries.long()).permute(1, 2, 0, 3).reshape(-1, length) for x in (low, end))
    place = torch.arange(length)
    opens = torch.ones_like(begin, dtype=torch.bool)
    opens[:, 1:] = begin[:, 1:] != begin[:, :-1]
    if not causal:
        opens[:, 1:] |= end[:, 1:] != end[:, :-1]
    opens |= (place - place.where(opens, 0).cummax(1).values) % MOST_ROWS == 0
    starts = opens.flatten().nonzero().flatten()
    blocks = F.pad(opens.view(batch * heads, -1).sum(1).cumsum(0), (1, 0))
    starts = F.pad(starts, (0, 1), value=opens.numel())
    entries = torch.full((starts.numel() - 1, 4), FAR, dtype=torch.int32)
    entries[:, 0], entries[:, 1] = begin.flatten()[starts[:-1]], end.flatten()[starts[1:] - 1]
    entries[:, 2], entries[:, 3] = -FAR, -1 if causal else FAR
    return blocks, starts, entries


def attend_own_lists(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    before: int,
    blocks: Tensor,
    starts: Tensor,
    entries: Tensor,
    scale: float,
    orders: tuple[Tensor, Tensor],
    itself: float,
    dropout: float,
    stretches: Tensor | None = None,
    places: Tensor | None = None,
) -> Tensor:
    """`attend_lists` where each head has blocks of its own, of one entry each, and a key may have several ranks.

    Queries and keys are counted by their ranks, but distances are between tokens: query token i stands at `before` + i. The queries of
    a block have rising positions, unless its entry bounds no distance.

    Args:
        q: Queries, [B, H, L, D], float32 or bfloat16.
        k: Keys, [B, H, S, D].
        v: Values, [B, H, S, E].
        before: Position of the first query token.
        blocks: First block of each sample and head, [B H + 1], int64.
        starts: First query of each block, and the end of the last, int64: queries of part p of head g are counted from
            (g P + p) L on, and every part has all of them.
        entries: What each block sees, [blocks, 4], int32; see `Entry`.
        scale: Factor of the scores.
        orders: Queries and keys by rank, [P, B, H, L] and [P, B, H, M].
        itself: How often a query sees the key at its own position beside its lists, where there is one; below 0 it does
            not see it in these either.
        dropout: Probability with which a weight is dropped, in each part for itself.
        stretches: The ranks that each query token sees in each part, the first and the end, [2, P, B, H, L] int32: a key
            counts in the first part that shows it alone. None where it counts in each.
        places: Needed with these: entries by rank, which are the same in all parts, and ranks by entry,
            [2, P, B, H, M] int32.

    Returns:
        [B, H, L, E] in the dtype of q.
    """
    counts = torch.arange(entries.shape[0] + 1)
    by_rank = [x.int().contiguous() for x in orders]
    lists = None, blocks, starts, counts, entries.int().contiguous(), *by_rank, stretches, places, None
    return attend(q, k, v, *lists, before, scale, 1, itself, dropout)[0]
