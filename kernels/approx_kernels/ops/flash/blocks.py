"""Lists of blocks: the tiles of keys for each tile of queries, and which of their pairs count."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# A row of a tile is one word of bits.
WIDEST = 64
# Pairs examined together while building a list.
_PAIRS = 2**24


class BlockList(NamedTuple):
    """Which pairs of queries and keys count, tile by tile, as built by `block_list`.

    Attributes:
        tile: Queries, and keys, per tile: at most 64.
        queries: L.
        keys: S.
        rows: [G, ⌈L / tile⌉, 3] int32: for each tile of queries, where its entries begin, where its partial entries
            begin, and where its entries end. G is 1, or H if heads differ.
        columns: [entries] int32, tiles of keys.
        tiles: [entries] int32, rows of `bits`; -1 where all pairs count.
        rows_of_keys: As `rows`, for each tile of keys.
        columns_of_keys: As `columns`, tiles of queries.
        tiles_of_keys: As `tiles`.
        bits: [tiles that differ, 64] int64: bit j of word i says whether query i of a tile sees its key j.
    """

    tile: int
    queries: int
    keys: int
    rows: Tensor
    columns: Tensor
    tiles: Tensor
    rows_of_keys: Tensor
    columns_of_keys: Tensor
    tiles_of_keys: Tensor
    bits: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that the kernels read."""
        return list(self[3:])

    def counts(self) -> Tensor:
        """How often each pair counts, [G, L, S] int32."""
        heads, down, _ = self.rows.shape
        across, size = -(-self.keys // self.tile), self.tile
        counts = self.rows.new_zeros(heads, down, across, size, size)
        place = torch.arange(size, device=self.bits.device)
        shown = ((self.bits[:, :size, None] >> place) & 1).int()
        for head in range(heads):
            for row, (begin, _, end) in enumerate(self.rows[head].tolist()):
                for column, tile in zip(self.columns[begin:end].tolist(), self.tiles[begin:end].tolist(), strict=True):
                    counts[head, row, column] += 1 if tile < 0 else shown[tile]
        whole = counts.transpose(2, 3).reshape(heads, down * size, across * size)
        return whole[:, : self.queries, : self.keys]


def block_list(
    pairs: Callable[[Tensor, Tensor], Tensor],
    queries: int,
    keys: int,
    *,
    tile: int,
    device: torch.device | str = "cpu",
    first: int | None = None,
    diagonal: bool = True,
) -> BlockList:
    """Build the list of blocks of a pattern, in O(L S), some rows at a time.

    Args:
        pairs: From positions of queries [n, 1] and of keys [S] to whether, or how often, each pair counts: [n, S] or,
            if heads differ, [H, n, S], bool or int.
        queries: L, at least 1.
        keys: S, at least 1.
        tile: Queries, and keys, per tile, a power of 2 from 16 to 64.
        device: Device of the list.
        first: Position of the first query; None for S - L.
        diagonal: Whether every query must see the key of its own token.

    Raises:
        ValueError: if a query does not see its own key but must, or a number is wrong.
    """
    if tile not in (16, 32, WIDEST):
        raise ValueError(f"tile is {tile}; allowed are 16, 32 and {WIDEST}.")
    if queries < 1 or keys < 1:
        raise ValueError(
            f"A block list of {queries} queries and {keys} keys was asked for; expected at least 1 of each."
        )
    first_query = keys - queries if first is None else first
    position = torch.arange(keys, device=device)
    down, across = -(-queries // tile), -(-keys // tile)
    step = max(1, _PAIRS // (tile * keys))
    entries, words = [], []
    for begin in range(0, down, step):
        rows = torch.arange(begin * tile, min((begin + step) * tile, queries), device=device)[:, None] + first_query
        counts = pairs(rows, position)
        counts = counts if counts.dim() == 3 else counts[None]
        if diagonal:
            _check_diagonal(counts, rows)
        below, right = -rows.shape[0] % tile, across * tile - keys
        counts = torch.nn.functional.pad(counts.int(), (0, right, 0, below))
        counts = counts.unflatten(2, (across, tile)).unflatten(1, (-1, tile)).transpose(2, 3)
        for times in range(int(counts.max())):
            shown = counts > times
            packed = (shown.long() << torch.arange(tile, device=device)).sum(-1)
            head, row, column = shown.any(-1).any(-1).nonzero().unbind(1)
            partial = ~shown.all(-1).all(-1)[head, row, column]
            entries.append(torch.stack([head, row + begin, column, partial.long()]))
            words.append(packed[head, row, column])
    head, row, column, partial = torch.cat(entries, 1)
    distinct, number = torch.cat(words)[partial.bool()].unique(dim=0, return_inverse=True)
    tiles = torch.full_like(head, -1).masked_scatter_(partial.bool(), number)
    heads = counts.shape[0]
    return BlockList(
        tile,
        queries,
        keys,
        *_sorted(head, row, column, partial, tiles, heads, down),
        *_sorted(head, column, row, partial, tiles, heads, across),
        torch.nn.functional.pad(distinct, (0, WIDEST - tile, 0, int(not len(distinct)))).contiguous(),
    )


def _sorted(
    head: Tensor, row: Tensor, column: Tensor, partial: Tensor, tiles: Tensor, heads: int, down: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Entries row by row, whole tiles first, and for each row the begin, the begin of partial tiles, and the end."""
    group = (head * down + row) * 2 + partial
    order = (group * (int(column.max()) + 1) + column).argsort(stable=True)
    edges = torch.nn.functional.pad(group.bincount(minlength=heads * down * 2).cumsum(0), (1, 0))
    rows = torch.stack([edges[:-1:2], edges[1::2], edges[2::2]], 1).view(heads, down, 3)
    return rows.int(), column[order].int(), tiles[order].int()


def _check_diagonal(counts: Tensor, rows: Tensor) -> None:
    """Check that every query that has its own key sees it."""
    own = rows.clamp(0, counts.shape[2] - 1).expand(counts.shape[0], -1, 1)
    blind = (counts.gather(2, own) == 0) & (rows == own)
    if blind.any():
        place = int(rows[blind.any(0)][0])
        raise ValueError(
            f"The pattern does not let the query at position {place} see its own key; every row must hold its diagonal. "
            "Add it, or say diagonal=False where another part of the pattern has it."
        )
