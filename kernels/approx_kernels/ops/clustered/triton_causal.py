"""Causal clustered attention of a batch on a GPU: the flash kernels inside chunks, fixed rows before them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.ops.clustered.triton_causal_far import far_forward
from approx_kernels.ops.clustered.triton_causal_launches import MOST_CHUNK, MOST_CHUNKS
from approx_kernels.ops.clustering.reference import nearest_centroids
from approx_kernels.ops.flash.api import flash, flash_obstacle
from approx_kernels.runtime.pytorch import without_autocast
from approx_kernels.tokens import stretches


def obstacle(q: Tensor, v: Tensor, chunk: int, topk: int, dropout: float) -> str | None:
    """Why causal clustered attention cannot run by kernels, with the remedy; None where it can."""
    chunk = max(chunk, topk + 1)
    if topk and MOST_CHUNK < chunk < v.shape[2]:
        return (
            f"its chunks have at most {MOST_CHUNK} tokens, and {chunk} were asked for. Take fewer, or ask for 'auto'."
        )
    if topk and v.shape[2] > MOST_CHUNKS * chunk:
        return f"samples have at most {MOST_CHUNKS} chunks, {chunk} tokens each. Ask for longer ones, or for 'auto'."
    return flash_obstacle(q, v, dropout)


def causal_on_gpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    *,
    centroids: Tensor,
    selectors: Tensor,
    chunk: int,
    topk: int,
    scale: float,
) -> Tensor:
    """Attend without waiting for the device."""
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k.to(q.dtype), v.to(q.dtype)))
    # At least one key remains for the sums, so that they are never empty.
    chunk, ahead = max(chunk, topk + 1), max(q.shape[2] - k.shape[2], 0)
    # With more queries than keys, the first queries precede all keys.
    q = q[:, :, ahead:]
    before = k.shape[2] - q.shape[2]
    asked = None if key_mask is None else key_mask[:, None, before:]
    with without_autocast(q.device.type):
        if k.shape[2] <= chunk:
            out = flash(q, k, v, key_mask, scale=scale, right=0, impl="triton")[0]
        else:
            rows, groups = _rows(q.detach(), centroids.detach(), selectors)
            if key_mask is None:
                rank = torch.arange(before, k.shape[2], device=q.device)
                near = _near(q, k, v, before, chunk, scale)
            else:
                rank = key_mask.cumsum(1)[:, None, before:] - 1
                k, v, *near = _near_real(q, k, v, key_mask, rank[:, 0], chunk, scale)
            lists = _lists(groups, rank, asked, rows.shape[2], -(-k.shape[2] // chunk), chunk)
            out = far_forward(q, k, v, *near, rows, *lists, chunk, topk, scale, asked is not None)[0]
        if asked is not None:
            out = out.masked_fill(~asked[..., None], 0.0)
        return F.pad(out, (0, 0, ahead, 0)) if ahead else out


def _rows(q: Tensor, centroids: Tensor, selectors: Tensor) -> tuple[Tensor, Tensor]:
    """The rows, [B, H, R, D], and the row of each query, [B, H, L]."""
    groups = nearest_centroids(q, selectors)
    rows = centroids.float().expand(q.shape[0], -1, -1, -1)
    if q.shape[2] < rows.shape[2]:
        # Each of the few queries of a decoding step has the row of its centroid; no other row is computed.
        rows = rows.gather(2, groups[..., None].expand_as(q))
        groups = torch.arange(q.shape[2], device=q.device).expand_as(groups)
    return rows.contiguous(), groups


def _lists(
    groups: Tensor, rank: Tensor, asked: Tensor | None, rows: int, chunks: int, chunk: int
) -> tuple[Tensor, Tensor]:
    """Queries sorted by row and then by chunk, and where each group begins; padding comes last."""
    each = groups * chunks + rank // chunk
    if asked is not None:
        each = each.where(asked, rows * chunks)
    each, order = each.int().sort(dim=2, stable=True)
    numbers = torch.arange(rows * chunks + 1, dtype=torch.int32, device=each.device)
    begins = torch.searchsorted(each, numbers.expand(*each.shape[:2], -1).contiguous(), out_int32=True)
    return order.int(), begins


def _near(q: Tensor, k: Tensor, v: Tensor, before: int, chunk: int, scale: float) -> tuple[Tensor, Tensor]:
    """Exact attention of each query inside its chunk, [B, H, L, E], and the log-sum-exps, [B, H, L]."""
    keys = k.shape[2]
    first, last = -(-before // chunk) * chunk, keys // chunk * chunk
    # The rest of a chunk that the cache has begun, whole chunks, and the beginning of the last one.
    parts = (before // chunk * chunk, min(first, keys)), (first, last), (max(first, last), keys)
    bounds = [each for each in parts if each[0] < each[1]]
    queries = stretches(q, [(max(begin, before) - before, end - before) for begin, end in bounds])
    cut = zip(queries, stretches(k, bounds), stretches(v, bounds), strict=True)
    outputs = [
        _by_chunk(*own, chunk if each == (first, last) else each[1] - each[0], scale)
        for each, own in zip(bounds, cut, strict=True)
    ]
    if len(outputs) == 1:
        near, lse = outputs[0]
    else:
        near, lse = torch.cat([x for x, _ in outputs], 2), torch.cat([x for _, x in outputs], 2)
    return near, lse.contiguous()


def _by_chunk(q: Tensor, k: Tensor, v: Tensor, chunk: int, scale: float) -> tuple[Tensor, Tensor]:
    """As `_near`, for whole chunks; a view when tokens are contiguous."""
    batch, count = k.shape[0], k.shape[2] // chunk
    if count == 1:
        return flash(q, k, v, scale=scale, right=0, impl="triton")
    q, k, v = (x.unflatten(2, (count, chunk)).transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    outputs = flash(q, k, v, scale=scale, right=0, impl="triton")
    near, lse = (x.unflatten(0, (batch, count)).transpose(1, 2).flatten(2, 3) for x in outputs)
    return near, lse


def _near_real(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor, rank: Tensor, chunk: int, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The real keys and values of each sample in chunks, zeros after them, and the results of `_near` for them."""
    length, keys = q.shape[2], k.shape[2]
    asked = key_mask[:, keys - length :]
    chunks = -(-keys // chunk)
    # Chunks in which the queries of a sample may be, from that of the first one on.
    some = min(chunks, (length + chunk - 2) // chunk + 1)
    count, queries = key_mask.sum(1, keepdim=True), asked.sum(1, keepdim=True)
    begin = ((count - queries) // chunk).clamp(max=chunks - some) * chunk
    place = torch.arange(chunks * chunk, device=k.device).expand(k.shape[0], -1)
    k, v = (_placed(x, key_mask, place) for x in (k, v))
    place = place[:, : some * chunk] + begin
    near_k, near_v = (k, v) if some == chunks else (_picked(x, place) for x in (k, v))
    outputs = _by_chunk(_placed(q, asked, place - (count - queries)), near_k, near_v, chunk, scale)
    back = (rank - begin).clamp(0, some * chunk - 1)
    near, lse = _picked(outputs[0], back), outputs[1].gather(2, back[:, None].expand(-1, q.shape[1], -1))
    return k, v, near, lse


def _placed(x: Tensor, real: Tensor, place: Tensor) -> Tensor:
    """The real tokens at these ranks among the real ones of their sample; zeros where there is none."""
    tokens = real.logical_not().byte().argsort(stable=True, dim=1)
    rows = _picked(x, tokens.gather(1, place.clamp(0, x.shape[2] - 1)))
    inside = (place >= 0) & (place < real.sum(1, keepdim=True))
    return rows.masked_fill(~inside[:, None, :, None], 0.0)


def _picked(x: Tensor, index: Tensor) -> Tensor:
    """Tokens [B, m] of each sample of x [B, H, n, D]: [B, H, m, D], the heads of a token adjacent in memory."""
    sample = torch.arange(x.shape[0], device=x.device)[:, None] * x.shape[2]
    rows = x.transpose(1, 2).flatten(0, 1).index_select(0, (index + sample).flatten())
    return rows.unflatten(0, index.shape).transpose(1, 2)
