"""Keys that each query weighs itself, gathered in tiles for the queries of one cluster."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.ops.clustering.means import flat_index
from approx_kernels.runtime.observed import without_functions

# Numbers in a working set: 1 MiB of float32, about the size of a core's own cache.
CACHED = 2**18


def own_weights(
    q: Tensor, k: Tensor, v: Tensor, groups: Tensor, top_keys: Tensor, *, tile: int, dropout: float
) -> tuple[Tensor, Tensor]:
    """Softmax attention of each query over the K keys of its cluster.

    Args: q [G, n, D], scaled; k [G, S, D]; v [G, S, E]; groups [G, n], the cluster of each query;
    top_keys [G, C, K], the keys of each cluster; `tile` queries of one cluster share their gathered keys.

    Returns the outputs, [G, n, E], and the logarithms of the sums of exponentials, [G, n].
    """
    heads, n, size = q.shape
    clusters, kept = top_keys.shape[1:]
    members = torch.bincount(flat_index(groups, clusters), minlength=heads * clusters).view(heads, clusters)
    slots, tile_cluster = _tiles(groups, members, tile)
    slots = flat_index(slots, tile_cluster.shape[1] * tile)
    tiled = q.new_zeros(tile_cluster.numel() * tile, size).index_copy(0, slots, q.reshape(heads * n, size))
    index = flat_index(top_keys, k.shape[1]).view(heads * clusters, kept)
    index = index.index_select(0, flat_index(tile_cluster, clusters))
    keep = None
    if dropout:
        keep = F.dropout(q.new_ones(index.shape[0], tile, kept), dropout)
    attend = _at_once if without_functions() else _OwnWeights.apply
    out, sums = attend(tiled.view(-1, tile, size), k.flatten(0, 1), v.flatten(0, 1), index, keep)  # pyright: ignore[reportGeneralTypeIssues]  # what forward returns
    out = out.flatten(0, 1).index_select(0, slots).view(heads, n, -1)
    return out, sums.flatten().index_select(0, slots).view(heads, n)


def _tiles(groups: Tensor, members: Tensor, tile: int) -> tuple[Tensor, Tensor]:
    """Lay the queries of each head out in tiles of one cluster each.

    Returns the slot of each query, [G, n], and the cluster of each tile, [G, tiles]; a cluster's last tile
    may have empty slots, and a head with fewer tiles than another has empty tiles.
    """
    tiles = (members + tile - 1) // tile
    last_tile = tiles.cumsum(1)
    order = groups.argsort(dim=1, stable=True)
    cluster = groups.gather(1, order)
    rank = torch.arange(groups.shape[1], device=groups.device) - (members.cumsum(1) - members).gather(1, cluster)
    slots = (last_tile - tiles).gather(1, cluster) * tile + rank
    total = int(last_tile[:, -1].max())
    numbers = torch.arange(total, device=groups.device).expand(groups.shape[0], total).contiguous()
    tile_cluster = torch.searchsorted(last_tile, numbers, right=True).clamp(max=members.shape[1] - 1)
    return torch.empty_like(slots).scatter(1, order, slots), tile_cluster


def _at_once(q: Tensor, k: Tensor, v: Tensor, index: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same as `_OwnWeights`, in n K (D + E) memory."""
    keys, values = _gather(k, index), _gather(v, index)
    scores = q @ keys.transpose(1, 2)
    weights = scores.softmax(-1)
    return (weights if keep is None else weights * keep) @ values, scores.logsumexp(-1)


class _OwnWeights(torch.autograd.Function):
    """Gathers keys and values a cache's worth at a time, again in the backward pass: stored, they would take n K (D + E)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, index: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        out, sums = q.new_empty(*q.shape[:2], v.shape[1]), q.new_empty(q.shape[:2])
        for block in _blocks(index, k, v):
            keys, values = _gather(k, index[block]), _gather(v, index[block])
            scores = q[block] @ keys.transpose(1, 2)
            weights = scores.softmax(-1)
            # Two maxima are much cheaper than a sum of exponentials.
            sums[block] = scores.amax(-1) - weights.amax(-1).log()
            torch.bmm(weights if keep is None else weights * keep[block], values, out=out[block])
        ctx.save_for_backward(q, k, v, index, keep)
        return out, sums

    # In plain steps, so that it can be differentiated again.
    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_sums: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]  # named arguments there
        q, k, v, index, keep = ctx.saved_tensors
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        for block in _blocks(index, k, v):
            keys, values = _gather(k, index[block]), _gather(v, index[block])
            weights = (q[block] @ keys.transpose(1, 2)).softmax(-1)
            kept = weights if keep is None else weights * keep[block]
            dv.index_add_(0, index[block].flatten(), (kept.transpose(1, 2) @ grad[block]).flatten(0, 1))
            change = kept * (grad[block] @ values.transpose(1, 2))
            change = change + weights * (grad_sums[block].unsqueeze(-1) - change.sum(-1, keepdim=True))
            dq[block] = change @ keys
            dk.index_add_(0, index[block].flatten(), (change.transpose(1, 2) @ q[block]).flatten(0, 1))
        return dq, dk, dv, None, None


def _blocks(index: Tensor, k: Tensor, v: Tensor) -> list[slice]:
    """Slices of tiles: all at once on an accelerator; on a CPU, as many as its cache holds keys and values for."""
    tiles, kept = index.shape
    together = max(1, CACHED // (kept * (k.shape[1] + v.shape[1]))) if k.device.type == "cpu" else tiles
    return [slice(first, first + together) for first in range(0, tiles, together)]


def _gather(x: Tensor, index: Tensor) -> Tensor:
    return x.index_select(0, index.flatten()).view(*index.shape, -1)
