"""Attention between whole blocks: neighbours (block attention) and lists of blocks (BigBird)."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from approx_kernels.dispatch.implementation import choose
from approx_kernels.gpu.language import ranked
from approx_kernels.ops.blocks.cpu import block_lists, neighbour_lists
from approx_kernels.ops.blocks.reference import bigbird_attention as plain_bigbird_attention
from approx_kernels.ops.blocks.reference import block_attention as plain_block_attention
from approx_kernels.ops.blocks.triton import bigbird_tiles, block_tiles
from approx_kernels.ops.flash.api import flash_obstacle
from approx_kernels.ops.flash.padding import under_padding
from approx_kernels.ops.key_lists.cpu import obstacle
from approx_kernels.ops.patterns.reference import bigbird_lists, draw_blocks
from approx_kernels.tokens import check_form, check_least, check_shapes, check_tensor, without_padding

__all__ = ["bigbird_attention", "bigbird_lists", "block_attention", "draw_blocks"]


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    size: int,
    neighbours: int,
    shift: int,
    causal: bool,
    scale: float,
    dropout: float = 0.0,
    impl: str = "auto",
) -> Tensor:
    """Softmax attention inside blocks and to neighbouring blocks, in O(L (2 neighbours + 1) size D).

    The token at position p of a sample is in block (p + shift) // size; positions count real tokens, and query i
    is the token of key S - L + i. A query that is padding or precedes all keys gives 0.

    Source: Qiu et al., 2019, Blockwise Self-Attention for Long Document Understanding, arXiv 1911.02972; departs
    from it in using the same blocks for all heads.

    Args:
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
        key_mask: [B, S] bool, True at real keys and their queries; None when all are real.
        size: Tokens of a block.
        neighbours: Blocks seen on each side of the own one.
        shift: Tokens by which the first block is shorter.
        causal: Whether a query sees only keys at or before its own position.
        scale: Factor of the scores.
        dropout: Probability of dropping an attention weight.
        impl: One of `IMPLEMENTATIONS`: `cpu` is compiled C, for float32 and bfloat16.

    Returns:
        [B, H, L, E] in the dtype of q.

    Raises:
        ValueError: if shapes or dtypes do not match, or the requested implementation cannot run.
    """
    check_shapes(q, k, v, key_mask)
    check_form(scale, dropout, causal=causal)
    check_least("size", size, 1)
    check_least("neighbours", neighbours, 0)
    check_least("shift", shift, 0)
    ways = {"cpu": obstacle(q), "reference": None}
    run = choose("block_attention", impl, ranked(q, flash_obstacle(q, v, dropout), **ways), q)
    how: dict[str, Any] = {"size": size, "neighbours": neighbours, "shift": shift, "causal": causal, "scale": scale}
    if run == "triton":
        return under_padding(partial(block_tiles, **how), q, k, v, key_mask)
    if run == "cpu":
        return without_padding(partial(neighbour_lists, **how, dropout=dropout), q, k, v, key_mask)
    return plain_block_attention(q, k, v, key_mask, **how, dropout=dropout)


def bigbird_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    block: int,
    draws: Tensor,
    compatible: bool = False,
    scale: float,
    dropout: float = 0.0,
    impl: str = "auto",
) -> Tensor:
    """Softmax attention of blocks to neighbours, the first, the last and random blocks, in O(L (5 + r) block D).

    The first and the last block see all and are seen by all; every pair counts once. Positions count real tokens,
    and query i is the token of key S - L + i. A query that is padding or precedes all keys gives 0.

    With `compatible` every random block repeats the first block, for all queries outside the first and the last block:
    softmax(s + log C), where C is 1 + r on the first block, as Hugging Face's BigBird attends in evaluation mode.
    mode.

    Source: Zaheer et al., 2020, Big Bird: Transformers for Longer Sequences, arXiv 2007.14062; departs from it in
    using the same random blocks for all heads.

    Args:
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
        key_mask: [B, S] bool, True at real keys and their queries; None when all are real.
        block: Tokens of a block.
        draws: The result of `draw_blocks`; its second size is the number of random blocks, r.
        compatible: Whether to attend as Hugging Face's BigBird does in evaluation mode.
        scale: Factor of the scores.
        dropout: Probability of dropping an attention weight.
        impl: One of `IMPLEMENTATIONS`: `cpu` is compiled C, for float32 and bfloat16.

    Returns:
        [B, H, L, E] in the dtype of q.

    Raises:
        ValueError: if shapes or dtypes do not match, or the requested implementation cannot run.
    """
    check_shapes(q, k, v, key_mask)
    check_form(scale, dropout, compatible=compatible)
    check_least("block", block, 1)
    check_tensor("draws", draws)
    if draws.ndim != 2 or not len(draws) or draws.dtype != torch.int64:
        raise ValueError(f"draws is {draws.dtype} of shape {list(draws.shape)}; expected torch.int64 [blocks, random].")
    ways = {"cpu": obstacle(q), "reference": None}
    run = choose("bigbird_attention", impl, ranked(q, flash_obstacle(q, v, dropout), **ways), q)

    def lists(keys: int) -> Sequence[Sequence[int]]:
        return bigbird_lists(-(-keys // block), draws, compatible)

    def tiles(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        return bigbird_tiles(q, k, v, key_mask, size=block, lists=lists(k.shape[2]), scale=scale)

    def listed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return block_lists(q, k, v, size=block, lists=lists(k.shape[2]), scale=scale, dropout=dropout)

    if run == "triton":
        return under_padding(tiles, q, k, v, key_mask, lambda count: -(-count // block) * block)
    if run == "cpu":
        return without_padding(listed, q, k, v, key_mask)
    how = {"block": block, "draws": draws, "compatible": compatible, "scale": scale, "dropout": dropout}
    return plain_bigbird_attention(q, k, v, key_mask, **how)
