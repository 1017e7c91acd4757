"""Performer attention by the kernels of linear attention, which are given the random features."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.linear.triton_heads import attend, size_obstacle
from approx_kernels.performer.reference import EPS, FLOOR
from approx_kernels.performer.sums import heights_of, key_features, logs_of, lowest, query_features
from approx_kernels.triton_language import obstacle


def performer_obstacle(
    q: Tensor, v: Tensor, projection: Tensor, *, kernel: str, causal: bool, dropout: float
) -> str | None:
    """Why the kernels cannot run, with the remedy; None where they can."""
    if kernel == "softmax" and causal:
        return (
            "causal features of the softmax are relative to earlier keys, which they do not follow yet. Ask for 'auto'."
        )
    if dropout:
        return "they drop no keys. Set the dropout of attention to 0, or ask for 'auto'."
    return obstacle(q, v) or size_obstacle(projection.shape[0], v.shape[3])


def performer_kernels(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    *,
    projection: Tensor,
    kernel: str,
    causal: bool,
    scale: float,
) -> Tensor:
    """Attend; features are made by PyTorch in float32, and kept as wide as the products of the kernels."""
    with torch.autocast(q.device.type, enabled=False):
        wide = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32
        rows, v = projection.float(), v.to(q.dtype)
        queries, keys = (x.float() * scale**0.5 for x in (q, k))
        if kernel == "relu":
            queries, keys, eps = F.relu(queries @ rows.T) + FLOOR, F.relu(keys @ rows.T) + FLOOR, EPS
        else:
            keep = None if key_mask is None else key_mask[:, None, :, None]
            logs = logs_of(keys, rows)
            real = logs.detach() if keep is None else logs.detach().masked_fill(~keep, lowest(logs.dtype))
            top = real.amax(2, keepdim=True)
            queries, keys, eps = query_features(heights_of(queries, rows), top), key_features(logs, top, keep), 0.0
        return attend(queries.to(wide), keys.to(wide), v, key_mask, causal, "given", 1.0, eps)[0]
