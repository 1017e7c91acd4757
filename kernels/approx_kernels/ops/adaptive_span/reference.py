"""Heads grouped by span; each group attends block by block of queries within its own window."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.ops.exact.api import exact_attention
from approx_kernels.runtime.pytorch import sdpa, without_autocast
from approx_kernels.tokens import beside, blank_padding, check_form, check_shapes, in_order, stretches, turns

# Queries per block, and granularity of windows: smaller ones cost more in groups and calls than they save.
_BLOCK = 64


def adaptive_span_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    spans: Tensor,
    known: Callable[[], Sequence[float]] | None = None,
    ramp: int,
    causal: bool,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """The op of this name in `api.py`, which explains the arguments and checks them."""
    numbers = known_spans(spans, known)
    how = {"ramp": ramp, "causal": causal, "scale": scale, "dropout": dropout}
    parts = [(q[:, turn], spans[turn], numbers[turn]) for turn in turns(q, k)]
    return in_order([grouped_heads(some, k, v, key_mask, spans=z, known=read, **how) for some, z, read in parts])


def known_spans(spans: Tensor, known: Callable[[], Sequence[float]] | None) -> Sequence[float]:
    """The spans as Python numbers.

    Raises:
        ValueError: if one is below 0.
    """
    numbers = spans.tolist() if known is None else known()
    if not all(number >= 0.0 for number in numbers):
        raise ValueError(f"spans are {list(numbers)}; expected distances, from 0 on.")
    return numbers


def window_sizes(known: Sequence[float], ramp: int, longest: int) -> list[int | None]:
    """Keys in reach of each head on one side, rounded up so that heads form few groups; None if unlimited.

    Args:
        known: The spans, in tokens.
        ramp: R, in tokens.
        longest: The longest distance between a query and a key.
    """
    return [
        None if span >= longest else min(-(-(math.ceil(span) + ramp) // _BLOCK) * _BLOCK, longest) for span in known
    ]


def grouped_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    *,
    spans: Tensor,
    known: Sequence[float],
    ramp: int,
    causal: bool,
    scale: float,
    dropout: float,
) -> Tensor:
    """Exact attention for heads that span everything, a window per group of the others."""
    length, keys = q.shape[2], k.shape[2]
    q, k, v = blank_padding(q, k, v, key_mask)
    windows = window_sizes(known, ramp, (keys if causal else max(length, keys)) - 1)
    groups = defaultdict(list)
    for head, window in enumerate(windows):
        groups[window].append(head)

    def attend(window: int | None, q: Tensor, k: Tensor, v: Tensor, spans: Tensor) -> Tensor:
        if window is None:
            return exact_attention(q, k, v, key_mask, causal=causal, scale=scale, dropout=dropout)
        # Autocast would round the logarithms of the mask.
        with without_autocast(q.device.type):
            k, v = k.to(q.dtype), v.to(q.dtype)
            return _windowed(q, k, v, key_mask, spans, window, ramp, causal, scale, dropout)

    if len(groups) == 1:
        return attend(next(iter(groups)), q, k, v, spans)
    out, order = [], []
    for window, heads in groups.items():
        own = torch.tensor(heads, device=q.device)
        group = q.index_select(1, own), k.index_select(1, own), v.index_select(1, own)
        out.append(attend(window, *group, spans.index_select(0, own)).to(q.dtype))
        order.append(own)
    return torch.cat(out, 1).index_select(1, torch.cat(order).argsort())


def _windowed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    spans: Tensor,
    window: int,
    ramp: int,
    causal: bool,
    scale: float,
    dropout: float,
) -> Tensor:
    """Fused attention between each block of queries and its stretch of keys, with log m added to the scores."""
    keys, before = k.shape[2], k.shape[2] - q.shape[2]
    after = 0 if causal else window
    # Queries so far before all keys (L > S) that they reach none.
    blind = max(-before - after, 0)
    q, before = q[:, :, blind:], before + blind
    starts = range(before, keys, _BLOCK)
    bounds = [(max(start - window, 0), min(start + _BLOCK + after, keys)) for start in starts]
    # Every block has the same distances, so one table serves all.
    table = _log_mask(spans, window, after, ramp, q[:, :, :_BLOCK])
    may_miss = before < 0 or key_mask is not None
    out = []
    blocks = zip(starts, bounds, q.split(_BLOCK, 2), stretches(k, bounds), stretches(v, bounds), strict=True)
    for start, (begin, end), queries, stretch, values in blocks:
        first = start - window
        bias = table[:, : queries.shape[2], begin - first : end - first]
        if not may_miss:
            out.append(_fused(queries, stretch, values, bias, scale, dropout))
            continue
        allowed = bias > -math.inf
        if key_mask is not None:
            allowed = allowed & key_mask[:, None, None, begin:end]
        # Kernels disagree on rows without an allowed key, so these see everything and are set to 0 afterwards.
        missed = ~allowed.any(-1, keepdim=True)
        bias = bias.masked_fill(~allowed, -math.inf).masked_fill(missed, 0.0)
        out.append(_fused(queries, stretch, values, bias, scale, dropout).masked_fill(missed, 0.0))
    joined = torch.cat(out, 2)
    return F.pad(joined, (0, 0, blind, 0)) if blind else joined


def _fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, dropout: float) -> Tensor:
    return sdpa(q, k, v, attn_mask=bias, dropout_p=dropout, scale=scale)


def _log_mask(spans: Tensor, window: int, after: int, ramp: int, q: Tensor) -> Tensor:
    """log m between a block of queries and the keys from `window` before it to `after` after it, [H, block, keys]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    query = torch.arange(q.shape[2], device=q.device)
    away = torch.arange(-window, q.shape[2] + after, device=q.device) - query[:, None]
    mask = ((ramp + spans.to(wide)[:, None, None] - away.abs()) / ramp).clamp(max=1.0)
    seen = mask > 0 if after else (mask > 0) & (away <= 0)
    # The clamp keeps the gradient of unseen keys 0; with log 0 it would be 0 times infinity.
    log = mask.clamp(min=torch.finfo(wide).tiny).log().masked_fill(~seen, -math.inf)
    # CPU kernels take a float32 mask with 16-bit inputs, others only one in the queries' dtype.
    return log if q.is_cpu else log.to(q.dtype)


def mass_by_distance(q: Tensor, k: Tensor, key_mask: Tensor | None = None, *, causal: bool, scale: float) -> Tensor:
    """Mean weight that the queries of each head give to all keys at distance x, in O(L S D) and blocks of queries.

    Args:
        q: Queries, [B, H, L, D], float; query i is at position S - L + i.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        key_mask: [B, S] bool, True at real keys; None when all are real. When L == S it also marks the real queries,
            which alone are counted.
        causal: Whether a query sees only keys at or before its own position.
        scale: Factor of the scores.

    Returns:
        [H, x], float64, x from 0 to the longest distance. Each row sums to 1, or to 0 without real queries.

    Raises:
        ValueError: if shapes or dtypes do not match.
    """
    check_shapes(q, k, k, key_mask)
    check_form(scale, causal=causal)
    length, keys = q.shape[2], k.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    mass = q.new_zeros(q.shape[1], max(length, keys), dtype=torch.float64)
    place = torch.arange(keys, device=q.device)
    with without_autocast(q.device.type):
        for first in range(0, length, _BLOCK):
            rows = slice(first, min(first + _BLOCK, length))
            away = torch.arange(keys - length, keys, device=q.device)[rows, None] - place
            seen = away >= 0 if causal else torch.ones_like(away, dtype=torch.bool)
            if key_mask is not None:
                seen = seen & key_mask[:, None, None, :]
                if length == keys:
                    seen = seen & key_mask[:, None, rows, None]
            scores = beside(q[:, :, rows].to(wide) * scale, k) @ k.to(wide).transpose(-2, -1)
            scores = scores.view(*q.shape[:2], -1, keys)
            weights = scores.masked_fill(~seen, torch.finfo(wide).min).softmax(-1).masked_fill(~seen, 0.0)
            mass.index_add_(1, away.abs().flatten(), weights.double().sum(0).flatten(1))
    return mass / mass.sum(1, keepdim=True).clamp(min=1.0)
