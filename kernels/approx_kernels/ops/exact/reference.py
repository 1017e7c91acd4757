"""The reference: softmax attention with materialised weights."""

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.runtime.autocast import without_autocast
from approx_kernels.tokens.grouped import beside
from approx_kernels.tokens.padding import blank_padding


def allowed_pairs(
    length: int, key_mask: Tensor | None, *, keys: int, causal: bool, device: torch.device
) -> Tensor | None:
    """Which query may see which key, broadcastable to [B, H, L, S]; None if every query sees every key."""
    allowed = None if key_mask is None else key_mask[:, None, None, :]
    # The last query sees every key, so a single query (a decoding step) needs no causal mask.
    if causal and length > 1:
        # Bottom-right: PyTorch's own `is_causal` aligns top-left, which is wrong with a cache.
        past = torch.ones(length, keys, dtype=torch.bool, device=device).tril(keys - length)
        allowed = past if allowed is None else allowed & past
    return allowed


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, causal: bool, scale: float, dropout: float
) -> Tensor:
    """Softmax attention in plain steps; 16-bit inputs are computed in float32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k, v = blank_padding(q, k, v, key_mask)
    with without_autocast(q.device.type):
        scores = (beside(q.to(wide) * scale, k) @ k.to(wide).transpose(-2, -1)).view(*q.shape[:3], k.shape[2])
        allowed = allowed_pairs(q.shape[2], key_mask, keys=k.shape[2], causal=causal, device=q.device)
        if allowed is None:
            weights = scores.softmax(-1)
        else:
            # A row without an allowed key is all -inf, and its softmax NaN: the second fill makes it 0,
            # and the finite fill value keeps its gradient 0 too.
            lowest = torch.finfo(wide).min
            weights = scores.masked_fill(~allowed, lowest).softmax(-1).masked_fill(~allowed, 0.0)
        return (beside(F.dropout(weights, dropout), k) @ v.to(wide)).view(*q.shape[:3], v.shape[3]).to(q.dtype)
