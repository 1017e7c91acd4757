"""Local attention on a CPU: the window of each block of queries is a list of one entry."""

from torch import Tensor

from approx_kernels.key_lists.cpu import FAR, WINDOW_ROWS, attend_lists


def local_lists(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, left: int, right: int, scale: float, dropout: float
) -> Tensor:
    """Attend to the keys from `left` before to `right` after the own position."""
    length, keys = q.shape[2], k.shape[2]
    starts = [*range(0, length, WINDOW_ROWS), length]
    entries = [[(0, keys, -min(left, FAR), min(right, FAR))]] * (len(starts) - 1)
    lists = {"before": keys - length, "starts": starts, "entries": entries}
    return attend_lists(q, k, v, key_mask, **lists, scale=scale, dropout=dropout)
