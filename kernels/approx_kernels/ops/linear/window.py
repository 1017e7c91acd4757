"""Linear attention in which a softmax weighs the nearest keys, under one denominator."""

import torch
from torch import Tensor
from torch.nn import functional as F

# Queries per block, and keys per partial sum: a block computes pairs with its window, rounded up to this.
_BLOCK = 64


def attend_windowed(
    q: Tensor,
    k: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    keep: Tensor | None,
    mix: Tensor,
    *,
    window: int,
    causal: bool,
    scale: float,
    eps: float,
    sums: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Softmax weights for keys in the window, feature products for the others, each pair in one of the two.

    Args: q [B, H, L, D], k [B, H, S, D], their features queries and keys (0 where padded), values [B, H, S, E],
    keep [B, 1, S, 1] the real keys, mix [H] the factor of the softmax part, sums [B, H, F, E + 1] of the features of
    earlier keys, which no window reaches, times values and a one; None without any. Returns [B, H, L, E], and these
    sums with the keys of which the next query's causal window has none.
    """
    length, total = q.shape[2], k.shape[2]
    offset = total - length
    left, right = (window - 1, 0) if causal else (window, window)
    # A last column of ones turns the normaliser into one more value.
    values = F.pad(values, (0, 1), value=1.0)
    before, after = _outer_sums(keys, values, causal)
    before = before if sums is None else before + sums.unsqueeze(2)
    q = q * scale
    out = []
    for first in range(0, length, _BLOCK):
        last = min(first + _BLOCK, length)
        # Whole blocks of keys, so that the sum over all others is available; at least one key, seen or not (L > S).
        begin = min(max(first + offset - left, 0), total - 1) // _BLOCK
        end = -(-max(min(last + offset + right, total), begin * _BLOCK + 1) // _BLOCK)
        stretch = slice(begin * _BLOCK, min(end * _BLOCK, total))
        own = torch.arange(first + offset, last + offset, device=q.device)[:, None]
        distance = torch.arange(stretch.start, stretch.stop, device=q.device) - own
        near = (distance >= -left) & (distance <= right)
        far = ~near & (distance < 0) if causal else ~near
        if keep is not None:
            near = near & keep[:, :, stretch, 0].unsqueeze(2)
        weights = near_weights(q[:, :, first:last] @ k[:, :, stretch].transpose(-2, -1), near, mix)
        query = queries[:, :, first:last]
        weights = weights + (query @ keys[:, :, stretch].transpose(-2, -1)).masked_fill_(~far, 0.0)
        outer = before[:, :, begin] if after is None else before[:, :, begin] + after[:, :, end]
        out.append(weights @ values[:, :, stretch] + query @ outer)
    beyond = max(total - left, 0)
    tail = slice(beyond // _BLOCK * _BLOCK, beyond)
    sums = before[:, :, beyond // _BLOCK] + keys[:, :, tail].transpose(-2, -1) @ values[:, :, tail]
    return divided(torch.cat(out, 2), eps), sums


def near_weights(scores: Tensor, near: Tensor | None, mix: Tensor) -> Tensor:
    """`mix exp(score - largest)` for near keys, 0 elsewhere; scores [B, H, L, S] are overwritten."""
    mix, lowest = mix.to(scores.dtype).log()[:, None, None], torch.finfo(scores.dtype).min
    scores = scores if near is None else scores.masked_fill_(~near, lowest)
    # The largest score is part of the definition here: it balances the softmax part against the linear one. If no
    # key is near, 0 in its place makes every exponential vanish.
    largest = scores.amax(-1, keepdim=True)
    return (scores - (largest.masked_fill(largest == lowest, 0.0) - mix)).exp_()


def divided(sums: Tensor, eps: float) -> Tensor:
    """Outputs from sums of weighted values and, in the last column, of weights."""
    # Adding eps would keep the widest window from being exact.
    return sums[..., :-1] / sums[..., -1:].clamp(min=eps)


def _outer_sums(keys: Tensor, values: Tensor, causal: bool) -> tuple[Tensor, Tensor | None]:
    """Sums over all blocks of keys before each border of blocks, [B, H, borders, F, E + 1], and over all after it.

    Each is summed from its own end: a difference of sums would lose digits.
    """
    blocks = -(-keys.shape[2] // _BLOCK)
    end = (0, 0, 0, blocks * _BLOCK - keys.shape[2])
    keys, values = (F.pad(x, end).unflatten(2, (blocks, _BLOCK)) for x in (keys, values))
    sums = F.pad(keys.transpose(-2, -1) @ values, (0, 0, 0, 0, 1, 1))
    before = sums[:, :, :-1].cumsum(2)
    return before, None if causal else sums[:, :, 1:].flip(2).cumsum(2).flip(2)
