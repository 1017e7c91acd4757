"""The attention of fixed centroids to a growing past: their largest keys, and the sums over all others."""

import torch
from torch import Tensor
from torch.nn import functional as F


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
