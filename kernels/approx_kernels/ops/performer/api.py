"""Performer attention (FAVOR+): positive random features whose products are softmax weights on average."""

from functools import partial

from torch import Tensor

from approx_kernels.dispatch.implementation import choose
from approx_kernels.gpu.language import ranked
from approx_kernels.ops.linear.decode import state_obstacle
from approx_kernels.ops.linear.reference import drop_keys
from approx_kernels.ops.performer.cpu import obstacle, performer_batch, performer_continue
from approx_kernels.ops.performer.estimators import ESTIMATORS, Fitted, fit_estimator
from approx_kernels.ops.performer.projection import draw_projection
from approx_kernels.ops.performer.reference import performer_heads
from approx_kernels.ops.performer.triton_heads import (
    performer_kernels,
    performer_obstacle,
    performer_prompt,
    prompt_obstacle,
)
from approx_kernels.ops.performer.uniform import SUMS, mixed
from approx_kernels.tokens.grouped import in_order, in_turns, sharing, turns
from approx_kernels.tokens.ring import State
from approx_kernels.tokens.shapes import check_part, check_shapes

__all__ = [
    "ESTIMATORS",
    "KERNELS",
    "Fitted",
    "draw_projection",
    "fit_estimator",
    "performer_attention",
    "performer_decode",
]

KERNELS = ("softmax", "relu")


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
    with the norms. `relu`: f(x) = relu(w.x) + 1e-3, which approximates no softmax.

    Offsets b are for estimators that weigh their rows, see `fit_estimator`: f(q).f(k) is a sum of terms times exp(b). With
    a share s the outputs are (1 - s) o_i and s times the mean of the values that query i may see. That does what the eps
    added to features does in the paper, which draws all weights towards each other where the estimate fails, but is the same
    for long and short keys and knows nothing of later ones.

    Nothing over- or underflows: features of keys are divided by the largest of that feature among the real keys (in
    the causal form among those already seen), which the queries are multiplied by before their own largest feature
    is taken out. Both cancel exactly, since no eps is added.

    With `causal`, query i stands at position S - L + i and the sums run up to there; they are computed in chunks,
    between which a running state is carried. A query without any allowed key gives 0.

    Source: Choromanski et al., 2021, Rethinking Attention with Performers, arXiv 2009.14794; departs from it in the
    stabiliser, which there is one number for all features and leaks the future through an added eps, and in the share.

    Args:
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
        key_mask: [B, S] bool, True at real keys; None when all are real.
        projection: Rows w, [M, D], as `draw_projection` draws them, for all heads; or [H, M, D], of each head.
        offsets: Logarithms of the weights of rows, [H, M], for rows of each head and the softmax kernel; None for no weights.
        share: Share of uniform attention of each head, [H], from 0 to 1; None for none.
        kernel: One of `KERNELS`.
        causal: Whether a query sees only keys at or before its own position.
        scale: Factor of the scores.
        dropout: Probability with which a key is dropped from the numerator, for all queries of a head at once:
            there are no weights of single pairs to drop.
        impl: One of `IMPLEMENTATIONS`: `cpu` is compiled C, in one pass, without a gradient of the projection; `triton` has
            neither that nor dropout nor rows of each head.

    Returns:
        [B, H, L, E] in the dtype of q.

    Raises:
        ValueError: if the shapes or dtypes do not fit together, or the implementation cannot run.
    """
    _check_parts(q, k, v, key_mask, projection, offsets, share, kernel)
    k, v = _of_own_rows(q, k, v, projection)
    no_kernels = performer_obstacle(q, v, projection, dropout)
    no_cpu = obstacle(q, projection, offsets)
    run = choose("performer_attention", impl, ranked(q, no_kernels, cpu=no_cpu, reference=None), q)
    how = {"projection": projection, "kernel": kernel, "causal": causal, "scale": scale}
    v = drop_keys(v, dropout)
    if run == "triton":
        out = in_turns(partial(performer_kernels, key_mask=key_mask, **how), q, k, v)
    elif run == "cpu":
        out = performer_batch(q, k, v, key_mask, **how, offsets=offsets)
    else:
        out, _ = performer_heads(q, k, v, key_mask, **how, offsets=offsets)
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
    """Causal `performer_attention` of tokens that follow others, of which a state of constant size is kept.

    Args: as for `performer_attention`, where not named here.
        k: Keys that are not in the state yet, [B, G, S, D], L <= S; the last L stand at the queries' positions.
        state: What the last call returned; None before the first key. It belongs to the call, which may overwrite it.

    Returns:
        [B, H, L, E] in the dtype of q, and the state, in float32 at least: `sums` of features times values and a
        one, [B, G, M, E + 1]; for the softmax kernel beside the `top` that they are relative to, [B, G, 1, M]; with a share
        also the sums of values and a one, `values`, [B, G, 1, E + 1]. Where
        each head has rows, it has all of these for itself.

    Raises:
        ValueError: if the shapes or dtypes do not fit together, or the implementation cannot run.
    """
    _check_parts(q, k, v, key_mask, projection, offsets, share, kernel)
    k, v = _of_own_rows(q, k, v, projection)
    no_cpu = obstacle(q, projection, offsets) or state_obstacle(q, k, v)
    no_kernels = performer_obstacle(q, v, projection) or state_obstacle(q, k, v) or prompt_obstacle(q, k, state)
    run = choose("performer_decode", impl, ranked(q, no_kernels, cpu=no_cpu, reference=None), q)
    ways = {"projection": projection, "kernel": kernel, "scale": scale}
    uniform = None if state is None else state.get(SUMS)
    state = None if state is None else {name: x for name, x in state.items() if name != SUMS}
    if run == "triton":
        found = [performer_prompt(q[:, turn], k, v, key_mask, **ways) for turn in turns(q, k)]
        # Each has left the same state.
        out, state = in_order([one for one, _ in found]), found[-1][1]
    elif run == "cpu":
        out, state = performer_continue(q, k, v, key_mask, state, **ways, offsets=offsets)
    else:
        out, state = performer_heads(q, k, v, key_mask, **ways, offsets=offsets, causal=True, state=state)
    if share is None:
        return out, state
    out, uniform = mixed(out, v, key_mask, share, causal=True, earlier=uniform)
    return out, state | {SUMS: uniform}


def _of_own_rows(q: Tensor, k: Tensor, v: Tensor, projection: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values for each query head where it has rows of its own, and so features of keys that it shares with none."""
    if projection.ndim == 2 or sharing(q, k) == 1:
        return k, v
    return k.repeat_interleave(sharing(q, k), 1), v.repeat_interleave(sharing(q, v), 1)


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
    heads, shape = q.shape[1], list(projection.shape)
    own = () if projection.ndim == 2 else (heads,)
    check_part("projection", projection, q, *own, "features", q.shape[3])
    if kernel not in KERNELS:
        raise ValueError(f"kernel is {kernel!r}; expected one of {', '.join(KERNELS)}.")
    if offsets is not None and (projection.ndim == 2 or kernel != "softmax" or list(offsets.shape) != shape[:2]):
        raise ValueError(
            f"offsets have shape {list(offsets.shape)} beside a projection of {shape} and kernel {kernel!r}; they need "
            "kernel 'softmax' and the first two numbers of a projection [heads, features, size]."
        )
    if offsets is not None:
        check_part("offsets", offsets, q, *shape[:2])
    if share is not None:
        check_part("share", share, q, heads)
