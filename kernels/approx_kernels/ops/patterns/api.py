"""Softmax attention under the pairs of a sparse pattern; `reference.py` defines the patterns."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from approx_kernels.dispatch.implementation import choose
from approx_kernels.gpu.language import ranked
from approx_kernels.ops.flash.api import flash, flash_obstacle
from approx_kernels.ops.flash.padding import under_padding
from approx_kernels.ops.key_lists.cpu import obstacle
from approx_kernels.ops.patterns.cpu import pattern_lists
from approx_kernels.ops.patterns.reference import Pattern, Window
from approx_kernels.ops.patterns.reference import local_attention as plain_local_attention
from approx_kernels.ops.patterns.reference import pattern_attention as plain_attention
from approx_kernels.ops.patterns.triton import pattern_tiles
from approx_kernels.tokens import (
    blank_for_gradients,
    by_step,
    check_form,
    check_shapes,
    check_steps,
    without_padding,
)


def local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    left: int,
    right: int,
    scale: float,
    dropout: float = 0.0,
    impl: str = "auto",
) -> Tensor:
    """Softmax attention of each query over the keys around it, in O(L (left + right) D), never through L x S.

    Unlike in `pattern_attention`, positions are those of the input, whether its tokens are real or not: query i is at
    position p = S - L + i and sees the real keys from p - left to p + right, both inclusive; causal is right = 0. A query with
    no allowed key gives 0.

    Source: Beltagy, Peters, Cohan, 2020, Longformer, arXiv 2004.05150; departs from it in having no global
    tokens.

    Args:
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
        key_mask: [B, S] bool, True at real keys; None when all are real.
        left: Keys seen before the query.
        right: Keys seen after the query.
        scale: Factor of the scores.
        dropout: Probability of dropping an attention weight.
        impl: One of `IMPLEMENTATIONS`: `cpu` is compiled C, for float32 and bfloat16.

    Returns:
        [B, H, L, E] in the dtype of q.

    Raises:
        ValueError: if shapes or dtypes do not match, or the requested implementation cannot run.
    """
    check_shapes(q, k, v, key_mask)
    check_form(scale, dropout)
    window = Window(left=left, right=right)
    ways = {"cpu": obstacle(q), "reference": None}
    run = choose("local_attention", impl, ranked(q, flash_obstacle(q, v, dropout), **ways), q)
    if run == "triton":
        return flash(q, k, v, key_mask, scale=scale, left=left, right=right, impl="triton")[0]
    if run == "cpu":
        tensors = blank_for_gradients(q, k, v, key_mask)
        return pattern_lists(*tensors, None, key_mask, pattern=lambda keys: window, scale=scale, dropout=dropout)[0]
    return plain_local_attention(q, k, v, key_mask, left=left, right=right, scale=scale, dropout=dropout)


def pattern_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    pattern: Callable[[int], Pattern],
    steps: Sequence[int | None] = (None,),
    scale: float,
    dropout: float = 0.0,
    impl: str = "auto",
) -> Tensor:
    """Softmax attention of each query to the keys that a pattern lets it see, in time and memory that grow with their number.

    Positions count real tokens, and query i is the token of key S - L + i. A query that is padding or precedes all keys
    gives 0.

    Args:
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
        key_mask: [B, S] bool, True at real keys and their queries; None when all are real.
        pattern: From the number of real tokens of a sample to its pattern. What a causal pattern lets earlier tokens see must
            not depend on the number of tokens.
        steps: From 1, or None (all merged): the step that each head uses, repeated over the heads.
        scale: Factor of the scores.
        dropout: Probability of dropping an attention weight.
        impl: One of `IMPLEMENTATIONS`: `cpu` is compiled C, for float32 and bfloat16.

    Returns:
        [B, H, L, E] in the dtype of q.

    Raises:
        ValueError: if shapes or dtypes do not match, a step is unknown, or the requested implementation cannot run.
    """
    check_shapes(q, k, v, key_mask)
    check_form(scale, dropout)
    keys = k.shape[2]
    whole = pattern(keys)
    if whole.causal and pattern(1) != whole:
        raise ValueError(
            f"The pattern is {pattern(1)} for 1 token and {whole} for {keys}; a causal pattern needs one stride, or earlier "
            "outputs would change as the sequence grows."
        )
    check_steps(steps, whole.count)
    why = flash_obstacle(q, v, dropout)
    if isinstance(whole, Window) and whole.once:
        why = "tokens that each sample chooses need a list for each. Give positions, or ask for 'reference'."
    run = choose(whole.op, impl, ranked(q, why, cpu=obstacle(q), reference=None), q)

    def tiles(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        attend = partial(pattern_tiles, key_mask=key_mask, pattern=pattern, scale=scale)
        return by_step(attend, q, k, v, steps)

    def lists(q: Tensor, k: Tensor, v: Tensor, step: int | None) -> Tensor:
        return pattern_lists(q, k, v, step, pattern=pattern, scale=scale, dropout=dropout)[0]

    if run == "triton":
        return under_padding(tiles, q, k, v, key_mask, _alike(pattern, keys))
    if run == "cpu":
        return without_padding(lambda q, k, v: by_step(lists, q, k, v, steps), q, k, v, key_mask)
    return plain_attention(q, k, v, key_mask, pattern=pattern, steps=steps, scale=scale, dropout=dropout)


def _alike(pattern: Callable[[int], Pattern], most: int) -> Callable[[int], int] | None:
    """A function from a number of tokens to the largest one up to `most` that sees the same; None if all do."""
    if pattern(most).ends:
        return lambda count: count
    if pattern(1) == pattern(most):
        return None
    return lambda count: bisect_left(range(most + 1), True, lo=count, key=lambda n: pattern(n) != pattern(count)) - 1
