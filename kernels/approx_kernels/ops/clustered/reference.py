"""Clustered and improved clustered attention in plain PyTorch: of samples of equal length at a time, and causal."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.ops.clustering.api import cluster_queries, nearest_centroids
from approx_kernels.ops.clustering.reference import flat_index, mean_queries
from approx_kernels.ops.exact.api import exact_attention
from approx_kernels.ops.near_keys.api import Exactly, Part, joined, near_keys
from approx_kernels.ops.near_keys.reference import far_mask, lowest, parts_in_turns, reach
from approx_kernels.runtime.pytorch import without_autocast, without_functions
from approx_kernels.tokens import attend_to_nothing, blank_padding, check_part, in_turns, without_padding

# Number of clusters: as given, or by a rule of the length. `auto` takes a share of the real queries of a sample, None the
# least up to `SHORT` real queries and the most beyond.
Clusters = int | Literal["auto"] | None
LEAST_DEFAULT_CLUSTERS, MOST_DEFAULT_CLUSTERS = 25, 100
QUERIES_PER_CLUSTER = 2
SHORT = 512


def default_clusters(queries: int, rule: Literal["auto"] | None) -> int:
    """Clusters by a rule for a sample with this many real queries."""
    if rule is None:
        return LEAST_DEFAULT_CLUSTERS if queries <= SHORT else MOST_DEFAULT_CLUSTERS
    return min(max(queries // QUERIES_PER_CLUSTER, LEAST_DEFAULT_CLUSTERS), MOST_DEFAULT_CLUSTERS)


def wanted_clusters(queries: Tensor, clusters: Clusters) -> Tensor:
    """The number of clusters of each sample, by a rule or as given; `queries` are its real queries, [B] int64."""
    if isinstance(clusters, int):
        return torch.full_like(queries, clusters)
    if clusters is None:
        return torch.where(queries > SHORT, MOST_DEFAULT_CLUSTERS, LEAST_DEFAULT_CLUSTERS)
    return (queries // QUERIES_PER_CLUSTER).clamp(LEAST_DEFAULT_CLUSTERS, MOST_DEFAULT_CLUSTERS)


def clustered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    planes: Tensor | None = None,
    draws: Tensor | None = None,
    selectors: Tensor | None = None,
    clusters: Clusters,
    iterations: int,
    topk: int | None,
    scale: float,
    dropout: float = 0.0,
    cluster: Callable[..., Tensor] = cluster_queries,
) -> Tensor:
    """The op of this name in `api.py`, which explains and checks the arguments; `cluster` is as `cluster_queries`."""

    def attend(q: Tensor, k: Tensor, v: Tensor, selectors: Tensor | None) -> Tensor:
        parts = {"planes": planes, "draws": draws, "selectors": selectors, "clusters": clusters, "cluster": cluster}
        how = {"iterations": iterations, "topk": topk, "scale": scale, "dropout": dropout}
        return clustered_samples(q, k, v, key_mask, **parts, **how)

    return in_turns(attend, q, k, v, selectors)


def causal_clustered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    centroids: Tensor,
    selectors: Tensor,
    chunk: int,
    topk: int | None,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """The op of this name in `api.py`, which explains the arguments and checks them."""
    how = {"chunk": chunk, "topk": topk or 0, "scale": scale, "dropout": dropout}

    def attend(q: Tensor, k: Tensor, v: Tensor, centroids: Tensor, selectors: Tensor) -> Tensor:
        samples = partial(causal_samples, centroids=centroids, selectors=selectors, **how)
        return without_padding(samples, q, k, v, key_mask)

    return in_turns(attend, q, k, v, centroids, selectors)


def clustered_samples(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    *,
    planes: Tensor | None,
    draws: Tensor | None,
    selectors: Tensor | None,
    clusters: Clusters,
    iterations: int,
    topk: int | None,
    scale: float,
    dropout: float,
    cluster: Callable[..., Tensor],
) -> Tensor:
    """Gather the real queries and keys of each sample, attend among them, and scatter the outputs."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        queries = q.shape[2]
        count = clusters if isinstance(clusters, int) else default_clusters(queries, clusters)
        if queries <= count:
            return exact_attention(q, k, v, causal=False, scale=scale, dropout=dropout)
        shape = q.shape
        if selectors is not None:
            groups = nearest_centroids(q, selectors).flatten(0, 1)
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        if selectors is None:
            assert planes is not None, "checked by the op"
            assert draws is not None, "checked by the op"
            groups = cluster(q.detach(), planes, draws, clusters=count, iterations=iterations)
        if topk is None:
            out = plain_heads(q, k, v, groups, clusters=count, scale=scale, dropout=dropout)
        else:
            out = improved_heads(q, k, v, groups, clusters=count, topk=topk, scale=scale, dropout=dropout)
        return out.view(*shape[:3], -1)

    k, v = k.to(q.dtype), v.to(q.dtype)
    with without_autocast(q.device.type):
        if key_mask is None or key_mask.all():
            return attend(q, k, v)
        padded_queries = q.shape[2] == k.shape[2]
        out = list(q.new_zeros(*q.shape[:3], v.shape[3]))
        lengths = key_mask.sum(1)
        for length in lengths.unique().tolist():
            samples = (lengths == length).nonzero().squeeze(1).tolist()
            real = [key_mask[sample].nonzero().squeeze(1) for sample in samples]
            if length:
                inner = _at(q, samples, real) if padded_queries else q[samples]
                some = attend(inner, _at(k, samples, real), _at(v, samples, real))
            else:
                some = attend_to_nothing(q[samples], k[samples], v[samples])
            for sample, tokens, sample_out in zip(samples, real, some, strict=True):
                place = length and padded_queries
                out[sample] = out[sample].index_copy(1, tokens, sample_out) if place else sample_out
        return torch.stack(out)


def _at(x: Tensor, samples: list[int], tokens: list[Tensor]) -> Tensor:
    """The tokens [m] of some samples of x [B, H, n, D], [b, H, m, D]; a view for a single sample."""

    def chosen(x: Tensor, index: Tensor) -> Tensor:
        first, count = int(index[0]), index.numel()
        return x[:, first : first + count] if int(index[-1]) == first + count - 1 else x.index_select(1, index)

    parts = [chosen(x[sample], index) for sample, index in zip(samples, tokens, strict=True)]
    return torch.stack(parts) if len(parts) > 1 else parts[0][None]


def plain_heads(
    q: Tensor, k: Tensor, v: Tensor, groups: Tensor, *, clusters: int, scale: float, dropout: float
) -> Tensor:
    """Attend with the mean query of each cluster and copy the result to its members.

    Args: q [G, n, D], k [G, S, D], v [G, S, E], groups [G, n] the cluster of each query. Returns [G, n, E].
    """
    means, _ = mean_queries(q, groups, clusters)
    shared = exact_attention(means.to(q.dtype)[None], k[None], v[None], causal=False, scale=scale, dropout=dropout)[0]
    rows = flat_index(groups, clusters)
    return shared.flatten(0, 1).index_select(0, rows).view(*q.shape[:2], v.shape[2])


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


def past_rows(
    rows: Tensor, k: Tensor, v: Tensor, *, begin: int, end: int, chunk: int, topk: int, dropout: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of attention over the keys before each of N boundaries, in O(S R D) for all of them together.

    Boundary i is at `begin + i chunk`, the last one at `end`. From one boundary to the next the K largest keys compete
    with those of the chunk; the losers are added to running sums, and never return.

    Args: rows [G, R, D], scaled queries; k [G, S, D]; v [G, S, E]; `begin` is above K.

    Returns for each boundary and row the K keys of the largest scores, [G, N, R, K], and of the other keys the
    logarithm of the sum of exponentials, [G, N, R, 1], the mean key, [G, N, R, D], and the mean value, [G, N, R, E].
    """
    count, size = rows.shape[1:]
    first = rows @ k[:, :begin].transpose(1, 2)
    chunks = (end - begin) // chunk
    keys, values = (x[:, begin:end].unflatten(1, (chunks, chunk)) for x in (k, v))
    scores = rows[:, None] @ keys.transpose(2, 3)  # [G, N - 1, R, chunk]
    top_keys, others, peaks, lost = _compete(first.detach(), scores.detach(), topk)

    def sums(scores: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = scores.exp()
        return torch.cat([weights.sum(-1, keepdim=True), weights @ k, F.dropout(weights, dropout) @ v], -1)

    begun = sums(first.masked_fill(~others[0], float("-inf")) - peaks[:, 0], k[:, :begin], v[:, :begin])
    added = sums(scores.masked_fill(~others[1], float("-inf")) - peaks[:, 1:], keys, values)
    # There are few: a row's K keys change with the logarithm of the past.
    g, i, r, slot = lost.nonzero(as_tuple=True)
    key = top_keys[g, i, r, slot] + g * k.shape[1]
    old_keys, old_values = (x.flatten(0, 1).index_select(0, key) for x in (k, v))
    old = rows.flatten(0, 1).index_select(0, g * count + r)
    weights = ((old * old_keys).sum(-1, keepdim=True) - peaks[g, i + 1, r]).exp()
    parts = torch.cat([weights, weights * old_keys, F.dropout(weights, dropout) * old_values], -1)
    added = added.flatten(0, 2).index_add(0, (g * chunks + i) * count + r, parts).view_as(added)
    running = [begun]
    for fade, more in zip((peaks[:, :-1] - peaks[:, 1:]).exp().unbind(1), added.unbind(1), strict=True):
        running.append(torch.addcmul(more, running[-1], fade))
    mass, mean_key, mean_value = torch.stack(running, 1).split([1, size, v.shape[2]], -1)
    return top_keys, peaks + mass.log(), mean_key / mass, mean_value / mass


def _compete(first: Tensor, scores: Tensor, topk: int) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor, Tensor]:
    """Find the K largest keys of each row at each boundary, and the largest score of all others.

    Args: first [G, R, begin], scores [G, N - 1, R, chunk].

    Returns the keys [G, N, R, K]; which of `first` and of `scores` are not among them at the next boundary; the
    peaks, [G, N, R, 1]; and which of the keys lose their place at the next boundary, [G, N - 1, R, K].
    """
    heads, chunks, count, chunk = scores.shape
    begin = first.shape[2]
    top, keys = first.topk(topk, sorted=False)
    left = first.scatter(-1, keys, float("-inf"))
    at_first, peak = left > float("-inf"), left.amax(-1, keepdim=True)
    top_keys, peaks, others, lost = [keys], [peak], [], []
    position = torch.arange(begin, begin + chunks * chunk, device=first.device).view(chunks, chunk)
    for new, place in zip(scores.unbind(1), position, strict=True):
        candidates = torch.cat([top, new], -1)
        chosen = candidates.topk(topk, sorted=False).indices
        left = candidates.scatter(-1, chosen, float("-inf"))
        top = candidates.gather(-1, chosen)
        keys = torch.cat([keys, place.expand(heads, count, -1)], -1).gather(-1, chosen)
        peak = torch.maximum(peak, left.amax(-1, keepdim=True))
        was_top, was_new = (left > float("-inf")).split([topk, chunk], -1)
        for series, each in zip((top_keys, peaks, others, lost), (keys, peak, was_new, was_top), strict=True):
            series.append(each)
    if not chunks:
        others, lost = [at_first.new_zeros(heads, count, chunk)], [at_first.new_zeros(heads, count, topk)]
    others, lost = torch.stack(others, 1)[:, :chunks], torch.stack(lost, 1)[:, :chunks]
    return torch.stack(top_keys, 1), (at_first, others), torch.stack(peaks, 1), lost


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
    """Gathers keys and values in parts that fit a cache, again in the backward pass: all would take n K (D + E)."""

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


# Keys of a block, whose sums each row of weights has.
_SUMMED = 64


def clustered_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    exactly: Exactly,
    weight: Tensor,
    planes: Tensor | None = None,
    draws: Tensor | None = None,
    centroids: Tensor | None = None,
    selectors: Tensor | None = None,
    clusters: Clusters,
    iterations: int,
) -> tuple[Part, Part]:
    """Softmax attention to near keys, and attention of each query's cluster to all others, to join under one normaliser.

    All queries of a cluster weigh far keys as its mean query does, in O(n C D); the causal form takes fixed centroids in
    place of means. The logarithm of the mass of far keys has the mean query's derivative at the query: a tangent.

    Source: the clusters are those of Vyas, Katharopoulos, Fleuret, 2020, arXiv 2007.04825; departs from it in the near keys
    and in the mass.

    Args: as for `clustered_attention`, and `causal_clustered_attention` where `exactly` is causal, except:
        exactly: Which keys are near, whether the form is causal, and the scale of scores.
        weight: Logarithm of each head's factor of the mass of far keys, [H]; samples with at most C real queries have none.

    Returns:
        The near keys and the others, in at least float32.

    Raises:
        ValueError: if shapes or dtypes do not match.
    """
    check_part("weight", weight, q, q.shape[1])
    q, k, v = blank_padding(q, k.to(q.dtype), v.to(q.dtype), key_mask)
    with without_autocast(q.device.type):
        near = near_keys(q, k, v, key_mask, exactly)
        wide = torch.promote_types(q.dtype, torch.float32)
        queries, keys, values = q.to(wide) * exactly.scale, k.to(wide), v.to(wide)
        weights = weight.to(wide)[:, None]
        if exactly.causal:
            assert centroids is not None, "the causal form has both"
            assert selectors is not None, "the causal form has both"
            rows, groups = centroids.to(wide).expand(q.shape[0], -1, -1, -1), nearest_centroids(q, selectors)
            rows = rows * exactly.scale
        else:
            way = {"planes": planes, "draws": draws, "selectors": selectors, "iterations": iterations}
            of_queries = key_mask if q.shape[2] == k.shape[2] else None
            groups, most, shared = _padded_groups(q.detach(), of_queries, clusters=clusters, **way)
            means, _ = mean_queries(queries.flatten(0, 1), groups.flatten(0, 1), most)
            rows, weights = means.unflatten(0, q.shape[:2]), weights * shared[:, None, None]
        if q.shape[2] < rows.shape[2]:
            # Few queries each take a row of their own.
            rows = rows.gather(2, groups[..., None].expand(-1, -1, -1, rows.shape[3]))
            groups = torch.arange(q.shape[2], device=q.device).expand_as(groups)
        mask = far_mask(key_mask, exactly.chosen)
        attend = partial(_far_of_rows, mask=mask, window=exactly.window, causal=exactly.causal)
        far = parts_in_turns(attend, queries, keys, values, rows, groups)
        log = torch.where(far.log > lowest(wide) / 2, far.log + weights, far.log)
        return Part(near.out, near.log.to(wide)), Part(far.out, log)


def _padded_groups(
    q: Tensor,
    mask: Tensor | None,
    *,
    planes: Tensor | None,
    draws: Tensor | None,
    selectors: Tensor | None,
    clusters: Clusters,
    iterations: int,
) -> tuple[Tensor, int, Tensor]:
    """The cluster of each query of samples with padding, which has one of its own.

    Args: queries q [B, H, L, D], and a mask of the real ones [B, L].

    Returns the clusters, [B, H, L]; their number; and which samples have fewer clusters than queries, [B] bool.
    """
    batch, length = q.shape[0], q.shape[2]

    def grouped(q: Tensor) -> tuple[Tensor, int]:
        queries = q.shape[-2]
        count = clusters if isinstance(clusters, int) else default_clusters(queries, clusters)
        if queries <= count:
            return torch.arange(queries, device=q.device).expand(q.shape[:-1]), queries
        if selectors is not None:
            return nearest_centroids(q, selectors), count
        assert planes is not None, "planes or selectors group queries"
        assert draws is not None, "planes have draws"
        own = cluster_queries(q.reshape(-1, *q.shape[-2:]), planes, draws, clusters=count, iterations=iterations)
        return own.view(q.shape[:-1]), count

    if mask is None:
        groups, most = grouped(q)
        return groups, most, torch.full((batch,), most < length, device=q.device)
    groups, most, shared = torch.full(q.shape[:3], -1, device=q.device), 0, torch.zeros(batch, dtype=torch.bool)
    for sample, real in enumerate(mask):
        places = real.nonzero().squeeze(1)
        if places.numel():
            groups[sample, :, places], count = grouped(q[sample].index_select(1, places))
            most, shared[sample] = max(most, count), count < places.numel()
    return groups.masked_fill(groups < 0, most), most + 1, shared.to(q.device)


def _far_of_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    groups: Tensor,
    *,
    mask: Tensor | None,
    window: int,
    causal: bool,
) -> Part:
    """Attention of each query to the keys outside its window by the weights of a row that it shares with others.

    Each row sums the keys of each block; a query takes whole blocks, and single keys of the blocks that its window touches.
    The logarithm of the mass of all of them has the row's derivative at the query, so that it is a tangent of the true one.

    Args: scaled queries q [B, H, L, D]; k [B, H, S, D], v [B, H, S, E]; scaled rows [B, H, C, D]; groups [B, H, L]; mask [B, S].
    """
    batch, _, length, size = q.shape
    keys, low, block = k.shape[2], lowest(k.dtype), _SUMMED
    # The first queries may precede all keys, the first keys all queries.
    ahead, first = max(length - keys, 0), max(keys - length, 0) // block
    blocks, spare = -(-(keys + ahead) // block), max(keys - length, 0) % block
    ends = (ahead, blocks * block - keys - ahead)
    mask = k.new_ones(batch, keys, dtype=torch.bool) if mask is None else mask
    mask = F.pad(mask, ends)
    # The mean key under the weights is the derivative.
    values = F.pad(torch.cat([v, k], -1), (0, 0, *ends))
    k = F.pad(k, (0, 0, *ends))
    scores = rows[:, :, None] @ k.unflatten(2, (blocks, block)).mT
    sums, logs = _attended(scores, mask.view(batch, 1, blocks, 1, block), values.unflatten(2, (blocks, block)))
    place = torch.arange(blocks, device=q.device)
    left, right = reach(window, causal)
    before, after = -(-left // block), -(-right // block)
    strip = bool(window) or causal
    own = place[first:, None] if strip else place[:1, None]
    seen = (place < own - before) | (place > own + after) & (not causal) if strip else place[None] >= 0
    # What each row takes for queries of each block: from [B, H, C, 1, blocks] to [B, H, C, blocks of queries, E + D].
    count, logs = len(own), logs.permute(0, 1, 3, 2)[:, :, :, None]
    whole = _attended(logs.expand(-1, -1, -1, count, -1), seen, sums.permute(0, 1, 3, 2, 4))
    index = groups * count + ((torch.arange(length, device=q.device) + spare) // block if strip else 0)
    each = index[..., None].expand(-1, -1, -1, values.shape[3])
    parts = [Part(whole.out.flatten(2, 3).gather(2, each), whole.log.flatten(2, 3).gather(2, index))]
    row = rows.gather(2, groups[..., None].expand(-1, -1, -1, size))
    if strip:
        span = (before + 1 + after) * block
        queries = F.pad(row, (0, 0, spare, count * block - spare - length)).unflatten(2, (count, block))
        sides = (before * block, after * block)
        near_k, near_v = (F.pad(x, (0, 0, *sides)).unfold(2, span, block)[:, :, first:] for x in (k, values))
        distance = torch.arange(span, device=q.device) - before * block - torch.arange(block, device=q.device)[:, None]
        outside = distance <= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
        outside = outside & ((distance < -left) | (distance > right)) if window else outside
        seen = F.pad(mask, sides).unfold(1, span, block)[:, None, first:, None] & outside
        some = _attended(queries @ near_k, seen, near_v.mT)
        parts.append(Part(*(x.flatten(2, 3)[:, :, spare : spare + length] for x in some)))
    log = torch.stack([part.log for part in parts]).logsumexp(0)
    out, mean_key = joined(parts).split([v.shape[3], size], -1)
    return Part(out, torch.where(log > low / 2, log + ((q - row) * mean_key).sum(-1), low))


def _attended(scores: Tensor, seen: Tensor, values: Tensor) -> Part:
    """The softmax of the scores [..., n, m] that are seen, over values [..., m, E]; an undefined output for none."""
    low = lowest(scores.dtype)
    scores = scores.masked_fill(~seen, low)
    top = scores.detach().amax(-1, keepdim=True)
    weights = (scores - top).exp_()
    total = weights.sum(-1, keepdim=True)
    return Part(
        weights @ values / total, (top + total.log()).squeeze(-1).masked_fill((top <= low / 2).squeeze(-1), low)
    )
