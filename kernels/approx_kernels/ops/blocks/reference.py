"""Attention of each block of queries to whole blocks of keys, in plain PyTorch."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from approx_kernels.ops.patterns.reference import bigbird_lists, draw_blocks
from approx_kernels.runtime.pytorch import sdpa
from approx_kernels.tokens import in_turns, stretches, without_padding

__all__ = ["bigbird_attention", "bigbird_lists", "block_attention", "draw_blocks"]


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    size: int,
    neighbours: int,
    shift: int,
    causal: bool,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """The op of this name in `api.py`, which explains the arguments and checks them."""
    how = {"size": size, "neighbours": neighbours, "shift": shift, "causal": causal, "scale": scale, "dropout": dropout}
    attend = partial(in_turns, partial(neighbour_blocks, **how))
    return without_padding(attend, q, k, v, key_mask)


def bigbird_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    block: int,
    draws: Tensor,
    compatible: bool = False,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """The op of this name in `api.py`, which explains the arguments and checks them."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lists = bigbird_lists(-(-k.shape[2] // block), draws, compatible)
        return in_turns(partial(listed_blocks, size=block, lists=lists, scale=scale, dropout=dropout), q, k, v)

    return without_padding(attend, q, k, v, key_mask)


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
