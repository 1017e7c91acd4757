"""Bidirectional plans: queries and keys in sorted order, cut into equally many clusters of equal size."""

from typing import NamedTuple

import torch
from torch import Tensor

from approx_kernels.ops.lsh.hashing import Buckets, finer, level_of, levels_within, sort_numbers
from approx_kernels.ops.lsh.plan import Plan, make_round


class Clusters(NamedTuple):
    """The stretch of sorted keys that each query sees, in every round."""

    rounds: list[tuple[Tensor, Tensor, Tensor, Tensor]]  # as `make_round` takes them, queries by cluster last
    most: Tensor  # [] queries of the largest cluster


def cluster_plan(
    q: Tensor, k: Tensor, key_mask: Tensor | None, *, projections: Tensor, variant: str, cluster: int, buckets: int = 1
) -> Plan:
    """The stretches of `cluster_stretches` in tiles. The shared variant leaves the own token out."""
    clusters = cluster_stretches(
        q, k, key_mask, projections=projections, variant=variant, cluster=cluster, buckets=buckets
    )
    tile, width = max(int(clusters.most), 1), max(int(clusters.rounds[0][2].max()), 1)
    rounds = [make_round(order, low, room, tile, queries) for order, low, room, queries in clusters.rounds]
    flat = torch.arange(k.shape[:3].numel(), device=k.device)
    return Plan(rounds, width, flat, flat if variant == "shared" else None)


def cluster_stretches(
    q: Tensor, k: Tensor, key_mask: Tensor | None, *, projections: Tensor, variant: str, cluster: int, buckets: int = 1
) -> Clusters:
    """The stretch of keys that each query sees, given all tokens.

    A sample of n real tokens has ⌈n / cluster⌉ clusters whose sizes differ by at most one; if the numbers of queries
    and keys differ, the larger counts, and every cluster has keys. Asymmetric: queries and keys are sorted separately
    by their own numbers and a query sees its cluster. Shared: queries are sorted by bucket, then position, and a query
    sees its cluster and the one before, without itself. There are then `buckets`, a power of two, per cluster: with
    more, neighbours in sorted order are more alike.

    Args: q [B, H, L, D], k [B, H, S, D], key_mask [B, S]; when L == S it also marks the real queries.
    """
    batch, heads, length, _ = q.shape
    keys = k.shape[2]
    query_mask = key_mask if length == keys else None
    queries_real = _count(query_mask, batch, length, q.device)
    keys_real = _count(key_mask, batch, keys, q.device)
    most = torch.maximum(queries_real, keys_real)
    clusters = torch.minimum(-(-most // cluster), torch.minimum(queries_real, keys_real)).clamp(min=1)

    # The cluster of each query in sorted order, and the ranks of the keys that it sees.
    place = torch.arange(length, device=q.device).expand(batch, length)
    own = ((place + 1) * clusters - 1) // queries_real.clamp(min=1)
    low, high = (((own + j) * keys_real) // clusters for j in ((-1 if variant == "shared" else 0), 1))
    low = low.clamp(min=0)
    room = (high - low).masked_fill((place >= queries_real) | (keys_real == 0), 0)
    low, room = (x[:, None].expand(batch, heads, length) for x in (low, room))

    rounds = []
    for query_order, key_order in _orders(q, k, query_mask, key_mask, projections, variant, cluster, buckets):
        own_low, own_room = (torch.empty_like(query_order).scatter(-1, query_order, x) for x in (low, room))
        rounds.append((key_order, own_low, own_room, query_order))
    return Clusters(rounds, (-(-queries_real // clusters)).max())


def _count(mask: Tensor | None, batch: int, length: int, device: torch.device) -> Tensor:
    """Number of real tokens of each sample, [B, 1]."""
    return torch.full((batch, 1), length, device=device) if mask is None else mask.sum(1, keepdim=True)


def _orders(
    q: Tensor,
    k: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    projections: Tensor,
    variant: str,
    cluster: int,
    buckets: int,
) -> list[tuple[Tensor, Tensor]]:
    """Queries and keys in sorted order, [B, H, L] and [B, H, S] for each round; padding comes last."""
    if variant == "asymmetric":
        numbers = sort_numbers(q, k, projections, query_mask, key_mask)
        return list(zip(*(x.argsort(dim=-1, stable=True).unbind() for x in numbers), strict=True))
    length = q.shape[2]
    level = level_of(_count(key_mask, q.shape[0], length, q.device) - 1, cluster, variant)[:, None]
    level = finer(level, buckets, variant)
    levels = levels_within(level, length - 1 if key_mask is None else 0, length - 1, cluster, variant, buckets)
    hashes = Buckets(q, projections, variant, levels[-1])
    numbers = hashes.at(0)
    for each in levels:
        numbers = hashes.at(each).where(level == each, numbers)
    if key_mask is not None:
        numbers = numbers.masked_fill(~key_mask[:, None], torch.iinfo(numbers.dtype).max)
    orders = numbers.argsort(dim=-1, stable=True).unbind()
    return list(zip(orders, orders, strict=True))
