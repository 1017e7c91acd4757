"""A window and chosen tokens on a CPU, by lists of keys."""

from collections.abc import Sequence

from torch import Tensor

from approx_kernels.ops.key_lists.cpu import FAR, Entry, attend_lists, cut


def window_lists(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    left: int,
    right: int,
    tokens: Sequence[int],
    causal: bool,
    scale: float,
    dropout: float,
) -> Tensor:
    """The same as `window_blocks`, for tokens that are the same in all samples."""
    length, keys = q.shape[2], k.shape[2]
    left, right = min(left, FAR), min(right, FAR)
    listed: list[Entry] = [(0, keys, -left, right)]
    for token in sorted({token for token in tokens if token < keys}):
        # Only outside the window, so that it does not count twice.
        listed.append((token, token + 1, -FAR, -left - 1))
        if not causal:
            listed.append((token, token + 1, right + 1, FAR))
    starts = cut(0, length)
    entries = [listed] * len(starts)
    lists = {"before": keys - length, "starts": [*starts, length], "entries": entries}
    return attend_lists(q, k, v, None, **lists, scale=scale, dropout=dropout)
