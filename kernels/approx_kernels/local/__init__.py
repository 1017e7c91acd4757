"""Local attention: exact softmax attention within a window."""

from torch import Tensor

from approx_kernels.local.reference import local_blocks
from approx_kernels.shapes import check_shapes


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
) -> Tensor:
    """Softmax attention of each query over the keys around it, in O(L (left + right) D), never through L x S.

    Query i stands at position p = S - L + i and sees the keys from p - left to p + right, both inclusive;
    causal is right = 0. A query without any allowed key gives 0.

    Source: Beltagy, Peters, Cohan, 2020, Longformer, arXiv 2004.05150; departs from it in having no global
    tokens.

    Args:
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, H, S, D].
        v: Values, [B, H, S, E].
        key_mask: [B, S] bool, True at real keys; None when all are real.
        left: Keys seen before the own position.
        right: Keys seen after the own position.
        scale: Factor of the scores.
        dropout: Probability with which an attention weight is dropped.

    Returns:
        [B, H, L, E] in the dtype of q.

    Raises:
        ValueError: if the shapes or dtypes do not fit together.
    """
    check_shapes(q, k, v, key_mask)
    return local_blocks(q, k, v, key_mask, left=left, right=right, scale=scale, dropout=dropout)
