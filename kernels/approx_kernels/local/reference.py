"""Local attention, one block of queries after another against the keys that it can reach."""

import torch
from torch import Tensor
from torch.nn import functional as F

# Small enough that little outside of the window is computed, large enough to keep a fused kernel busy.
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
    length, keys = q.shape[2], k.shape[2]
    offset = keys - length
    out = []
    for first in range(0, length, _BLOCK):
        last = min(first + _BLOCK, length)
        # At least one key, allowed or not: a query before all keys (L > S) has an empty stretch otherwise.
        begin = min(max(first + offset - left, 0), keys - 1)
        end = max(min(last + offset + right, keys), begin + 1)
        own = torch.arange(first + offset, last + offset, device=q.device)[:, None]
        seen = torch.arange(begin, end, device=q.device)
        allowed = (seen >= own - left) & (seen <= own + right)
        if key_mask is not None:
            allowed = allowed & key_mask[:, None, None, begin:end]
        block = q[:, :, first:last], k[:, :, begin:end], v[:, :, begin:end]
        out.append(_masked_attention(*block, allowed, scale, dropout, offset < 0 or key_mask is not None))
    return torch.cat(out, 2)


def _masked_attention(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float, dropout: float, may_miss: bool
) -> Tensor:
    if not may_miss:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, dropout_p=dropout, scale=scale)
    # Kernels disagree on a row without any allowed key, so it sees everything and is then set to 0.
    missed = ~allowed.any(-1, keepdim=True)
    mask = allowed | missed
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
    return out.masked_fill(missed, 0.0)
