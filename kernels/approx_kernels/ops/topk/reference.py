"""Exact top-k attention, one block of queries after another."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.runtime.pytorch import without_autocast
from approx_kernels.tokens import blank_padding, in_turns

# Queries whose scores exist at a time.
_BLOCK = 64


def topk_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    topk: int,
    causal: bool,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """The op of this name in `api.py`, which explains the arguments and checks them."""
    how = {"topk": topk, "causal": causal, "scale": scale, "dropout": dropout}
    return in_turns(partial(topk_blocks, key_mask=key_mask, **how), q, k, v)


def topk_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    *,
    topk: int,
    causal: bool,
    scale: float,
    dropout: float,
) -> Tensor:
    """Scores of a block, softmax over the largest of each row, and a dense product with the values."""
    wide = torch.promote_types(q.dtype, torch.float32)
    keys, offset = k.shape[2], k.shape[2] - q.shape[2]
    lowest = torch.finfo(wide).min
    q, k, v = blank_padding(q, k, v, key_mask)
    # In an exported program the number of blocks cannot depend on the length.
    whole = torch.compiler.is_exporting()
    size = q.shape[2] if whole else _BLOCK
    kept: Any = torch.sym_min(topk, keys) if whole else min(topk, keys)
    out = []
    with without_autocast(q.device.type):
        queries, k, v = q.to(wide) * scale, k.to(wide), v.to(wide)
        position = torch.arange(keys, device=q.device)
        for first in (0,) if whole else range(0, q.shape[2], size):
            block = queries[:, :, first : first + size]
            allowed = None if key_mask is None else key_mask[:, None, None, :]
            if causal:
                own = torch.arange(first, first + block.shape[2], device=q.device)[:, None] + offset
                allowed = position <= own if allowed is None else allowed & (position <= own)
            scores = block @ k.transpose(-2, -1)
            scores = scores if allowed is None else scores.masked_fill(~allowed, lowest)
            largest = scores.topk(kept, sorted=False)
            weights = torch.zeros_like(scores).scatter(-1, largest.indices, largest.values.softmax(-1))
            # Forbidden keys are chosen only if nothing else is left.
            weights = weights if allowed is None else weights.masked_fill(~allowed, 0.0)
            out.append((F.dropout(weights, dropout) @ v).to(q.dtype))
    return torch.cat(out, 2)
