"""Linear attention: a kernel feature map in place of the softmax."""

from torch import Tensor

from approx_kernels.linear.reference import linear_heads
from approx_kernels.shapes import check_shapes


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    causal: bool,
    eps: float,
    input_scale: float = 1.0,
    dropout: float = 0.0,
) -> Tensor:
    """`o_i = f(q_i) sum_j f(k_j) v_j / (f(q_i) sum_j f(k_j) + eps)` with f(x) = elu(x) + 1, in O(n D E).

    With `causal`, query i stands at position S - L + i and the sums run up to there; they are computed in
    chunks, between which a running state is carried. A query without any allowed key gives 0.

    Source: Katharopoulos, Vyas, Pappas, Fleuret, 2020, Transformers are RNNs, arXiv 2006.16236; departs from
    it in nothing.

    Args:
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, H, S, D].
        v: Values, [B, H, S, E].
        key_mask: [B, S] bool, True at real keys; None when all are real.
        causal: Whether a query sees only keys at or before its own position.
        eps: Added to the normaliser.
        input_scale: Factor of q and of k before the feature map.
        dropout: Probability with which a key is dropped from the numerator, for all queries of a head at once:
            there are no weights of single pairs to drop.

    Returns:
        [B, H, L, E] in the dtype of q.

    Raises:
        ValueError: if the shapes or dtypes do not fit together.
    """
    check_shapes(q, k, v, key_mask)
    return linear_heads(q, k, v, key_mask, causal=causal, eps=eps, input_scale=input_scale, dropout=dropout)
