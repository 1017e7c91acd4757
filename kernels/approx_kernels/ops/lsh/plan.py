"""Which query sees which keys: each round has an order of the keys in which every query sees one stretch."""

from typing import NamedTuple

import torch
from torch import Tensor

_NOBODY = torch.iinfo(torch.int64).max


class Round(NamedTuple):
    """One round of hashing. Ranks number the sorted entries of all samples and heads.

    An entry is a key, or with doubling buckets a key in the table of one level; `Plan.keys` maps entries to keys.
    """

    order: Tensor  # [B·H·M] entry at each rank
    rank: Tensor  # [B·H·M] rank of each entry
    low: Tensor  # [B·H·L] first rank that a query sees
    room: Tensor  # [B·H·L] how many ranks it sees, 0 where it takes no part
    queries: Tensor  # [N, T] tiles: queries that see from the same rank on; free slots repeat one of them
    filled: Tensor  # [N, T] which slots are taken
    slot: Tensor  # [B·H·L] slot of each query, N·T where it takes no part


class Plan(NamedTuple):
    """All rounds; `width` is the largest number of ranks that a query sees."""

    rounds: list[Round]
    width: int
    keys: Tensor  # [B·H·M] row of the key behind an entry, among B·H·S
    own: Tensor | None  # [B·H·L] entry of the query's own token, where no round may see it


def make_round(order: Tensor, low: Tensor, room: Tensor, tile: int, by_low: Tensor | None = None) -> Round:
    """Group queries that see from the same rank on into tiles of `tile` slots.

    Args:
        order: Entries by rank, [B, H, M], numbered within a sample and head.
        low: First rank that each query sees, [B, H, L], numbered likewise.
        room: Number of ranks it sees, [B, H, L]; 0 excludes it.
        tile: Slots of a tile, T.
        by_low: The queries sorted by `low`, those without room last, [B, H, L]; None sorts them here.
    """
    rows, queries, entries = low.shape[0] * low.shape[1], low.shape[2], order.shape[2]
    low, room = low.reshape(rows, queries), room.reshape(rows, queries)
    asked = low.masked_fill(room == 0, _NOBODY)
    by_low = asked.argsort(dim=-1, stable=True) if by_low is None else by_low.reshape(rows, queries)
    asked = asked.gather(-1, by_low)

    place = torch.arange(queries, device=low.device).expand(rows, queries)
    opens = torch.ones_like(asked, dtype=torch.bool)
    opens[:, 1:] = asked[:, 1:] != asked[:, :-1]
    in_group = place - place.where(opens, torch.zeros_like(place)).cummax(-1).values
    part = asked != _NOBODY
    opens = (in_group % tile == 0) & part
    number = opens.flatten().cumsum(0).view_as(opens) - 1
    count = int(number[-1, -1]) + 1
    slot = (number * tile + in_group % tile).where(part, torch.full_like(number, count * tile))

    row = torch.arange(rows, device=low.device)[:, None]
    flat = by_low + row * queries
    members = flat[opens][:, None].repeat(1, tile).flatten()
    filled = torch.zeros_like(members, dtype=torch.bool)
    members[slot[part]] = flat[part]
    filled[slot[part]] = True
    ordered = (order.reshape(rows, entries) + row * entries).flatten()
    ranks = torch.arange(rows * entries, device=low.device)
    return Round(
        order=ordered,
        rank=torch.empty_like(ordered).scatter(0, ordered, ranks),
        low=(low + row * entries).flatten(),
        room=room.flatten(),
        queries=members.view(count, tile),
        filled=filled.view(count, tile),
        slot=torch.empty_like(slot).scatter(-1, by_low, slot).flatten(),
    )
