"""Causal clustered attention of heads without padding: exact nearby, through fixed centroids further back."""

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.ops.clustered.own import CACHED, own_weights
from approx_kernels.ops.clustered.past import past_rows
from approx_kernels.ops.clustering.api import nearest_centroids
from approx_kernels.ops.clustering.means import flat_index

# Queries of one chunk and cluster that share their gathered keys and values in one small product.
_CAUSAL_TILE = 4


def causal_samples(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    centroids: Tensor,
    selectors: Tensor,
    chunk: int,
    topk: int,
    scale: float,
    dropout: float,
) -> Tensor:
    """Attend; q [B, H, L, D] are the last of k [B, H, S, D], v [B, H, S, E]; centroids [H, C, D]. [B, H, L, E]."""
    batch, heads, length, size = q.shape
    groups = nearest_centroids(q, selectors)
    rows = centroids.expand(batch, -1, -1, -1)
    if length < rows.shape[2]:
        # The few queries of a decoding step each take their centroid's row, so no other row is computed.
        rows = rows.gather(2, groups[..., None].expand(-1, -1, -1, size))
        groups = torch.arange(length, device=q.device).expand_as(groups)
    # At least one key is left to the sums, so that they are never empty.
    chunk = max(chunk, topk + 1)
    together = max(1, CACHED // (rows.shape[2] * k.shape[2])) if q.device.type == "cpu" else batch * heads
    blocks = zip(*(x.flatten(0, 1).split(together) for x in (q, k, v, rows, groups)), strict=True)
    settings = {"chunk": chunk, "topk": topk, "scale": scale, "dropout": dropout}
    return torch.cat([_block(*block, **settings) for block in blocks]).view(batch, heads, length, -1)


def _block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    groups: Tensor,
    *,
    chunk: int,
    topk: int,
    scale: float,
    dropout: float,
) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    out_dtype = q.dtype
    # Contiguous, or each gather of single keys would copy all of them.
    q, k, v, rows = q.to(wide) * scale, k.to(wide).contiguous(), v.to(wide).contiguous(), rows.to(wide) * scale
    before = k.shape[1] - q.shape[1]
    near, near_sums = _own_chunk(q, k, v, before, chunk, dropout)
    begin, end = max(before // chunk, 1) * chunk, (k.shape[1] - 1) // chunk * chunk
    if not end:
        return near.to(out_dtype)
    top_keys, rest_sums, mean_key, mean_value = past_rows(
        rows, k, v, begin=begin, end=end, chunk=chunk, topk=topk, dropout=dropout
    )
    # Queries of the first chunk have no past; all others use the row of their cluster at the start of their chunk.
    far = max(chunk - before, 0)
    q, groups = q[:, far:], groups[:, far:]
    boundary = torch.arange(before + far, k.shape[1], device=q.device) // chunk - begin // chunk
    place = groups + boundary * rows.shape[1]
    index = flat_index(place, top_keys.shape[1] * rows.shape[1])
    rest_sums, mean_key, mean_value = (
        x.flatten(0, 2).index_select(0, index).view(*place.shape, -1) for x in (rest_sums, mean_key, mean_value)
    )
    row = rows.flatten(0, 1).index_select(0, flat_index(groups, rows.shape[1])).view_as(q)
    # Tangent of a convex function: the remaining mass of a query near the centroid, never overestimated.
    rest_sums = rest_sums.squeeze(-1) + ((q - row) * mean_key).sum(-1)
    parts, sums = [near[:, far:], mean_value], [near_sums[:, far:], rest_sums]
    if topk:
        own, own_sums = own_weights(q, k, v, place, top_keys.flatten(1, 2), tile=_CAUSAL_TILE, dropout=dropout)
        parts, sums = [*parts, own], [*sums, own_sums]
    shares = torch.stack(sums, -1).softmax(-1).unsqueeze(-1).unbind(2)
    out = parts[0] * shares[0]
    for part, share in zip(parts[1:], shares[1:], strict=True):
        out = torch.addcmul(out, part, share)
    return torch.cat([near[:, :far], out], 1).to(out_dtype)


def _own_chunk(q: Tensor, k: Tensor, v: Tensor, before: int, chunk: int, dropout: float) -> tuple[Tensor, Tensor]:
    """Exact attention of each query inside its chunk, [G, L, E], and the log-sums of exponentials, [G, L]."""
    heads, length, _ = q.shape
    first, last = before // chunk, (k.shape[1] - 1) // chunk
    ahead = behind = 0
    if last > first:
        ahead, behind = before - first * chunk, (last + 1) * chunk - k.shape[1]
    keys, values = (
        F.pad(x[:, first * chunk :], (0, 0, 0, behind)).view(heads, last - first + 1, -1, x.shape[2]) for x in (k, v)
    )
    queries = F.pad(q, (0, 0, ahead, behind)).view(heads, last - first + 1, -1, q.shape[2])
    scores = queries @ keys.transpose(2, 3)
    future = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(scores.shape[3] - scores.shape[2] + 1)
    scores = scores.masked_fill(future, float("-inf"))
    out = F.dropout(scores.softmax(-1), dropout) @ values
    sums = scores.logsumexp(-1)
    return out.flatten(1, 2)[:, ahead : ahead + length], sums.flatten(1, 2)[:, ahead : ahead + length]
