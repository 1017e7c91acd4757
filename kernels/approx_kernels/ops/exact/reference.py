"""Exact softmax attention in plain PyTorch: over all keys, and over a window and chosen tokens."""

from collections.abc import Sequence
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
from approx_kernels.tokens import beside, blank_padding, sharing, stretches

# PyTorch counts the FLOPs of its fused kernels only on GPUs.
_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# Queries that share their keys: a balance between computing outside the window and copying.
_BLOCK = 64


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


def places(tokens: Sequence[int] | Tensor, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Positions of the chosen tokens, [G] for all samples or [B, G] for each, and which of them are valid.

    Samples choose different numbers of tokens; G is the largest of them.
    """
    if not isinstance(tokens, Tensor):
        index = torch.tensor([token for token in tokens if token < keys], dtype=torch.long, device=device)
        return index, torch.ones_like(index, dtype=torch.bool)
    counts = tokens.sum(1, keepdim=True)
    most = int(counts.max())
    index = tokens.to(torch.int8).sort(stable=True, dim=1, descending=True).indices[:, :most]
    return index, torch.arange(most, device=device) < counts


def window_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    left: int,
    right: int,
    chosen: tuple[Tensor, Tensor] | None = None,
    causal: bool,
    scale: float,
    dropout: float,
) -> Tensor:
    """One fused product per block: the chosen tokens outside of each query's window, and its stretch of keys.

    `chosen` is the result of `places`, or None.
    """
    length, keys = q.shape[2], k.shape[2]
    before = keys - length
    index, counts = places((), keys, q.device) if chosen is None else chosen
    chosen_rows = [tokens_at(x, index) for x in (k, v)]
    bounds = [
        (max(first + before - left, 0), min(first + before + _BLOCK + right, keys))
        for first in range(0, length, _BLOCK)
    ]
    blocks = zip(q.split(_BLOCK, 2), bounds, stretches(k, bounds), stretches(v, bounds), strict=True)
    out = []
    for number, (queries, (begin, end), *own) in enumerate(blocks):
        position = torch.arange(queries.shape[2], device=q.device)[:, None] + (before + number * _BLOCK)
        allowed = _within(torch.arange(begin, end, device=q.device), position, left, right)
        if index.shape[-1]:
            far = counts[..., None, :] & ~_within(index[..., None, :], position, left, right)
            far = far & (index[..., None, :] <= position) if causal else far
            allowed = torch.cat([far, allowed.expand(*far.shape[:-1], -1)], -1)
            own = [torch.cat(pair, 2) for pair in zip(chosen_rows, own, strict=True)]
        # One mask for all samples, or one per sample; always the same for all heads.
        allowed = allowed[:, None] if allowed.dim() == 3 else allowed
        out.append(sdpa(queries, *own, attn_mask=allowed, dropout_p=dropout, scale=scale))
    return torch.cat(out, 2)


def _within(key: Tensor, position: Tensor, left: int, right: int) -> Tensor:
    return (key >= position - left) & (key <= position + right)


def tokens_at(x: Tensor, index: Tensor) -> Tensor:
    """Tokens of x [B, H, n, D] at [G] or [B, G], [B, H, G, D]."""
    if index.dim() == 1:
        return x.index_select(2, index)
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def _operations(q: list[int], k: list[int], v: list[int], *_: object, **__: object) -> int:
    return sdpa_flop_count(q, k, v)


def _operations_backward(grad: list[int], q: list[int], k: list[int], v: list[int], *_: object, **__: object) -> int:
    return sdpa_backward_flop_count(grad, q, k, v)


if _ON_CPU not in flop_registry:
    register_flop_formula([_ON_CPU])(_operations)
    register_flop_formula([_BACKWARD_ON_CPU])(_operations_backward)
