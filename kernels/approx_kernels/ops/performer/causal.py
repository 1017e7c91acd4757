"""The causal form of Performer attention: chunk by chunk, with the sums over all earlier ones."""

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

# Queries per chunk: pairs are computed inside it, a state of size M x E is carried between chunks.
CHUNK = 64
# How far a feature's logarithm may exceed that of earlier keys: exp(60) times any sum here fits into float32, and
# query features below exp(-87) meet at most exp(60), a product that is negligible beside weights of 1.
RISE = 60.0


def causal_sums(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, rows: Rows, sums: KeySums
) -> tuple[Tensor, KeySums]:
    """Outputs of queries that are tokens of their keys, all of which follow those in `sums`, and the updated sums.

    Args: q and k [G, n, D], v [G, n, E + 1] with its column of ones, keep [G, n, 1]. Returns [G, n, E].

    A query must not depend on how large later keys of its chunk are, not even through rounding. So features of keys are
    relative to the largest of earlier chunks. Queries that have seen a key rise far above that are recomputed pair by
    pair.
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
            joined = _recomputed(joined, earlier, heights, logs, values, real, top)
        out.append(divided(joined))
        sums = sums.add(logs, values, real)
    return torch.cat(out, 1), sums


def _first_real(logs: Tensor, keep: Tensor | None) -> Tensor:
    """Logarithms of the first real key, [G, 1, M]: every query with a key has seen it."""
    if keep is None:
        return logs[:, :1]
    index = keep.int().argmax(1, keepdim=True)
    return logs.gather(1, index.expand(-1, -1, logs.shape[2]))


def _recomputed(
    joined: Tensor, earlier: Tensor, heights: Tensor, logs: Tensor, v: Tensor, keep: Tensor | None, top: Tensor
) -> Tensor:
    """`joined` with the sums of queries that have seen a key rise too far recomputed from weights of single pairs.

    Which queries these are depends only on the keys that they see.
    """
    rise = (logs.detach() - top).amax(2)
    rise = rise if keep is None else rise.masked_fill(~keep[..., 0], lowest(logs.dtype))
    beyond = rise.cummax(1).values > RISE
    corrected = list(joined)
    # Head by head: pairs times features are n x n x M numbers.
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
