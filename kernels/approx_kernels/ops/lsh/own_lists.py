"""Attention to separate lists of keys for each head."""

import torch
from torch import Tensor

from approx_kernels.ops.key_lists.cpu import attend


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
    """`attend_lists` with separate blocks for each head, of one entry each; a key may have several ranks.

    Queries and keys are numbered by rank, but distances are between tokens: query token i is at `before` + i. Queries
    of a block have ascending positions, unless its entry does not limit the distance.

    Args:
        q: Queries, [B, H, L, D], float32 or bfloat16.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
        before: Position of the first query token.
        blocks: First block of each sample and head, [B H + 1], int64.
        starts: First query of each block, and the end of the last, int64: queries of part p of head g are numbered from
            (g P + p) L on, and every part has all of them.
        entries: The keys of each block, [blocks, 4], int32; see `Entry`.
        scale: Factor of the scores.
        orders: Queries and keys by rank, [P, B, H, L] and [P, B, H, M].
        itself: How often a query sees the key at its own position besides its lists, if there is one; below 0 it does
            not see it in the lists either.
        dropout: Probability of dropping a weight, separately in each part.
        stretches, places: As in `attend_lists`, for all ranks, [2, P, B, H, M].

    Returns:
        [B, H, L, E] in the dtype of q.
    """
    counts = torch.arange(entries.shape[0] + 1)
    by_rank = [x.int().contiguous() for x in orders]
    lists = None, blocks, starts, counts, entries.int().contiguous(), *by_rank, stretches, places, None
    return attend(q, k, v, *lists, before, scale, 1, itself, dropout)[0]
