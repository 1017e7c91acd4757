"""Attention of each block of queries to a window and to chosen tokens beside it."""

from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.tokens import stretches

# Queries that share their keys: little outside of the window is computed, and little is copied.
_BLOCK = 64


def window_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    left: int,
    right: int,
    tokens: Sequence[int] = (),
    causal: bool,
    scale: float,
    dropout: float,
) -> Tensor:
    """One fused product a block: its stretch of keys between the chosen tokens before and after the stretch."""
    length, keys = q.shape[2], k.shape[2]
    before = keys - length
    tokens = [token for token in tokens if token < keys]
    chosen = torch.zeros(keys, dtype=torch.bool, device=q.device)
    index = torch.tensor(tokens, dtype=torch.long, device=q.device)
    chosen[index] = True
    beside = [x.index_select(2, index) for x in (k, v)]
    bounds = [
        (max(first + before - left, 0), min(first + before + _BLOCK + right, keys))
        for first in range(0, length, _BLOCK)
    ]
    blocks = zip(q.split(_BLOCK, 2), bounds, stretches(k, bounds), stretches(v, bounds), strict=True)
    out = []
    for number, (queries, (begin, end), *own) in enumerate(blocks):
        position = torch.arange(queries.shape[2], device=q.device)[:, None] + (before + number * _BLOCK)
        seen = torch.arange(begin, end, device=q.device)
        allowed = (seen >= position - left) & (seen <= position + right) | chosen[begin:end]
        allowed = allowed & (seen <= position) if causal else allowed
        earlier, later = bisect_left(tokens, begin), len(tokens) if causal else bisect_left(tokens, end)
        if earlier or later < len(tokens):
            own = [torch.cat([x[:, :, :earlier], y, x[:, :, later:]], 2) for x, y in zip(beside, own, strict=True)]
            allowed = F.pad(allowed, (earlier, len(tokens) - later), value=True)
        out.append(F.scaled_dot_product_attention(queries, *own, attn_mask=allowed, dropout_p=dropout, scale=scale))
    return torch.cat(out, 2)


def seeing_rows(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    tokens: Sequence[int],
    causal: bool,
    scale: float,
    dropout: float,
) -> Tensor:
    """The outputs with those of the chosen tokens exchanged for exact attention over all keys."""
    keys, before = k.shape[2], k.shape[2] - q.shape[2]
    positions = torch.tensor([token for token in tokens if before <= token < keys], device=q.device)
    if not positions.numel():
        return out
    rows = positions - before
    past = torch.arange(keys, device=q.device) <= positions[:, None] if causal else None
    queries = q.index_select(2, rows)
    exact = F.scaled_dot_product_attention(queries, k, v, attn_mask=past, dropout_p=dropout, scale=scale)
    return out.index_copy(2, rows, exact)
