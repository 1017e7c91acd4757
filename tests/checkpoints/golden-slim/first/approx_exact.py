# Travels with a checkpoint converted by approx (Apache-2.0); it needs torch and transformers, and nothing else.
"""Exact softmax attention."""

from typing import Any

import torch
from torch import Tensor

from .approx_runtime import sdpa
from .approx_tokens import check_shapes, sharing


def allowed_pairs(
    length: int, key_mask: Tensor | None, *, keys: int, causal: bool, device: torch.device
) -> Tensor | None:
    """Which query may see which key, broadcastable to [B, H, L, S]; None when every query sees every key."""
    allowed = None if key_mask is None else key_mask[:, None, None, :]
    # The last query sees every key, so a single one (a decoding step) needs no causal mask.
    if causal and length > 1:
        # Bottom-right: PyTorch's own `is_causal` aligns top-left, which is wrong on top of a cache.
        past = torch.ones(length, keys, dtype=torch.bool, device=device).tril(keys - length)
        allowed = past if allowed is None else allowed & past
    return allowed


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, causal: bool, scale: float, dropout: float
) -> Tensor:
    """SDPA with the smallest mask that says what is allowed, so that its fastest kernels stay open."""
    length, keys, grouped = q.shape[2], k.shape[2], sharing(q, k) > 1

    def attend(**how: Any) -> Tensor:
        return sdpa(q, k, v, dropout_p=dropout, scale=scale, enable_gqa=grouped, **how)

    if causal and key_mask is None and length == keys:
        return attend(is_causal=True)
    allowed = allowed_pairs(length, key_mask, keys=keys, causal=causal, device=q.device)
    if allowed is None:
        return attend()
    # Kernels disagree on a row without any allowed key, so it sees everything and is then set to 0.
    reached = allowed.any(-1, keepdim=True)
    allowed = allowed | ~reached
    out = attend(attn_mask=allowed)
    return out.masked_fill(~reached, 0.0)


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    causal: bool,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """Softmax attention, `o_i = sum_j softmax_j(scale q_i.k_j) v_j`, in O(L S D).

    With `causal`, query i stands at position S - L + i and sees the keys up to there. A query without any
    allowed key gives 0.

    Source: Vaswani et al., 2017, Attention Is All You Need, arXiv 1706.03762; departs from it in nothing.

    Args:
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
        key_mask: [B, S] bool, True at real keys; None when all are real.
        causal: Whether a query sees only keys at or before its own position.
        scale: Factor of the scores.
        dropout: Probability with which an attention weight is dropped.

    Returns:
        [B, H, L, E] in the dtype of q.

    Raises:
        ValueError: if the shapes or dtypes do not fit together.
    """
    check_shapes(q, k, v, key_mask)
    attend_all = fused_attention
    return attend_all(q, k, v, key_mask, causal=causal, scale=scale, dropout=dropout)
