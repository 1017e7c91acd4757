"""Attention of each block of queries to a window and to chosen tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.runtime.sdpa import sdpa
from approx_kernels.tokens.grouped import sharing
from approx_kernels.tokens.stretches import stretches

# Queries that share their keys: a balance between computing outside the window and copying.
_BLOCK = 64


def places(tokens: Sequence[int] | Tensor, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Positions of the chosen tokens, [G] for all samples or [B, G] for each, and which of them are valid.

    Samples choose different numbers of tokens; G is the largest of them.
    """
    if not isinstance(tokens, Tensor):
        index = torch.tensor([token for token in tokens if token < keys], dtype=torch.long, device=device)
        return index, torch.ones_like(index, dtype=torch.bool)
    counts = tokens.sum(1, keepdim=True)
    most = int(counts.max())
    index = tokens.to(torch.int8).sort(stable=True, dim=1, descending=True).indices[:, :most]
    return index, torch.arange(most, device=device) < counts


def window_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    left: int,
    right: int,
    chosen: tuple[Tensor, Tensor] | None = None,
    causal: bool,
    scale: float,
    dropout: float,
) -> Tensor:
    """One fused product per block: the chosen tokens outside of each query's window, and its stretch of keys.

    `chosen` is the result of `places`, or None.
    """
    length, keys = q.shape[2], k.shape[2]
    before = keys - length
    index, counts = places((), keys, q.device) if chosen is None else chosen
    beside = [_at(x, index) for x in (k, v)]
    bounds = [
        (max(first + before - left, 0), min(first + before + _BLOCK + right, keys))
        for first in range(0, length, _BLOCK)
    ]
    blocks = zip(q.split(_BLOCK, 2), bounds, stretches(k, bounds), stretches(v, bounds), strict=True)
    out = []
    for number, (queries, (begin, end), *own) in enumerate(blocks):
        position = torch.arange(queries.shape[2], device=q.device)[:, None] + (before + number * _BLOCK)
        allowed = _within(torch.arange(begin, end, device=q.device), position, left, right)
        if index.shape[-1]:
            far = counts[..., None, :] & ~_within(index[..., None, :], position, left, right)
            far = far & (index[..., None, :] <= position) if causal else far
            allowed = torch.cat([far, allowed.expand(*far.shape[:-1], -1)], -1)
            own = [torch.cat(pair, 2) for pair in zip(beside, own, strict=True)]
        # One mask for all samples, or one per sample; always the same for all heads.
        allowed = allowed[:, None] if allowed.dim() == 3 else allowed
        out.append(sdpa(queries, *own, attn_mask=allowed, dropout_p=dropout, scale=scale))
    return torch.cat(out, 2)


def seeing_rows(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    chosen: tuple[Tensor, Tensor],
    causal: bool,
    scale: float,
    dropout: float,
) -> Tensor:
    """The outputs, with those of the chosen tokens replaced by exact attention over all keys."""
    length, keys = q.shape[2], k.shape[2]
    before = keys - length
    index, counts = chosen
    if not index.shape[-1]:
        return out
    past = torch.arange(keys, device=q.device) <= index[..., None] if causal else None
    past = past[:, None] if past is not None and past.dim() == 3 else past
    queries = _at(q, (index - before).clamp(min=0))
    how = {"dropout_p": dropout, "scale": scale, "enable_gqa": sharing(q, k) > 1}
    exact = sdpa(queries, k, v, attn_mask=past, **how)
    # Non-queries, and fillers for samples with fewer chosen tokens, go to an extra last row that is cut off.
    rows = torch.where(counts & (index >= before), index - before, length)
    rows = rows[..., None, :, None].expand_as(exact)
    return F.pad(out, (0, 0, 0, 1)).scatter(2, rows, exact)[:, :, :length]


def _within(key: Tensor, position: Tensor, left: int, right: int) -> Tensor:
    return (key >= position - left) & (key <= position + right)


def _at(x: Tensor, index: Tensor) -> Tensor:
    """Tokens of x [B, H, n, D] at [G] or [B, G], [B, H, G, D]."""
    if index.dim() == 1:
        return x.index_select(2, index)
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
