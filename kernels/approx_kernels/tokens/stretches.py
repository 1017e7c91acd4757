"""Real tokens, heads and stretches: pre- and postprocessing common to all sparse patterns."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.runtime.autocast import without_autocast
from approx_kernels.runtime.observed import without_functions
from approx_kernels.tokens.grouped import heads_of
from approx_kernels.tokens.padding import attend_to_nothing


def without_padding(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None
) -> Tensor:
    """Attend among the real tokens of each sample only.

    Query i is the token of key S - L + i. If that key is padding, or does not exist (L > S), its output is 0. So
    `attend` gets only real tokens, with the queries last and at most as many as keys. Without a mask it gets the
    whole batch at once.

    Args:
        attend: From q [B, H, L, D], k [B, H, S, D], v [B, H, S, E] with L <= S to [B, H, L, E].
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
        key_mask: [B, S] bool, True at real keys; None when all are real.

    Returns:
        [B, H, L, E] in the dtype of q.
    """
    before = k.shape[2] - q.shape[2]
    k, v = k.to(q.dtype), v.to(q.dtype)

    def sample(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        keys = mask.nonzero().squeeze(1)
        queries = keys[keys >= before] - before
        if not queries.numel():
            return attend_to_nothing(q, k, v)
        out = attend(_at(q, queries), _at(k, keys), _at(v, keys))
        return out.new_zeros(*q.shape[:3], v.shape[3]).index_copy(2, queries, out)

    with without_autocast(q.device.type):
        if key_mask is not None:
            samples = zip(q.split(1), k.split(1), v.split(1), key_mask, strict=True)
            return torch.cat([sample(*each) for each in samples])
        if before < 0:
            return F.pad(attend(q[:, :, -before:], k, v), (0, 0, -before, 0))
        return attend(q, k, v)


def _at(x: Tensor, index: Tensor) -> Tensor:
    """Tokens of a sample; a view if they are contiguous, as with right or left padding."""
    first, count = int(index[0]), index.numel()
    return x[:, :, first : first + count] if int(index[-1]) == first + count - 1 else x.index_select(2, index)


def by_step(
    attend: Callable[[Tensor, Tensor, Tensor, int | None], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    steps: Sequence[int | None],
) -> Tensor:
    """Let head h attend in step `steps[h mod p]` of a pattern of p steps; None stands for their union."""
    heads, period = q.shape[1], len(steps)
    if period == 1:
        return attend(q, k, v, steps[0])
    own = [slice(first, None, period) for first in range(min(period, heads))]
    parts = [(q[:, s], k[:, heads_of(q, k, s)], v[:, heads_of(q, k, s)]) for s in own]
    out = torch.cat([attend(*part, step) for part, step in zip(parts, steps, strict=False)], 1)
    place = torch.arange(heads, device=q.device)
    return out.index_select(1, torch.cat([place[s] for s in own]).argsort())


def stretches(x: Tensor, bounds: Sequence[tuple[int, int]]) -> tuple[Tensor, ...]:
    """Views of x [B, H, n, D], one per pair of bounds; they may overlap.

    Autograd would allocate a zero-filled x for the gradient of each view; here all are added into one.
    """
    if without_functions():
        return tuple(x[:, :, begin:end] for begin, end in bounds)
    return _Stretches.apply(x, bounds)  # pyright: ignore[reportReturnType]  # what forward returns


class _Stretches(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bounds: Sequence[tuple[int, int]]) -> tuple[Tensor, ...]:
        ctx.bounds, ctx.shape = bounds, x.shape
        return tuple(x[:, :, begin:end] for begin, end in bounds)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]  # named arguments there
        total = grads[0].new_zeros(ctx.shape)
        for grad, (begin, end) in zip(grads, ctx.bounds, strict=True):
            total[:, :, begin:end] += grad
        return total, None
