"""Hashes and orders of tokens on a CPU, in C: each step is an operator, so that profilers see it."""

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.cpu.compile import call
from approx_kernels.cpu.structs import Hashing, Ordering, Stretching, address, rows_of
from approx_kernels.ops.key_lists.cpu import FAR, MOST_ROWS
from approx_kernels.runtime.custom_op import custom_op

# Planes are rows of whole vectors, for the widest vector registers.
_LANES = 8


def columns_of(planes: Tensor) -> Tensor:
    """Planes [D, n] in float64, in rows of whole vectors."""
    return F.pad(planes.double(), (0, -planes.shape[1] % _LANES)).contiguous()


def _no_orders(q: Tensor, k: Tensor, columns: Tensor, query_lift: Tensor, key_lift: Tensor) -> tuple[Tensor, Tensor]:
    by_query, by_key = (q.new_empty(len(query_lift), *q.shape[:2], x.shape[2], dtype=torch.int32) for x in (q, k))
    return by_query, by_key


@custom_op(_no_orders)
def sort_tokens(q: Tensor, k: Tensor, columns: Tensor, query_lift: Tensor, key_lift: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys sorted by `sort_numbers`, [R, B, H, L] and [R, B, H, S] int32.

    Args:
        q: Queries, [B, H, L, D], float32 or bfloat16, rows contiguous.
        k: Keys, [B, G, S, D]; the keys near a query depend on how long the queries of its head are.
        columns: One plane per round, from `columns_of`.
        query_lift: The planes' coordinates for the lifts of queries, [R] float64.
        key_lift: The same for keys.
    """
    orders, rounds = _no_orders(q, k, columns, query_lift, key_lift), len(query_lift)
    sizes = *q.shape[:2], rounds, q.shape[2], k.shape[2], q.shape[3], columns.shape[1]
    places = (
        address(columns, torch.float64, q.shape[3], columns.shape[1]),
        *(address(lift, torch.float64, rounds) for lift in (query_lift, key_lift)),
        *(
            address(order, torch.int32, rounds, *q.shape[:2], x.shape[2])
            for order, x in zip(orders, (q, k), strict=True)
        ),
    )
    how = q.dtype == torch.bfloat16, torch.get_num_threads()
    call("lsh/sorting.c", "sort_tokens", Ordering(*sizes, *how, *rows_of(q, k), *places))
    return orders


@custom_op(lambda codes, most: torch.empty_like(codes))
def sort_codes(codes: Tensor, most: int) -> Tensor:
    """Tokens sorted by codes [..., n], int32 from 0 to below `most`; equal ones in order."""
    order, n = torch.empty_like(codes), codes.shape[-1]
    given, written = (address(each, torch.int32, *codes.shape) for each in (codes, order))
    call("lsh/sorting.c", "sort_codes", codes.numel() // n, n, most, given, written)
    return order


def _no_codes(
    x: Tensor, columns: Tensor, rounds: int, bits: int, mask: Tensor | None, before: Tensor | None, sums: Tensor | None
) -> Tensor:
    return x.new_empty(*x.shape[:2], rounds, x.shape[2], dtype=torch.int32)


@custom_op(_no_codes, mutates=("sums",))
def hash_tokens(
    x: Tensor, columns: Tensor, rounds: int, bits: int, mask: Tensor | None, before: Tensor | None, sums: Tensor | None
) -> Tensor:
    """The first bits of each token and round as in `Buckets`, [B, H, R, n] int32.

    Args:
        x: Tokens, [B, H, n, D], float32 or bfloat16, rows contiguous.
        columns: The planes of each round, from `columns_of`.
        rounds: R.
        bits: Planes per round.
        mask: [B, n] bool, True at real tokens; None when all are real.
        before: For keys, the number of real ones before these, [B] int64.
        sums: For keys, the sums of the products of those before, to which these are added in place, [B, H, planes]
            float64; the mean up to each key is subtracted from it. None subtracts nothing.
    """
    codes = _no_codes(x, columns, rounds, bits, mask, before, sums)
    batch, heads, tokens, size = x.shape
    sizes = batch, heads, rounds, tokens, size, columns.shape[1], bits, 0
    places = (
        address(columns, torch.float64, size, columns.shape[1]),
        address(mask, torch.bool, batch, tokens),
        address(before, torch.int64, batch),
        address(sums, torch.float64, batch, heads, columns.shape[1]),
        address(codes, torch.int32, batch, heads, rounds, tokens),
    )
    how = x.dtype == torch.bfloat16, torch.get_num_threads()
    call("lsh/sorting.c", "hash_tokens", Hashing(*sizes, *how, *rows_of(x), *places))
    return codes


def _no_buckets(q: Tensor, columns: Tensor, rounds: int, levels: int) -> Tensor:
    return q.new_empty(levels + 1, *q.shape[:2], rounds, q.shape[2], dtype=torch.int32)


@custom_op(_no_buckets)
def nearest_buckets(q: Tensor, columns: Tensor, rounds: int, levels: int) -> Tensor:
    """Buckets of the shared variant at levels 0 to `levels`, which is at least 1, [levels + 1, B, H, R, L] int32.

    Args:
        q: Queries, [B, H, L, D], float32 or bfloat16, rows contiguous.
        columns: The directions of each round, from `columns_of`.
        rounds: R.
        levels: The last level.
    """
    codes = _no_buckets(q, columns, rounds, levels)
    batch, heads, tokens, size = q.shape
    sizes = batch, heads, rounds, tokens, size, columns.shape[1], 1 << levels >> 1, levels
    how = q.dtype == torch.bfloat16, torch.get_num_threads()
    planes = address(columns, torch.float64, size, columns.shape[1])
    written = address(codes, torch.int32, *codes.shape)
    call("lsh/sorting.c", "hash_tokens", Hashing(*sizes, *how, *rows_of(q), planes, None, None, None, written))
    return codes


def _no_stretches(
    by_query: Tensor,
    by_key: Tensor,
    mask: Tensor | None,
    cluster: int,
    highest: int,
    ranks: int,
    most: int,
    shared: bool,
    wants_seen: bool,
    wants_places: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # as it is called
    batch, heads, rounds, length = by_query.shape[-4:]
    items, short, whole = batch * heads * rounds, torch.int32, torch.int64
    return (
        by_query.new_zeros(rounds, batch, heads, length, dtype=short),
        by_query.new_zeros(rounds, batch, heads, ranks, dtype=short),
        by_query.new_empty(batch * heads + 1, dtype=whole),
        by_query.new_empty(items * most + 1, dtype=whole),
        by_query.new_empty(items * most, 4, dtype=short),
        by_query.new_empty((2, rounds, batch, heads, length) if wants_seen else (0,), dtype=short),
        # Unranked tokens are seen by no query.
        by_query.new_full((2, rounds, batch, heads, ranks) if wants_places else (0,), -1, dtype=short),
    )


@custom_op(_no_stretches)
def find_stretches(
    by_query: Tensor,
    by_key: Tensor,
    mask: Tensor | None,
    cluster: int,
    highest: int,
    ranks: int,
    most: int,
    shared: bool,
    wants_seen: bool,
    wants_places: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Blocks of queries that see one stretch of keys in their past, for `attend_own_lists`.

    Args:
        by_query: Codes of queries, [B, H, R, L] int32; in the shared variant one per level, [levels, B, H, R, L].
        by_key: Codes of keys, [B, G, R, S] or [levels, B, H, R, S].
        mask: [B, S] bool, True at real keys; None when all are real.
        cluster: Tokens per cluster.
        highest: The last level.
        ranks: Places of keys in the order of a round, M.
        most: Most blocks per head and round.
        shared: Whether there are codes for each level.
        wants_seen: Whether to return the stretch of each query.
        wants_places: Whether to return the places of keys.

    Returns:
        Queries by rank [R, B, H, L], keys by rank [R, B, H, M], the first block of each head [B H + 1], the first query
        of each block [B H R most + 1], its keys [B H R most, 4], and `stretches` and `places` of `attend_lists`, empty
        unless wanted.
    """
    form = cluster, highest, ranks, most, shared, wants_seen, wants_places
    made = _no_stretches(by_query, by_key, mask, *form)
    query_order, key_order, blocks, starts, entries, seen, places = made
    batch, heads, rounds, length = by_query.shape[-4:]
    groups, keys = by_key.shape[-3], by_key.shape[-1]
    if mask is not None:
        # Ranks outside every stretch may be read along with their neighbours, so they point to a real token if there is
        # one.
        key_order += mask.to(torch.uint8).argmax(1)[:, None, None]
    items = batch * heads * rounds
    count = torch.empty(items, dtype=torch.int64)
    levels = (highest + 1,) if shared else ()
    whole, short = torch.int64, torch.int32
    addresses = (
        address(by_query, short, *levels, batch, heads, rounds, length),
        address(by_key, short, *levels, batch, groups, rounds, keys),
        address(mask, torch.bool, batch, keys),
        address(query_order, short, rounds, batch, heads, length),
        address(key_order, short, rounds, batch, heads, ranks),
        address(blocks, whole, batch * heads + 1),
        address(starts, whole, items * most + 1),
        address(entries, short, items * most, 4),
        address(count, whole, items),
        address(seen if wants_seen else None, short, 2, rounds, batch, heads, length),
        address(places if wants_places else None, short, 2, rounds, batch, heads, ranks),
    )
    numbers = batch, heads, rounds, length, keys, cluster, highest, ranks, most, MOST_ROWS, FAR, shared and highest
    how = heads // groups, torch.get_num_threads()
    call("lsh/stretches.c", "stretches", Stretching(*numbers, *how, *addresses))
    return made
