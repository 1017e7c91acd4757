"""Exact attention to some keys, joined under one normaliser with a cheap estimate for the others."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from approx_kernels.dispatch.implementation import choose
from approx_kernels.ops.exact_part.cpu import (
    has_gradients,
    linear_in_one_pass,
    performer_in_one_pass,
    runs_in_one_pass,
)
from approx_kernels.ops.exact_part.delta import delta_by_fla, delta_in_c, fla_obstacle
from approx_kernels.ops.exact_part.exported import linear_in_blocks, runs_in_blocks
from approx_kernels.ops.exact_part.pairs import LONGEST, performer_of_pairs
from approx_kernels.ops.exact_part.reference import (
    LEAST_NORM,
    LinearFar,
    PerformerFar,
    attend_linear,
    attend_performer,
    continue_linear,
    linear_parts,
    logs_of,
    near_and_mass,
    performer_and_exact_decode,
    performer_parts,
    plain_sums,
)
from approx_kernels.ops.exact_part.reference import linear_and_exact as plain_linear
from approx_kernels.ops.exact_part.reference import linear_and_exact_decode as plain_linear_decode
from approx_kernels.ops.exact_part.reference import performer_and_exact as plain_performer
from approx_kernels.ops.key_lists.cpu import obstacle as lists_obstacle
from approx_kernels.ops.linear.cpu import features_obstacle, linear_batch
from approx_kernels.ops.linear.reference import FEATURE_MAPS, FORGETFUL
from approx_kernels.ops.near_keys.cpu import near_lists
from approx_kernels.ops.near_keys.reference import Exactly, Part, check_exactly, near_keys
from approx_kernels.ops.performer.cpu import obstacle as performer_obstacle
from approx_kernels.ops.performer.cpu import random_features
from approx_kernels.ops.performer.reference import EPS, mixed
from approx_kernels.tokens import (
    State,
    check_least,
    check_number,
    check_part,
    check_shapes,
    check_word,
)

__all__ = [
    "LinearFar",
    "PerformerFar",
    "linear_and_exact",
    "linear_and_exact_decode",
    "linear_parts",
    "near_and_mass",
    "performer_and_exact",
    "performer_and_exact_decode",
    "performer_parts",
]

# Added to sums of features in C, and far below any that counts.
_TINY = 1e-3 * LEAST_NORM


def linear_and_exact(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    exactly: Exactly,
    far: LinearFar,
    dropout: float = 0.0,
    impl: str = "auto",
) -> Tensor:
    """Softmax attention to the near keys of each query, and linear attention to the others, under one normaliser.

    With m_i the largest score of a near key, near keys weigh exp(scale q_i.k_j - m_i) and the others
    exp(q_i.a + c) f(q_i).f(k_j) exp(k_j.b), a gate that learns how much of a query's attention is far and which keys
    matter; in O(n (window + chosen + F) E). Causal sums may forget, see `LinearFar`: those of `gated` fade, those of `unit` follow
    the gated delta rule, whose read o_i counts as one more key with the value o_i and the weight exp(q_i.a + c) w_i.

    Source: the window is that of Zhang et al., 2024, LoLCATs, arXiv 2410.10254; departs from it in the chosen keys and the gates.
    The gated delta rule is that of Yang et al., 2024, arXiv 2412.06464; `gated` that of Lan et al., 2025, Liger, arXiv
    2503.01496; both depart from them in leaving near keys to the softmax.

    Args:
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
        key_mask: [B, S] bool, True at real keys; None when all are real.
        exactly: Which keys are near, and the scale of their scores.
        far: Features and gates of the other keys.
        dropout: Probability of dropping a key from the numerator, for all queries of a head at once, since there are
            no weights of single pairs.
        impl: `cpu` computes the softmax and the sums of features in C, and the delta rule where it needs no gradient; if several
            near keys have the largest score, only one of them gets its gradient. `fla` runs the delta rule by
            flash-linear-attention, in 16 bits on a GPU.

    Returns:
        [B, H, L, E] in the dtype of q; 0 for a query with no allowed key.

    Raises:
        ValueError: if shapes or dtypes do not match, or the implementation cannot run.
    """
    check_shapes(q, k, v, key_mask)
    check_exactly(exactly, k, dropout)
    _check_linear(q, far, exactly.causal)
    if runs_in_blocks(q, k, exactly, far):
        return linear_in_blocks(q, k, v, key_mask, exactly, far, dropout)
    run = choose("linear_and_exact", impl, _obstacles(q, v, far))
    if run == "fla":
        attend = _linear_by_fla(q)
        return attend(q, k, v, key_mask, exactly, far, dropout=dropout)[0]
    if run == "reference":
        return plain_linear(q, k, v, key_mask, exactly=exactly, far=far, dropout=dropout)
    return _linear_in_c(q, k, v, far)(q, k, v, key_mask, exactly, far, dropout=dropout)[0]


def linear_and_exact_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    state: State | None = None,
    *,
    sinks: int,
    window: int,
    scale: float,
    far: LinearFar,
    impl: str = "auto",
) -> tuple[Tensor, State]:
    """Causal `linear_and_exact` of tokens that follow others, from a state of constant size.

    Args: as for `linear_and_exact`, except:
        k: Keys not yet in the state, [B, G, S, D], L <= S; the last L are at the queries' positions.
        state: The state returned by the last call, which this call may overwrite; None before the first key.
        sinks: First real keys of each sample, which every query sees.
        window: Last keys that a query sees, with its own.

    Returns:
        [B, H, L, E] in the dtype of q, and the state: `sums`, [B, H, F, E + 1] for F features, in at least float32, and a
        ring of the first `sinks` and last `window - 1` keys.

    Raises:
        ValueError: if shapes or dtypes do not match, or the implementation cannot run.
    """
    check_shapes(q, k, v, key_mask)
    check_exactly(Exactly(True, window, None, scale), k)
    check_least("sinks", sinks, 0)
    _check_linear(q, far, causal=True)
    step = "a state is continued in PyTorch. Ask for 'auto'." if state is not None or q.shape[2] == 1 else None
    run = choose("linear_and_exact_decode", impl, _obstacles(q, v, far, step))
    if run == "fla":
        return continue_linear(q, k, v, key_mask, state, sinks, window, scale, far, _linear_by_fla(q))
    if run == "reference":
        return plain_linear_decode(q, k, v, key_mask, state, sinks=sinks, window=window, scale=scale, far=far)
    return continue_linear(q, k, v, key_mask, state, sinks, window, scale, far, _linear_in_c(q, k, v, far))


def performer_and_exact(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    mapped: tuple[Tensor, Tensor],
    exactly: Exactly,
    far: PerformerFar,
    dropout: float = 0.0,
    impl: str = "auto",
) -> Tensor:
    """Softmax attention to the near keys of each query, and random features for the others, under one normaliser.

    Args: as for `linear_and_exact`, except:
        mapped: Queries and keys in the basis of the features, [B, H, L, D] and [B, H, S, D].
        far: Rows, weights and shares of the features; long inputs have no gradient of the rows in C.

    Returns, raises: as for `linear_and_exact`.
    """
    check_shapes(q, k, v, key_mask)
    check_exactly(exactly, k, dropout)
    check_shapes(*mapped, v.repeat_interleave(q.shape[1] // k.shape[1], 1), key_mask)
    learned = far.projection, far.offsets, far.share, far.weight, far.logs
    of_pairs = max(q.shape[2], k.shape[2]) <= LONGEST and has_gradients(far.projection, far.offsets)
    no_cpu = lists_obstacle(q) or (None if of_pairs else performer_obstacle(q, far.projection, far.offsets))
    run = choose("performer_and_exact", impl, {"cpu": no_cpu, "reference": None})
    if run == "reference":
        return plain_performer(q, k, v, key_mask, mapped=mapped, exactly=exactly, far=far, dropout=dropout)
    if of_pairs:
        return performer_of_pairs(q, k, v, key_mask, mapped, exactly, far, dropout)
    if exactly.causal or not runs_in_one_pass(q, k, v, *mapped, *learned):
        # A causal query must not depend on later keys, not even by rounding.
        return attend_performer(q, k, v, key_mask, mapped, exactly, far, near_lists, _features, dropout)
    return performer_in_one_pass(q, k, v, key_mask, mapped, exactly, far, dropout)


def _linear_in_c(q: Tensor, k: Tensor, v: Tensor, far: LinearFar) -> Callable[..., tuple[Tensor, State]]:
    """`attend_linear` in one pass, or, where it forgets or needs gradients, from parts."""
    if far.feature_map in FORGETFUL:
        return partial(attend_linear, near_op=near_lists, sums_op=_sums, delta_op=delta_in_c)
    if runs_in_one_pass(q, k, v, *(far.maps or ()), far.query_gate, far.key_gate):
        return linear_in_one_pass
    return partial(attend_linear, near_op=near_lists, sums_op=_sums)


def _sums(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Part:
    """`plain_sums` in C."""
    how = {"feature_map": "relu", "input_scale": 1.0, "eps": _TINY}
    out, norm, _ = linear_batch(q, k, v, mask, causal=causal, **how)
    return Part(out, logs_of(norm - _TINY))


def _features(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, *, far: PerformerFar) -> Part:
    """`plain_features` in C."""
    form = {"projection": far.projection, "offsets": far.offsets, "kernel": far.kernel, "scale": far.scale}
    out, norm, bases = random_features(q, k, v, mask, causal=causal, **form)
    out = out if far.share is None else mixed(out, v, mask, far.share, causal=causal)[0]
    return Part(out, logs_of(norm - EPS, bases))


def _obstacles(q: Tensor, v: Tensor, far: LinearFar, step: str | None = None) -> dict[str, str | None]:
    """Why implementations cannot run, the best first; `step` says why none continues a state."""
    no_cpu = step or lists_obstacle(q) or (None if far.feature_map in FORGETFUL else features_obstacle(q))
    if far.feature_map != "unit":
        return {"cpu": no_cpu, "reference": None}
    fla = {"fla": step or fla_obstacle(q, v.shape[3])}
    return {**fla, "cpu": no_cpu, "reference": None} if q.is_cuda else {"cpu": no_cpu, "reference": None, **fla}


def _linear_by_fla(q: Tensor) -> Callable[..., tuple[Tensor, State]]:
    return partial(attend_linear, near_op=near_keys, sums_op=plain_sums, delta_op=partial(delta_by_fla, dtype=q.dtype))


def _check_linear(q: Tensor, far: LinearFar, causal: bool) -> None:
    heads, size = q.shape[1], q.shape[3]
    check_word("feature_map", far.feature_map, (*FEATURE_MAPS, *FORGETFUL))
    if far.feature_map in FORGETFUL and not causal:
        raise ValueError(
            f"feature_map {far.feature_map!r} forgets from key to key and is causal; exactly.causal is False."
        )
    check_number("input_scale", far.input_scale)
    check_part("query_gate", far.query_gate, q, heads, size + 1)
    delta = far.feature_map == "unit"
    for name, each, numbers in (
        ("decay", far.decay, size + 1),
        ("rate", far.rate, size + 1),
        ("key_gate", far.key_gate, size),
    ):
        if (each is None) is (delta is (name != "key_gate")):
            raise ValueError(f"{name} is {'None' if each is None else 'a tensor'} for feature_map {far.feature_map!r}.")
        if each is not None:
            check_part(name, each, q, heads, numbers)
    if (far.maps is None) is (far.feature_map in ("t2r", "hedgehog", "unit")):
        raise ValueError(
            f"maps is {'None' if far.maps is None else 'two tensors'} for feature_map {far.feature_map!r}."
        )
    for name, each in zip(("the map of queries", "the map of keys"), far.maps or (), strict=False):
        check_part(name, each, q, heads, size + (far.feature_map == "t2r"), "features")
