"""The specification of the flash kernels, with materialised weights."""

import math

import torch
from torch import Tensor

from approx_kernels.ops.flash.blocks import BlockList
from approx_kernels.tokens import sharing


def flash_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor | None,
    key_mask: Tensor | None,
    spans: Tensor | None,
    blocks: BlockList | None,
    *,
    left: int,
    right: int,
    ramp: int,
    scale: float,
    packed: bool,
) -> tuple[Tensor, Tensor]:
    """softmax(s + log C + log m) V and the log-sum-exps, for each sample by itself; see `flash`."""
    wide = torch.promote_types(q.dtype, torch.float32)
    length, keys = q.shape[2], k.shape[2]
    row, column = torch.arange(length, device=q.device)[:, None], torch.arange(keys, device=q.device)
    away = column - row - (0 if packed else keys - length)
    counts = ((away <= right) & (away >= -left))[None] if blocks is None else blocks.counts()
    counts = counts[None].to(wide)
    if bounds is not None:
        inside = [
            (row >= first) & (row < last) & (column >= begin) & (column < end)
            for first, last, begin, end, _ in bounds.tolist()
        ]
        counts = counts * (torch.stack(inside).any(0)[None, None] if packed else torch.stack(inside)[:, None])
        if packed:
            sample = torch.bucketize(torch.arange(length, device=q.device), bounds[:, 1].contiguous(), right=True)
            counts = counts * (sample[:, None] == sample)
    if key_mask is not None:
        counts = counts * key_mask[:, None, None, :]
    # All weights are in memory anyway, so copies of grouped keys hardly matter.
    k, v = (x.repeat_interleave(sharing(q, x), 1) for x in (k, v))
    scores = (q.to(wide) * scale) @ k.to(wide).transpose(-2, -1)
    if spans is not None:
        mass = ((ramp + spans.to(wide)[:, None, None] - away.abs()) / ramp).clamp(max=1.0)
        counts = counts * (mass > 0)
        scores = scores + mass.clamp(min=torch.finfo(wide).tiny).log()
    shown = (counts > 0).expand_as(scores)
    # Finite, so that a row without keys has a gradient of 0.
    scores = (scores + counts.clamp(min=1).log()).masked_fill(~shown, torch.finfo(wide).min)
    weights = scores.softmax(-1).masked_fill(~shown, 0.0)
    lse = scores.logsumexp(-1).masked_fill(~shown.any(-1), -math.inf)
    return (weights @ v.to(wide)).to(q.dtype), lse
