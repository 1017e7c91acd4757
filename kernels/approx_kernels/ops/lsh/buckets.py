"""Causal plans: buckets that depend only on the past, with the tokens of each in order."""

from typing import NamedTuple

import torch
from torch import Tensor

from approx_kernels.ops.lsh.hashing import Buckets, level_of, levels_within
from approx_kernels.ops.lsh.plan import Plan, make_round

_LAST = torch.iinfo(torch.int64).max


class Stretches(NamedTuple):
    """The stretch of sorted entries that each query sees, in every round; an entry is a key in the table of one level."""

    rounds: list[tuple[Tensor, Tensor, Tensor]]  # entry at each rank [B, H, M]; first rank and how many [B, H, L]
    keys: Tensor  # [B, M] key of each entry
    own: Tensor  # [B, L] entry of the query's own token


def bucket_plan(
    q: Tensor, k: Tensor, key_mask: Tensor | None, *, projections: Tensor, variant: str, cluster: int
) -> Plan:
    """The stretches of `bucket_stretches` in tiles, without the own token, which the caller adds once."""
    stretches = bucket_stretches(q, k, key_mask, projections=projections, variant=variant, cluster=cluster)
    batch, heads, keys = k.shape[:3]
    rounds = [make_round(*each, max(cluster // 2, 1)) for each in stretches.rounds]
    row = torch.arange(batch * heads, device=k.device).view(batch, heads, 1)
    key_of_entry, own = stretches.keys[:, None] + row * keys, stretches.own[:, None] + row * stretches.keys.shape[1]
    return Plan(rounds, 2 * cluster, key_of_entry.flatten(), own.flatten())


def bucket_stretches(
    q: Tensor, k: Tensor, key_mask: Tensor | None, *, projections: Tensor, variant: str, cluster: int
) -> Stretches:
    """The stretch of keys that each query sees, computed causally.

    Sorting and cutting the whole sequence would reveal how many later tokens sort below a token. Here a token's bucket
    depends only on itself, and the chunks of a bucket, of `cluster` keys each, start at the bucket's first key: a query
    sees the chunk with the newest key of its bucket, as far as it is filled, and the chunk before. The number of buckets
    doubles with the position of the query, so that it sees 1 to 2 clusters of keys in a bucket of mean size; keys are in
    the tables of all levels that may need them, 2 S entries in all and at most S per level. A stretch may end with the
    own token.

    Args: q [B, H, L, D] of the last L tokens, k [B, H, S, D], key_mask [B, S].
    """
    batch, heads, length, _ = q.shape
    keys, device = k.shape[2], q.device
    # The real tokens in order, first, and the position of each query among them; below 0 it has none.
    if key_mask is None:
        real = torch.arange(keys, device=device).expand(batch, keys)
        count = torch.full((batch, 1), keys, device=device)
        position = torch.arange(keys - length, keys, device=device).expand(batch, length)
    else:
        real = (~key_mask).long().argsort(dim=-1, stable=True)
        count = key_mask.sum(1, keepdim=True)
        position = (key_mask.cumsum(1) - 1).masked_fill(~key_mask, -1)[:, max(keys - length, 0) :]
        position = torch.cat([position.new_full((batch, length - position.shape[1]), -1), position], 1)
    level = level_of(position.clamp(min=0), cluster, variant)
    first_query = 0 if key_mask is not None else max(keys - length, 0)
    levels = levels_within(level, first_query, keys - 1, cluster, variant)
    sizes = [min(keys, cluster << (each + 1)) if each < levels[-1] else keys for each in levels]
    place = torch.cat([torch.arange(size, device=device) for size in sizes])  # position of the key of each entry
    entries = place.numel()

    by_query = by_key = Buckets(q, projections, variant, levels[-1])
    if variant == "asymmetric":
        so_far = (
            torch.arange(1, keys + 1, device=device).expand(batch, keys) if key_mask is None else key_mask.cumsum(1)
        )
        by_key = Buckets(k, projections, variant, levels[-1], so_far, key_mask)
    # Buckets of all levels are numbered as in a heap, 2^level - 1 first at each level.
    tables, asked_for = [], level.new_zeros(len(projections), batch, heads, length)
    for each, size in zip(levels, sizes, strict=True):
        numbers, first = by_key.at(each), (1 << each) - 1
        places = real[:, None, :size].expand(*numbers.shape[:-1], size)
        tables.append(numbers.gather(-1, places) + first)
        asked_for = (by_query.at(each) + first).where(level[:, None] == each, asked_for)

    rounds = []
    for table, asked in zip(torch.cat(tables, -1), asked_for, strict=True):
        numbers = table * keys + place
        numbers = numbers.masked_fill((place >= count)[:, None], _LAST)
        ordered, order = numbers.sort(-1)
        begin = torch.searchsorted(ordered, asked * keys)
        end = torch.searchsorted(ordered, asked * keys + position[:, None], right=True)
        seen = (end - begin).masked_fill((position < 0)[:, None], 0)
        low = begin + ((seen - 1) // cluster - 1).clamp(min=0) * cluster
        room = (end - low).masked_fill(seen == 0, 0)
        rounds.append((order, low, room))
    # A Python list would have to be copied to the device synchronously.
    offset = (cluster << torch.arange(levels[0] + 1, levels[-1] + 2, device=device)).clamp(max=keys)
    offset = (offset.cumsum(0) - offset)[level - levels[0]]
    return Stretches(rounds, real.gather(-1, place.expand(batch, entries)), offset + position.clamp(min=0))
