"""Attention within a soft window whose length each head learns."""

from collections.abc import Callable, Sequence

from torch import Tensor

from approx_kernels.dispatch.implementation import choose
from approx_kernels.gpu.language import ranked
from approx_kernels.ops.adaptive_span.cpu import spans_in_c
from approx_kernels.ops.adaptive_span.reference import adaptive_span_attention as plain_attention
from approx_kernels.ops.adaptive_span.reference import known_spans, mass_by_distance, window_sizes
from approx_kernels.ops.flash.api import flash, flash_obstacle
from approx_kernels.ops.key_lists.cpu import obstacle
from approx_kernels.tokens import check_form, check_least, check_part, check_shapes

__all__ = ["adaptive_span_attention", "mass_by_distance", "window_sizes"]


def adaptive_span_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    spans: Tensor,
    known: Callable[[], Sequence[float]] | None = None,
    ramp: int,
    causal: bool,
    scale: float,
    dropout: float = 0.0,
    impl: str = "auto",
) -> Tensor:
    """Softmax attention whose weights fall with the distance x as m(x) = clip((R + z - x) / R, 0, 1), then sum to 1.

    Query i is at position S - L + i; x is the distance of positions. Nothing is computed beyond z + R, where m is 0:
    heads of similar span share one window, in O(L (z + R) D) per head, and heads whose span covers every distance run
    exact attention. A query with no allowed key gives 0. Differentiable in q, k, v and z.

    Source: Sukhbaatar, Grave, Bojanowski, Joulin, 2019, Adaptive Attention Span in Transformers, arXiv 1905.07799;
    departs from it in windows per group of heads instead of one as long as the longest span, in keeping the model's
    positions, and in the bidirectional form, which reaches equally far on both sides.

    Args:
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
        key_mask: [B, S] bool, True at real keys; None when all are real.
        spans: z, [H], float, 0 or more, in tokens.
        known: Returns `spans` as Python numbers, possibly cached; it is called only when the windows depend on them,
            since reading them synchronises with an accelerator.
        ramp: R, in tokens, 1 or more.
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
    check_part("spans", spans, q, q.shape[1])
    check_least("ramp", ramp, 1)
    ways = {"cpu": obstacle(q), "reference": None}
    run = choose("adaptive_span_attention", impl, ranked(q, flash_obstacle(q, v, dropout), **ways), q)
    if run == "triton":
        # Each head of the kernel stops at its own span, so the spans need not be read first.
        right = 0 if causal else None
        return flash(q, k, v, key_mask, scale=scale, right=right, spans=spans, ramp=ramp, impl="triton")[0]
    how = {"ramp": ramp, "causal": causal, "scale": scale, "dropout": dropout}
    if run == "cpu":
        return spans_in_c(q, k, v, key_mask, spans=spans, known=known_spans(spans, known), **how)
    return plain_attention(q, k, v, key_mask, spans=spans, known=known, **how)
