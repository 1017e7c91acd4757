"""Attention inside blocks and to summaries by the flash kernels: the summary columns are gathered behind the keys."""

from __future__ import annotations

import torch
from torch import Tensor

from approx_kernels.ops.flash.listed import kept, listed_attention
from approx_kernels.ops.summaries.reference import Inside, own_pairs, summary_columns


def summary_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    *,
    stride: int,
    summary: int,
    inside: Inside,
    causal: bool,
    step: int | None,
    scale: float,
) -> Tensor:
    """Attention to each query's block, and to the summaries of the others in separate tiles; real keys come first."""
    length, keys = q.shape[2], k.shape[2]
    pattern = ("summaries", stride, summary, inside, causal, step)

    def gathered() -> Tensor:
        place = torch.arange(keys, device=q.device)
        sizes = (keys - place // stride * stride).clamp(max=stride)
        return summary_columns(place % stride, sizes, summary, inside).nonzero().squeeze(1)

    def pairs(i: Tensor, j: Tensor) -> Tensor:
        token = torch.cat([torch.arange(keys, device=i.device), columns])[j]
        own = (i // stride == token // stride) & (j < keys)
        size = stride if causal else (keys - token // stride * stride).clamp(max=stride)
        seen = own_pairs(i % stride, token % stride, size, summary, inside, causal, step)
        own = own if seen is None else own & seen
        far = (j >= keys) & ((token // stride < i // stride) if causal else (token // stride != i // stride))
        return (own | far) & (token <= i) if causal else own | far

    columns = kept((pattern, keys, "columns", q.device), gathered) if step != 1 else torch.empty(0, dtype=torch.long)
    columns = columns.to(q.device)
    if step != 1:
        k, v = (torch.cat([x, x.index_select(2, columns)], 2) for x in (k, v))
    real = None if key_mask is None else torch.cat([key_mask, key_mask.index_select(1, columns)], 1)
    out = listed_attention(q, k, v, (pattern, keys), pairs, key_mask=real, scale=scale, first=keys - length)[0]
    # With summaries there are more keys than queries, so this is not taken for a mask of queries.
    return out if key_mask is None else out.masked_fill(~key_mask[:, None, keys - length :, None], 0.0)
