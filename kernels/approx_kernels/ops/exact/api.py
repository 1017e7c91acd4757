"""Exact softmax attention: materialised (the reference), or through PyTorch's fused kernels."""

from torch import Tensor

from approx_kernels.dispatch.implementation import choose
from approx_kernels.ops.exact.cpu import chunked_attention, chunks_obstacle
from approx_kernels.ops.exact.lengths import by_lengths
from approx_kernels.ops.exact.reference import exact_attention as fused_attention
from approx_kernels.ops.exact.reference import materialised_attention as dense_attention
from approx_kernels.tokens import check_form, check_shapes

CHUNK = 256


def exact_attention(
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
    """Softmax attention, `o_i = sum_j softmax_j(scale q_i.k_j) v_j`, in O(L S D).

    With `causal`, query i is at position S - L + i and sees the keys up to there. A query with no
    allowed key gives 0.

    Source: Vaswani et al., 2017, Attention Is All You Need, arXiv 1706.03762; no departures.

    Args:
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
        key_mask: [B, S] bool, True at real keys; None when all are real.
        causal: Whether a query sees only keys at or before its own position.
        scale: Factor of the scores.
        dropout: Probability of dropping an attention weight.
        impl: `auto` is plain SDPA of PyTorch; `reference` materialises the weights in at least float32; `cpu`
            multiplies matrices a chunk of queries at a time.

    Returns:
        [B, H, L, E] in the dtype of q.

    Raises:
        ValueError: if shapes or dtypes do not match, or the requested implementation cannot run.
    """
    check_shapes(q, k, v, key_mask)
    check_form(scale, dropout, causal=causal)
    run = choose("exact_attention", impl, {"fused": None, "cpu": chunks_obstacle(q, dropout), "reference": None})
    if run == "cpu":

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return chunked_attention(q, k, v, causal=causal, scale=scale, chunk=CHUNK)

        return by_lengths(attend, q, k, v, key_mask, causal=causal)
    attend_all = dense_attention if run == "reference" else fused_attention
    return attend_all(q, k, v, key_mask, causal=causal, scale=scale, dropout=dropout)


def materialised_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    causal: bool,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """`exact_attention` with materialised weights, unless another implementation is set.

    Args, result and errors: as for `exact_attention`.
    """
    check_shapes(q, k, v, key_mask)
    check_form(scale, dropout, causal=causal)
    return dense_attention(q, k, v, key_mask, causal=causal, scale=scale, dropout=dropout)
