"""The ring: keys and values that queries to come can still reach, for decoding in bounded memory."""

import torch
from torch import Tensor
from torch.nn import functional as F

State = dict[str, Tensor]


def joined(ring: State | None, k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys, values and mask of a ring with those that follow; the mask stays None while all are real.

    Args:
        ring: What `newest` or `first_and_newest` returned; None before the first token.
        k: Keys that follow, [B, H, n, D].
        v: Their values, [B, H, n, E].
        key_mask: [B, n] bool, True at real ones; None when all are.
    """
    if ring is None:
        return k, v, key_mask
    known = ring.get("real")
    if known is not None or key_mask is not None:
        known = k.new_ones(k.shape[0], ring["k"].shape[2], dtype=torch.bool) if known is None else known
        key_mask = F.pad(known, (0, k.shape[2]), value=True) if key_mask is None else torch.cat([known, key_mask], 1)
    return torch.cat([ring["k"], k], 2), torch.cat([ring["v"], v], 2), key_mask


def newest(k: Tensor, v: Tensor, key_mask: Tensor | None, count: int) -> State:
    """The ring of the last `count` keys, padding among them."""
    first = max(k.shape[2] - count, 0)
    # A view of one token more is cheaper than a copy; one of a long prompt, or of projections, would keep all of it.
    copied = first > 1 or not (k.is_contiguous() and v.is_contiguous())
    ring = {"k": k, "v": v} if key_mask is None else {"k": k, "v": v, "real": key_mask}
    kept = {name: x[:, first:] if name == "real" else x[:, :, first:] for name, x in ring.items()}
    return {name: x.clone() for name, x in kept.items()} if copied else kept


def first_and_newest(k: Tensor, v: Tensor, key_mask: Tensor | None, first: int, count: int) -> State:
    """The ring of the `first` real keys of each sample and its last `count` real ones, in their order."""
    if k.shape[2] <= first + count:
        return newest(k, v, key_mask, k.shape[2])
    if key_mask is None:
        place = torch.arange(k.shape[2], device=k.device)
        kept = torch.cat([place[:first], place[k.shape[2] - count :]])
        return {"k": k.index_select(2, kept), "v": v.index_select(2, kept)}
    rank = key_mask.cumsum(1)
    reached = key_mask & ((rank <= first) | (rank > rank[:, -1:] - count))
    # Samples keep different numbers of keys: what is short is filled with others, which count as padding.
    kept = (~reached).to(torch.uint8).argsort(dim=1, stable=True)[:, : first + count]
    k, v = (x.gather(2, kept[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])) for x in (k, v))
    return {"k": k, "v": v, "real": reached.gather(1, kept)}
