"""Exact softmax attention in plain PyTorch."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import (
    flop_registry,
    register_flop_formula,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from approx_kernels.runtime.pytorch import in_autocast, sdpa, without_autocast
from approx_kernels.tokens import beside, blank_padding, sharing

# PyTorch counts the FLOPs of its fused kernels only on GPUs.
_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


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
    if torch.compiler.is_exporting():
        # Runtimes of ONNX's `Attention` do not broadcast a mask over queries.
        allowed = allowed.expand(-1, -1, length, -1)
    out = attend(attn_mask=allowed)
    return out.masked_fill(~reached, 0.0)


# In plain PyTorch nothing is faster than its SDPA.
fastest_attention = layer_attention = exact_attention


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    causal: bool,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """`exact_attention` in the dtype of autocast, where no flash kernel runs."""
    return exact_attention(*in_autocast(q, k, v), key_mask, causal=causal, scale=scale, dropout=dropout)


def materialised_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    causal: bool,
    scale: float,
    dropout: float = 0.0,
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


def _operations(q: list[int], k: list[int], v: list[int], *_: object, **__: object) -> int:
    return sdpa_flop_count(q, k, v)


def _operations_backward(grad: list[int], q: list[int], k: list[int], v: list[int], *_: object, **__: object) -> int:
    return sdpa_backward_flop_count(grad, q, k, v)


if _ON_CPU not in flop_registry:
    register_flop_formula([_ON_CPU])(_operations)
    register_flop_formula([_BACKWARD_ON_CPU])(_operations_backward)
