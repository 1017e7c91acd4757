# Travels with a checkpoint converted by approx (Apache-2.0); it needs torch and transformers, and nothing else.
"""Exact softmax attention."""

from typing import Any

import torch
from torch import Tensor

from .approx_runtime import sdpa
from .approx_tokens import check_form, check_shapes, sharing


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


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, causal: bool, scale: float, dropout: float
) -> Tensor:
    """SDPA with the smallest possible mask, so that its fastest kernels can run."""
    length, keys, grouped = q.shape[2], k.shape[2], sharing(q, k) > 1

    def attend(**how: Any) -> Tensor:
        return sdpa(q, k, v, dropout_p=dropout, scale=scale, enable_gqa=grouped, **how)

    if causal and key_mask is None and length == keys:
        return attend(is_causal=True)
    allowed = allowed_pairs(length, key_mask, keys=keys, causal=causal, device=q.device)
    if allowed is None:
        return attend()
    # Kernels disagree on rows without an allowed key, so these see everything and are set to 0 afterwards.
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

    With `causal`, query i is at position S - L + i and sees the keys up to there. A query with no
    allowed key gives 0.

    Source: Vaswani et al., 2017, Attention Is All You Need, arXiv 1706.03762; no departures.

    Args:
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
        key_mask: [B, S] bool, True at real keys; None when all are real.
        causal: Whether a query sees only keys at or before its own position.
        scale: Factor of the scores.
        dropout: Probability of dropping an attention weight.

    Returns:
        [B, H, L, E] in the dtype of q.

    Raises:
        ValueError: if shapes or dtypes do not match.
    """
    check_shapes(q, k, v, key_mask)
    check_form(scale, dropout, causal=causal)
    attend_all = fused_attention
    return attend_all(q, k, v, key_mask, causal=causal, scale=scale, dropout=dropout)
