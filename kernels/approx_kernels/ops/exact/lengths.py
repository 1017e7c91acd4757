"""Attention of padded batches without a mask: each sample attends among its own tokens."""

from collections.abc import Callable

import torch
from torch import Tensor

from approx_kernels.tokens import attend_to_nothing

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_lengths(attend: Attend, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, causal: bool) -> Tensor:
    """Attend among real tokens; samples with real tokens at the same positions share a call.

    The work of a sample falls with the square of its share of real tokens. Queries are the last tokens of the keys if
    L == S or `causal`; padded ones are skipped and give 0.

    Args:
        attend: From q [b, H, l, D], k [b, H, s, D], v [b, H, s, E] to [b, H, l, E], with l <= s where queries are
            tokens.
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
        key_mask: [B, S] bool, True at real keys; None when all are real.
        causal: Whether a query sees only keys at or before its own position.

    Returns:
        [B, H, L, E] in the dtype of q.
    """
    length, keys = q.shape[2], k.shape[2]
    before = keys - length
    tokens = causal or not before
    if key_mask is None:
        if not (tokens and before < 0):
            return attend(q, k, v)
        key_mask = q.new_ones(q.shape[0], keys, dtype=torch.bool)
    places: dict[bytes, list[int]] = {}
    host = key_mask.cpu()
    for sample, real in enumerate(host):
        places.setdefault(real.numpy().tobytes(), []).append(sample)

    parts: list[Tensor] = []
    for samples in places.values():
        kept = host[samples[0]].nonzero().squeeze(1)
        asking = kept[kept >= before] - before if tokens else torch.arange(length)
        if not (kept.numel() and asking.numel()):
            parts.append(attend_to_nothing(q[samples], k[samples], v[samples]))
            continue
        own = (_at(_of(x, samples), index) for x, index in ((q, asking), (k, kept), (v, kept)))
        out = attend(*own)
        if asking.numel() < length:
            whole = out.new_zeros(*out.shape[:2], length, out.shape[3])
            out = whole.index_copy(2, asking.to(q.device), out)
        parts.append(out)
    if len(parts) == 1:
        return parts[0]
    order = [sample for samples in places.values() for sample in samples]
    joined = torch.cat(parts)
    return joined if order == sorted(order) else joined[torch.tensor(order, device=q.device).argsort()]


def _of(x: Tensor, samples: list[int]) -> Tensor:
    first, count = samples[0], len(samples)
    together = samples[-1] - first == count - 1
    return x[first : first + count] if together else x[samples]


def _at(x: Tensor, index: Tensor) -> Tensor:
    """Tokens of samples; a view if they are contiguous, as with right or left padding."""
    first, count = int(index[0]), index.numel()
    together = int(index[-1]) - first == count - 1
    return x[:, :, first : first + count] if together else x.index_select(2, index.to(x.device))
