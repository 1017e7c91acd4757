"""Adaptive span on a CPU, by lists of keys: a window for each head alone, whose weights fall off inside the C."""

from torch import Tensor

from approx_kernels.ops.exact.compiled import compiled_few, few_obstacle
from approx_kernels.ops.key_lists.cpu import FAR, MOST_ROWS, WINDOW_ROWS, attend_lists, cut

# Queries up to which reading keys where they lie is faster.
_FEW = 8


def span_lists(
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
    """Attend within the span of each head, and the ramp behind it, or without spans to everything; differentiable in them too."""
    length, keys = q.shape[2], k.shape[2]
    if spans is None and length <= _FEW and not dropout and few_obstacle(q, k, v) is None:
        return compiled_few(q, k, v, key_mask, causal=causal, scale=scale)
    starts = cut(0, length, MOST_ROWS if spans is None else WINDOW_ROWS)
    entries = [[(0, keys, -FAR, 0 if causal else FAR)]] * len(starts)
    lists = {"before": keys - length, "starts": [*starts, length], "entries": entries}
    form = {"spans": None if spans is None else spans.float(), "ramp": ramp, "scale": scale, "dropout": dropout}
    return attend_lists(q, k, v, key_mask, **lists, **form)
