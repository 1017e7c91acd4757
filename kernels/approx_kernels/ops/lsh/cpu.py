"""LSH attention on a CPU, by lists of keys: after sorting in C, queries that see the same stretch form a block."""

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.cpu.compile import obstacle as c_obstacle
from approx_kernels.ops.key_lists.cpu import FAR, MOST_ROWS, Entry, attend_lists, cut
from approx_kernels.ops.key_lists.cpu import obstacle as lists_obstacle
from approx_kernels.ops.lsh.own_lists import attend_own_lists
from approx_kernels.ops.lsh.sorting_cpu import (
    columns_of,
    find_stretches,
    hash_tokens,
    nearest_buckets,
    sort_codes,
    sort_tokens,
)
from approx_kernels.tokens import sharing

# Results about the keys of a cache between calls: their codes, and the sums that later codes need.
Notes = dict[str, Tensor]


def obstacle(q: Tensor) -> str | None:
    """Why sorted tokens cannot attend in C, with the remedy; None if they can."""
    return lists_obstacle(q) or c_obstacle("lsh/sorting.c", q) or c_obstacle("lsh/stretches.c", q)


def sorted_lists(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    projections: Tensor,
    variant: str,
    cluster: int,
    buckets: int,
    dedup: bool,
    scale: float,
    dropout: float,
) -> Tensor:
    """The bidirectional form among real tokens; see `cluster_stretches`. Rounds are parts of one softmax."""
    length, keys, rounds, shared = q.shape[2], k.shape[2], len(projections), variant == "shared"
    clusters = max(min(-(-max(length, keys) // cluster), length, keys), 1)
    starts: list[int] = []
    entries: list[list[Entry]] = []
    bounds = [(max(own - shared, 0) * keys // clusters, (own + 1) * keys // clusters) for own in range(clusters)]
    for own, seen in enumerate(bounds):
        rows = cut(own * length // clusters, (own + 1) * length // clusters)
        starts += rows
        entries += [[(*seen, -FAR, FAR)]] * len(rows)
    starts = [part * length + start for part in range(rounds) for start in starts]
    lists = {"before": 0, "starts": [*starts, rounds * length], "entries": entries * rounds}
    orders = _bucket_orders(q, projections, cluster, buckets) if shared else _orders(q, k, projections)
    lonely = shared and any(end - low <= 1 for low, end in bounds)
    stretches = places = None
    if dedup or lonely:
        own = (torch.arange(1, length + 1) * clusters - 1) // length
        by_rank = torch.tensor(bounds, dtype=torch.int32).T[:, None, None, None, own].expand(2, *orders[0].shape)
        stretches = torch.empty(by_rank.shape, dtype=torch.int32).scatter_(
            -1, orders[0].long().expand_as(by_rank), by_rank
        )
    if dedup:
        ranks = torch.arange(keys, dtype=torch.int32).expand_as(orders[1])
        places = torch.stack([orders[1], torch.empty_like(orders[1]).scatter_(-1, orders[1].long(), ranks)])
    lists |= {"stretches": stretches if dedup else None, "places": places, "itself": not shared}
    out = attend_lists(q, k, v, None, **lists, scale=scale, orders=orders, dropout=dropout)
    return _alone(out, v, stretches, dropout) if lonely and stretches is not None else out


def _alone(out: Tensor, v: Tensor, stretches: Tensor, dropout: float) -> Tensor:
    """The own value for queries that see at most their own key in every round."""
    alone = (stretches[1] - stretches[0] <= 1).all(0)[..., None]
    if not alone.any():
        return out
    own = v.repeat_interleave(sharing(out, v), 1)
    return torch.where(alone, F.dropout(torch.ones_like(out[..., :1]), dropout) * own, out)


def _bucket_orders(q: Tensor, projections: Tensor, cluster: int, buckets: int) -> tuple[Tensor, Tensor]:
    """Tokens by bucket, then position, as queries and as keys, [rounds, B, H, L] int32."""
    doubled = max((q.shape[2] - 1) // cluster, 1).bit_length() + buckets.bit_length() - 2
    level = min(doubled, projections.shape[2].bit_length())
    codes = _nearest(q, projections, level)[level].movedim(2, 0).contiguous()
    order = sort_codes(codes, 1 << level)
    return order, order


def _orders(q: Tensor, k: Tensor, projections: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys sorted by `sort_numbers`, [rounds, B, H, L] and [rounds, B, H, S] int32."""
    q, k = (x.detach() if x.stride(-1) == 1 else x.detach().contiguous() for x in (q, k))
    planes = projections.squeeze(-1).double()
    lifts = planes[:, -1].contiguous(), planes[:, -2].contiguous()
    return sort_tokens(q, k, columns_of(planes[:, :-2].T), *lifts)


def bucket_lists(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    *,
    projections: Tensor,
    variant: str,
    cluster: int,
    dedup: bool,
    scale: float,
    dropout: float,
    notes: Notes | None,
) -> Tensor:
    """The causal form; see `bucket_stretches`. Outputs of padded queries are undefined."""
    length, keys = q.shape[2], k.shape[2]
    rounds, shared = len(projections), variant == "shared"
    bits = projections.shape[2].bit_length() if shared else projections.shape[2]
    highest, first = (min(max(at // cluster, 1).bit_length() - 1, bits) for at in (keys - 1, keys - length))
    lowest = first if key_mask is None else 0
    ranks = keys + sum(min(keys, cluster << (level + 1)) for level in range(lowest, highest))
    # Stretches start at every other cluster of a bucket at most, and long ones are cut.
    most = min(length, ranks // cluster + (2 << highest) + 1) + length // MOST_ROWS
    mask = None if key_mask is None else key_mask.contiguous()
    by_query = _nearest(q, projections, highest) if shared else _codes(q, projections, highest)
    if shared:
        by_key = by_query
    elif notes is None:
        by_key = _codes(k, projections, highest, mask, {})
    else:
        by_key = _noted_codes(k, projections, mask, notes)
    form = cluster, highest, ranks, most, shared, dedup or shared, dedup
    query_order, key_order, blocks, starts, entries, seen, places = find_stretches(by_query, by_key, mask, *form)
    total = int(blocks[-1])
    out = attend_own_lists(
        q,
        k,
        v,
        before=keys - length,
        blocks=blocks,
        starts=starts[: total + 1],
        entries=entries[:total],
        scale=scale,
        orders=(query_order, key_order),
        itself=0 if shared else 1 if dedup else rounds,
        dropout=dropout,
        stretches=seen if dedup else None,
        places=places if dedup else None,
    )
    return _alone(out, v, seen, dropout) if shared else out


def _noted_codes(k: Tensor, projections: Tensor, mask: Tensor | None, notes: Notes) -> Tensor:
    """Codes of all keys, [B, G, rounds, S]; only those of new keys are computed."""
    seen = notes["codes"].shape[3] if notes else 0
    if mask is None and "real" in notes:
        mask = _all_real(k)
    if mask is not None:
        if seen and not torch.equal(mask[:, :seen], notes.get("real", _all_real(k[:, :, :seen]))):
            # The subtracted means would differ.
            notes.clear()
            seen = 0
        notes["real"] = mask
    new = None if mask is None else mask[:, seen:].contiguous()
    codes = _codes(k[:, :, seen:], projections, projections.shape[2], new, notes)
    notes["codes"] = torch.cat([notes["codes"], codes], 3) if seen else codes
    return notes["codes"]


def _codes(
    x: Tensor, projections: Tensor, bits: int, mask: Tensor | None = None, so_far: Notes | None = None
) -> Tensor:
    """The first bits of each token and round as in `Buckets`, [B, H, rounds, n] int32.

    `so_far` is for keys: the sums and the number of the real keys before these, to which these are added; the mean up
    to each key is subtracted from it.
    """
    x = x.detach() if x.stride(-1) == 1 else x.detach().contiguous()
    columns = columns_of(projections[..., :bits].transpose(0, 1).flatten(1))
    sums = before = None
    if so_far is not None:
        sums = so_far.setdefault("sums", torch.zeros(*x.shape[:2], columns.shape[1], dtype=torch.float64))
        before = so_far.get("count", torch.zeros(x.shape[0], dtype=torch.int64))
        so_far["count"] = before + (x.shape[2] if mask is None else mask.sum(1))
    return hash_tokens(x, columns, len(projections), bits, mask, before, sums)


def _nearest(q: Tensor, projections: Tensor, levels: int) -> Tensor:
    """Buckets of the shared variant at levels up to `levels`, [levels + 1, B, H, rounds, L] int32."""
    if not levels:
        return torch.zeros(1, *q.shape[:2], len(projections), q.shape[2], dtype=torch.int32)
    q = q.detach() if q.stride(-1) == 1 else q.detach().contiguous()
    directions = projections[..., : 1 << levels >> 1]
    return nearest_buckets(q, columns_of(directions.transpose(0, 1).flatten(1)), len(projections), levels)


def _all_real(k: Tensor) -> Tensor:
    return torch.ones(k.shape[0], k.shape[2], dtype=torch.bool)
