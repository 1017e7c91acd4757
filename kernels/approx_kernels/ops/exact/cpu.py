"""Softmax attention on a CPU in plain matrix products, a chunk of queries of one head at a time.

The working set stays in the second-level cache, and the products run at the speed of the BLAS library, which in
16 bits is up to four times as fast as PyTorch's fused attention.
"""

from typing import Any

import torch
from torch import Tensor

from approx_kernels.ops.exact.reference import materialised_attention
from approx_kernels.runtime.pytorch import needs_pytorch, without_autocast
from approx_kernels.tokens import beside, empty_gradients, sharing, summed


def chunked_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, chunk: int) -> Tensor:
    """Softmax attention among real tokens only, in O(L S D) time and O(L + chunk S) memory, also backward.

    Products and weights are rounded to the dtype of q; sums within them have the library's precision.

    Args:
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
        causal: Whether query i, at position S - L + i, sees only keys up to there; then L <= S.
        scale: Factor of the scores.
        chunk: Queries at a time.

    Returns:
        [B, H, L, E] in the dtype of q.
    """
    with without_autocast(q.device.type):
        return _Chunked.apply(q, k.to(q.dtype), v.to(q.dtype), causal, scale, chunk)  # pyright: ignore[reportReturnType]  # what forward returns


def batched_attention(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, causal: bool, scale: float
) -> Tensor:
    """Softmax attention with materialised weights in the dtype of q, for the few queries of a decoding step.

    Args: as for `exact_attention`.
    """
    length, keys = q.shape[2], k.shape[2]
    with without_autocast(q.device.type):
        scores = (beside(q * scale, k) @ k.to(q.dtype).transpose(-2, -1)).view(*q.shape[:3], keys)
        allowed = None if key_mask is None else key_mask[:, None, None, :]
        if causal and length > 1:
            past = torch.ones(length, keys, dtype=torch.bool, device=q.device).tril(keys - length)
            allowed = past if allowed is None else allowed & past
        if allowed is None:
            weights = scores.softmax(-1)
        else:
            weights = scores.masked_fill(~allowed, torch.finfo(q.dtype).min).softmax(-1).masked_fill(~allowed, 0.0)
        return (beside(weights, k) @ v.to(q.dtype)).view(*q.shape[:3], v.shape[3])


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, chunk: int) -> Tensor:
        out = q.new_empty(*q.shape[:3], v.shape[3])
        scores, weights = (_Buffer(q, chunk * k.shape[2]) for _ in range(2))
        each = sharing(q, k)
        for b, h in _heads(q):
            queries, keys, values = q[b, h] * scale, k[b, h // each].contiguous().t(), v[b, h // each].contiguous()
            for rows, seen in _chunks(q.shape[2], k.shape[2], causal, chunk):
                weight = _weights(queries[rows], keys[:, :seen], causal, scores, weights)
                torch.mm(weight, values[:seen], out=out[b, h, rows])
        ctx.save_for_backward(q, k, v, out)
        ctx.settings = causal, scale, chunk
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out = ctx.saved_tensors
        causal, scale, chunk = ctx.settings
        if torch.is_grad_enabled():
            return _differentiable_gradients(ctx.needs_input_grad, q, k, v, grads[0], causal, scale)
        wide = torch.promote_types(q.dtype, torch.float32)
        grad = grads[0]
        dq, dk, dv = empty_gradients(q, k, v)
        each = sharing(q, k)
        scores, weights = (_Buffer(q, chunk * k.shape[2]) for _ in range(2))
        for b, h in _heads(q):
            queries, keys, values = q[b, h] * scale, k[b, h // each].contiguous(), v[b, h // each].contiguous()
            given = grad[b, h].contiguous()
            # Sums over chunks are kept wider than the products.
            key_sum, value_sum = (torch.zeros(x.shape, dtype=wide) for x in (keys, values))
            shared = (given.to(wide) * out[b, h].to(wide)).sum(-1, keepdim=True)
            for rows, seen in _chunks(q.shape[2], k.shape[2], causal, chunk):
                weight = _weights(queries[rows], keys[:seen].t(), causal, scores, weights)
                value_sum[:seen] += weight.t() @ given[rows]
                # The buffer of the scores is free again.
                change = torch.mm(given[rows], values[:seen].t(), out=scores.of(*weight.shape))
                change = ((change - shared[rows]) * weight).to(q.dtype)
                torch.mm(change, keys[:seen], out=dq[b, h, rows]).mul_(scale)
                key_sum[:seen] += change.t() @ queries[rows]
            dk[b, h], dv[b, h] = key_sum, value_sum
        return dq, summed(dk, k.shape[1]), summed(dv, k.shape[1]), None, None, None


def _differentiable_gradients(
    wanted: tuple[bool, ...], q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool, scale: float
) -> tuple[Tensor | None, ...]:
    """What `_Chunked.backward` returns, with a graph for second derivatives, in the memory of all weights."""
    # Views, since one tensor may be queries, keys and values at once.
    inputs = q.view_as(q), k.view_as(k), v.view_as(v)
    out = materialised_attention(*inputs, None, causal=causal, scale=scale, dropout=0.0)
    learned = [x for x, is_wanted in zip(inputs, wanted, strict=False) if is_wanted]
    slopes = iter(torch.autograd.grad(out, learned, grad, create_graph=True))
    return *(next(slopes) if is_wanted else None for is_wanted in wanted[:3]), None, None, None


class _Buffer:
    """Memory reused by every chunk, so that the pages of its temporaries are touched only once."""

    def __init__(self, like: Tensor, numbers: int) -> None:
        self._memory = like.new_empty(numbers)

    def of(self, rows: int, columns: int) -> Tensor:
        return self._memory[: rows * columns].view(rows, columns)


def _heads(x: Tensor) -> list[tuple[int, int]]:
    return [(b, h) for b in range(x.shape[0]) for h in range(x.shape[1])]


def _chunks(length: int, keys: int, causal: bool, chunk: int) -> list[tuple[slice, int]]:
    """The rows of each chunk, and the number of keys its last query sees."""
    ends = [(begin, min(begin + chunk, length)) for begin in range(0, length, chunk)]
    return [(slice(begin, end), keys - length + end if causal else keys) for begin, end in ends]


def _weights(queries: Tensor, keys: Tensor, causal: bool, scores: _Buffer, weights: _Buffer) -> Tensor:
    """Attention weights of a chunk, [rows, keys seen by its last query]; the queries are already scaled."""
    rows, seen = queries.shape[0], keys.shape[1]
    score = torch.mm(queries, keys, out=scores.of(rows, seen))
    if causal:
        # Queries of a chunk differ only in which of the last keys they see.
        future = torch.ones(rows, rows, dtype=torch.bool).triu(1)
        score[:, seen - rows :].masked_fill_(future, float("-inf"))
    return torch.softmax(score, -1, out=weights.of(rows, seen))


def chunks_obstacle(q: Tensor, dropout: float) -> str | None:
    """Why products in chunks cannot run, with the remedy; None if they can."""
    if q.device.type != "cpu":
        return f"the tensors are on the {q.device.type}. Move them to the cpu, or ask for 'auto'."
    if q.dtype == torch.float16:
        return "the tensors are float16, whose products in chunks take many times as long. Convert them, or ask for 'auto'."
    return f"it has no dropout, and {dropout} was asked for. Ask for 'auto'." if dropout else needs_pytorch(q)
