"""Improved clustered attention of the heads of one sample."""

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.clustered.plain import flat_index, mean_queries

# Queries of one cluster that share their gathered keys and values in one small product.
_TILE = 16
# Numbers in a working set: 1 MiB of float32, about what a core's own cache holds.
_CACHED = 2**18


def improved_heads(
    q: Tensor, k: Tensor, v: Tensor, groups: Tensor, *, clusters: int, topk: int, scale: float, dropout: float
) -> Tensor:
    """Attend with the mean queries, and let each query weigh anew the keys that its cluster weighs most.

    Args: q [G, n, D], k [G, S, D], v [G, S, E], groups [G, n] the cluster of each query. Returns [G, n, E].
    """
    on_cpu = q.device.type == "cpu"
    heads = max(1, _CACHED // (clusters * k.shape[1])) if on_cpu else q.shape[0]
    blocks = zip(q.split(heads), k.split(heads), v.split(heads), groups.split(heads), strict=True)
    return torch.cat([_improved_block(*block, clusters, topk, scale, dropout) for block in blocks])


def _improved_block(
    q: Tensor, k: Tensor, v: Tensor, groups: Tensor, clusters: int, topk: int, scale: float, dropout: float
) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    heads, n, size = q.shape
    keys, out_dtype = k.shape[1], q.dtype
    q, k, v = q.to(wide) * scale, k.to(wide), v.to(wide)
    means, members = mean_queries(q, groups, clusters)
    scores = means @ k.transpose(1, 2)
    shared = scores.softmax(-1)
    top_keys = scores.detach().topk(min(topk, keys), sorted=False).indices  # [G, C, K]
    mass = shared.gather(-1, top_keys).sum(-1, keepdim=True)
    rest = F.dropout(shared.scatter(-1, top_keys, 0.0), dropout) @ v

    slots, tile_cluster = _tiles(groups, members)
    slots = flat_index(slots, tile_cluster.shape[1] * _TILE)
    tile_cluster = flat_index(tile_cluster, clusters)
    tiled = q.new_zeros(tile_cluster.shape[0] * _TILE, size).index_copy(0, slots, q.reshape(heads * n, size))
    tile_keys = flat_index(top_keys, keys).view(heads * clusters, -1).index_select(0, tile_cluster)
    tile_mass = mass.view(-1, 1, 1).index_select(0, tile_cluster)
    tile_rest = rest.view(heads * clusters, 1, -1).index_select(0, tile_cluster)
    k, v = k.reshape(heads * keys, -1), v.reshape(heads * keys, -1)

    together = max(1, _CACHED // (tile_keys.shape[1] * (size + v.shape[1])))
    out = []
    for queries, chosen, part, remainder in zip(
        tiled.view(-1, _TILE, size).split(together),
        tile_keys.split(together),
        tile_mass.split(together),
        tile_rest.split(together),
        strict=True,
    ):
        own_keys = k.index_select(0, chosen.flatten()).view(*chosen.shape, -1)
        own_values = v.index_select(0, chosen.flatten()).view(*chosen.shape, -1)
        own = F.dropout(torch.bmm(queries, own_keys.transpose(1, 2)).softmax(-1), dropout) * part
        out.append(torch.baddbmm(remainder, own, own_values))
    return torch.cat(out).flatten(0, 1).index_select(0, slots).view(heads, n, -1).to(out_dtype)


def _tiles(groups: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
    """Lay the queries of each head out in tiles of one cluster each.

    Returns the slot of each query, [G, n], and the cluster of each tile, [G, tiles]; a cluster's last tile
    may have empty slots, and a head with fewer tiles than another has empty tiles.
    """
    tiles = (members + _TILE - 1) // _TILE
    last_tile = tiles.cumsum(1)
    order = groups.argsort(dim=1, stable=True)
    cluster = groups.gather(1, order)
    rank = torch.arange(groups.shape[1], device=groups.device) - (members.cumsum(1) - members).gather(1, cluster)
    slots = (last_tile - tiles).gather(1, cluster) * _TILE + rank
    total = int(last_tile[:, -1].max())
    numbers = torch.arange(total, device=groups.device).expand(groups.shape[0], total).contiguous()
    tile_cluster = torch.searchsorted(last_tile, numbers, right=True).clamp(max=members.shape[1] - 1)
    return torch.empty_like(slots).scatter(1, order, slots), tile_cluster
