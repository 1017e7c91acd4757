"""Performer attention (FAVOR+): positive random features whose products are softmax weights on average."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from approx_kernels.dispatch.implementation import choose
from approx_kernels.gpu.language import ranked
from approx_kernels.ops.linear.decode import state_obstacle
from approx_kernels.ops.performer.cpu import obstacle, performer_continue, random_features
from approx_kernels.ops.performer.reference import (
    ESTIMATORS,
    KERNELS,
    SUMS,
    Fitted,
    draw_projection,
    fit_estimator,
    mixed,
    of_own_rows,
    with_share,
)
from approx_kernels.ops.performer.reference import performer_attention as plain_attention
from approx_kernels.ops.performer.reference import performer_decode as plain_decode
from approx_kernels.ops.performer.triton_heads import (
    performer_kernels,
    performer_obstacle,
    performer_prompt,
    prompt_obstacle,
)
from approx_kernels.runtime.pytorch import drop_keys
from approx_kernels.tokens import (
    State,
    check_form,
    check_part,
    check_shapes,
    check_state,
    check_tensor,
    check_word,
    in_order,
    in_turns,
    turns,
)

__all__ = [
    "ESTIMATORS",
    "KERNELS",
    "Fitted",
    "draw_projection",
    "fit_estimator",
    "performer_attention",
    "performer_decode",
]


def performer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    projection: Tensor,
    offsets: Tensor | None = None,
    share: Tensor | None = None,
    kernel: str = "softmax",
    causal: bool,
    scale: float,
    dropout: float = 0.0,
    impl: str = "auto",
) -> Tensor:
    """`o_i = f(q_i) sum_j f(k_j) v_j / (f(q_i) sum_j f(k_j))` for M random features f, in O(n M E).

    `softmax`: f(x) = exp(w.x - |x|^2 / 2) for every row w of the projection, x being scaled by the root of `scale`;
    f(q).f(k) / M is exp(scale q.k) on average, with a relative error that falls as 1 / root M and grows exponentially
    with the norms. `relu`: f(x) = relu(w.x) + 1e-3, which does not approximate the softmax.

    Offsets b are for estimators that weigh their rows, see `fit_estimator`: f(q).f(k) is a sum of terms times exp(b).
    With a share s the outputs are (1 - s) o_i plus s times the mean of the values that query i may see. It replaces the
    paper's eps added to features, which pulls all weights together where the estimate fails, but does not depend on the
    length of keys or on later ones.

    Nothing over- or underflows: features of keys are divided by the largest value of that feature among the real keys
    (in the causal form, among those already seen); queries are multiplied by it before they are divided by their own
    largest feature. Both cancel exactly, since no eps is added.

    With `causal`, query i is at position S - L + i and the sums run up to there; they are computed in chunks, with a
    running state carried between them. A query with no allowed key gives 0.

    Source: Choromanski et al., 2021, Rethinking Attention with Performers, arXiv 2009.14794; departs from it in the
    stabiliser, which there is a single number for all features and leaks the future through an added eps, and in the
    share.

    Args:
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
        key_mask: [B, S] bool, True at real keys; None when all are real.
        projection: Rows w, [M, D], from `draw_projection`, for all heads; or [H, M, D], per head.
        offsets: Logarithms of the weights of rows, [H, M], for rows per head and the softmax kernel; None for no
            weights.
        share: Share of uniform attention of each head, [H], from 0 to 1; None for none.
        kernel: One of `KERNELS`.
        causal: Whether a query sees only keys at or before its own position.
        scale: Factor of the scores.
        dropout: Probability of dropping a key from the numerator, for all queries of a head at once, since there are no
            weights of single pairs.
        impl: One of `IMPLEMENTATIONS`: `cpu` is compiled C, in one pass, without a gradient of the projection; `triton`
            supports neither that nor dropout.

    Returns:
        [B, H, L, E] in the dtype of q.

    Raises:
        ValueError: if shapes or dtypes do not match, or the implementation cannot run.
    """
    _check_parts(q, k, v, key_mask, projection, offsets, share, kernel)
    check_form(scale, dropout, causal=causal)
    own_k, own_v = of_own_rows(q, k, v, projection)
    no_kernels = performer_obstacle(q, own_v, projection, dropout)
    no_cpu = obstacle(q, projection, offsets)
    run = choose("performer_attention", impl, ranked(q, no_kernels, cpu=no_cpu, reference=None), q)
    how = {"projection": projection, "kernel": kernel, "causal": causal, "scale": scale}
    if run == "reference":
        return plain_attention(q, k, v, key_mask, **how, offsets=offsets, share=share, dropout=dropout)
    v = drop_keys(own_v, dropout)
    if run == "triton":
        out = in_turns(partial(performer_kernels, key_mask=key_mask, **how, offsets=offsets), q, own_k, v)
    else:
        out = random_features(q, own_k, v, key_mask, **how, offsets=offsets)[0]
    return out if share is None else mixed(out, v, key_mask, share, causal=causal)[0]


def performer_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    state: State | None = None,
    *,
    projection: Tensor,
    offsets: Tensor | None = None,
    share: Tensor | None = None,
    kernel: str = "softmax",
    scale: float,
    impl: str = "auto",
) -> tuple[Tensor, State]:
    """Causal `performer_attention` of tokens that follow others, from a state of constant size.

    Args: as for `performer_attention`, except:
        k: Keys not yet in the state, [B, G, S, D], L <= S; the last L are at the queries' positions.
        state: The state returned by the last call, which this call may overwrite; None before the first key.

    Returns:
        [B, H, L, E] in the dtype of q, and the state, in at least float32: `sums` of features times values and a
        one, [B, G, M, E + 1]; for the softmax kernel also the `top` that they are relative to, [B, G, 1, M]; with a
        share also the sums of values and a one, `values`, [B, G, 1, E + 1]. With
        rows per head, each query head has its own.

    Raises:
        ValueError: if shapes or dtypes do not match, or the implementation cannot run.
    """
    _check_parts(q, k, v, key_mask, projection, offsets, share, kernel)
    check_form(scale)
    k, v = of_own_rows(q, k, v, projection)
    if state is not None:
        batch, heads = k.shape[:2]
        shapes: dict[str, Sequence[int]] = {"sums": (batch, heads, projection.shape[-2], v.shape[3] + 1)}
        shapes |= {"top": (batch, heads, 1, projection.shape[-2])} if kernel == "softmax" else {}
        shapes |= {} if share is None else {SUMS: (batch, heads, 1, v.shape[3] + 1)}
        check_state(state, q, torch.promote_types(q.dtype, torch.float32), **shapes)
    no_cpu = obstacle(q, projection, offsets) or state_obstacle(q, k, v)
    no_kernels = performer_obstacle(q, v, projection) or state_obstacle(q, k, v) or prompt_obstacle(q, k, state)
    run = choose("performer_decode", impl, ranked(q, no_kernels, cpu=no_cpu, reference=None), q)
    ways = {"projection": projection, "kernel": kernel, "scale": scale}

    def attend(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        if run == "cpu":
            return performer_continue(q, k, v, key_mask, state, **ways, offsets=offsets)
        results = [performer_prompt(q[:, turn], k, v, key_mask, **ways, offsets=offsets) for turn in turns(q, k)]
        # Each turn produced the same state.
        return in_order([one for one, _ in results]), results[-1][1]

    if run == "reference":
        return plain_decode(q, k, v, key_mask, state, **ways, offsets=offsets, share=share)
    return with_share(attend, q, k, v, key_mask, state, share)


def _check_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    projection: Tensor,
    offsets: Tensor | None,
    share: Tensor | None,
    kernel: str,
) -> None:
    check_shapes(q, k, v, key_mask)
    check_tensor("projection", projection)
    heads, shape = q.shape[1], list(projection.shape)
    own = () if projection.ndim == 2 else (heads,)
    check_part("projection", projection, q, *own, "features", q.shape[3])
    check_word("kernel", kernel, KERNELS)
    if offsets is not None:
        check_tensor("offsets", offsets)
    if offsets is not None and (projection.ndim == 2 or kernel != "softmax" or list(offsets.shape) != shape[:2]):
        raise ValueError(
            f"offsets have shape {list(offsets.shape)} beside a projection of {shape} and kernel {kernel!r}; they need "
            "kernel 'softmax' and the first two numbers of a projection [heads, features, size]."
        )
    if offsets is not None:
        check_part("offsets", offsets, q, *shape[:2])
    if share is not None:
        check_part("share", share, q, heads)
