"""Attention of each block of queries to whole blocks of keys."""

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.tokens import stretches

# Query blocks with draws of their own; beyond, the draws of the first ones serve again.
_DRAWN_BLOCKS = 1024


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
        out.append(
            F.scaled_dot_product_attention(queries, stretch, values, attn_mask=past, dropout_p=dropout, scale=scale)
        )
    return torch.cat(out, 2)


def listed_blocks(
    q: Tensor, k: Tensor, v: Tensor, *, size: int, lists: list[list[int]], scale: float, dropout: float
) -> Tensor:
    """Fused attention of each block to the blocks of keys on its list, side by side; an empty list is all keys."""
    first = (k.shape[2] - q.shape[2]) // size
    head = min(size - (k.shape[2] - q.shape[2]) % size, q.shape[2])
    rows = q[:, :, :head], *(q[:, :, head:].split(size, 2) if head < q.shape[2] else ())
    keys, values = k.split(size, 2), v.split(size, 2)
    out = []
    for queries, chosen in zip(rows, lists[first:], strict=True):
        own = (torch.cat([x[b] for b in chosen], 2) for x in (keys, values)) if chosen else (k, v)
        out.append(F.scaled_dot_product_attention(queries, *own, dropout_p=dropout, scale=scale))
    return torch.cat(out, 2)


def draw_blocks(random: int, seed: int) -> Tensor:
    """Numbers that choose the random blocks of each query block, [blocks, random], int64."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(2**31, (_DRAWN_BLOCKS, random), generator=generator, device="cpu")


def bigbird_lists(blocks: int, draws: Tensor) -> list[list[int]]:
    """Blocks of keys of each block of queries, sorted; empty for those that see all: the first and the last.

    Args:
        blocks: Number of blocks.
        draws: What `draw_blocks` returned.
    """
    drawn = draws[:blocks].tolist()
    lists: list[list[int]] = []
    for block in range(blocks):
        seen = {0, max(block - 1, 0), block, min(block + 1, blocks - 1), blocks - 1}
        for number in drawn[block % len(drawn)]:
            if len(seen) < blocks:
                # One of the blocks that are not seen yet, by its number among them.
                other = number % (blocks - len(seen))
                for known in sorted(seen):
                    other += other >= known
                seen.add(other)
        lists.append([] if block in (0, blocks - 1) else sorted(seen))
    return lists
