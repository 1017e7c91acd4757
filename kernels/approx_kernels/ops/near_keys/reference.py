"""Exact attention to a window and to chosen keys, and how estimates for all other keys join it, in plain PyTorch.

The keys near a query are those in its window and the chosen ones, which every query sees. With o and l the softmax over them
and the logarithm of its normaliser, and with o_p and l_p the same of estimates for the others,

    out = (exp(l) o + sum_p exp(l_p) o_p) / (exp(l) + sum_p exp(l_p)).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.tokens import check_form, check_least, check_tensor, in_order, sharing, turns

# Queries per block; wide windows take larger ones, so that keys outside of them are at most as many as those inside.
_BLOCK = 64


class Part(NamedTuple):
    """Attention to some of the keys.

    Attributes:
        out: Outputs, [B, H, L, E], in at least float32.
        log: Logarithm of the normaliser of each query, [B, H, L]; `lowest` where it sees none of the keys.
    """

    out: Tensor
    log: Tensor


class Near(NamedTuple):
    """The softmax over the near keys.

    Attributes:
        out: Outputs, [B, H, L, E], in at least float32.
        log: Logarithm of the normaliser, [B, H, L]; `lowest` where a query sees no near key.
        total: The normaliser relative to the largest weight, [B, H, L], at least 1; 0 where a query sees no near key.
    """

    out: Tensor
    log: Tensor
    total: Tensor


def lowest(dtype: torch.dtype) -> float:
    """Below every logarithm of a normaliser, and finite, so that differences are numbers."""
    return torch.finfo(dtype).min / 4


def reach(window: int, causal: bool) -> tuple[int, int]:
    """Keys of a window before the query's position and after it: the last `window` with its own, or as many on either side."""
    return (max(window - 1, 0), 0) if causal else (window, window)


def far_mask(key_mask: Tensor | None, chosen: Tensor | None) -> Tensor | None:
    """The keys that only a window makes near, [B, S] bool; None for all."""
    if chosen is None:
        return key_mask
    return ~chosen if key_mask is None else key_mask & ~chosen


class Exactly(NamedTuple):
    """Which keys are exact, and how they are attended to.

    Attributes:
        causal: Whether a query sees only keys at or before its own position.
        window: Width of the window, see `reach`; 0 for none.
        chosen: [B, S] bool, the keys that every query sees; None for none.
        scale: Factor of the scores.
        most: Most chosen keys of a sample, if positions choose them; without it, programs compute as if all could be.
    """

    causal: bool
    window: int
    chosen: Tensor | None
    scale: float
    most: int | None = None


class Front(NamedTuple):
    """The chosen keys of each sample, in order and moved together; samples with fewer are filled up.

    Attributes:
        k: [B, G, g, D].
        v: [B, G, g, E].
        place: Position of each, [B, g].
        real: Whether it is a chosen key, [B, g] bool.
    """

    k: Tensor
    v: Tensor
    place: Tensor
    real: Tensor

    @classmethod
    def of(cls, k: Tensor, v: Tensor, key_mask: Tensor | None, exactly: Exactly) -> "Front | None":
        """The chosen keys that are real; None if no key is chosen."""
        if (chosen := exactly.chosen) is None:
            return None
        chosen = chosen if key_mask is None else chosen & key_mask
        if torch.compiler.is_exporting():
            # A program cannot count them; an input may have fewer keys than `most`.
            most = chosen.shape[1] if exactly.most is None else exactly.most
            chosen = F.pad(chosen, (0, most))
        else:
            most = int(chosen.sum(1).max()) if chosen.numel() else 0
        if not most:
            return None
        # The first ones have the highest rank: ONNX has no stable sort.
        place = (chosen * torch.arange(chosen.shape[1], 0, -1.0, device=chosen.device)).topk(most, dim=1).indices
        real = chosen.gather(1, place)
        place = place.clamp(max=k.shape[2] - 1)
        rows = place[:, None, :, None]
        k, v = (x.gather(2, rows.expand(-1, x.shape[1], -1, x.shape[3])) for x in (k, v))
        return cls(k, v, place, real)


def near_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    exactly: Exactly,
) -> Near:
    """The softmax over the keys in a window and the chosen ones, of all blocks of queries at once.

    Args:
        q: Queries, [B, H, L, D].
        k: Keys, [B, G, S, D]; padding holds numbers.
        v: Values, [B, G, S, E].
        key_mask: [B, S] bool, True at real keys; None when all are real.
        exactly: Which keys these are.
    """
    causal, window, chosen, scale, _ = exactly
    length, keys, shared = q.shape[2], k.shape[2], sharing(q, k)
    before = keys - length
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k, v = q.to(wide) * scale, k.to(wide), v.to(wide)
    front = Front.of(k, v, key_mask, exactly)
    left, right = reach(window, causal)
    if not torch.compiler.is_exporting():
        left, right = (min(side, max(keys, length)) for side in (left, right))
    size = max(_BLOCK, left + right) if window else length
    # An exported program for several blocks does not take a single one, except after a state, with few queries at a time.
    if whole := torch.compiler.is_exporting() and before > 0:
        size = length
    blocks = 1 if whole else (length + size - 1) // size + bool(window and torch.compiler.is_exporting())
    row = torch.arange(size, device=q.device)[:, None]
    first = torch.arange(blocks, device=q.device)[:, None, None] * size + before
    queries = F.pad(q, (0, 0, 0, blocks * size - length)).unflatten(2, (blocks, size)).unflatten(1, (-1, shared))
    # Keys, values and who sees them, [B, G or 1, 1, blocks or 1, size, n].
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    if front is not None:
        seen = front.real[:, None, None, None, None].expand(-1, 1, 1, blocks, size, -1)
        seen = seen & (front.place[:, None, None, None, None] <= first + row) if causal else seen
        parts.append((front.k[:, :, None, None], front.v[:, :, None, None], seen))
    if window:
        column = torch.arange(size + left + right, device=q.device)
        # The first queries may precede all keys, the last block ends after them.
        start, end = max(-before, 0) + left, blocks * size - length + right
        places = (first[:, 0] - left + start) + column
        real = far_mask(key_mask, chosen)
        real = k.new_ones(k.shape[0], keys, dtype=torch.bool) if real is None else real
        seen = F.pad(real, (start, end))[:, places][:, None, None, :, None]
        seen = seen & (column >= row) & (column <= row + left + right)
        near_k, near_v = (F.pad(x, (0, 0, start, end))[:, :, places].unsqueeze(2) for x in (k, v))
        parts.append((near_k, near_v, seen))
    if not parts:
        nothing = (q[..., :1] * 0.0).expand(*q.shape[:3], v.shape[3])
        return Near(nothing, torch.full_like(nothing[..., 0], lowest(wide)), nothing[..., 0])
    visible = torch.cat([seen for *_, seen in parts], -1)
    scores = torch.cat([queries @ own.transpose(-2, -1) for own, *_ in parts], -1).masked_fill(~visible, lowest(wide))
    largest = scores.amax(-1, keepdim=True)
    weights = (scores - largest).exp().masked_fill(~visible, 0.0)
    total = weights.sum(-1, keepdim=True)
    per_part = weights.split([seen.shape[-1] for *_, seen in parts], -1)
    first, *others = (some @ values for some, (_, values, _) in zip(per_part, parts, strict=True))
    norm = total.clamp(min=1.0)
    log = torch.where(visible.any(-1, keepdim=True), largest + norm.log(), lowest(wide))
    found = sum(others, first) / norm, log, total
    out, log, total = (x.flatten(1, 2).flatten(2, 3)[:, :, :length] for x in found)
    return Near(out, log[..., 0], total[..., 0])


def joined(parts: Sequence[Part]) -> Tensor:
    """Outputs under one normaliser; 0 for a query that sees no key."""
    logs = torch.stack([part.log for part in parts], -1)
    bound = lowest(logs.dtype)
    nothing = (logs <= bound).all(-1, keepdim=True)
    weights = logs.softmax(-1).masked_fill(nothing, 0.0)
    out = weights[..., 0, None] * parts[0].out
    for number, part in enumerate(parts[1:], 1):
        out = out + weights[..., number, None] * part.out
    return out


def check_exactly(exactly: Exactly, k: Tensor, dropout: float = 0.0) -> None:
    """Refuse near keys that do not fit keys k [B, G, S, D], and a wrong dropout.

    Raises:
        ValueError: if one of them is wrong.
    """
    check_form(exactly.scale, dropout, causal=exactly.causal)
    check_least("window", exactly.window, 0)
    if exactly.chosen is not None:
        check_tensor("chosen", exactly.chosen)
        if exactly.chosen.dtype != torch.bool or exactly.chosen.shape != (k.shape[0], k.shape[2]):
            raise ValueError(
                f"chosen is {exactly.chosen.dtype} of shape {list(exactly.chosen.shape)}; "
                f"expected torch.bool of shape [{k.shape[0]}, {k.shape[2]}], True at the chosen keys."
            )


def per_query_head(q: Tensor, x: Tensor) -> Tensor:
    """Keys or values [B, G, S, n] as one for each query head, [B, H, S, n]."""
    count = sharing(q, x)
    return x if count == 1 else x.repeat_interleave(count, 1)


def parts_in_turns(attend: Callable[..., Part], q: Tensor, k: Tensor, v: Tensor, *own: Tensor) -> Part:
    """Apply `attend(q, k, v, *own)`, which needs as many query heads as key heads, to more query heads, without repeating keys.

    Args: as for `in_turns`, except that `own` are tensors [B, H, ...].
    """
    parts = [attend(q[:, turn], k, v, *(x[:, turn] for x in own)) for turn in turns(q, k)]
    return Part(*(in_order(each) for each in zip(*parts, strict=True)))


def first_keys(k: Tensor, key_mask: Tensor | None, count: int) -> Tensor | None:
    """The first `count` real keys of each sample, [B, S] bool; None for none."""
    if not count:
        return None
    if key_mask is None:
        return (torch.arange(k.shape[2], device=k.device) < count).expand(k.shape[0], -1)
    return key_mask & (key_mask.cumsum(1) <= count)
