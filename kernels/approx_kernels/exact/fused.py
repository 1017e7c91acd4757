"""Softmax attention through PyTorch's fused kernels."""

from torch import Tensor
from torch.nn import functional as F

from approx_kernels.exact.reference import allowed_pairs


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, causal: bool, scale: float, dropout: float
) -> Tensor:
    """SDPA with the smallest mask that says what is allowed, so that its fastest kernels stay open."""
    length, keys = q.shape[2], k.shape[2]
    if causal and key_mask is None and length == keys:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, scale=scale)
    allowed = allowed_pairs(length, key_mask, keys=keys, causal=causal, device=q.device)
    if allowed is None:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scale)
    # Kernels disagree on a row without any allowed key, so it sees everything and is then set to 0.
    reached = allowed.any(-1, keepdim=True)
    allowed = allowed | ~reached
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, dropout_p=dropout, scale=scale)
    return out.masked_fill(~reached, 0.0)
