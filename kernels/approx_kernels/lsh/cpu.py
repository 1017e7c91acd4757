"""LSH attention on a CPU, by lists of keys: once sorted, those who see the same stretch of a round are a block."""

import torch
from torch import Tensor

from approx_kernels.key_lists.cpu import FAR, MOST_ROWS, Entry, attend_lists, attend_own_lists, cut
from approx_kernels.lsh.buckets import bucket_stretches
from approx_kernels.lsh.hashing import sort_numbers


def sorted_lists(q: Tensor, k: Tensor, v: Tensor, *, projections: Tensor, cluster: int, scale: float) -> Tensor:
    """The asymmetric variant among real tokens; see `cluster_plan`. Rounds are parts of one softmax."""
    length, keys = q.shape[2], k.shape[2]
    clusters = max(min(-(-max(length, keys) // cluster), length, keys), 1)
    with torch.no_grad():
        wide = torch.promote_types(q.dtype, torch.float32)
        numbers = sort_numbers(q.to(wide), k.to(wide), projections, None, None)
        by_query, by_key = (x.argsort(dim=-1, stable=True) for x in numbers)
    starts: list[int] = []
    entries: list[list[Entry]] = []
    for own in range(clusters):
        rows = cut(own * length // clusters, (own + 1) * length // clusters)
        starts += rows
        entries += [[(own * keys // clusters, (own + 1) * keys // clusters, -FAR, FAR)]] * len(rows)
    rounds = len(projections)
    starts = [part * length + start for part in range(rounds) for start in starts]
    lists = {"before": 0, "starts": [*starts, rounds * length], "entries": entries * rounds}
    return attend_lists(q, k, v, None, **lists, scale=scale, orders=(by_query, by_key))


def bucket_lists(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, projections: Tensor, cluster: int, scale: float
) -> Tensor:
    """The causal form of the asymmetric variant; see `bucket_stretches`. Padded queries attend to themselves alone."""
    batch, heads, length, _ = q.shape
    rounds = len(projections)
    with torch.no_grad():
        wide = torch.promote_types(q.dtype, torch.float32)
        found = bucket_stretches(
            q.to(wide), k.to(wide), key_mask, projections=projections, variant="asymmetric", cluster=cluster
        )
        order, low, room = (torch.stack(each, 2) for each in zip(*found.rounds, strict=True))
        entries = order.shape[-1]
        by_rank = found.keys[:, None, None].expand(order.shape).gather(-1, order)
        # Queries by where their stretch begins, and in it by their positions; who sees nothing stands together.
        low = low.masked_fill(room == 0, entries)
        low, by_low = low.sort(dim=-1, stable=True)
        end = low + room.gather(-1, by_low)
        place = torch.arange(length).expand_as(low)
        opens = torch.ones_like(low, dtype=torch.bool)
        opens[..., 1:] = low[..., 1:] != low[..., :-1]
        opens |= (place - place.where(opens, 0).cummax(-1).values) % MOST_ROWS == 0
        starts = opens.flatten().nonzero().squeeze(1)
        starts = torch.cat([starts, torch.tensor([low.numel()])])
        # Stretches of a block begin together, and the last query sees farthest.
        stretch = torch.stack([low.flatten()[starts[:-1]], end.flatten()[starts[1:] - 1]], 1)
        listed = torch.cat([stretch, torch.tensor([[-FAR, -1]]).expand_as(stretch)], 1)
        blocks = torch.searchsorted(starts, torch.arange(batch * heads + 1) * rounds * length)
    orders = by_low.movedim(2, 0), by_rank.movedim(2, 0)
    return attend_own_lists(
        q,
        k,
        v,
        before=k.shape[2] - length,
        blocks=blocks,
        starts=starts,
        entries=listed,
        scale=scale,
        orders=orders,
        itself=rounds,
    )
