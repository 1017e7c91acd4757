"""Improved clustered attention of heads without padding."""

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.ops.clustered.own import CACHED, own_weights
from approx_kernels.ops.clustering.means import flat_index, mean_queries

# Queries of one cluster that share their gathered keys and values in one small product.
_IMPROVED_TILE = 16


def improved_heads(
    q: Tensor, k: Tensor, v: Tensor, groups: Tensor, *, clusters: int, topk: int, scale: float, dropout: float
) -> Tensor:
    """Attend with the mean queries, and let each query recompute the weights of the keys that its cluster weighs most.

    Args: q [G, n, D], k [G, S, D], v [G, S, E], groups [G, n] the cluster of each query. Returns [G, n, E].
    """
    on_cpu = q.device.type == "cpu"
    heads = max(1, CACHED // (clusters * k.shape[1])) if on_cpu else q.shape[0]
    blocks = zip(q.split(heads), k.split(heads), v.split(heads), groups.split(heads), strict=True)
    return torch.cat([_improved_block(*block, clusters, topk, scale, dropout) for block in blocks])


def _improved_block(
    q: Tensor, k: Tensor, v: Tensor, groups: Tensor, clusters: int, topk: int, scale: float, dropout: float
) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    out_dtype = q.dtype
    q, k, v = q.to(wide) * scale, k.to(wide), v.to(wide)
    means, _ = mean_queries(q, groups, clusters)
    scores = means @ k.transpose(1, 2)
    shared = scores.softmax(-1)
    top_keys = scores.detach().topk(min(topk, k.shape[1]), sorted=False).indices  # [G, C, K]
    mass = shared.gather(-1, top_keys).sum(-1, keepdim=True)
    rest = F.dropout(shared.scatter(-1, top_keys, 0.0), dropout) @ v
    own, _ = own_weights(q, k, v, groups, top_keys, tile=_IMPROVED_TILE, dropout=dropout)
    rows = flat_index(groups, clusters)
    mass, rest = (x.flatten(0, 1).index_select(0, rows).view(*groups.shape, -1) for x in (mass, rest))
    return torch.addcmul(rest, mass, own).to(out_dtype)
