"""A window and global tokens: Longformer, attention sinks."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from approx_kernels.dispatch.implementation import choose
from approx_kernels.gpu.language import ranked
from approx_kernels.ops.flash.api import flash_obstacle
from approx_kernels.ops.flash.listed import listed_attention
from approx_kernels.ops.flash.padding import under_padding
from approx_kernels.ops.global_tokens.cpu import window_lists
from approx_kernels.ops.global_tokens.reference import global_token_attention as plain_attention
from approx_kernels.ops.global_tokens.reference import seeing_rows
from approx_kernels.ops.key_lists.cpu import obstacle
from approx_kernels.tokens import check_form, check_least, check_shapes, check_tensor, without_padding


def global_token_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    left: int,
    right: int,
    tokens: Sequence[int] | Tensor,
    see_all: bool,
    causal: bool,
    scale: float,
    dropout: float = 0.0,
    impl: str = "auto",
) -> Tensor:
    """Softmax attention of each query to the keys around it and to chosen tokens, in O(L (left + right + g) D).

    The query at position p sees the keys from p - left to p + right, both inclusive, and the g chosen tokens;
    with `see_all` a chosen token itself sees all keys. Positions count real tokens, and query i is the token of
    key S - L + i. A query that is padding or precedes all keys gives 0.

    Source: Beltagy, Peters, Cohan, 2020, Longformer, arXiv 2004.05150, and Xiao, Tian, Chen, Han, Lewis, 2023,
    Efficient Streaming Language Models with Attention Sinks, arXiv 2309.17453; departs from the first in having no
    separate projections for global tokens, from the second in keeping the model's positions.

    Args:
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
        key_mask: [B, S] bool, True at real keys and their queries; None when all are real.
        left: Keys seen before the query.
        right: Keys seen after the query.
        tokens: Positions of the chosen tokens, the same for all samples; shorter samples go without those beyond. Or
            [B, S] bool, True at the keys that a sample chooses.
        see_all: Whether the chosen tokens see every key.
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
    check_form(scale, dropout, causal=causal, see_all=see_all)
    check_least("left", left, 0)
    check_least("right", right, 0)
    if not isinstance(tokens, Tensor | Sequence):
        raise ValueError(f"tokens is of type {type(tokens).__name__}; expected positions, or a tensor [batch, keys].")
    if isinstance(tokens, Tensor):
        check_tensor("tokens", tokens)
        if tokens.dtype != torch.bool or tokens.shape != (k.shape[0], k.shape[2]):
            raise ValueError(
                f"tokens is {tokens.dtype} of shape {list(tokens.shape)}; "
                f"expected torch.bool of shape [{k.shape[0]}, {k.shape[2]}], True at the chosen keys."
            )
    else:
        for token in tokens:
            check_least("a chosen token", token, 0)
    right = 0 if causal else right
    elsewhere = "tokens that each sample chooses need a list for each. Give positions, or ask for 'reference'."
    own = isinstance(tokens, Tensor)
    ways = {"cpu": elsewhere if own else obstacle(q), "reference": None}
    run = choose(
        "global_token_attention", impl, ranked(q, elsewhere if own else flash_obstacle(q, v, dropout), **ways), q
    )

    if run == "triton":
        chosen = tuple(map(int, tokens))
        tiles = partial(_tiles, left=left, right=right, tokens=chosen, see_all=see_all, causal=causal, scale=scale)
        return under_padding(tiles, q, k, v, key_mask)
    if run == "cpu":
        how: dict[str, Any] = {"causal": causal, "scale": scale, "dropout": dropout}

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = window_lists(q, k, v, left=left, right=right, tokens=[int(token) for token in tokens], **how)
            return seeing_rows(out, q, k, v, tokens, **how) if see_all else out

        return without_padding(attend, q, k, v, key_mask)
    return plain_attention(
        q,
        k,
        v,
        key_mask,
        left=left,
        right=right,
        tokens=tokens,
        see_all=see_all,
        causal=causal,
        scale=scale,
        dropout=dropout,
    )


def _tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    *,
    left: int,
    right: int,
    tokens: tuple[int, ...],
    see_all: bool,
    causal: bool,
    scale: float,
) -> Tensor:
    """The window and the tokens as one list of blocks for the flash kernels; real keys come first."""

    def pairs(i: Tensor, j: Tensor) -> Tensor:
        chosen = torch.tensor(tokens, dtype=torch.long, device=i.device)
        seen = (j >= i - left) & (j <= i + right) | torch.isin(j, chosen)
        seen = seen | torch.isin(i, chosen) if see_all else seen
        return seen & (j <= i) if causal else seen

    pattern = "global tokens", left, right, tokens, see_all, causal
    return listed_attention(q, k, v, pattern, pairs, key_mask=key_mask, scale=scale)[0]
