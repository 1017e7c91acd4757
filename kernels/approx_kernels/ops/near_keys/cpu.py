"""The softmax over a window and chosen keys on a CPU, by lists of keys: the chosen ones are moved together in front."""

import torch
from torch import Tensor

from approx_kernels.ops.key_lists.cpu import FAR, MOST_ROWS, WINDOW_ROWS, attend
from approx_kernels.ops.near_keys.reference import Exactly, Front, Near, far_mask, lowest, near_keys, reach
from approx_kernels.tokens import blank_for_gradients


def near_lists(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    exactly: Exactly,
) -> Near:
    """Like `near_keys`, in C; if several keys have the largest score, only one of them gets its gradient from `total`."""
    causal, window, chosen, scale, _ = exactly
    form = {"window": window, "causal": causal, "scale": scale}
    q, k, v = blank_for_gradients(q, k, v, key_mask)
    front = Front.of(k, v, key_mask, exactly)
    length, keys = q.shape[2], k.shape[2]
    if front is None and window:
        return _lists(q, k, v, far_mask(key_mask, chosen), 0, **form)
    # In lists, queries that precede all keys see none.
    if front is None or length > keys:
        return near_keys(q, k, v, key_mask, exactly)
    # The first queries of a causal layer do not see all chosen keys.
    last = int(front.place.masked_fill(~front.real, -1).max()) if causal else -1
    early = max(last - (keys - length), 0)
    mask = far_mask(key_mask, chosen)
    mask = torch.cat([front.real, ~k.new_zeros(k.shape[0], keys, dtype=torch.bool) if mask is None else mask], 1)
    together = torch.cat([front.k, k], 2), torch.cat([front.v, v], 2), mask, front.k.shape[2]
    near = _lists(q[:, :, early:], *together, **form)
    if not early:
        return near
    seen = slice(keys - length + early)
    few = near_keys(
        q[:, :, :early],
        k[:, :, seen],
        v[:, :, seen],
        None if key_mask is None else key_mask[:, seen],
        exactly._replace(chosen=None if chosen is None else chosen[:, seen]),
    )
    return Near(*(torch.cat([x.to(y.dtype), y], 2) for x, y in zip(few, near, strict=True)))


def _lists(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    count: int,
    *,
    window: int,
    causal: bool,
    scale: float,
) -> Near:
    """All queries see the first `count` keys, and those of their windows among the others."""
    length, keys = q.shape[2], k.shape[2]
    left, right = reach(window, causal)
    window_entry = [(count, keys, -min(left, FAR), min(right, FAR))] if window else []
    entries = [(0, count, -FAR, FAR)] * bool(count) + window_entry
    starts = [*range(0, length, WINDOW_ROWS if window else MOST_ROWS), length]
    blocks = len(starts) - 1
    first = torch.arange(blocks + 1) * len(entries)
    listed = torch.tensor(entries, dtype=torch.int32).repeat(blocks, 1)
    mask = None if mask is None else mask.contiguous()
    lists = mask, None, torch.tensor(starts), first, listed, *[None] * 5
    out, log, total = attend(q, k, v, *lists, keys - length, scale, 1, 0.0, 0.0, totals=True)
    return Near(out.float(), log.clamp(min=lowest(log.dtype)), total)
