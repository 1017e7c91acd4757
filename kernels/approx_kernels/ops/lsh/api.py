"""Attention among tokens that locality-sensitive hashing groups together."""

from functools import partial

from torch import Tensor

from approx_kernels.dispatch.implementation import choose
from approx_kernels.gpu.language import ranked
from approx_kernels.ops.exact.api import exact_attention
from approx_kernels.ops.flash.api import flash_obstacle
from approx_kernels.ops.lsh.cpu import Notes, bucket_lists, obstacle, sorted_lists
from approx_kernels.ops.lsh.reference import (
    VARIANTS,
    draw_projections,
    is_exact,
    own_key,
    unit_keys,
    without_padded_queries,
)
from approx_kernels.ops.lsh.reference import lsh_attention as plain_attention
from approx_kernels.ops.lsh.triton import round_by_round, sorted_tiles
from approx_kernels.runtime.pytorch import without_autocast
from approx_kernels.tokens import (
    blank_for_gradients,
    check_form,
    check_least,
    check_part,
    check_shapes,
    check_word,
    in_turns,
    without_padding,
)

__all__ = ["VARIANTS", "draw_projections", "lsh_attention"]


def lsh_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    projections: Tensor,
    variant: str,
    cluster: int,
    buckets: int = 1,
    dedup: bool,
    causal: bool,
    scale: float,
    dropout: float = 0.0,
    impl: str = "auto",
    notes: Notes | None = None,
) -> Tensor:
    """Softmax attention of each query over the keys that hashing places near it, in O(rounds n cluster D) and sorting.

    A pair that meets in C of the rounds counts C times, `softmax(s_ij + log C_ij) V`, or once with `dedup`.
    Scores are differentiated, hashes are not.

    `asymmetric` sorts queries by a projection of [q; 0; (m - |q|²)^½] and keys by that of [k; (m - |k|²)^½; 0] and cuts
    both orders into equally many clusters. m and the order of all tokens depend on the future, so the causal form
    hashes directions instead, of keys less the mean of the keys before them, into buckets whose number doubles with the
    position (see `bucket_plan`), and adds the query's own key to every round. `shared` uses the queries, at length D^½,
    as keys: k gets a gradient of 0. Its buckets are argmax [xR; -xR], `buckets` per cluster and at most 128; it looks
    back one cluster and sees itself only if it sees nothing else. When causal, it uses the causal buckets.

    Query i is the token of key S - L + i if that matters: in the causal form and in masks with L == S. Padded queries,
    and queries without keys, give 0.

    Source: Daras, Kitaev, Odena, Dimakis, 2020, SMYRF, arXiv 2010.05315 (asymmetric); Kitaev, Kaiser, Levskaya, 2020,
    Reformer, arXiv 2001.04451 (shared); departs from them in clusters of unequal numbers of queries and keys, and in
    the causal forms.

    Args:
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
        key_mask: [B, S] bool, True at real keys; None when all are real.
        projections: The result of `draw_projections` for this variant and form.
        variant: `asymmetric` or `shared`.
        cluster: Tokens per cluster; the asymmetric variant is exact for samples of at most this many, and its causal
            form for twice as many.
        buckets: Buckets per cluster of the bidirectional shared variant, a power of two; more buckets group tokens that
            are more alike. Other forms ignore it.
        dedup: Whether a pair that meets in several rounds counts only once.
        causal: Whether a query sees only keys at or before its own position.
        scale: Factor of the scores.
        dropout: Probability of dropping an attention weight, in each round.
        impl: `triton`, which has every form, but no dropout; `cpu`, which is compiled C and has every form: with dedup
            it drops a pair in all rounds or in none. If neither can run, `auto` uses tiles. `reference` materialises
            all pairs.
        notes: For decoding: a dictionary, empty at first, with results of earlier calls about the first of these keys;
            its samples may have been reordered or selected along the first dimension. It is updated. Only `cpu` uses
            it, if causal and asymmetric, to hash only the new keys. None stores nothing.

    Returns:
        [B, H, L, E] in the dtype of q.

    Raises:
        ValueError: if shapes or dtypes do not match, the shared variant gets L != S, or the requested
            implementation cannot run.
    """
    check_shapes(q, k, v, key_mask)
    check_form(scale, dropout, dedup=dedup, causal=causal)
    check_word("variant", variant, VARIANTS)
    length, keys = q.shape[2], k.shape[2]
    lifted = variant == "asymmetric" and not causal
    check_part("projections", projections, q, "rounds", q.shape[3] + 2 * lifted, 1 if lifted else "columns")
    check_least("cluster", cluster, 1)
    check_least("buckets", buckets, 1)
    if buckets & (buckets - 1):
        raise ValueError(f"buckets is {buckets}; expected a power of two, such as 1, 4 or 8.")
    if variant == "shared" and length != keys:
        raise ValueError(f"The shared variant makes its keys from the queries, but got {length} queries, {keys} keys.")
    k, v = k.to(q.dtype), v.to(q.dtype)
    with without_autocast(q.device.type):
        no_cpu = _obstacle(length, keys, key_mask, causal) or obstacle(q)
        ways = {"cpu": no_cpu, "tiles": None, "reference": None}
        run = choose("lsh_attention", impl, ranked(q, flash_obstacle(q, v, dropout), **ways), q)
        if is_exact(length, keys, variant=variant, cluster=cluster, causal=causal):
            return exact_attention(q, k, v, key_mask, causal=causal, scale=scale, dropout=dropout)
        form = {"projections": projections, "cluster": cluster, "scale": scale}
        kind = {**form, "variant": variant, "dedup": dedup}
        if run == "triton":
            if variant == "asymmetric" and not (dedup or causal) and key_mask is None:
                return in_turns(partial(sorted_tiles, **form), q, k, v)
            own = own_key(variant, causal)
            rounds = partial(round_by_round, key_mask=key_mask, **kind, buckets=buckets, causal=causal, own=own)
            return in_turns(rounds, q, k, v)
        if run == "cpu":
            q, k, v = blank_for_gradients(q, k, v, key_mask)
            made = unit_keys(q, k) if variant == "shared" else k
            if not causal:
                attend = partial(sorted_lists, **kind, buckets=buckets, dropout=dropout)
                # Without padding there are no positions either: with L > S all queries take part.
                return attend(q, made, v) if key_mask is None else without_padding(attend, q, made, v, key_mask)
            out = bucket_lists(q, made, v, key_mask, **kind, dropout=dropout, notes=notes)
            return without_padded_queries(out, key_mask, keys, causal=causal).to(q.dtype)
    dense = run == "reference"
    return plain_attention(q, k, v, key_mask, **kind, buckets=buckets, causal=causal, dropout=dropout, dense=dense)


def _obstacle(queries: int, keys: int, key_mask: Tensor | None, causal: bool) -> str | None:
    """Why implementations for real tokens only cannot run; None if they can."""
    if key_mask is not None and not causal and queries != keys:
        return "bidirectional, it takes a key mask where there are as many queries as keys only. Ask for 'auto'."
    return None
