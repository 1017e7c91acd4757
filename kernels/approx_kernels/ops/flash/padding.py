"""Position patterns with a key mask, through kernels: samples that a pattern treats alike share a launch."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from approx_kernels.runtime.pytorch import capturing, changes, without_autocast
from approx_kernels.tokens import without_padding

# Results of reading a mask, which all layers of a model share.
_READ = WeakTensorKeyDictionary()


def under_padding(
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    alike: Callable[[int], int] | None = None,
) -> Tensor:
    """Attend among the real tokens of each sample, like `without_padding`, with few launches.

    With right padding, positions are already those of the real tokens. Other masks have the real tokens moved to the
    front if L == S; otherwise samples attend one by one. The host synchronises with the device once per mask, and never
    during a CUDA graph capture, where `alike` must be None.

    Args:
        attend: From q [B, H, L, D], k [B, H, S, D], v [B, H, S, E] with L <= S and a mask [B, S], or None, of which
            each sample has the real keys at the front, to [B, H, L, E], with 0 for padded queries where L == S.
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
        key_mask: [B, S] bool, True at real keys; None when all are real.
        alike: From a number of real tokens to the largest one for which the pattern is the same; None if it is the same
            for any number.

    Returns:
        [B, H, L, E] in the dtype of q.
    """
    length, keys = q.shape[2], k.shape[2]
    before = keys - length
    if key_mask is None:
        return without_padding(lambda q, k, v: attend(q, k, v, None), q, k, v, None)
    if before < 0:
        return F.pad(under_padding(attend, q[:, :, -before:], k, v, key_mask, alike), (0, 0, -before, 0))
    # A value read during a graph capture would apply only to its first replay.
    waits = alike is not None or before > 0 or not capturing()
    counts, at_front = _read(key_mask) if waits else ([], False)
    if before and not at_front:
        return without_padding(lambda q, k, v: attend(q, k, v, None), q, k, v, key_mask)
    with without_autocast(q.device.type):
        k, v = k.to(q.dtype), v.to(q.dtype)
        if at_front:
            out = _grouped(attend, q, k, v, key_mask, counts, alike)
            return out.masked_fill(~key_mask[:, None, before:, None], 0.0) if before else out
        order = key_mask.logical_not().byte().argsort(dim=1, stable=True)
        front = torch.arange(keys, device=q.device) < key_mask.sum(1, keepdim=True)
        out = _grouped(attend, _at(q, order), _at(k, order), _at(v, order), front, counts, alike)
        return _at(out, order.argsort(dim=1))


def _grouped(
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor,
    counts: list[int],
    alike: Callable[[int], int] | None,
) -> Tensor:
    """Attend with real keys at the front, once for all samples with the same maximal tokens."""
    if alike is None:
        return attend(q, k, v, key_mask)
    length, keys = q.shape[2], k.shape[2]
    before = keys - length
    groups: dict[int, list[int]] = {}
    for sample, count in enumerate(counts):
        groups.setdefault(min(alike(max(count, before + 1)), keys), []).append(sample)
    parts = []
    for most, samples in groups.items():
        own = slice(None) if len(groups) == 1 else samples
        out = attend(q[own][:, :, : most - before], k[own][:, :, :most], v[own][:, :, :most], key_mask[own][:, :most])
        parts.append(F.pad(out, (0, 0, 0, keys - most)))
    if len(parts) == 1:
        return parts[0]
    order = torch.tensor([sample for samples in groups.values() for sample in samples], device=q.device)
    return torch.cat(parts).index_select(0, order.argsort())


def _read(key_mask: Tensor) -> tuple[list[int], bool]:
    """Number of real keys of each sample, and whether all have them at the front."""
    version = changes(key_mask)
    known = _READ.get(key_mask)
    if known is None or version is None or known[0] != version:
        rising = (key_mask[:, 1:] > key_mask[:, :-1]).any()
        *counts, rises = torch.cat([key_mask.sum(1), rising[None]]).tolist()
        known = _READ[key_mask] = version, counts, not rises
    return known[1:]


def _at(x: Tensor, order: Tensor) -> Tensor:
    return x.gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
