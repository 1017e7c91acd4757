"""Local attention on a CPU: the window of each block of queries is a list of one entry."""

import torch
from torch import Tensor

from approx_kernels.ops.key_lists.cpu import FAR, WINDOW_ROWS, attend, attend_lists
from approx_kernels.tokens import blank_for_gradients


def local_lists(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, left: int, right: int, scale: float, dropout: float
) -> Tensor:
    """Attend to the keys from `left` before to `right` after each query's position."""
    q, k, v = blank_for_gradients(q, k, v, key_mask)
    length, keys = q.shape[2], k.shape[2]
    starts = [*range(0, length, WINDOW_ROWS), length]
    entries = [[(0, keys, -min(left, FAR), min(right, FAR))]] * (len(starts) - 1)
    lists = {"before": keys - length, "starts": starts, "entries": entries}
    return attend_lists(q, k, v, key_mask, **lists, scale=scale, dropout=dropout)


def local_totals(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, left: int, right: int, scale: float
) -> tuple[Tensor, Tensor]:
    """The same, and the normaliser of each query relative to its largest weight, [B, H, L] in float32."""
    q, k, v = blank_for_gradients(q, k, v, key_mask)
    length, keys = q.shape[2], k.shape[2]
    starts = torch.tensor([*range(0, length, WINDOW_ROWS), length])
    entry = torch.tensor([[0, keys, -min(left, FAR), min(right, FAR)]], dtype=torch.int32)
    mask = None if key_mask is None else key_mask.contiguous()
    lists = mask, None, starts, torch.arange(starts.numel()), entry.repeat(starts.numel() - 1, 1)
    return attend(q, k, v, *lists, *[None] * 5, keys - length, scale, 1, 0.0, 0.0, totals=True)
