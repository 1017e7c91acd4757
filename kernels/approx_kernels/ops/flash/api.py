"""Exact attention over windows and lists of blocks, tile by tile with an online softmax, forward and backward."""

from collections.abc import Sequence

import torch
from torch import Tensor

from approx_kernels.dispatch.implementation import choose
from approx_kernels.gpu.language import obstacle, ranked
from approx_kernels.ops.exact.api import exact_attention
from approx_kernels.ops.flash.blocks import BlockList, block_list
from approx_kernels.ops.flash.library import library_attention, library_obstacle
from approx_kernels.ops.flash.reference import flash_reference
from approx_kernels.ops.flash.samples import behind_each_other, stretches
from approx_kernels.ops.flash.triton import ENDLESS, flash_forward, list_tile
from approx_kernels.runtime.pytorch import in_autocast, without_autocast
from approx_kernels.tokens import MOST, check_form, check_least, check_part, check_shapes

__all__ = ["BlockList", "block_list", "flash", "flash_attention", "flash_obstacle", "list_tile"]


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    causal: bool,
    scale: float,
    dropout: float = 0.0,
    impl: str = "auto",
) -> Tensor:
    """Softmax attention by an installed FlashAttention, the flash kernels or PyTorch's fused kernels, in O(L S D).

    FlashAttention-4 and -3 run on all inputs that they take; see `library_obstacle`. The flash kernels skip padding.

    With `causal`, query i is at position S - L + i and sees the keys up to there. A query with no allowed key gives
    0; so do, with the flash kernels, padded queries before the first and after the last real token.

    Source: Dao, 2023, FlashAttention-2, arXiv 2307.08691; departs from it in a deterministic backward pass without
    atomic additions.

    Args:
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
        key_mask: [B, S] bool, True at real keys and, when L == S, their queries; None when all are real.
        causal: Whether a query sees only keys at or before its own position.
        scale: Factor of the scores.
        dropout: Probability of dropping an attention weight.
        impl: `library` (FlashAttention-4 or -3), `triton`, `fused`, or `reference`, which materialises the weights.

    Returns:
        [B, H, L, E] in the dtype of q, or in that of autocast.

    Raises:
        ValueError: if shapes or dtypes do not match, or the requested implementation cannot run.
    """
    check_shapes(q, k, v, key_mask)
    check_form(scale, dropout, causal=causal)
    q, k, v = in_autocast(q, k, v)
    ours = ranked(q, flash_obstacle(q, v, dropout), fused=None, reference=None)
    theirs = library_obstacle(q, k, v, key_mask, dropout)
    run = choose(
        "flash_attention", impl, {"library": None, **ours} if theirs is None else {**ours, "library": theirs}, q
    )
    if run == "library":
        return library_attention(q, k, v, causal=causal, scale=scale)
    if run == "triton":
        return flash(q, k, v, key_mask, scale=scale, right=0 if causal else None, impl="triton")[0]
    way = "reference" if run == "reference" else "auto"
    return exact_attention(q, k, v, key_mask, causal=causal, scale=scale, dropout=dropout, impl=way)


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    scale: float,
    left: int | None = None,
    right: int | None = None,
    blocks: BlockList | None = None,
    spans: Tensor | None = None,
    ramp: int = 1,
    lengths: Sequence[int] | None = None,
    both: bool = True,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Softmax attention in a window or list of blocks, `softmax(s_ij + log C_ij + log m(i, j)) v`, and log-sum-exps.

    The query at position p = S - L + i sees the keys from p - left to p + right, both inclusive, or those listed in
    `blocks`, C times. Time and memory grow with the tiles that hold such a pair. A query without keys gives 0 and -inf.

    Args:
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
        key_mask: [B, S] bool, True at real keys and, when L == S and `both`, with that at their queries: those before
            the first and after the last real key give 0. None when all are real.
        scale: Factor of the scores.
        left: Keys seen before the query, any sign; None for all.
        right: Keys seen after it; None for all, 0 for causal.
        blocks: The pairs that count, instead of a window. For kernels its tiles must be
            `list_tile(q, v)` wide.
        spans: z, [H], float: weights at distance x are multiplied by m = clip((R + z - x) / R, 0, 1), then sum to 1.
        ramp: R, in tokens.
        lengths: With B = 1, the numbers of tokens of consecutive samples, which do not see each other.
        both: Whether queries are the tokens of the keys if there are as many of both.
        impl: `triton` or `reference`.

    Returns:
        [B, H, L, E] in the dtype of q, or in that of autocast, and [B, H, L] in float32 (float64 for such inputs).
        Both are differentiable in q, k, v and spans.

    Raises:
        ValueError: if shapes, lengths or tiles do not match, or the requested implementation cannot run.
    """
    check_shapes(q, k, v, key_mask)
    check_form(scale, both=both)
    check_least("ramp", ramp, 1)
    for name, reach in (("left", left), ("right", right)):
        if reach is not None:
            check_least(name, reach, -MOST)
    if spans is not None:
        check_part("spans", spans, q, q.shape[1])
    if blocks is not None and not isinstance(blocks, BlockList):
        raise ValueError(f"blocks is of type {type(blocks).__name__}; expected the result of `block_list`.")
    run = choose("flash", impl, ranked(q, flash_obstacle(q, v, 0.0), reference=None), q)
    q, k, v = in_autocast(q, k, v)
    if blocks is not None:
        _check_blocks(q, k, blocks, left, right, list_tile(q, v) if run == "triton" else None)
    bounds = stretches(key_mask, q.shape[2], both) if lengths is None else behind_each_other(q, k, key_mask, lengths)
    left, right = (ENDLESS if reach is None else max(min(reach, ENDLESS), -ENDLESS) for reach in (left, right))
    with without_autocast(q.device.type):
        if run == "reference":
            return flash_reference(
                q,
                k,
                v,
                bounds,
                key_mask,
                spans,
                blocks,
                left=left,
                right=right,
                ramp=ramp,
                scale=scale,
                packed=lengths is not None,
            )
        q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
        mask = None if key_mask is None else key_mask.contiguous().view(torch.uint8)
        tensors = [] if blocks is None else blocks.tensors
        own_spans = None if spans is None else spans.float()
        longest = 0 if lengths is None else max(lengths)
        return flash_forward(q, k, v, bounds, mask, own_spans, tensors, left, right, ramp, scale, longest, False)[:2]


def flash_obstacle(q: Tensor, v: Tensor, dropout: float) -> str | None:
    """Why the flash kernels cannot run, with the remedy; None if they can."""
    if dropout:
        return f"it has no dropout, and {dropout} was asked for. Set the attention dropout to 0, or ask for 'auto'."
    return obstacle(q, v)


def _check_blocks(
    q: Tensor, k: Tensor, blocks: BlockList, left: int | None, right: int | None, tile: int | None
) -> None:
    if left is not None or right is not None:
        raise ValueError("A window and a list of blocks were asked for together; put the window into the list.")
    heads = blocks.rows.shape[0]
    if (blocks.queries, blocks.keys) != (q.shape[2], k.shape[2]) or heads not in (1, q.shape[1]):
        raise ValueError(
            f"The list of blocks is for {heads} heads, {blocks.queries} queries and {blocks.keys} keys, but there are "
            f"{q.shape[1]}, {q.shape[2]} and {k.shape[2]}. Make it for them; one head serves all."
        )
    if tile not in (None, blocks.tile):
        raise ValueError(f"The list's tiles are {blocks.tile} wide; {q.dtype} and these head sizes take {tile}.")
    if blocks.rows.device != q.device:
        raise ValueError(
            f"The list of blocks is on {blocks.rows.device}, the queries are on {q.device}. Make it there."
        )
