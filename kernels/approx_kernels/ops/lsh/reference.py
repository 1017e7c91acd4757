"""Attention among tokens that hashing groups together, in plain PyTorch: hashes, plans of who sees whom, and tiles."""

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.ops.exact.api import exact_attention
from approx_kernels.ops.near_keys.api import Exactly, Part, near_keys
from approx_kernels.ops.near_keys.reference import lowest, parts_in_turns, reach
from approx_kernels.runtime.pytorch import unreadable, without_autocast, without_functions
from approx_kernels.tokens import blank_padding, check_draw, check_form, check_least, check_part, check_word, in_turns

# Hashes are computed in float64 and rounded to float32 for sorting: an order of tokens, or a side of a plane, that
# depended on rounding would change with the padding and the batch around a sample.

VARIANTS = ("asymmetric", "shared")

# Columns drawn for buckets: one per bit, or one per two buckets. More would help only with impractically long inputs,
# or cost more than the attention inside a bucket.
_BITS = 16
_DIRECTIONS = 64
# Numbers in float64 at a time, which fit into a core's own cache.
_CACHED = 2**17


def draw_projections(size: int, *, rounds: int, variant: str, causal: bool, seed: int) -> Tensor:
    """Random directions N(0, 1), drawn once from the seed.

    Returns:
        [rounds, D + 2, 1] for the asymmetric variant, [rounds, D, 16] for its causal form and [rounds, D, 64] for
        the shared one, float32.
    """
    check_draw(seed, rounds=rounds, size=size)
    check_word("variant", variant, VARIANTS)
    check_form(causal=causal)
    rows, columns = (size, _DIRECTIONS) if variant == "shared" else (size, _BITS) if causal else (size + 2, 1)
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(rounds, rows, columns, generator=generator, device="cpu", dtype=torch.float32)


def sort_numbers(
    q: Tensor, k: Tensor, projections: Tensor, query_mask: Tensor | None, key_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Projections of F(q) = [q; 0; (m - |q|²)^½] and G(k) = [k; (m - |k|²)^½; 0], m = max |q|² + max |k|².

    Both lie on one sphere, where the nearest key of a query has the largest product. The maxima are over the real
    tokens of a sample and head; others are sorted to the end.

    Returns:
        [rounds, B, H, L] and [rounds, B, H, S], float32.
    """
    planes = projections.squeeze(-1).double()
    (queries, query_squares), (keys, key_squares) = (_products(x, planes[:, :-2]) for x in (q, k))
    longest = _longest(query_squares, query_mask) + _longest(key_squares, key_mask)
    values = []
    for products, squares, extra, mask in (
        (queries, query_squares, planes[:, -1], query_mask),
        (keys, key_squares, planes[:, -2], key_mask),
    ):
        lifts = (longest - squares).clamp(min=0).sqrt()
        numbers = torch.addcmul(products, lifts, extra.view(-1, 1, 1, 1)).float()
        values.append(numbers if mask is None else numbers.masked_fill(~mask[:, None], torch.inf))
    return values[0], values[1]


def _products(x: Tensor, planes: Tensor) -> tuple[Tensor, Tensor]:
    """Products with the planes, [rounds, B, H, L], and squared lengths, [B, H, L], in float64."""
    products = x.new_empty(*planes.shape[:1], *x.shape[:3], dtype=torch.float64)
    squares = torch.empty_like(products[0])
    for piece in _pieces(x, x.shape[3]):
        wide = x[piece].double()
        products[:, *piece] = (wide @ planes.T).movedim(-1, 0)
        squares[piece] = wide.square().sum(-1)
    return products, squares


def _longest(squares: Tensor, mask: Tensor | None) -> Tensor:
    squares = squares if mask is None else squares.masked_fill(~mask[:, None], 0.0)
    return squares.amax(-1, keepdim=True)


def _pieces(x: Tensor, columns: int) -> Iterator[tuple[slice, slice, slice]]:
    """Samples, heads and tokens of x [B, H, n, D], token by token, few enough at a time for a CPU's cache."""
    samples, heads, tokens = x.shape[:3]
    if x.device.type == "cpu":
        tokens = min(tokens, max(1, _CACHED // columns))
        heads = min(heads, max(1, _CACHED // (columns * tokens)))
        samples = min(samples, max(1, _CACHED // (columns * tokens * heads)))
    steps = (samples, heads, tokens)
    for starts in itertools.product(*(range(0, n, step) for n, step in zip(x.shape, steps, strict=False))):
        first, second, third = (slice(start, start + step) for start, step in zip(starts, steps, strict=True))
        yield first, second, third


def level_of(position: Tensor, cluster: int, variant: str) -> Tensor:
    """How often the buckets have doubled at a position, so that each holds 1 to 2 clusters of the tokens up to it."""
    bounds = cluster * 2 ** torch.arange(1, _doublings(variant) + 1, device=position.device)
    return torch.bucketize(position, bounds, right=True)


def finer(level: Tensor, buckets: int, variant: str) -> Tensor:
    """A level with `buckets` times as many buckets, at most the highest level."""
    return (level + buckets.bit_length() - 1).clamp(max=_doublings(variant))


def levels_within(level: Tensor, first: int, last: int, cluster: int, variant: str, buckets: int = 1) -> range:
    """Levels of positions from `first` to `last`, `buckets` times as fine, without synchronising a GPU.

    On a CPU they are only those that occur.
    """
    if level.device.type == "cpu" and not unreadable(level):
        return range(int(level.min()), int(level.max()) + 1)
    most = _doublings(variant)
    lowest, highest = (
        min(max((at // cluster).bit_length() - 1, 0) + buckets.bit_length() - 1, most) for at in (first, last)
    )
    return range(lowest, highest + 1)


def _doublings(variant: str) -> int:
    return _DIRECTIONS.bit_length() if variant == "shared" else _BITS


class Buckets:
    """The bucket of each token among 2^level, for any level up to `highest`.

    Asymmetric: the first `level` bits [x·a > 0]. Shared: the nearest of the directions and their opposites, that is
    argmax [xR; -xR], among the first 2^level of them.

    Args:
        x: Tokens, [B, H, n, D].
        projections: The projections of the shared variant or of the causal form of the asymmetric one.
        variant: `asymmetric` or `shared`.
        highest: The highest level needed.
        count: Number of real tokens up to each, [B, n], to subtract their mean from x first: a vector subtracted from
            all keys does not change the softmax, but makes hashes tell keys apart. None subtracts nothing.
        mask: [B, n] bool, True at real tokens; used only with `count`.
    """

    def __init__(
        self,
        x: Tensor,
        projections: Tensor,
        variant: str,
        highest: int,
        count: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> None:
        self.shared = variant == "shared"
        rounds, size, _ = projections.shape
        columns = (1 << highest) >> 1 if self.shared else highest
        planes = projections[..., :columns].double().transpose(0, 1).reshape(size, rounds * columns)
        made = highest if self.shared else 1
        self.numbers = torch.zeros(made, rounds, *x.shape[:3], dtype=torch.int64, device=x.device)
        carry = torch.zeros((), dtype=planes.dtype)
        for piece in _pieces(x, max(size, planes.shape[1])) if highest else ():
            products = x[piece].double() @ planes
            if count is not None:
                samples, _, tokens = piece
                real = products if mask is None else products * mask[samples, None, tokens, None]
                sums = real.cumsum(2) if tokens.start == 0 else real.cumsum(2).add_(carry)
                carry = sums[:, :, -1:]
                mean = sums / count[samples, None, tokens, None].clamp(min=1)
                # Identical keys must all lie on one side, however their mean is rounded.
                products = products - mean - 1e-9 * mean.abs()
            products = products.unflatten(-1, (rounds, columns))
            buckets = _nearest(products, highest) if self.shared else _bits(products)[None]
            self.numbers[:, :, *piece] = buckets.movedim(-1, 1)

    def at(self, level: int) -> Tensor:
        """Numbers from 0 to 2^level - 1, int64 [rounds, B, H, n]."""
        if self.shared:
            return self.numbers[level - 1] if level else self.numbers.new_zeros(()).expand(self.numbers.shape[1:])
        return self.numbers[0] & ((1 << level) - 1)


def _bits(products: Tensor) -> Tensor:
    """Signs of the products [..., columns] as the bits of a number."""
    powers = 2.0 ** torch.arange(products.shape[-1], dtype=products.dtype, device=products.device)
    return ((products > 0).to(products) @ powers).long()


def _nearest(products: Tensor, highest: int) -> Tensor:
    """The direction or opposite of the largest product [..., columns] among the first 2, 4, 8, … of them."""
    lengths = products.abs()
    most, best = lengths[..., 0], torch.zeros_like(products[..., 0], dtype=torch.int64)
    by_level = []
    for level in range(1, highest + 1):
        if level > 1:
            half = 1 << (level - 2)
            new = lengths[..., half : 2 * half].max(-1)
            best = torch.where(new.values > most, new.indices + half, best)
            most = torch.maximum(new.values, most)
        opposite = products.gather(-1, best[..., None]).squeeze(-1) < 0
        by_level.append(2 * best + opposite)
    return torch.stack(by_level)


def unit_keys(q: Tensor, k: Tensor) -> Tensor:
    """Queries of length D^½ as keys, [B, H, S, D]; k is [B, G, S, D].

    The learned keys get a gradient of 0, so that their projection's gradient is not missing for trainers.
    """
    units = F.normalize(q, dim=-1) * q.shape[-1] ** 0.5
    chosen = torch.ones((), dtype=torch.bool, device=q.device)
    return torch.where(chosen, units.unflatten(1, (k.shape[1], -1)), k.unsqueeze(2)).flatten(1, 2)


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


class Hidden(NamedTuple):
    """Pairs that no round may see, since each query attends to these keys exactly."""

    queries: int  # L
    keys: int  # S
    reach: tuple[int, int] | None  # keys of a window before a query and after it
    chosen: Tensor | None  # [B·H·S] keys that no query may see

    @classmethod
    def of(cls, q: Tensor, k: Tensor, exactly: Exactly) -> "Hidden":
        """Those of queries [B, H, L, D] and keys [B, H, S, D]."""
        chosen = exactly.chosen
        chosen = None if chosen is None else chosen[:, None].expand(-1, k.shape[1], -1).flatten()
        return cls(q.shape[2], k.shape[2], reach(exactly.window, exactly.causal) if exactly.window else None, chosen)

    def among(self, members: Tensor, rows: Tensor) -> Tensor:
        """Which of the keys [N, U] each of the queries [N, T] may not see, [N, T, U] bool."""
        hidden = torch.zeros((), dtype=torch.bool, device=rows.device)
        if self.reach is not None:
            distance = (rows % self.keys)[:, None] - (members % self.queries + self.keys - self.queries)[..., None]
            hidden = (distance >= -self.reach[0]) & (distance <= self.reach[1])
        hidden = hidden if self.chosen is None else hidden | self.chosen[rows][:, None]
        return hidden.expand(*members.shape, rows.shape[1])


class Plan(NamedTuple):
    """All rounds; `width` is the largest number of ranks that a query sees."""

    rounds: list[Round]
    width: int
    keys: Tensor  # [B·H·M] row of the key behind an entry, among B·H·S
    own: Tensor | None  # [B·H·L] entry of the query's own token, where no round may see it
    hidden: Hidden | None = None  # further pairs that no round may see


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


_LAST = torch.iinfo(torch.int64).max


class Stretches(NamedTuple):
    """The stretch of sorted entries that each query sees in every round; an entry is a key in a level's table."""

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
    sees the chunk with the newest key of its bucket, as far as it is filled, and the chunk before. The number of
    buckets doubles with the position of the query, so that it sees 1 to 2 clusters of keys in a bucket of mean size;
    keys are in the tables of all levels that may need them, 2 S entries in all and at most S per level. A stretch may
    end with the own token.

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


# Numbers in a working set: 1 MiB of float32, about the size of a core's own cache; a GPU benefits from more.
_ON_CPU, _ON_GPU = 2**18, 2**26


def tile_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, dropout: float, dedup: bool
) -> tuple[Tensor, Tensor]:
    """Softmax attention over the keys that the rounds of the plan show to each query, and the log of its normaliser.

    Scores exist for only some tiles at a time, also in the backward pass, which recomputes them: memory is that of the
    inputs and the plan. Gradients pass through both results.

    Args: q [B·H·L, D], already scaled, k [B·H·S, D], v [B·H·S, E], of one dtype of at least 32 bits.

    Returns:
        [B·H·L, E] and [B·H·L]; 0 and -inf for a query that sees nothing.
    """
    # One seed reproduces all masks in the backward pass.
    seed = int(torch.randint(2**31, ())) if dropout else 0
    return _TileAttention.apply(q, k, v, plan, dropout, seed, dedup)  # pyright: ignore[reportReturnType]  # what forward returns


class _TileAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float, seed: int, dedup: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.rest = plan, dropout, seed, dedup
        work = _Work(q, k, v, *ctx.rest)
        out, lse = v.new_zeros(q.shape[0], v.shape[1]), q.new_full(q.shape[:1], -torch.inf)
        for number, tiles in enumerate(plan.rounds):
            # An extra slot, for queries that take no part.
            sums = v.new_empty(tiles.queries.numel() + 1, v.shape[1])
            sums[-1] = 0.0
            top = q.new_full(sums.shape[:1], -torch.inf)
            total = q.new_zeros(sums.shape[:1])
            for block in work.blocks(number):
                shape = block.scores.shape
                most = torch.amax(block.scores, -1, out=top[block.slots].view(shape[:2]))
                most = most.clamp(min=torch.finfo(most.dtype).min)
                weights = block.scores.sub_(most[..., None]).exp_()
                weights = weights if block.met is None else weights.div_(block.met)
                torch.sum(weights, -1, out=total[block.slots].view(shape[:2]))
                torch.bmm(work.dropped(weights), block.values, out=sums[block.slots].view(*shape[:2], -1))
            # Sums of weights relative to their maximum, merged as in an online softmax.
            top, total = top.index_select(0, tiles.slot), total.index_select(0, tiles.slot)
            both = torch.logaddexp(lse, top + total.log())
            finite = both.masked_fill(both == -torch.inf, 0.0)
            out.mul_((lse - finite).exp_()[:, None])
            out.addcmul_(sums.index_select(0, tiles.slot), (top - finite).exp_()[:, None])
            lse = both
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]  # named arguments there
        q, k, v, out, lse = ctx.saved_tensors
        plan, dropout, seed, dedup = ctx.rest
        work = _Work(q, k, v, plan, dropout, seed, dedup)
        delta = (grad * out).sum(-1) - grad_lse
        lse = lse.masked_fill(lse == -torch.inf, 0.0)
        grad_q, grad_k, grad_v = (torch.zeros_like(x) for x in (q, k, v))
        for number, tiles in enumerate(plan.rounds):
            parts = q.new_empty(tiles.queries.numel() + 1, q.shape[1])
            parts[-1] = 0.0
            members = tiles.queries.flatten()
            for block in work.blocks(number):
                shape, mine = block.scores.shape, members[block.slots]
                weights = block.scores.sub_(lse.index_select(0, mine).view(*shape[:2], 1)).exp_()
                weights = weights if block.met is None else weights / block.met
                outer = grad.index_select(0, mine).view(*shape[:2], -1)
                kept = work.dropped(torch.ones_like(weights)) if dropout else None
                used = weights if kept is None else weights * kept
                grad_v.index_add_(0, block.rows, torch.bmm(used.transpose(1, 2), outer).flatten(0, 1))
                inner = torch.bmm(outer, block.values.transpose(1, 2))
                inner = inner if kept is None else inner.mul_(kept)
                inner.sub_(delta.index_select(0, mine).view(*shape[:2], 1)).mul_(weights)
                parts[block.slots] = torch.bmm(inner, block.keys).flatten(0, 1)
                grad_k.index_add_(0, block.rows, torch.bmm(inner.transpose(1, 2), block.queries).flatten(0, 1))
            grad_q += parts.index_select(0, tiles.slot)
        return grad_q, grad_k, grad_v, None, None, None, None


class _Block(NamedTuple):
    """Some tiles of a round."""

    slots: slice
    rows: Tensor  # [N·U] rows of the keys
    queries: Tensor  # [N, T, D]
    keys: Tensor  # [N, U, D]
    values: Tensor  # [N, U, E]
    scores: Tensor  # [N, T, U], -inf where a query does not see a key
    met: Tensor | None  # [N, T, U] in how many rounds it does, where that matters


class _Work:
    """The blocks of one pass, the same in the forward and the backward pass."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float, seed: int, dedup: bool) -> None:
        self.q, self.k, self.v, self.plan, self.dropout, self.dedup = q, k, v, plan, dropout, dedup
        self.generator = torch.Generator(q.device).manual_seed(seed) if dropout else None
        tile, width = plan.rounds[0].queries.shape[1], plan.width
        each = tile * width + (tile + width) * q.shape[1] + width * v.shape[1]
        self.together = max(1, (_ON_CPU if q.device.type == "cpu" else _ON_GPU) // each)
        self.stretches = [tuple(x.int() for x in (each.rank, each.low, each.room)) for each in plan.rounds if dedup]
        self.steps = torch.arange(width, dtype=torch.int32, device=q.device)

    def blocks(self, number: int) -> Iterator[_Block]:
        """Gather the queries, keys and values of some tiles into reused memory, and score them."""
        plan, tiles, width = self.plan, self.plan.rounds[number], self.plan.width
        low = tiles.low[tiles.queries[:, 0]]
        room = tiles.room[tiles.queries].masked_fill(~tiles.filled, 0)
        # Beyond its room a query sees nothing, so any key that the tile sees can fill in.
        rank = torch.minimum(low[:, None] + self.steps, (low + room.amax(-1) - 1)[:, None])
        entries = tiles.order[rank]
        rows, members = plan.keys[entries], tiles.queries
        own = None if plan.own is None else tiles.rank[plan.own[members]] - low[:, None]
        all_seen = bool((room == width).all())
        room = room.int()
        tile = members.shape[1]
        memory, score_memory = [None] * 3, None
        # A graph for second derivatives keeps everything.
        if not torch.is_grad_enabled():
            sizes = (tile * self.q.shape[1], width * self.k.shape[1], width * self.v.shape[1], tile * width)
            *memory, score_memory = (self.q.new_empty(self.together * size) for size in sizes)
        for begin in range(0, members.shape[0], self.together):
            count = min(self.together, members.shape[0] - begin)
            now = slice(begin, begin + count)
            own_rows = rows[now].flatten()
            sources = zip((self.q, self.k, self.v), (members[now].flatten(), own_rows, own_rows), memory, strict=True)
            queries, keys, values = (_taken(x, index, place).view(count, -1, x.shape[1]) for x, index, place in sources)
            place = None if score_memory is None else score_memory[: count * tile * width].view(count, tile, width)
            scores = torch.bmm(queries, keys.transpose(1, 2), out=place)
            if not all_seen:
                scores.masked_fill_(self.steps >= room[now][..., None], -torch.inf)
            if own is not None:
                _leave_out(scores, own[now])
            if plan.hidden is not None:
                scores.masked_fill_(plan.hidden.among(members[now], rows[now]), -torch.inf)
            met = self._met(number, members[now], entries[now]) if self.dedup else None
            yield _Block(
                slice(begin * tile, (begin + count) * tile), rows[now].flatten(), queries, keys, values, scores, met
            )

    def _met(self, number: int, members: Tensor, entries: Tensor) -> Tensor:
        counts = torch.uint8 if len(self.stretches) < 256 else torch.int32
        met = torch.ones(*members.shape, entries.shape[1], dtype=counts, device=members.device)
        for other, (rank, low, room) in enumerate(self.stretches):
            if other != number:
                at = rank[entries][:, None] - low[members][..., None]
                met += ((at >= 0) & (at < room[members][..., None])).view(torch.uint8)
        return met.to(self.q.dtype)

    def dropped(self, weights: Tensor) -> Tensor:
        """The weights after dropout; called in the same order in both passes."""
        if self.generator is None:
            return weights
        kept = torch.rand(weights.shape, generator=self.generator, device=weights.device) >= self.dropout
        return weights * kept / (1 - self.dropout)


def _taken(x: Tensor, index: Tensor, place: Tensor | None) -> Tensor:
    """Rows of x [n, D], in `place` where there is one."""
    out = None if place is None else place[: index.numel() * x.shape[1]].view(-1, x.shape[1])
    return torch.index_select(x, 0, index, out=out)


def _leave_out(scores: Tensor, at: Tensor) -> None:
    """Hide the key `at` [N, T] steps into the stretch from all queries."""
    inside = (at >= 0) & (at < scores.shape[-1])
    index = at.clamp(0, scores.shape[-1] - 1)[..., None]
    scores.masked_fill_(torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, index, inside[..., None]), -torch.inf)


def tile_union(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, own: str, scale: float, dedup: bool, dropout: float
) -> Tensor:
    """Tiles of all samples and heads, then the own key where `own` is `always` or the `last resort`.

    Args: q [B, H, L, D], k [B, H, S, D], v [B, H, S, E]. Returns [B, H, L, E].
    """
    q = q * scale
    queries, keys, values = (x.reshape(-1, x.shape[-1]) for x in (q, k, v))
    out, lse = tile_attention(queries, keys, values, plan, dropout=dropout, dedup=dedup)
    out, lse = out.view(*q.shape[:3], -1), lse.view(*q.shape[:3], 1)
    if own == "as any other":
        return out
    key, value = (_of_queries(x, q.shape[2]) for x in (k, v))
    if own == "last resort":
        return torch.where(lse == -torch.inf, F.dropout(torch.ones_like(lse), dropout) * value, out)
    score = (q * key).sum(-1, keepdim=True) + (0.0 if dedup else math.log(len(plan.rounds)))
    weight = (score - lse).sigmoid()
    return out * (1 - weight) + F.dropout(weight, dropout) * value


def _of_queries(x: Tensor, queries: int) -> Tensor:
    """Rows of the tokens of the last L queries; 0 if a query has no token (L > S)."""
    before = x.shape[2] - queries
    return x[:, :, before:] if before >= 0 else F.pad(x, (0, 0, -before, 0))


def pair_counts(plan: Plan, keys: int) -> Tensor:
    """Number of rounds in which each query sees each key, without its own if the plan says so, [B·H·L, S]."""
    counts = torch.zeros(plan.rounds[0].low.numel(), keys, device=plan.keys.device)
    steps = torch.arange(plan.width, device=plan.keys.device)
    for each in plan.rounds:
        seen = steps < each.room[:, None]
        entries = each.order[(each.low[:, None] + steps).where(seen, torch.zeros_like(steps))]
        seen = seen if plan.own is None else seen & (entries != plan.own[:, None])
        counts.scatter_add_(1, plan.keys[entries] % keys, seen.to(counts))
    return counts


def dense_union(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, own: str, scale: float, dedup: bool, dropout: float
) -> Tensor:
    """`softmax(s_ij + log C_ij) V`, 0 for a query without keys.

    Args: q [B, H, L, D], k [B, H, S, D], v [B, H, S, E]. Returns [B, H, L, E].
    """
    length, keys = q.shape[2], k.shape[2]
    counts = pair_counts(plan, keys).view(*q.shape[:3], keys)
    if own != "as any other":
        position = torch.arange(keys - length, keys, device=q.device)
        diagonal = (position[:, None] == torch.arange(keys, device=q.device)).to(counts)
        alone = (counts == 0).all(-1, keepdim=True) if own == "last resort" else torch.ones_like(counts[..., :1])
        counts = counts + diagonal * alone * len(plan.rounds)
    counts = counts.clamp(max=1) if dedup else counts
    reached = (counts > 0).any(-1, keepdim=True)
    scores = (q @ k.transpose(-2, -1)) * scale + counts.to(q).log()
    weights = scores.masked_fill(~reached, 0.0).softmax(-1).masked_fill(~reached, 0.0)
    return F.dropout(weights, dropout) @ v


# Tokens of all heads sorted together on a CPU: the tables of more do not fit into its caches.
_TOGETHER = 2**16


def lsh_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    projections: Tensor,
    variant: str,
    cluster: int,
    buckets: int = 1,
    dedup: bool,
    causal: bool,
    scale: float,
    dropout: float = 0.0,
    dense: bool = False,
    notes: dict[str, Tensor] | None = None,
) -> Tensor:
    """The op of this name in `api.py`, which explains the arguments and checks them.

    With `dense` all pairs exist at a time. Only C uses the notes.
    """
    heads, length, keys = q.shape[1], q.shape[2], k.shape[2]
    k, v = k.to(q.dtype), v.to(q.dtype)
    with without_autocast(q.device.type):
        if is_exact(length, keys, variant=variant, cluster=cluster, causal=causal):
            return exact_attention(q, k, v, key_mask, causal=causal, scale=scale, dropout=dropout)
        how = {"projections": projections, "variant": variant, "cluster": cluster}
        make = partial(bucket_plan, **how) if causal else partial(cluster_plan, **how, buckets=buckets)
        union = partial(
            dense_union if dense or without_functions() else tile_union,
            **{"own": own_key(variant, causal), "scale": scale, "dedup": dedup, "dropout": dropout},
        )
        wide = torch.promote_types(q.dtype, torch.float32)
        together = max(1, _TOGETHER // (q.shape[0] * keys)) if q.device.type == "cpu" else heads

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k = unit_keys(q, k) if variant == "shared" else k
            outputs = []
            for part in zip(*(x.split(together, 1) for x in (q, k, v)), strict=True):
                with torch.no_grad():
                    plan = make(*part[:2], key_mask)
                outputs.append(union(*part, plan))
            return torch.cat(outputs, 1)

        out = in_turns(attend, *(x.to(wide) for x in blank_padding(q, k, v, key_mask)))
        return without_padded_queries(out, key_mask, keys, causal=causal).to(q.dtype)


def lsh_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    exactly: Exactly,
    weight: Tensor,
    projections: Tensor,
    cluster: int,
) -> tuple[Part, Part]:
    """Softmax attention to near keys, and to those of the others that hashing places near a query, to join under one normaliser.

    Only of the asymmetric variant. A pair counts once, in however many rounds it meets. A causal query sees itself only
    through its window.

    Args: as for `lsh_attention`, except:
        exactly: Which keys are near, whether the form is causal, and the scale of scores.
        weight: Logarithm of each head's factor of far keys, [H]; queries that see all real keys anyway have none.

    Returns:
        The near keys and the others, in at least float32.

    Raises:
        ValueError: if shapes or dtypes do not match.
    """
    check_part("weight", weight, q, q.shape[1])
    lifted = 2 * (not exactly.causal)
    check_part("projections", projections, q, "rounds", q.shape[3] + lifted, 1 if lifted else "columns")
    check_least("cluster", cluster, 1)
    causal, length, keys = exactly.causal, q.shape[2], k.shape[2]
    q, k, v = blank_padding(q, k.to(q.dtype), v.to(q.dtype), key_mask)
    with without_autocast(q.device.type):
        near = near_keys(q, k, v, key_mask, exactly)
        wide = torch.promote_types(q.dtype, torch.float32)
        how = {"projections": projections, "variant": "asymmetric", "cluster": cluster}
        make = partial(bucket_plan if causal else cluster_plan, key_mask=key_mask, **how)
        out, log = parts_in_turns(partial(_far, make=make, exactly=exactly), *(x.to(wide) for x in (q, k, v)))
        real = torch.ones_like(k[:, 0, :, 0], dtype=torch.bool) if key_mask is None else key_mask
        if causal:
            few = F.pad(real.cumsum(1), (max(length - keys, 0), 0))[:, -length:] <= 2 * cluster
        else:
            few = real.sum(1, keepdim=True).clamp(min=0 if length == keys else length) <= cluster
        weights, nothing = weight.to(wide)[:, None] * ~few[:, None], log == -torch.inf
        return Part(near.out, near.log.to(wide)), Part(out, torch.where(nothing, lowest(wide), log + weights))


def _far(q: Tensor, k: Tensor, v: Tensor, *, make: Callable[..., Plan], exactly: Exactly) -> Part:
    """Attention to the keys that `make` shows to queries and that are not near; the logarithm is -inf for none."""
    together = max(1, _TOGETHER // (q.shape[0] * k.shape[2])) if q.device.type == "cpu" else q.shape[1]
    attend, parts = _dense_far if without_functions() else _tiled_far, []
    for queries, keys, values in zip(*(x.split(together, 1) for x in (q, k, v)), strict=True):
        with torch.no_grad():
            plan = make(queries, keys)._replace(hidden=Hidden.of(queries, keys, exactly))
        parts.append(attend(queries * exactly.scale, keys, values, plan))
    return Part(*(torch.cat(each, 1) for each in zip(*parts, strict=True)))


def _tiled_far(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    queries, keys, values = (x.reshape(-1, x.shape[-1]) for x in (q, k, v))
    out, log = tile_attention(queries, keys, values, plan, dropout=0.0, dedup=True)
    return out.view(*q.shape[:3], -1), log.view(q.shape[:3])


def _dense_far(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """The same with the scores of all pairs at a time."""
    assert plan.hidden is not None, "near keys are hidden"
    members, rows = (torch.arange(x.shape[:3].numel(), device=q.device).view(-1, x.shape[2]) for x in (q, k))
    met = pair_counts(plan, k.shape[2]).view(*q.shape[:3], -1) > 0
    met = met & ~plan.hidden.among(members, rows).view_as(met)
    nothing = ~met.any(-1, keepdim=True)
    scores = (q @ k.mT).masked_fill(~met, -torch.inf).masked_fill(nothing, 0.0)
    log = scores.logsumexp(-1).masked_fill(nothing[..., 0], -torch.inf)
    return scores.softmax(-1).masked_fill(nothing, 0.0) @ v, log


def is_exact(length: int, keys: int, *, variant: str, cluster: int, causal: bool) -> bool:
    """Whether every query sees all keys anyway."""
    return variant == "asymmetric" and max(length, keys) <= (2 * cluster if causal else cluster)


def own_key(variant: str, causal: bool) -> str:
    """When a query sees the key of its own token: as any other, always, or as a last resort."""
    return "last resort" if variant == "shared" else "always" if causal else "as any other"


def without_padded_queries(out: Tensor, key_mask: Tensor | None, keys: int, *, causal: bool) -> Tensor:
    """Outputs [B, H, L, E] with 0 for queries that are padding by the mask of S keys."""
    length = out.shape[2]
    if key_mask is None or not (causal or length == keys):
        return out
    # A query without a position (L > S) sees nothing anyway.
    real = key_mask[:, max(keys - length, 0) :]
    return out.masked_fill(~F.pad(real, (length - real.shape[1], 0))[:, None, :, None], 0.0)
