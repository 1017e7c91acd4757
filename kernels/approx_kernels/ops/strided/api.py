"""Strided attention: a window and every l-th token."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from approx_kernels.dispatch.implementation import choose
from approx_kernels.gpu.language import ranked
from approx_kernels.ops.flash.api import flash_obstacle
from approx_kernels.ops.flash.padding import under_padding
from approx_kernels.ops.key_lists.cpu import obstacle
from approx_kernels.ops.strided.cpu import strided_lists
from approx_kernels.ops.strided.reference import strided_attention as plain_attention
from approx_kernels.ops.strided.triton import strided_tiles
from approx_kernels.tokens import (
    by_step,
    check_form,
    check_shapes,
    check_steps,
    checked_stride,
    root_above,
    same_stride,
    without_padding,
)

__all__ = ["root_above", "strided_attention"]


def strided_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    stride: Callable[[int], int],
    causal: bool,
    steps: Sequence[int | None] = (None,),
    scale: float,
    dropout: float = 0.0,
    impl: str = "auto",
) -> Tensor:
    """Softmax attention to the keys nearer than l and to every l-th key, in O(L (l + S / l) D).

    Step 1 is |i - j| < l; step 2 is (i - j) mod l = 0, dense attention in each of l columns when the sequence is
    laid out in rows of l. Positions count real tokens, and query i is the token of key S - L + i. A query that is
    padding or stands before all keys gives 0.

    Source: Child, Gray, Radford, Sutskever, 2019, Generating Long Sequences with Sparse Transformers,
    arXiv 1904.10509; departs from it in the bidirectional form.

    Args:
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
        key_mask: [B, S] bool, True at real keys and their queries; None when all are real.
        stride: From the number of real tokens of a sample to l, non-decreasing; constant if causal.
        causal: Whether a query sees only keys at or before its own position.
        steps: 1, 2 or None (both merged): what each head uses, repeated over the heads.
        scale: Factor of the scores.
        dropout: Probability of dropping an attention weight.
        impl: One of `IMPLEMENTATIONS`: `cpu` is compiled C, for float32 and bfloat16.

    Returns:
        [B, H, L, E] in the dtype of q.

    Raises:
        ValueError: if shapes or dtypes do not match, a step or stride is unknown, or the requested implementation
            cannot run.
    """
    check_shapes(q, k, v, key_mask)
    check_form(scale, dropout, causal=causal)
    check_steps(steps, 2)
    stride = checked_stride(stride, causal, k.shape[2])
    ways = {"cpu": obstacle(q), "reference": None}
    run = choose("strided_attention", impl, ranked(q, flash_obstacle(q, v, dropout), **ways), q)

    def tiles(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        def attend(q: Tensor, k: Tensor, v: Tensor, step: int | None) -> Tensor:
            own = stride(k.shape[2])
            return strided_tiles(q, k, v, key_mask, stride=own, causal=causal, step=step, scale=scale)

        return by_step(attend, q, k, v, steps)

    def lists(q: Tensor, k: Tensor, v: Tensor, step: int | None) -> Tensor:
        how: dict[str, Any] = {"causal": causal, "step": step, "scale": scale, "dropout": dropout}
        return strided_lists(q, k, v, stride=stride(k.shape[2]), **how)

    if run == "triton":
        return under_padding(tiles, q, k, v, key_mask, same_stride(stride, k.shape[2]))
    if run == "cpu":
        return without_padding(lambda q, k, v: by_step(lists, q, k, v, steps), q, k, v, key_mask)
    form = {"stride": stride, "causal": causal, "steps": steps, "scale": scale, "dropout": dropout}
    return plain_attention(q, k, v, key_mask, **form)
