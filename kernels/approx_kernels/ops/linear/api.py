"""Linear attention: a kernel feature map in place of the softmax."""

import torch
from torch import Tensor

from approx_kernels.dispatch.implementation import choose
from approx_kernels.gpu.language import ranked
from approx_kernels.ops.linear.decode import continue_in_place, decode_obstacle, state_obstacle
from approx_kernels.ops.linear.reference import FEATURE_MAPS, own_parts
from approx_kernels.ops.linear.reference import linear_attention as plain_attention
from approx_kernels.ops.linear.reference import linear_decode as plain_decode
from approx_kernels.ops.linear.triton_decode import continue_by_kernels, step_obstacle
from approx_kernels.ops.linear.triton_heads import linear_kernels, linear_obstacle
from approx_kernels.ops.linear.triton_window import windowed_kernels
from approx_kernels.ops.linear.window_cpu import linear_parts, obstacle
from approx_kernels.runtime.pytorch import drop_keys
from approx_kernels.tokens import (
    State,
    check_form,
    check_least,
    check_number,
    check_part,
    check_ring,
    check_shapes,
    check_state,
    check_word,
    in_order,
)

__all__ = ["FEATURE_MAPS", "linear_attention", "linear_decode"]


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    causal: bool,
    feature_map: str = "elu",
    maps: tuple[Tensor, Tensor] | None = None,
    window: int = 0,
    mix: Tensor | None = None,
    scale: float = 1.0,
    input_scale: float = 1.0,
    eps: float = 1e-6,
    dropout: float = 0.0,
    impl: str = "auto",
) -> Tensor:
    """`o_i = f(q_i) sum_j f(k_j) v_j / (f(q_i) sum_j f(k_j) + eps)` for a feature map f, in O(n D E).

    With `causal`, query i is at position S - L + i and the sums run up to there; they are computed in
    chunks, with a running state carried between them. A query with no allowed key gives 0.

    With `window`, pairs with keys near the query weigh `mix exp(scale q_i.k_j - m_i)` instead, m_i being the
    largest of these scores, in O(n window D) more; both parts share one normaliser, which is then bounded below by
    `eps` instead of increased by it, so that a window over everything is softmax attention.

    Source: Katharopoulos, Vyas, Pappas, Fleuret, 2020, Transformers are RNNs, arXiv 2006.16236; the window is
    that of Zhang et al., 2024, LoLCATs, arXiv 2410.10254. No departures.

    Args:
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
        key_mask: [B, S] bool, True at real keys; None when all are real.
        causal: Whether a query sees only keys at or before its own position.
        feature_map: One of `FEATURE_MAPS`: `elu` is elu(x) + 1, `relu` relu(x), `softmax` the softmax over the D
            numbers of x, `t2r` relu(x W + b), `hedgehog` the softmax of x W beside that of -x W.
        maps: W of queries and of keys, [H, D, D]; for `t2r` with b below it, [H, D + 1, D]. None if nothing is
            learned.
        window: Keys of the softmax part: with `causal` the last ones up to the query's own, otherwise this many on
            either side and its own; 0 for none.
        mix: Factor of the softmax part for each head, [H]; needed with a window.
        scale: Factor of the scores of the softmax part.
        input_scale: Factor of q and of k before the feature map.
        eps: Added to the normaliser.
        dropout: Probability of dropping a key from the numerator, for all queries of a head at once, since there are
            no weights of single pairs.
        impl: One of `IMPLEMENTATIONS`: `cpu` is compiled C and `triton` kernels, for every map and window; if several
            keys of a window have the largest score, only one of them gets its gradient.

    Returns:
        [B, H, L, E] in the dtype of q.

    Raises:
        ValueError: if shapes or dtypes do not match, or the implementation cannot run.
    """
    check_shapes(q, k, v, key_mask)
    check_form(scale, dropout, causal=causal)
    _check_parts(q, feature_map, maps, window, mix, input_scale, eps)
    no_cpu = obstacle(q)
    no_kernels = linear_obstacle(q, v, dropout=dropout)
    run = choose("linear_attention", impl, ranked(q, no_kernels, cpu=no_cpu, reference=None), q)
    form = {"causal": causal, "feature_map": feature_map, "input_scale": input_scale, "eps": eps}
    if run == "triton":
        outputs = []
        for turn, _, learned in own_parts(q, k, None, maps, mix if window else None):
            if window:
                outputs.append(
                    windowed_kernels(q[:, turn], k, v, key_mask, **learned, window=window, scale=scale, **form)
                )
            else:
                outputs.append(linear_kernels(q[:, turn], k, v, key_mask, maps=learned["maps"], **form))
        return in_order(outputs)
    if run == "cpu":
        v = drop_keys(v, dropout)
        return linear_parts(q, k, v, key_mask, maps=maps, window=window, mix=mix, scale=scale, **form)
    form |= {"maps": maps, "window": window, "mix": mix, "scale": scale, "dropout": dropout}
    return plain_attention(q, k, v, key_mask, **form)


def linear_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    state: State | None = None,
    *,
    feature_map: str = "elu",
    maps: tuple[Tensor, Tensor] | None = None,
    window: int = 0,
    mix: Tensor | None = None,
    scale: float = 1.0,
    input_scale: float = 1.0,
    eps: float = 1e-6,
    impl: str = "auto",
) -> tuple[Tensor, State]:
    """Causal `linear_attention` of tokens that follow others, from a state of constant size.

    Args: as for `linear_attention`, except:
        k: Keys not yet in the state, [B, G, S, D], L <= S; the last L are at the queries' positions.
        state: The state returned by the last call, which this call may overwrite; None before the first key.

    Returns:
        [B, H, L, E] in the dtype of q, and the state: `sums`, [B, G, F, E + 1] for F features, or [B, H, F, E + 1] with
        learned maps, in at least float32; with a window, of the keys before it, with its last w - 1 keys as a ring.

    Raises:
        ValueError: if shapes or dtypes do not match, or the implementation cannot run.
    """
    check_shapes(q, k, v, key_mask)
    check_form(scale)
    _check_parts(q, feature_map, maps, window, mix, input_scale, eps)
    if state is not None:
        features = q.shape[3] * (2 if feature_map == "hedgehog" else 1)
        heads = (k if maps is None else q).shape[1]
        check_state(
            state, q, torch.promote_types(q.dtype, torch.float32), sums=(q.shape[0], heads, features, v.shape[3] + 1)
        )
        if window:
            check_ring(state, k, v)
    kept = state_obstacle(q, k, v, *(maps or ()), *(() if mix is None else (mix,)))
    no_cpu = decode_obstacle(q, k) or kept
    no_kernels = linear_obstacle(q, v, dropout=0.0) or kept or step_obstacle(q, k, state, window)
    run = choose("linear_decode", impl, ranked(q, no_kernels, cpu=no_cpu, reference=None), q)
    ways = {"feature_map": feature_map, "maps": maps, "input_scale": input_scale, "eps": eps}
    if run == "triton":
        return continue_by_kernels(q, k, v, key_mask, state, **ways)
    go_on = continue_in_place if run == "cpu" else plain_decode
    mix = mix if window else None
    return go_on(q, k, v, key_mask, state, window=window, mix=mix, scale=scale, **ways)


def _check_parts(
    q: Tensor,
    feature_map: str,
    maps: tuple[Tensor, Tensor] | None,
    window: int,
    mix: Tensor | None,
    input_scale: float,
    eps: float,
) -> None:
    heads, size = q.shape[1], q.shape[3]
    check_word("feature_map", feature_map, FEATURE_MAPS)
    check_number("input_scale", input_scale)
    check_number("eps", eps)
    if maps is not None and not (isinstance(maps, tuple | list) and all(isinstance(each, Tensor) for each in maps)):
        raise ValueError(f"maps is of type {type(maps).__name__}; expected two tensors, or None.")
    learned = {"t2r": [heads, size + 1, size], "hedgehog": [heads, size, size]}.get(feature_map)
    shapes = None if maps is None else [list(each.shape) for each in maps]
    if shapes != (None if learned is None else [learned, learned]):
        raise ValueError(
            f"maps has shapes {shapes}; expected {'None' if learned is None else [learned] * 2} for {feature_map}."
        )
    for name, each in zip(("the map of queries", "the map of keys"), maps or (), strict=False):
        check_part(name, each, q, *each.shape)
    check_least("window", window, 0)
    if window and mix is None:
        raise ValueError(f"mix is None; expected a tensor [{heads}] for a window.")
    if window and mix is not None:
        check_part("mix", mix, q, heads)
