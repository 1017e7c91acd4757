"""The causal form of Performer attention: chunk after chunk, with the sums over all earlier ones."""

import torch
from torch import Tensor

from approx_kernels.ops.performer.sums import (
    KeySums,
    Rows,
    divided,
    heights_of,
    key_features,
    logs_of,
    lowest,
    query_features,
)

# Queries of a chunk: inside it pairs are computed, from chunk to chunk a state of size M x E is carried.
CHUNK = 64
# How far a feature's logarithm may rise above what earlier keys had: exp(60) times any sum here is a float32, and
# what a query's features lose below exp(-87) meets at most exp(60), which leaves nothing beside weights of 1.
RISE = 60.0


def causal_sums(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, rows: Rows, sums: KeySums
) -> tuple[Tensor, KeySums]:
    """Outputs of queries that stand beside their keys, all of which follow those in `sums`, and the sums with these.

    Args: q and k [G, n, D], v [G, n, E + 1] with its column of ones, keep [G, n, 1]. Returns [G, n, E].

    A query may not know how large later keys of its chunk are, not even through rounding. So features of keys are
    relative to the largest that earlier chunks had. Queries that have seen one rise far above that are
    computed again, pair by pair.
    """
    out = []
    for first in range(0, q.shape[1], CHUNK):
        chunk = slice(first, first + CHUNK)
        heights, logs, values = heights_of(q[:, chunk], rows), logs_of(k[:, chunk], rows), v[:, chunk]
        real = None if keep is None else keep[:, chunk]
        top = torch.where(sums.top > lowest(logs.dtype), sums.top, _first_real(logs.detach(), real))
        rise = sums.raised(logs, real) - top
        risen = bool((rise > RISE).any())
        keys = key_features(logs.clamp(max=top + RISE) if risen else logs, top, real)
        queries = query_features(heights, top)
        earlier = queries @ sums.state
        joined = torch.baddbmm(earlier, (queries @ keys.transpose(1, 2)).tril(), values)
        if risen:
            joined = _mended(joined, earlier, heights, logs, values, real, top)
        out.append(divided(joined))
        sums = sums.add(logs, values, real)
    return torch.cat(out, 1), sums


def _first_real(logs: Tensor, keep: Tensor | None) -> Tensor:
    """Logarithms of the first real key, [G, 1, M]: all that every query with a key is sure to have seen."""
    if keep is None:
        return logs[:, :1]
    index = keep.int().argmax(1, keepdim=True)
    return logs.gather(1, index.expand(-1, -1, logs.shape[2]))


def _mended(
    joined: Tensor, earlier: Tensor, heights: Tensor, logs: Tensor, v: Tensor, keep: Tensor | None, top: Tensor
) -> Tensor:
    """`joined` with the sums of queries that have seen a key rise too far taken from weights of single pairs.

    Which queries these are depends on the keys that they see alone.
    """
    rise = (logs.detach() - top).amax(2)
    rise = rise if keep is None else rise.masked_fill(~keep[..., 0], lowest(logs.dtype))
    beyond = rise.cummax(1).values > RISE
    corrected = list(joined)
    # One head after another: pairs times features are n x n x M numbers.
    for group in beyond.any(1).nonzero().flatten().tolist():
        visible = torch.ones(logs.shape[1], logs.shape[1], dtype=torch.bool, device=logs.device).tril()
        visible = visible if keep is None else visible & keep[group, :, 0]
        pairs = (heights[group][:, None] + logs[group]).logsumexp(-1).masked_fill(~visible, lowest(logs.dtype))
        past = (heights[group] + top[group]).amax(-1, keepdim=True).detach()
        largest = torch.maximum(past, pairs.amax(-1, keepdim=True).detach())
        weights = (pairs - largest).exp().masked_fill(~visible, 0.0)
        sums = earlier[group] * (past - largest).exp() + weights @ v[group]
        corrected[group] = torch.where(beyond[group][:, None], sums, joined[group])
    return torch.stack(corrected)
