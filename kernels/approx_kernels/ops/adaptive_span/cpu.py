"""Adaptive span on a CPU, by lists of keys: one window per head, with the soft mask computed in C."""

from collections.abc import Sequence

from torch import Tensor

from approx_kernels.ops.adaptive_span.reference import window_sizes
from approx_kernels.ops.exact.compiled import compiled_few, few_obstacle
from approx_kernels.ops.key_lists.cpu import FAR, MOST_ROWS, WINDOW_ROWS, attend_lists, cut
from approx_kernels.runtime.pytorch import without_autocast
from approx_kernels.tokens import blank_for_gradients

# Up to this many queries, reading keys in place is faster.
_FEW = 8


def spans_in_c(
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
    """The same as `grouped_heads` in one call for all heads: C skips keys beyond each span."""
    length, keys = q.shape[2], k.shape[2]
    q, k, v = blank_for_gradients(q, k, v, key_mask)
    windows = window_sizes(known, ramp, (keys if causal else max(length, keys)) - 1)
    own = None if all(window is None for window in windows) else spans
    # Autocast would round the logarithms of the mask.
    with without_autocast(q.device.type):
        k, v = k.to(q.dtype), v.to(q.dtype)
        return _span_lists(q, k, v, key_mask, spans=own, ramp=ramp, causal=causal, scale=scale, dropout=dropout)


def _span_lists(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    *,
    spans: Tensor | None,
    ramp: int,
    causal: bool,
    scale: float,
    dropout: float,
) -> Tensor:
    """Attend within the span and ramp of each head, or to everything without spans; differentiable in the spans too."""
    length, keys = q.shape[2], k.shape[2]
    if spans is None and length <= _FEW and not dropout and few_obstacle(q, k, v) is None:
        return compiled_few(q, k, v, key_mask, causal=causal, scale=scale)
    starts = cut(0, length, MOST_ROWS if spans is None else WINDOW_ROWS)
    entries = [[(0, keys, -FAR, 0 if causal else FAR)]] * len(starts)
    lists = {"before": keys - length, "starts": [*starts, length], "entries": entries}
    form = {"spans": None if spans is None else spans.float(), "ramp": ramp, "scale": scale, "dropout": dropout}
    return attend_lists(q, k, v, key_mask, **lists, **form)
