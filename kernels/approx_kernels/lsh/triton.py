"""Bidirectional LSH attention by the flash kernels: once sorted, a round is blocks along the diagonal."""

from __future__ import annotations

import torch
from torch import Tensor

from approx_kernels.flash.listed import listed_attention
from approx_kernels.lsh.hashing import sort_numbers


def sorted_tiles(q: Tensor, k: Tensor, v: Tensor, *, projections: Tensor, cluster: int, scale: float) -> Tensor:
    """The asymmetric variant among real tokens, each pair as often as rounds bring it together; see `cluster_plan`."""
    length, keys = q.shape[2], k.shape[2]
    clusters = max(min(-(-max(length, keys) // cluster), length, keys), 1)

    def pairs(i: Tensor, j: Tensor) -> Tensor:
        own = ((i + 1) * clusters - 1) // length
        return (j >= own * keys // clusters) & (j < (own + 1) * keys // clusters)

    with torch.no_grad():
        wide = torch.promote_types(q.dtype, torch.float32)
        numbers = sort_numbers(q.to(wide), k.to(wide), projections, None, None)
        rounds = zip(*(x.argsort(dim=-1, stable=True) for x in numbers), strict=True)
    outs, lses = [], []
    for by_query, by_key in rounds:
        out, lse = listed_attention(
            _at(q, by_query), _at(k, by_key), _at(v, by_key), ("lsh", clusters), pairs,
            scale=scale, first=0, diagonal=False,
        )  # fmt: skip
        back = by_query.argsort(dim=-1)
        outs.append(_at(out, back))
        lses.append(lse.gather(-1, back))
    shares = torch.stack(lses).softmax(0)
    return (shares[..., None] * torch.stack(outs)).sum(0).to(q.dtype)


def _at(x: Tensor, order: Tensor) -> Tensor:
    return x.gather(2, order[..., None].expand(*order.shape, x.shape[3]))
