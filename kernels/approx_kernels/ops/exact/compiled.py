"""Softmax attention on a CPU in C: causal, it computes only the visible half; few queries read keys without copies."""

from typing import Any

import torch
from torch import Tensor

from approx_kernels.cpu.compile import call
from approx_kernels.cpu.compile import obstacle as c_obstacle
from approx_kernels.cpu.structs import FewQueries, address, rows_of
from approx_kernels.ops.key_lists.cpu import FAR, MOST_ROWS, attend_lists, cut, obstacle
from approx_kernels.runtime.custom_op import custom_op

__all__ = ["compiled_attention", "compiled_few", "few_obstacle", "obstacle"]

# Numbers of a row that C handles at a time on the widest processors.
_VECTOR = 16


def compiled_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Softmax attention among real tokens only, with an online softmax; see `attend_lists`.

    Args:
        q: Queries, [B, H, L, D], float32 or bfloat16.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
        causal: Whether query i, at position S - L + i, sees only keys up to there.
        scale: Factor of the scores.

    Returns:
        [B, H, L, E] in the dtype of q.
    """
    length, keys = q.shape[2], k.shape[2]
    starts = cut(0, length, MOST_ROWS)
    entries = [[(0, keys, -FAR, 0 if causal else FAR)]] * len(starts)
    return attend_lists(q, k, v, None, before=keys - length, starts=[*starts, length], entries=entries, scale=scale)


def few_obstacle(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why `compiled_few` cannot run, with the remedy; None if it can."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        return "it has no gradient. Decode under torch.no_grad(), or ask for 'auto'."
    if q.shape[3] % _VECTOR or v.shape[3] % _VECTOR:
        return f"the head sizes are {q.shape[3]} and {v.shape[3]}; multiples of {_VECTOR} are allowed. Ask for 'auto'."
    return c_obstacle("exact/few.c", q, k, v)


def compiled_few(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, causal: bool, scale: float) -> Tensor:
    """Softmax attention of a few queries, reading keys and values once and in place; without a gradient.

    Args:
        q: Queries, [B, H, L, D], float32 or bfloat16.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
        key_mask: [B, S] bool, True at real keys; None when all are.
        causal: Whether query i, at position S - L + i, sees only keys up to there.
        scale: Factor of the scores.

    Returns:
        [B, H, L, E] in the dtype of q.
    """
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    return _few(q, k, v, None if key_mask is None else key_mask.contiguous(), causal, scale)


def _no_output(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


@custom_op(_no_output)
def _few(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    out = _no_output(q, k, v)
    mask = address(key_mask, torch.bool, q.shape[0], k.shape[2])
    sizes = *q.shape[:3], k.shape[2], q.shape[3], v.shape[3]
    how = q.dtype == torch.bfloat16, causal, torch.get_num_threads()
    call("exact/few.c", "few_queries", FewQueries(*sizes, *how, *rows_of(q, k, v, out), mask, scale))
    return out
