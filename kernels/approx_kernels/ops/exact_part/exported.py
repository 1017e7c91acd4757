"""Linear attention with exact keys for exported programs: few large steps over blocks, which runtimes compute fast."""

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.ops.exact_part.reference import LinearFar
from approx_kernels.ops.linear.reference import FORGETFUL
from approx_kernels.ops.near_keys.reference import Exactly, Front, far_mask, per_query_head, reach
from approx_kernels.runtime.pytorch import drop_keys, without_autocast

# Blocks of an exported program have 32 tokens at least, and 64 at most unless a window then spans more than four of them.
_LEAST_BLOCK, _MOST_BLOCK, _MOST_SPANNED = 32, 64, 4
# Bound of the logarithm of a query's gate, so that no product overflows.
_MOST_GATE = 40.0
# Added to the score of a key that is not seen, and the least logarithm of a weight relative to the largest: it changes no sum,
# and processors compute slowly with numbers so small that they have fewer digits.
_UNSEEN, _LEAST_LOG = -1e30, -80.0


def runs_in_blocks(q: Tensor, k: Tensor, exactly: Exactly, far: LinearFar) -> bool:
    """Whether a program is exported whose keys are those of its queries and whose far keys are sums that do not forget."""
    sums = far.feature_map not in FORGETFUL
    return torch.compiler.is_exporting() and bool(exactly.window) and sums and q.shape[2] == k.shape[2]


def linear_in_blocks(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, exactly: Exactly, far: LinearFar, dropout: float = 0.0
) -> Tensor:
    """`linear_and_exact` of as many queries as keys, for exported programs: few large steps, which runtimes compute fast.

    A block of queries sees the blocks of keys that its windows reach, pair by pair, and all others by their sums. Padding holds
    numbers, as in programs of exact attention. The sum of the sums is a product with zeros and ones, quadratic in the number of
    blocks, but little work at lengths of some thousands.
    """
    with without_autocast(q.device.type):
        return _in_blocks(q, k, drop_keys(v, dropout), key_mask, exactly, far)


def _in_blocks(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, exactly: Exactly, far: LinearFar) -> Tensor:
    length = q.shape[2]
    left, right = reach(exactly.window, exactly.causal)
    size = -(-left // min(-(-left // _MOST_BLOCK) or 1, _MOST_SPANNED))
    size = max(-(-size // 16) * 16, _LEAST_BLOCK)
    before, after = -(-left // size), -(-right // size)
    # A program for several blocks does not take a single one.
    blocks = (length + size - 1) // size + 1
    end, around = blocks * size - length, before + 1 + after
    wide = torch.promote_types(q.dtype, torch.float32)
    dtype, q, k, v = q.dtype, q.to(wide), per_query_head(q, k).to(wide), per_query_head(q, v).to(wide)
    front = Front.of(k, v, key_mask, exactly)
    real = far_mask(key_mask, exactly.chosen)
    real = torch.ones_like(k[:, 0, :, 0], dtype=torch.bool) if real is None else real
    sides = before * size, end + after * size
    q, real = F.pad(q, (0, 0, 0, end)), F.pad(real, sides)
    k, v = (F.pad(x, (0, 0, *sides)) for x in (k, v))

    def near(x: Tensor, dim: int = 2) -> Tensor:
        """Of each block of queries all blocks that it reaches, side by side."""
        x = x.unflatten(dim, (-1, size))
        return torch.cat([x.narrow(dim, first, blocks) for first in range(around)], dim + 1)

    row = torch.arange(size, device=q.device)[:, None]
    apart = row - torch.arange(-before * size, (1 + after) * size, device=q.device)
    reached = (apart <= left) & (apart >= -right)
    seen = reached & near(real, 1)[:, None, :, None]
    queries = q.unflatten(2, (blocks, size))
    scores = (queries * exactly.scale) @ near(k).mT + torch.where(seen, 0.0, _UNSEEN)
    if front is not None:
        seen = front.real[:, None, None, None].expand(-1, 1, blocks, size, -1)
        if exactly.causal:
            first = torch.arange(blocks, device=q.device)[:, None, None] * size
            seen = seen & (front.place[:, None, None, None] <= first + row)
        own = (queries * exactly.scale) @ front.k[:, :, None].mT + torch.where(seen, 0.0, _UNSEEN)
        scores = torch.cat([scores, own], -1)
    weights = torch.maximum(scores, scores.amax(-1, keepdim=True) + _LEAST_LOG).softmax(-1)
    # That of the largest score, to which far keys are relative.
    unit = weights.amax(-1, keepdim=True)
    if front is None:
        out = weights @ near(v)
    else:
        weights, own = weights.split([around * size, front.k.shape[2]], -1)
        out = weights @ near(v) + own @ front.v[:, :, None]
    keys, gates = far.gated(k)
    factors = real[:, None, :, None].to(wide)
    factors = factors if gates is None else gates * factors
    # A last column of ones turns the normaliser into one more value.
    values = torch.cat([v * factors, factors], -1).unflatten(2, (-1, size))
    asked, keys = far.queries(q).unflatten(2, (blocks, size)), keys.unflatten(2, (-1, size))
    row = torch.arange(blocks, device=q.device)[:, None]
    column = torch.arange(keys.shape[2], device=q.device)
    outside = column < row
    outside = outside if exactly.causal else outside | (column >= row + around)
    # Values first, since keys have more features.
    sums = values.mT @ keys
    others = asked @ (outside.to(wide) @ sums.flatten(3)).unflatten(3, sums.shape[3:]).mT
    far_pairs = apart > left if exactly.causal else ~reached
    for number in range(around):
        # Blocks that lie whole in the windows of all queries have no far pair.
        if (abs(number - before) + 1) * size - 1 > (right if number > before else left):
            pairs = asked @ keys.narrow(2, number, blocks).mT
            pairs = pairs * far_pairs[:, number * size : (number + 1) * size].to(wide)
            others = others + pairs @ values.narrow(2, number, blocks)
    gate = far.gates(q).clamp(max=_MOST_GATE).exp().unflatten(2, (blocks, size))[..., None]
    others = others * (unit * gate)
    out = (out + others[..., :-1]) / (others[..., -1:] + 1.0)
    return out.flatten(2, 3)[:, :, :length].to(dtype)
