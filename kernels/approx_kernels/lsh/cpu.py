"""Bidirectional LSH attention on a CPU, by lists of keys: once sorted, each cluster of a round is a block of queries and one of keys."""

import torch
from torch import Tensor

from approx_kernels.key_lists.cpu import FAR, Entry, attend_lists, cut
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
