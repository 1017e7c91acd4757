"""Exact top-k attention: softmax over the largest scores of each query."""

from functools import partial
from typing import Any

from torch import Tensor

from approx_kernels.dispatch.implementation import choose
from approx_kernels.gpu.language import ranked
from approx_kernels.ops.flash.api import flash_obstacle
from approx_kernels.ops.topk.cpu import obstacle, topk_rows
from approx_kernels.ops.topk.reference import topk_attention as plain_attention
from approx_kernels.ops.topk.triton import topk_gathered
from approx_kernels.tokens import check_form, check_least, check_shapes, in_turns


def topk_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    topk: int,
    causal: bool,
    scale: float,
    dropout: float = 0.0,
    impl: str = "auto",
) -> Tensor:
    """Softmax attention of each query over the K keys with its largest scores, in O(L S D).

    All scores are computed, a block of queries at a time: an upper bound on the quality of choosing keys, not a way to
    save anything. Scores are differentiated, the choice is not. With `causal`, query i is at position
    S - L + i and chooses among the keys up to there. A query with no allowed key gives 0.

    Source: Gupta, Dar, Goodman, Ciprut, Berant, 2021, Memory-efficient Transformers via Top-k Attention,
    arXiv 2106.06899; no departures.

    Args:
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
        key_mask: [B, S] bool, True at real keys; None when all are real.
        topk: Keys that a query keeps, K; with fewer allowed it keeps them all.
        causal: Whether a query sees only keys at or before its own position.
        scale: Factor of the scores.
        dropout: Probability of dropping an attention weight.
        impl: `triton`, which has no dropout, `reference`, or `cpu` in C on float32 and bfloat16.

    Returns:
        [B, H, L, E] in the dtype of q.

    Raises:
        ValueError: if shapes or dtypes do not match, or `impl` cannot run.
    """
    check_shapes(q, k, v, key_mask)
    check_form(scale, dropout, causal=causal)
    check_least("topk", topk, 1)
    ways = ranked(q, flash_obstacle(q, v, dropout), cpu=obstacle(q), reference=None)
    run = choose("topk_attention", impl, ways, q)
    how: dict[str, Any] = {"key_mask": key_mask, "topk": topk, "causal": causal, "scale": scale}
    if run == "triton":
        return in_turns(partial(topk_gathered, **how), q, k, v)
    if run == "cpu":
        return topk_rows(q, k, v, **how, dropout=dropout)
    return plain_attention(q, k, v, **how, dropout=dropout)
