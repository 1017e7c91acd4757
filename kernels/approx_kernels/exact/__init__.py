"""Exact softmax attention: materialised (the oracle) or through PyTorch's fused kernels."""

from typing import Literal

from torch import Tensor

from approx_kernels.exact.fused import fused_attention
from approx_kernels.exact.reference import dense_attention
from approx_kernels.shapes import check_shapes


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    causal: bool,
    scale: float,
    dropout: float = 0.0,
    impl: Literal["reference", "fused"] = "fused",
) -> Tensor:
    """Softmax attention, `o_i = sum_j softmax_j(scale q_i.k_j) v_j`, in O(L S D).

    With `causal`, query i stands at position S - L + i and sees the keys up to there. A query without any
    allowed key gives 0.

    Source: Vaswani et al., 2017, Attention Is All You Need, arXiv 1706.03762; departs from it in nothing.

    Args:
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, H, S, D].
        v: Values, [B, H, S, E].
        key_mask: [B, S] bool, True at real keys; None when all are real.
        causal: Whether a query sees only keys at or before its own position.
        scale: Factor of the scores.
        dropout: Probability with which an attention weight is dropped.
        impl: `reference` materialises the weights in float32 at least; `fused` is PyTorch's SDPA.

    Returns:
        [B, H, L, E] in the dtype of q.

    Raises:
        ValueError: if the shapes or dtypes do not fit together.
    """
    check_shapes(q, k, v, key_mask)
    attend = dense_attention if impl == "reference" else fused_attention
    return attend(q, k, v, key_mask, causal=causal, scale=scale, dropout=dropout)
