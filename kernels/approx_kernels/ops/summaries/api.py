"""Attention inside blocks and to the summary columns of all blocks: fixed and full-information patterns."""

from collections.abc import Callable, Sequence
from typing import Any, get_args

from torch import Tensor

from approx_kernels.dispatch.implementation import choose
from approx_kernels.gpu.language import ranked
from approx_kernels.ops.flash.api import flash_obstacle
from approx_kernels.ops.flash.padding import under_padding
from approx_kernels.ops.key_lists.cpu import obstacle
from approx_kernels.ops.summaries.cpu import summary_lists
from approx_kernels.ops.summaries.reference import Inside, side_and_step
from approx_kernels.ops.summaries.reference import summary_attention as plain_attention
from approx_kernels.ops.summaries.triton import summary_tiles
from approx_kernels.tokens import (
    by_step,
    check_form,
    check_least,
    check_shapes,
    check_steps,
    check_word,
    checked_stride,
    root_below,
    same_stride,
    without_padding,
)

__all__ = ["root_below", "summary_attention"]

_INSIDE: tuple[Inside, ...] = get_args(Inside)


def summary_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    stride: Callable[[int], int],
    summary: int,
    inside: Inside,
    causal: bool,
    steps: Sequence[int | None] = (None,),
    scale: float,
    dropout: float = 0.0,
    impl: str = "auto",
) -> Tensor:
    """Softmax attention of each block to its own keys and c columns of every block, in O(L (l + c S / l) D).

    Step 1 is the own block; step 2 is the summaries and the query's own key. A summary is the last c columns of a
    block, the first c with `inside="future"`; a partial block has one too, unless `causal`, where blocks may still
    grow. With `inside="both"` steps 1 and 2 are those of the past, 3 and 4 those of the future. Positions count real
    tokens, and query i is the token of key S - L + i. A query that is padding or precedes all keys gives 0.

    Source: Child, Gray, Radford, Sutskever, 2019, Generating Long Sequences with Sparse Transformers,
    arXiv 1904.10509, and Daras, Odena, Zhang, Dimakis, 2019, Your Local GAN, arXiv 1911.12287; departs from them in
    the summary of a partial block.

    Args:
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
        key_mask: [B, S] bool, True at real keys and their queries; None when all are real.
        stride: From the number of real tokens of a sample to the tokens of a block, l, non-decreasing; constant if
            causal.
        summary: Columns of a summary, c.
        inside: The part of its own block that a query sees in step 1: all, the past and itself, the future and itself,
            or `both`, the past in steps 1 and 2 and the future in steps 3 and 4.
        causal: Whether a query sees only keys at or before its own position; only with `inside="past"`.
        steps: 1, 2, ... or None (all merged): what each head uses, repeated over the heads.
        scale: Factor of the scores.
        dropout: Probability of dropping an attention weight.
        impl: One of `IMPLEMENTATIONS`: `cpu` is compiled C, for float32 and bfloat16.

    Returns:
        [B, H, L, E] in the dtype of q.

    Raises:
        ValueError: if shapes or dtypes do not match, `inside` is unknown, a causal pattern would look ahead, or
            the requested implementation cannot run.
    """
    check_shapes(q, k, v, key_mask)
    check_form(scale, dropout, causal=causal)
    check_word("inside", inside, _INSIDE)
    check_steps(steps, 4 if inside == "both" else 2)
    check_least("summary", summary, 1)
    stride = checked_stride(stride, causal, k.shape[2])
    if causal and inside != "past":
        raise ValueError(f"A causal pattern with inside={inside!r}; expected inside='past'.")
    ways = {"cpu": obstacle(q), "reference": None}
    run = choose("summary_attention", impl, ranked(q, flash_obstacle(q, v, dropout), **ways), q)

    def how(keys: int, step: int | None) -> dict[str, Any]:
        side, step = side_and_step(inside, step)
        settings = {"stride": stride(keys), "summary": summary, "causal": causal, "scale": scale}
        return settings | {"inside": side, "step": step}

    def tiles(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        def attend(q: Tensor, k: Tensor, v: Tensor, step: int | None) -> Tensor:
            return summary_tiles(q, k, v, key_mask, **how(k.shape[2], step))

        return by_step(attend, q, k, v, steps)

    def lists(q: Tensor, k: Tensor, v: Tensor, step: int | None) -> Tensor:
        return summary_lists(q, k, v, **how(k.shape[2], step), dropout=dropout)

    if run == "triton":
        # The summary of a partial last block ends where the sample does, unless it consists of the first columns.
        apart = not causal and inside != "future"
        alike = (lambda count: count) if apart else same_stride(stride, k.shape[2])
        return under_padding(tiles, q, k, v, key_mask, alike)
    if run == "cpu":
        return without_padding(lambda q, k, v: by_step(lists, q, k, v, steps), q, k, v, key_mask)
    form = {"stride": stride, "summary": summary, "inside": inside, "causal": causal, "steps": steps, "scale": scale}
    return plain_attention(q, k, v, key_mask, **form, dropout=dropout)
