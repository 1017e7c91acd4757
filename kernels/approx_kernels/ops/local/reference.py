"""Local attention: each block of queries against the keys in its reach."""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.runtime.pytorch import sdpa
from approx_kernels.tokens import blank_padding, in_turns, stretches

# Small enough to compute little outside the window, large enough to keep a fused kernel busy.
_BLOCK = 64


def local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    left: int,
    right: int,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """The op of this name in `api.py`, which explains the arguments and checks them."""
    attend = partial(local_blocks, key_mask=key_mask, left=left, right=right, scale=scale, dropout=dropout)
    return in_turns(attend, q, k, v)


def local_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    *,
    left: int,
    right: int,
    scale: float,
    dropout: float,
) -> Tensor:
    """Fused exact attention between a block of queries and its stretch of keys, under the window's mask."""
    q, k, v = blank_padding(q, k, v, key_mask)
    if torch.compiler.is_exporting():
        return _all_blocks(q, k, v, key_mask, left=left, right=right, scale=scale, dropout=dropout)
    before = k.shape[2] - q.shape[2]
    if before < 0:
        # Queries that precede all keys: a mask gives them masked keys, so that they need no special case.
        key_mask = k.new_ones(k.shape[0], k.shape[2], dtype=torch.bool) if key_mask is None else key_mask
        k, v, key_mask = F.pad(k, (0, 0, -before, 0)), F.pad(v, (0, 0, -before, 0)), F.pad(key_mask, (-before, 0))
    length, keys = q.shape[2], k.shape[2]
    # Beyond the sequence there is nothing to reach.
    left, right = min(left, keys), min(right, keys)
    starts = range(keys - length, keys, _BLOCK)
    bounds = [(max(first - left, 0), min(first + _BLOCK + right, keys)) for first in starts]
    row = torch.arange(_BLOCK, device=q.device)[:, None]
    column = torch.arange(_BLOCK + left + right, device=q.device)
    # Every block has the same band, except where the sequence ends.
    band = (column >= row) & (column <= row + left + right)
    out = []
    blocks = zip(starts, bounds, q.split(_BLOCK, 2), stretches(k, bounds), stretches(v, bounds), strict=True)
    for first, (begin, end), queries, own, values in blocks:
        cut = begin - (first - left)
        allowed = band[: queries.shape[2], cut : cut + end - begin]
        if key_mask is not None:
            allowed = allowed & key_mask[:, None, None, begin:end]
        out.append(_masked_attention(queries, own, values, allowed, scale, dropout, key_mask is not None))
    return torch.cat(out, 2)


def _all_blocks(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, left: int, right: int, scale: float, dropout: float
) -> Tensor:
    """The same for all blocks at once, since the number of steps of an exported program cannot depend on the length.

    There are at least as many keys as queries.
    """
    batch, heads, length, _ = q.shape
    # With one block more than needed there are always several; a program for several does not take a single one.
    keys, blocks = k.shape[2], (length + _BLOCK - 1) // _BLOCK + 1
    end = blocks * _BLOCK - length
    reach = torch.arange(_BLOCK + left + right, device=q.device)
    # Positions in the padded keys, [blocks, reach].
    places = torch.arange(blocks, device=q.device)[:, None] * _BLOCK + (keys - length) + reach
    real = k.new_ones(batch, keys, dtype=torch.bool) if key_mask is None else key_mask
    real = F.pad(real, (left, right + end))[:, places]
    own, values = (F.pad(x, (0, 0, left, right + end))[:, :, places] for x in (k, v))
    queries = F.pad(q, (0, 0, 0, end)).reshape(batch, heads, blocks, _BLOCK, q.shape[3])
    queries, own, values = (x.transpose(1, 2).flatten(0, 1) for x in (queries, own, values))
    row = torch.arange(_BLOCK, device=q.device)[:, None]
    band = (reach >= row) & (reach <= row + left + right)
    allowed = band & real.flatten(0, 1)[:, None, None, :]
    out = _masked_attention(queries, own, values, allowed, scale, dropout, True)
    out = out.reshape(batch, blocks, heads, _BLOCK, v.shape[3]).transpose(1, 2)
    return out.reshape(batch, heads, blocks * _BLOCK, v.shape[3])[:, :, :length]


def _masked_attention(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float, dropout: float, may_miss: bool
) -> Tensor:
    if not may_miss:
        return sdpa(q, k, v, attn_mask=allowed, dropout_p=dropout, scale=scale)
    # Kernels disagree on rows without an allowed key, so these see everything and are set to 0 afterwards.
    missed = ~allowed.any(-1, keepdim=True)
    mask = allowed | missed
    out = sdpa(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
    return out.masked_fill(missed, 0.0)
