"""Adaptive span on a CPU, by lists of keys: a window for each head alone, whose weights fall off inside the C."""

from torch import Tensor

from approx_kernels.key_lists.cpu import FAR, attend_lists, cut


def span_lists(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    *,
    spans: Tensor,
    ramp: int,
    causal: bool,
    scale: float,
    dropout: float,
) -> Tensor:
    """Attend within the span of each head, and the ramp behind it; differentiable in the spans too."""
    length, keys = q.shape[2], k.shape[2]
    starts = cut(0, length)
    entries = [[(0, keys, -FAR, 0 if causal else FAR)]] * len(starts)
    lists = {"before": keys - length, "starts": [*starts, length], "entries": entries}
    form = {"spans": spans.float(), "ramp": ramp, "scale": scale, "dropout": dropout}
    return attend_lists(q, k, v, key_mask, **lists, **form)
