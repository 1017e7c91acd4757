"""Attention of each block of queries to whole blocks of keys."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from approx_kernels.runtime.sdpa import sdpa
from approx_kernels.runtime.torch_internals import changes
from approx_kernels.tokens.shapes import check_draw, check_least
from approx_kernels.tokens.stretches import stretches

# Query blocks with their own draws; later blocks reuse them.
_DRAWN_BLOCKS = 1024
# Cached lists by draws, for a limited number of block counts each.
_LISTS = WeakTensorKeyDictionary()
_KEPT = 64


def neighbour_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    size: int,
    neighbours: int,
    shift: int,
    causal: bool,
    scale: float,
    dropout: float,
) -> Tensor:
    """Fused attention of each block to one stretch of keys: its own and the neighbouring blocks."""
    keys, before = k.shape[2], k.shape[2] - q.shape[2]

    def edge(block: int) -> int:
        return min(max(block * size - shift, 0), keys)

    after = 0 if causal else neighbours
    numbers = range((before + shift) // size, (keys - 1 + shift) // size + 1)
    rows = q.split([edge(b + 1) - max(edge(b), before) for b in numbers], 2)
    bounds = [(edge(b - neighbours), edge(b + after + 1)) for b in numbers]
    out = []
    for queries, stretch, values in zip(rows, stretches(k, bounds), stretches(v, bounds), strict=True):
        # Causal queries are the last tokens of their stretch.
        shape = queries.shape[2], stretch.shape[2]
        past = q.new_ones(shape, dtype=torch.bool).tril(shape[1] - shape[0]) if causal else None
        out.append(sdpa(queries, stretch, values, attn_mask=past, dropout_p=dropout, scale=scale))
    return torch.cat(out, 2)


def listed_blocks(
    q: Tensor, k: Tensor, v: Tensor, *, size: int, lists: Sequence[Sequence[int]], scale: float, dropout: float
) -> Tensor:
    """Fused attention of each block to the listed blocks of keys, concatenated; an empty list means all keys."""
    first = (k.shape[2] - q.shape[2]) // size
    head = min(size - (k.shape[2] - q.shape[2]) % size, q.shape[2])
    rows = q[:, :, :head], *(q[:, :, head:].split(size, 2) if head < q.shape[2] else ())
    keys, values = k.split(size, 2), v.split(size, 2)
    out = []
    for queries, chosen in zip(rows, lists[first:], strict=True):
        own = (torch.cat([x[b] for b in chosen], 2) for x in (keys, values)) if chosen else (k, v)
        out.append(sdpa(queries, *own, dropout_p=dropout, scale=scale))
    return torch.cat(out, 2)


def draw_blocks(random: int, seed: int) -> Tensor:
    """Numbers that choose the random blocks of each query block, [blocks, random], int64."""
    check_draw(seed)
    check_least("random", random, 0)
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(2**31, (_DRAWN_BLOCKS, random), generator=generator, device="cpu")


def bigbird_lists(blocks: int, draws: Tensor, compatible: bool) -> Sequence[Sequence[int]]:
    """Ascending blocks of keys for each block of queries; empty for those that see all: the first and the last.

    Lists are cached, since the next call probably needs the same ones.

    Args:
        blocks: Number of blocks.
        draws: The result of `draw_blocks`.
        compatible: Whether all random blocks repeat the first block, which is then listed that many more times.
    """
    count = changes(draws)
    if count is None:
        # Without a version counter a cached list might be stale.
        return _lists(blocks, draws, compatible)
    known = _LISTS.get(draws)
    if known is None:
        known = _LISTS[draws] = {}
    lists = known.get(key := (blocks, compatible, count))
    if lists is None:
        if len(known) >= _KEPT:
            known.clear()
        lists = known[key] = _lists(blocks, draws, compatible)
    return lists


def _lists(blocks: int, draws: Tensor, compatible: bool) -> list[list[int]]:
    rows = torch.arange(1, max(blocks - 1, 1), device="cpu")
    seen = torch.stack([0 * rows, rows - 1, rows, rows + 1, 0 * rows + blocks - 1], 1)
    # Duplicates, and draws for which no unseen block is left, get a number beyond all blocks.
    beyond = 2**40
    seen = seen.masked_fill(F.pad(seen.diff() == 0, (1, 0)), beyond).sort(1).values
    for numbers in () if compatible else draws.cpu()[rows % len(draws)].unbind(1):
        left = blocks - (seen < beyond).sum(1)
        # The draw's index among the unseen blocks; it moves past the seen blocks before it.
        other = numbers % left.clamp(min=1)
        other = other + (seen - torch.arange(seen.shape[1], device="cpu") <= other[:, None]).sum(1)
        seen = torch.cat([seen, other.masked_fill(left == 0, beyond)[:, None]], 1).sort(1).values
    again = [0] * draws.shape[1] if compatible else []
    between = [again + [block for block in listed if block < beyond] for listed in seen.tolist()]
    return [[], *between, []][:blocks]
