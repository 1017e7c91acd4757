"""Softmax attention through PyTorch's fused kernels."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import (
    flop_registry,
    register_flop_formula,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from approx_kernels.ops.exact.reference import allowed_pairs
from approx_kernels.runtime.sdpa import sdpa
from approx_kernels.tokens.grouped import sharing

# PyTorch counts the FLOPs of its fused kernels only on GPUs.
_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


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


def _operations(q: list[int], k: list[int], v: list[int], *_: object, **__: object) -> int:
    return sdpa_flop_count(q, k, v)


def _operations_backward(grad: list[int], q: list[int], k: list[int], v: list[int], *_: object, **__: object) -> int:
    return sdpa_backward_flop_count(grad, q, k, v)


if _ON_CPU not in flop_registry:
    register_flop_formula([_ON_CPU])(_operations)
    register_flop_formula([_BACKWARD_ON_CPU])(_operations_backward)
