"""Plans as kernels read them: for each round the keys by rank, and the queries by the start of their stretch."""

from typing import NamedTuple

import torch
from torch import Tensor

from approx_kernels.ops.lsh.reference import bucket_stretches, cluster_stretches


class SortedRounds(NamedTuple):
    """All R rounds, int32. An entry is a key, or with doubling buckets a key in the table of one level.

    In the order of `queries` neither `low` nor `end` ever decreases, so queries that see a rank are contiguous.
    """

    tokens: Tensor  # [R, B, H, M] key at each rank
    entries: Tensor  # [R, B, H, M] entry at each rank
    queries: Tensor  # [R, B, H, L] queries by the first rank that they see, those that see nothing last
    low: Tensor  # [R, B, H, L] first rank that each query sees; M where it sees nothing
    end: Tensor  # [R, B, H, L] the rank behind its last one
    keys: Tensor  # [B, M] key of each entry
    ranks: Tensor | None  # [R, B, H, M] rank of each entry, which tells pairs that an earlier round has shown


def sorted_rounds(
    q: Tensor,
    k: Tensor,
    key_mask: Tensor | None,
    *,
    projections: Tensor,
    variant: str,
    cluster: int,
    buckets: int,
    causal: bool,
    dedup: bool,
) -> SortedRounds:
    """The stretches of `bucket_stretches` or `cluster_stretches`; on a GPU nothing here synchronises.

    Args: q [B, H, L, D], k [B, H, S, D], of at least 32 bits, key_mask [B, S].
    """
    how = {"projections": projections, "variant": variant, "cluster": cluster}
    if causal:
        stretches = bucket_stretches(q, k, key_mask, **how)
        order, low, room = (torch.stack(each) for each in zip(*stretches.rounds, strict=True))
        keys, queries = stretches.keys, None
    else:
        order, low, room, queries = (
            torch.stack(each)
            for each in zip(*cluster_stretches(q, k, key_mask, **how, buckets=buckets).rounds, strict=True)
        )
        keys = torch.arange(k.shape[2], device=k.device).expand(k.shape[0], -1)
    low = low.masked_fill(room == 0, order.shape[-1])
    # Queries of one bucket stay in order, so that they see farther and farther.
    queries = low.argsort(dim=-1, stable=True) if queries is None else queries
    tokens = keys[:, None].expand(order.shape).gather(-1, order)
    ranks = None
    if dedup:
        place = torch.arange(order.shape[-1], device=q.device).expand(order.shape)
        ranks = torch.empty_like(order).scatter_(-1, order, place).int()
    narrow = [x.int().contiguous() for x in (tokens, order, queries, low, low + room, keys)]
    return SortedRounds(*narrow, ranks=ranks)
