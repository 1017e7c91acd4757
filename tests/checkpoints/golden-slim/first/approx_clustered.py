# Travels with a checkpoint converted by approx (Apache-2.0); it needs torch and transformers, and nothing else.
"""Clustered attention, plain and improved, bidirectional and causal."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .approx_clustering import check_clustering, cluster_queries, flat_index, mean_queries, nearest_centroids
from .approx_exact import exact_attention
from .approx_runtime import without_autocast, without_functions
from .approx_tokens import attend_to_nothing, check_least, check_part, check_shapes, in_turns, without_padding

# Keys that each query weighs itself, shared by the queries of one cluster in tiles.


# Numbers in a working set: 1 MiB of float32, about what a core's own cache holds.
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
    """What `_OwnWeights` gives, in n K (D + E) memory."""
    keys, values = _gather(k, index), _gather(v, index)
    scores = q @ keys.transpose(1, 2)
    weights = scores.softmax(-1)
    return (weights if keep is None else weights * keep) @ values, scores.logsumexp(-1)


class _OwnWeights(torch.autograd.Function):
    """Gathers keys and values a cache's worth at a time, in the backward once more: kept, they would be n K (D + E)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, index: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        out, sums = q.new_empty(*q.shape[:2], v.shape[1]), q.new_empty(q.shape[:2])
        for block in _blocks(index, k, v):
            keys, values = _gather(k, index[block]), _gather(v, index[block])
            scores = q[block] @ keys.transpose(1, 2)
            weights = scores.softmax(-1)
            # Twice a maximum is much cheaper than a sum of exponentials.
            sums[block] = scores.amax(-1) - weights.amax(-1).log()
            torch.bmm(weights if keep is None else weights * keep[block], values, out=out[block])
        ctx.save_for_backward(q, k, v, index, keep)
        return out, sums

    @staticmethod
    @once_differentiable
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
    """Slices of tiles: all at once on an accelerator, and on a CPU as many as its cache holds keys and values of."""
    tiles, kept = index.shape
    together = max(1, CACHED // (kept * (k.shape[1] + v.shape[1]))) if k.device.type == "cpu" else tiles
    return [slice(first, first + together) for first in range(0, tiles, together)]


def _gather(x: Tensor, index: Tensor) -> Tensor:
    return x.index_select(0, index.flatten()).view(*index.shape, -1)


def past_rows(
    rows: Tensor, k: Tensor, v: Tensor, *, begin: int, end: int, chunk: int, topk: int, dropout: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of attention over the keys before each of N boundaries, in O(S R D) for all of them together.

    Boundary i stands at `begin + i chunk`, and the last one at `end`. From one to the next the K
    largest keys compete with those of the chunk; who loses goes into running sums, and never comes back.

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
    # Few: a row's K keys change as the logarithm of the past.
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
    peaks, [G, N, R, 1]; and which of the keys have lost their place at the boundary after, [G, N - 1, R, K].
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
        for found, each in zip((top_keys, peaks, others, lost), (keys, peak, was_new, was_top), strict=True):
            found.append(each)
    if not chunks:
        others, lost = [at_first.new_zeros(heads, count, chunk)], [at_first.new_zeros(heads, count, topk)]
    others, lost = torch.stack(others, 1)[:, :chunks], torch.stack(lost, 1)[:, :chunks]
    return torch.stack(top_keys, 1), (at_first, others), torch.stack(peaks, 1), lost


def plain_heads(
    q: Tensor, k: Tensor, v: Tensor, groups: Tensor, *, clusters: int, scale: float, dropout: float
) -> Tensor:
    """Attend with the mean query of each cluster and hand the result to its members.

    Args: q [G, n, D], k [G, S, D], v [G, S, E], groups [G, n] the cluster of each query. Returns [G, n, E].
    """
    means, _ = mean_queries(q, groups, clusters)
    shared = exact_attention(means.to(q.dtype)[None], k[None], v[None], causal=False, scale=scale, dropout=dropout)[0]
    rows = flat_index(groups, clusters)
    return shared.flatten(0, 1).index_select(0, rows).view(*q.shape[:2], v.shape[2])


# Improved clustered attention of heads without padding.


# Queries of one cluster that share their gathered keys and values in one small product.
_IMPROVED_TILE = 16


def improved_heads(
    q: Tensor, k: Tensor, v: Tensor, groups: Tensor, *, clusters: int, topk: int, scale: float, dropout: float
) -> Tensor:
    """Attend with the mean queries, and let each query weigh anew the keys that its cluster weighs most.

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


# Causal clustered attention of heads without padding: exact near each query, by fixed centroids far from it.


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
        # The few queries of a decoding step each bring the row of their centroid, and no other is computed.
        rows = rows.gather(2, groups[..., None].expand(-1, -1, -1, size))
        groups = torch.arange(length, device=q.device).expand_as(groups)
    # One key at least is left to the sums, so that they are never empty.
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
    # Contiguous once, or each gather of single keys would copy all of them.
    q, k, v, rows = q.to(wide) * scale, k.to(wide).contiguous(), v.to(wide).contiguous(), rows.to(wide) * scale
    before = k.shape[1] - q.shape[1]
    near, near_sums = _own_chunk(q, k, v, before, chunk, dropout)
    begin, end = max(before // chunk, 1) * chunk, (k.shape[1] - 1) // chunk * chunk
    if not end:
        return near.to(out_dtype)
    top_keys, rest_sums, mean_key, mean_value = past_rows(
        rows, k, v, begin=begin, end=end, chunk=chunk, topk=topk, dropout=dropout
    )
    # Queries of the first chunk have no past. Each other has the row of its cluster at the start of its chunk.
    far = max(chunk - before, 0)
    q, groups = q[:, far:], groups[:, far:]
    boundary = torch.arange(before + far, k.shape[1], device=q.device) // chunk - begin // chunk
    place = groups + boundary * rows.shape[1]
    index = flat_index(place, top_keys.shape[1] * rows.shape[1])
    rest_sums, mean_key, mean_value = (
        x.flatten(0, 2).index_select(0, index).view(*place.shape, -1) for x in (rest_sums, mean_key, mean_value)
    )
    row = rows.flatten(0, 1).index_select(0, flat_index(groups, rows.shape[1])).view_as(q)
    # The tangent of a convex function: the remaining mass of a query near the centroid, and never more than it.
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


# Clustered and improved clustered attention of samples of equal length at a time, each without its padding.


# Up to so many queries there are so many clusters by default.
SHORT = (512, 25)
MOST_DEFAULT_CLUSTERS = 100


def default_clusters(queries: int) -> int:
    """Clusters for a sample of so many real queries: 25 up to 512, 100 beyond."""
    return SHORT[1] if queries <= SHORT[0] else MOST_DEFAULT_CLUSTERS


def clustered_samples(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    *,
    planes: Tensor | None,
    draws: Tensor | None,
    selectors: Tensor | None,
    clusters: int | None,
    iterations: int,
    topk: int | None,
    scale: float,
    dropout: float,
) -> Tensor:
    """Take the real queries and keys of each sample, attend among them, put the outputs back; `impl` clusters."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        queries = q.shape[2]
        count = clusters or default_clusters(queries)
        if queries <= count:
            return exact_attention(q, k, v, causal=False, scale=scale, dropout=dropout)
        shape = q.shape
        if selectors is not None:
            groups = nearest_centroids(q, selectors).flatten(0, 1)
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        if selectors is None:
            assert planes is not None, "checked by the op"
            assert draws is not None, "checked by the op"
            groups = cluster_queries(q.detach(), planes, draws, clusters=count, iterations=iterations)
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
            for sample, tokens, found in zip(samples, real, some, strict=True):
                place = length and padded_queries
                out[sample] = out[sample].index_copy(1, tokens, found) if place else found
        return torch.stack(out)


def _at(x: Tensor, samples: list[int], tokens: list[Tensor]) -> Tensor:
    """The tokens [m] of each of some samples of x [B, H, n, D], [b, H, m, D]; a view of a sample by itself."""

    def chosen(x: Tensor, index: Tensor) -> Tensor:
        first, count = int(index[0]), index.numel()
        return x[:, first : first + count] if int(index[-1]) == first + count - 1 else x.index_select(1, index)

    found = [chosen(x[sample], index) for sample, index in zip(samples, tokens, strict=True)]
    return torch.stack(found) if len(found) > 1 else found[0][None]


def clustered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    planes: Tensor | None = None,
    draws: Tensor | None = None,
    selectors: Tensor | None = None,
    clusters: int | None,
    iterations: int,
    topk: int | None,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """Attend with the mean query of each cluster, in O(n C D); with `topk`, mend its largest weights too.

    Plain: every member of a cluster receives what the cluster's mean query attends to. Improved (`topk`): the
    K keys that the mean query weighs most are weighed anew by each member, within the mass that the mean query
    gave to them, in O(n K D) more. Gradients pass through the means and the masses, not through the choices.

    Each sample is computed without its padding, so nothing depends on padding or neighbours. A sample with at
    most C real queries is exact: each query is its own cluster. Padded queries and samples without a key give 0.

    Source: Vyas, Katharopoulos, Fleuret, 2020, Fast Transformers with Clustered Attention, arXiv 2007.04825;
    departs from it in the clustering (see `cluster_queries`) and in differentiating the mass.

    Args:
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
        key_mask: [B, S] bool, True at real keys, and when L == S at real queries; None when all are real.
        planes: Hash planes, [bits, D + 1], the biases last; queries are then clustered by their hashes.
        draws: Random numbers for the clustering, int64, at least C; needed with `planes`.
        selectors: Selectors of frozen centroids, [H, C, D + 1], instead of planes; there is then no k-means.
        clusters: Number of clusters, C; None takes `default_clusters` of the real queries of each sample.
        iterations: Assignments of the clustering.
        topk: Keys each member weighs itself, K, at most all; None for plain clustered attention.
        scale: Factor of the scores.
        dropout: Probability with which a weight is dropped: one of a cluster's, or one a member weighed itself.

    Returns:
        [B, H, L, E] in the dtype of q.

    Raises:
        ValueError: if the shapes or dtypes do not fit together, not just one way to cluster is given.
    """
    check_shapes(q, k, v, key_mask)
    if (planes is None or draws is None) == (selectors is None):
        raise ValueError("Either planes and draws or selectors say which queries are alike; expected one of the two.")
    check_least("clusters", clusters, 1)
    check_least("topk", topk, 1)
    if selectors is not None:
        if clusters is None:
            raise ValueError("clusters is None beside selectors; expected their number.")
        check_part("selectors", selectors, q, q.shape[1], clusters, q.shape[3] + 1)
    elif planes is not None and draws is not None:
        check_clustering(q, planes, draws, clusters or default_clusters(q.shape[2]), iterations)
    settings = {"clusters": clusters, "iterations": iterations, "topk": topk, "scale": scale}
    ways = {"planes": planes, "draws": draws}

    def attend(q: Tensor, k: Tensor, v: Tensor, selectors: Tensor | None) -> Tensor:
        parts = {**ways, "selectors": selectors, **settings}
        return clustered_samples(q, k, v, key_mask, **parts, dropout=dropout)

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
    """Attend exactly inside chunks and through fixed centroids to the keys before, in O(n (chunk + C + K) D).

    The real tokens of a sample are cut into chunks. A query weighs the keys of its own chunk itself, up to its
    own. Of the keys before the chunk it weighs those K itself that the nearest centroid weighs most; the others
    it shares with all queries of the centroid: their mean key and mean value under the centroid's weights, and
    their mass, which the mean key corrects to first order for the query's distance from the centroid. All of it
    has one normaliser, joined by log-sum-exp. `topk` of None shares all keys before the chunk.

    The centroids are constants, so a query uses nothing but itself and the keys up to its own: nothing sees the
    future, and new queries on top of a cache get what the whole sequence gives them, up to rounding (which may,
    seldom, swap two keys that a centroid weighs alike). From chunk to chunk the centroids' rows are carried
    on, not computed anew. Query i stands at position S - L + i. Padded queries, and those without a key, give 0.

    Source: built on Vyas, Katharopoulos, Fleuret, 2020, Fast Transformers with Clustered Attention, arXiv
    2007.04825, which has no strictly causal form; departs from it in all of the above.

    Args:
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
        key_mask: [B, S] bool, True at real keys; None when all are real.
        centroids: Fixed centroids of queries, [H, C, D].
        selectors: What says which centroid is nearest, [H, C, D + 1] (see `fit_centroids`).
        chunk: Real tokens of a chunk; at least `topk` + 1 are taken.
        topk: Keys before the chunk that each query weighs itself, K; None for plain clustered attention.
        scale: Factor of the scores.
        dropout: Probability with which a weight is dropped: one of a query's own, or one that is shared.

    Returns:
        [B, H, L, E] in the dtype of q.

    Raises:
        ValueError: if the shapes or dtypes do not fit together.
    """
    check_shapes(q, k, v, key_mask)
    check_part("centroids", centroids, q, q.shape[1], "clusters", q.shape[3])
    check_part("selectors", selectors, q, q.shape[1], centroids.shape[1], q.shape[3] + 1)
    check_least("chunk", chunk, 1)
    check_least("topk", topk, 1)
    settings = {"chunk": chunk, "topk": topk or 0, "scale": scale}

    def attend_turn(q: Tensor, k: Tensor, v: Tensor, centroids: Tensor, selectors: Tensor) -> Tensor:
        fitted = {"centroids": centroids, "selectors": selectors}
        return without_padding(partial(causal_samples, **fitted, **settings, dropout=dropout), q, k, v, key_mask)

    return in_turns(attend_turn, q, k, v, centroids, selectors)
