"""Attention to lists of keys that each head has of its own."""

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
    """`attend_lists` where each head has blocks of its own, of one entry each, and a key may have several ranks.

    Queries and keys are counted by their ranks, but distances are between tokens: query token i stands at `before` + i. The queries of
    a block have rising positions, unless its entry bounds no distance.

    Args:
        q: Queries, [B, H, L, D], float32 or bfloat16.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
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
        stretches, places: As there, of all ranks, [2, P, B, H, M].

    Returns:
        [B, H, L, E] in the dtype of q.
    """
    counts = torch.arange(entries.shape[0] + 1)
    by_rank = [x.int().contiguous() for x in orders]
    lists = None, blocks, starts, counts, entries.int().contiguous(), *by_rank, stretches, places, None
    return attend(q, k, v, *lists, before, scale, 1, itself, dropout)[0]
