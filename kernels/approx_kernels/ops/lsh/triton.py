"""LSH attention on a GPU: by the flash kernels where sorted rounds are blocks along the diagonal; else by its own."""

from __future__ import annotations

import torch
from torch import Tensor

from approx_kernels.ops.flash.listed import listed_attention
from approx_kernels.ops.lsh.reference import sort_numbers, unit_keys
from approx_kernels.ops.lsh.sorted_rounds import sorted_rounds
from approx_kernels.ops.lsh.triton_rounds import lsh_forward


def sorted_tiles(q: Tensor, k: Tensor, v: Tensor, *, projections: Tensor, cluster: int, scale: float) -> Tensor:
    """The asymmetric variant among real tokens, each pair as often as rounds join it; see `cluster_plan`."""
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
            _at(q, by_query),
            _at(k, by_key),
            _at(v, by_key),
            ("lsh", clusters),
            pairs,
            scale=scale,
            first=0,
            diagonal=False,
        )
        back = by_query.argsort(dim=-1)
        outs.append(_at(out, back))
        lses.append(lse.gather(-1, back))
    shares = torch.stack(lses).softmax(0)
    return (shares[..., None] * torch.stack(outs)).sum(0).to(q.dtype)


def _at(x: Tensor, order: Tensor) -> Tensor:
    return x.gather(2, order[..., None].expand(*order.shape, x.shape[3]))


def round_by_round(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    *,
    projections: Tensor,
    variant: str,
    cluster: int,
    buckets: int,
    dedup: bool,
    causal: bool,
    own: str,
    scale: float,
) -> Tensor:
    """Every form, by kernels that gather tokens where they are; padded queries give 0. See `lsh_attention`."""
    wide = torch.promote_types(q.dtype, torch.float32)
    with torch.no_grad():
        plan = sorted_rounds(
            q.to(wide),
            k.to(wide),
            key_mask,
            projections=projections,
            variant=variant,
            cluster=cluster,
            buckets=buckets,
            causal=causal,
            dedup=dedup,
        )
    k = unit_keys(q.to(wide), k.to(wide)).to(q.dtype) if variant == "shared" else k
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    mask = None if key_mask is None else key_mask.contiguous().view(torch.uint8)
    width = min(k.shape[2], 2 * cluster if causal or variant == "shared" else cluster)
    return lsh_forward(q, k, v, mask, list(plan[:-1]), plan.ranks, own, width, scale)[0]
