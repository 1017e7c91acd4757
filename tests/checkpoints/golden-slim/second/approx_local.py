# Travels with a checkpoint converted by approx (Apache-2.0); it needs torch and transformers, and nothing else.
"""Attention within a sliding window."""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from .approx_runtime import sdpa
from .approx_tokens import blank_padding, check_form, check_least, check_shapes, in_turns, stretches

# Local attention: each block of queries against the keys in its reach.

# Small enough to compute little outside the window, large enough to keep a fused kernel busy.
_BLOCK = 64


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
    """Softmax attention of each query over the keys around it, in O(L (left + right) D), never through L x S.

    Query i is at position p = S - L + i and sees the keys from p - left to p + right, both inclusive;
    causal is right = 0. A query with no allowed key gives 0.

    Source: Beltagy, Peters, Cohan, 2020, Longformer, arXiv 2004.05150; departs from it in having no global
    tokens.

    Args:
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
        key_mask: [B, S] bool, True at real keys; None when all are real.
        left: Keys seen before the query.
        right: Keys seen after the query.
        scale: Factor of the scores.
        dropout: Probability of dropping an attention weight.

    Returns:
        [B, H, L, E] in the dtype of q.

    Raises:
        ValueError: if shapes or dtypes do not match.
    """
    check_shapes(q, k, v, key_mask)
    check_form(scale, dropout)
    # A window may be said to be as wide as any input.
    check_least("left", left, 0, 2**48)
    check_least("right", right, 0, 2**48)
    attend = partial(local_blocks, key_mask=key_mask, left=left, right=right, scale=scale, dropout=dropout)
    return in_turns(attend, q, k, v)
