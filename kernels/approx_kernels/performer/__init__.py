"""Performer attention (FAVOR+): positive random features whose products are softmax weights on average."""

from torch import Tensor

from approx_kernels.implementation import choose
from approx_kernels.linear.decode import state_obstacle
from approx_kernels.linear.reference import drop_keys
from approx_kernels.performer.cpu import obstacle, performer_batch, performer_continue
from approx_kernels.performer.projection import draw_projection
from approx_kernels.performer.reference import performer_heads
from approx_kernels.performer.triton_heads import (
    performer_kernels,
    performer_obstacle,
    performer_prompt,
    prompt_obstacle,
)
from approx_kernels.ring import State
from approx_kernels.shapes import check_shapes
from approx_kernels.triton_language import ranked

__all__ = ["KERNELS", "draw_projection", "performer_attention", "performer_decode"]

KERNELS = ("softmax", "relu")


def performer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    projection: Tensor,
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

    Nothing over- or underflows: features of keys are divided by the largest of that feature among the real keys (in
    the causal form among those already seen), which the queries are multiplied by before their own largest feature
    is taken out. Both cancel exactly, since no eps is added.

    With `causal`, query i stands at position S - L + i and the sums run up to there; they are computed in chunks,
    between which a running state is carried. A query without any allowed key gives 0.

    Source: Choromanski et al., 2021, Rethinking Attention with Performers, arXiv 2009.14794; departs from it in the
    stabiliser, which there is one number for all features and leaks the future through an added eps.

    Args:
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, H, S, D].
        v: Values, [B, H, S, E].
        key_mask: [B, S] bool, True at real keys; None when all are real.
        projection: Rows w, [M, D], as `draw_projection` draws them; all heads share them.
        kernel: One of `KERNELS`.
        causal: Whether a query sees only keys at or before its own position.
        scale: Factor of the scores.
        dropout: Probability with which a key is dropped from the numerator, for all queries of a head at once:
            there are no weights of single pairs to drop.
        impl: One of `IMPLEMENTATIONS`: `cpu` is compiled C, in one pass, without a gradient of the projection; `triton` has
            neither that nor dropout.

    Returns:
        [B, H, L, E] in the dtype of q.

    Raises:
        ValueError: if the shapes or dtypes do not fit together, or the implementation cannot run.
    """
    _check_parts(q, k, v, key_mask, projection, kernel)
    no_kernels = performer_obstacle(q, v, projection, dropout)
    run = choose("performer_attention", impl, ranked(q, no_kernels, cpu=obstacle(q, projection), reference=None))
    how = {"projection": projection, "kernel": kernel, "causal": causal, "scale": scale}
    if run == "triton":
        return performer_kernels(q, k, v, key_mask, **how)
    if run == "cpu":
        return performer_batch(q, k, drop_keys(v, dropout), key_mask, **how)
    out, _ = performer_heads(q, k, v, key_mask, **how, dropout=dropout)
    return out


def performer_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    state: State | None = None,
    *,
    projection: Tensor,
    kernel: str = "softmax",
    scale: float,
    impl: str = "auto",
) -> tuple[Tensor, State]:
    """Causal `performer_attention` of tokens that follow others, of which a state of constant size is kept.

    Args: as for `performer_attention`, where not named here.
        k: Keys that are not in the state yet, [B, H, S, D], L <= S; the last L stand at the queries' positions.
        state: What the last call returned; None before the first key. It belongs to the call, which may overwrite it.

    Returns:
        [B, H, L, E] in the dtype of q, and the state, in float32 at least: `sums` of features times values and a
        one, [B, H, M, E + 1]; for the softmax kernel beside the `top` that they are relative to, [B, H, 1, M].

    Raises:
        ValueError: if the shapes or dtypes do not fit together, or the implementation cannot run.
    """
    _check_parts(q, k, v, key_mask, projection, kernel)
    no_cpu = obstacle(q, projection) or state_obstacle(q, k, v)
    no_kernels = performer_obstacle(q, v, projection) or state_obstacle(q, k, v) or prompt_obstacle(q, k, state)
    run = choose("performer_decode", impl, ranked(q, no_kernels, cpu=no_cpu, reference=None))
    ways = {"projection": projection, "kernel": kernel, "scale": scale}
    if run == "triton":
        return performer_prompt(q, k, v, key_mask, **ways)
    if run == "cpu":
        return performer_continue(q, k, v, key_mask, state, **ways)
    return performer_heads(q, k, v, key_mask, **ways, causal=True, state=state)


def _check_parts(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, projection: Tensor, kernel: str) -> None:
    check_shapes(q, k, v, key_mask)
    if projection.ndim != 2 or projection.shape[1] != q.shape[3]:
        raise ValueError(f"projection has shape {list(projection.shape)}; expected [features, {q.shape[3]}] to fit q.")
    if kernel not in KERNELS:
        raise ValueError(f"kernel is {kernel!r}; expected one of {', '.join(KERNELS)}.")
