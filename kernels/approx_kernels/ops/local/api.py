"""Local attention: exact softmax attention within a window."""

from torch import Tensor

from approx_kernels.dispatch.implementation import choose
from approx_kernels.gpu.language import ranked
from approx_kernels.ops.flash.api import flash, flash_obstacle
from approx_kernels.ops.key_lists.cpu import obstacle
from approx_kernels.ops.local.cpu import local_lists
from approx_kernels.ops.local.reference import local_attention as plain_attention
from approx_kernels.tokens import check_form, check_least, check_shapes


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

    Query i is at position p = S - L + i and sees the keys from p - left to p + right, both inclusive;
    causal is right = 0. A query with no allowed key gives 0.

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
    # A window may be said to be as wide as any input.
    check_least("left", left, 0, 2**48)
    check_least("right", right, 0, 2**48)
    ways = {"cpu": obstacle(q), "reference": None}
    run = choose("local_attention", impl, ranked(q, flash_obstacle(q, v, dropout), **ways), q)
    if run == "triton":
        return flash(q, k, v, key_mask, scale=scale, left=left, right=right, impl="triton")[0]
    if run == "cpu":
        return local_lists(q, k, v, key_mask, left=left, right=right, scale=scale, dropout=dropout)
    return plain_attention(q, k, v, key_mask, left=left, right=right, scale=scale, dropout=dropout)
