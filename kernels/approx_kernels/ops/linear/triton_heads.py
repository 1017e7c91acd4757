"""Linear attention by kernels: which inputs they take, and how they are called."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.gpu.language import obstacle
from approx_kernels.ops.linear.reference import features
from approx_kernels.ops.linear.triton import linear_forward, most_features
from approx_kernels.runtime.pytorch import without_autocast

FUSED = ("elu", "relu")


def linear_obstacle(q: Tensor, v: Tensor, *, dropout: float) -> str | None:
    """Why the kernels of linear attention cannot run, with the remedy; None where they can."""
    if dropout:
        return "they drop no keys. Set the dropout of attention to 0, or ask for 'auto'."
    return obstacle(q, v)


def linear_kernels(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    *,
    causal: bool,
    feature_map: str,
    maps: tuple[Tensor, Tensor] | None,
    input_scale: float,
    eps: float,
) -> Tensor:
    """Attend; fused maps are recomputed in the backward pass, others are inputs of the kernels."""
    with without_autocast(q.device.type):
        q, k, v, how = as_features(q, k, v, feature_map, maps, input_scale)
        return attend(q, k, v, key_mask, causal, *how, eps)[0]


def as_features(
    q: Tensor, k: Tensor, v: Tensor, feature_map: str, maps: tuple[Tensor, Tensor] | None, input_scale: float
) -> tuple[Tensor, Tensor, Tensor, tuple[str, float]]:
    """The inputs of the kernels: tensors of one dtype, or features where the map is not fused; and how to map them."""
    k, v = k.to(q.dtype), v.to(q.dtype)
    if feature_map in FUSED:
        return q, k, v, (feature_map, input_scale)
    # In the dtype of the products in the kernels.
    wide = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32
    query_map, key_map = maps or (None, None)
    queries, keys = (
        features(x.float() * input_scale, feature_map, weight).to(wide) for x, weight in ((q, query_map), (k, key_map))
    )
    return queries, keys, v, ("given", 1.0)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    causal: bool,
    feature_map: str,
    input_scale: float,
    eps: float,
    *,
    whole: bool = False,
) -> tuple[Tensor, ...]:
    """`linear_forward` for any strides, any L and any number of features; with sums only if `whole`. For queries before
    all keys outputs are 0, and one over normalisers is 1 / eps.
    """
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    mask = None if key_mask is None else key_mask.contiguous().view(torch.uint8)
    # Aligned at the last key: with L > S the first L - S queries precede all keys and see none.
    blind = max(q.shape[2] - k.shape[2], 0) if causal else 0
    most = most_features(q, v)
    parts = [
        linear_forward(*part, v, mask, causal, whole, feature_map, input_scale, eps)
        for part in zip(q[:, :, blind:].split(most, 3), k.split(most, 3), strict=True)
    ]
    out, inverse = parts[0][:2] if len(parts) == 1 else _joined(parts, eps)
    if blind:
        out, inverse = F.pad(out, (0, 0, blind, 0)), F.pad(inverse, (blind, 0), value=1 / eps if eps else 0.0)
    sums = zip(*(part[2:] for part in parts), strict=True) if whole else ()
    return out, inverse, *(each[0] if len(each) == 1 else torch.cat(each, 3) for each in sums)


def _joined(parts: Sequence[tuple[Tensor, ...]], eps: float) -> tuple[Tensor, Tensor]:
    """Outputs and one over normalisers, from those of parts of the features: both are quotients of sums over them."""
    norms = [inverted(part[1]) for part in parts]
    # Every part includes eps.
    inverse = inverted(reduce(torch.add, norms) - (len(parts) - 1) * eps)
    shares = [(norm * inverse)[..., None] * part[0] for norm, part in zip(norms, parts, strict=True)]
    return reduce(torch.add, shares).to(parts[0][0].dtype), inverse


def inverted(x: Tensor) -> Tensor:
    """1 / x, and 0 where x is 0."""
    return 1 / x.masked_fill(x == 0, math.inf)
