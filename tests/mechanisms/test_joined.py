"""Exact keys of `clustered` and `lsh`: outputs are those of loops over single queries, and the other rules of exact keys."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from approx.errors import ApproxError, Exit
from approx.mechanisms.clustered import ClusteredAttention
from approx.mechanisms.lsh import LshAttention
from approx_kernels.dispatch.implementation import chosen_in, implementation
from approx_kernels.ops.clustered.api import default_clusters
from approx_kernels.ops.clustering.api import cluster_queries, nearest_centroids
from approx_kernels.ops.exact.api import exact_attention
from approx_kernels.ops.lsh.reference import bucket_plan, cluster_plan, pair_counts
from approx_kernels.ops.near_keys.reference import reach
from c_sources import needs_compiler
from closeness import assert_close, at_real_queries, with_float64
from forms import draw_mask

SCALE, SIZE = 0.35, 8
KINDS = (ClusteredAttention, LshAttention)
over_kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
over_forms = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
SMALL = {ClusteredAttention: {"clusters": 5, "iterations": 3}, LshAttention: {"rounds": 3, "cluster": 6}}


def made(kind, *, causal=False, fit=True, heads=2, **changed):
    mechanism = kind(heads, SIZE, causal=causal, scale=SCALE, **(SMALL[kind] | changed))
    if mechanism.needs_calibration and fit:
        mechanism.calibrate(*torch.randn(3, 1, heads, 90, SIZE))
    mechanism.far_weight.copy_(torch.randn(heads) / 2)
    return mechanism


def near_of(query, keys, mechanism, chosen, real, before):
    """The near and the far keys of a query at `before` + `query`."""
    place = query + before
    left, right = reach(mechanism.window, mechanism.causal)
    seen = [key for key in range(keys) if real[key] and not (mechanism.causal and key > place)]
    near = [key for key in seen if chosen[key] or (mechanism.window and -left <= key - place <= right)]
    return near, [key for key in seen if key not in near]


def rows_of(mechanism, q, real, square):
    """What each query of a head weighs far keys by, [H, L, D], and whether that is not itself."""
    if mechanism.causal:
        groups = nearest_centroids(q, mechanism.selectors)
        return mechanism.centroids.double().gather(1, groups[..., None].expand(-1, -1, SIZE)), True
    places = real.nonzero().flatten() if square else torch.arange(q.shape[1])
    clusters = mechanism.clusters
    clusters = clusters if isinstance(clusters, int) else default_clusters(len(places), clusters)
    if len(places) <= clusters:
        return q, False
    own, rows = q[:, places], q.clone()
    if mechanism.frozen:
        groups = nearest_centroids(own, mechanism.selectors)
    else:
        how = {"clusters": clusters, "iterations": mechanism.iterations}
        groups = cluster_queries(own, mechanism.planes, mechanism.draws, **how)
    for head, members in enumerate(groups):
        for group in members.unique():
            rows[head, places[members == group]] = own[head, members == group].mean(0)
    return rows, True


def looped(mechanism, q, k, v, mask, chosen):
    """Outputs query by query in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    batch, heads, length, _ = q.shape
    keys, shared = k.shape[2], heads // k.shape[1]
    k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
    real = torch.ones(batch, keys, dtype=torch.bool) if mask is None else mask
    chosen = torch.zeros_like(real) if chosen is None else chosen
    out = torch.zeros(batch, heads, length, v.shape[3], dtype=torch.float64)
    counts = None
    if isinstance(mechanism, LshAttention):
        make = bucket_plan if mechanism.causal else cluster_plan
        how = {"projections": mechanism.projections, "variant": "asymmetric", "cluster": mechanism.cluster}
        counts = pair_counts(make(q, k, mask, **how), keys).view(batch, heads, length, keys)
        counts = counts.clamp(max=1)
    for b in range(batch):
        rows, approximated = rows_of(mechanism, q[b], real[b], length == keys) if counts is None else (q[b], True)
        for i in range(length):
            near, far = near_of(i, keys, mechanism, chosen[b], real[b], keys - length)
            if counts is not None:
                known = max(int(real[b].sum()), length if length != keys else 0)
                known = int(real[b, : max(i + 1 + keys - length, 0)].sum()) if mechanism.causal else known
                approximated = known > mechanism.cluster * (2 if mechanism.causal else 1)
            for h in range(heads):
                weights = torch.zeros(keys, dtype=torch.float64)
                weights[near] = (SCALE * k[b, h, near] @ q[b, h, i]).exp()
                factor = float(mechanism.far_weight[h].exp()) if approximated else 1.0
                if far and counts is None:
                    row = rows[h, i]
                    own = (SCALE * k[b, h, far] @ row).exp()
                    mean_key = own @ k[b, h, far] / own.sum()
                    weights[far] = factor * own * (SCALE * (q[b, h, i] - row) @ mean_key).exp()
                elif far and counts is not None:
                    weights[far] = factor * counts[b, h, i, far] * (SCALE * k[b, h, far] @ q[b, h, i]).exp()
                out[b, h, i] = weights @ v[b, h] / weights.sum() if weights.sum() else 0.0
    return out


def drawn(length, keys, groups=2):
    q = torch.randn(2, 2, length, SIZE)
    k, v = torch.randn(2, groups, keys, SIZE), torch.randn(2, groups, keys, 5)
    return q, k, v


@pytest.mark.sample(1)
@over_kinds
@over_forms
@settings(max_examples=8)
@given(
    length=st.integers(1, 80),
    more=st.sampled_from((0, 0, 0, -40, 70)),
    groups=st.sampled_from((1, 2)),
    exact=st.sampled_from(
        ({"window": 1}, {"window": 7}, {"window": 70}, {"window": 5, "sinks": 3}, {"window": 64, "sinks": 1})
    ),
    padding=st.sampled_from((None, "right", "left", "arbitrary", "one row empty")),
    seed=st.integers(0, 1000),
)
@torch.no_grad()
def test_outputs_are_those_of_loops_over_single_queries(kind, causal, length, more, groups, exact, padding, seed):
    torch.manual_seed(seed)
    keys = max(length + more, 1)
    q, k, v = drawn(length, keys, groups)
    mask = None if padding is None else draw_mask(padding, batch=2, length=keys, seed=seed)
    mechanism = made(kind, causal=causal, **exact)
    chosen = mechanism.exactly(k, mask).chosen
    expected = looped(mechanism, q, k, v, mask, chosen)
    # All tokens in one cluster are exact attention.
    found = mechanism.double()(q.double(), k.double(), v.double(), mask)
    real = torch.ones(1, 1, 1, 1) if mask is None or length != keys else mask[:, None, :, None]
    torch.testing.assert_close(found * real, expected * real)


@pytest.mark.parametrize(
    "exact",
    [{"sinks": 3}, {"global_tokens": [2, 50, 51]}, {"frozen": True, "window": 6}, {"clusters": "auto", "window": 6}],
    ids=str,
)
@torch.no_grad()
def test_clusters_of_all_kinds_are_joined_with_exact_keys(exact):
    q, k, v = drawn(60, 60)
    mask = torch.rand(2, 60) < 0.9
    mechanism = made(ClusteredAttention, **exact)
    chosen = mechanism.exactly(k, mask).chosen
    found = mechanism.double()(q.double(), k.double(), v.double(), mask)
    real = mask[:, None, :, None]
    torch.testing.assert_close(found * real, looped(mechanism, q, k, v, mask, chosen) * real)


@torch.no_grad()
def test_chosen_tokens_without_a_window_are_not_seen_twice():
    q, k, v = drawn(60, 60)
    mechanism = made(LshAttention, window=0, global_tokens=[0, 30])
    chosen = mechanism.exactly(k, None).chosen
    found = mechanism.double()(q.double(), k.double(), v.double())
    torch.testing.assert_close(found, looped(mechanism, q, k, v, None, chosen))


@over_kinds
@over_forms
@torch.no_grad()
def test_a_window_over_everything_is_exact_attention(kind, causal):
    q, k, v = drawn(50, 50)
    mask = draw_mask("arbitrary", batch=2, length=50, seed=1)
    exact = exact_attention(q, k, v, mask, causal=causal, scale=SCALE) * mask[:, None, :, None]
    found = made(kind, causal=causal, window=50)(q, k, v, mask) * mask[:, None, :, None]
    torch.testing.assert_close(found, exact)


@over_kinds
@torch.no_grad()
def test_samples_that_clusters_leave_exact_stay_so_whatever_the_factor(kind):
    q, k, v = drawn(40, 40)
    mask = torch.arange(40) < torch.tensor([[40], [5]])
    found = made(kind, window=1)(q, k, v, mask)[1, :, :5]
    exact = exact_attention(q[1:, :, :5], k[1:, :, :5], v[1:, :, :5], causal=False, scale=SCALE)[0]
    torch.testing.assert_close(found, exact)


@needs_compiler
@over_kinds
@over_forms
def test_c_is_as_accurate_as_the_reference_and_gives_its_gradients(kind, causal):
    tensors = drawn(150, 150, 1)
    mask = draw_mask("right", batch=2, length=150, seed=3)
    mechanism = made(kind, causal=causal, window=9, sinks=3)

    def attend(q, k, v, impl):
        with implementation(impl):
            return at_real_queries(mechanism(q, k, v, mask), mask)

    assert chosen_in(lambda: attend(*tensors, "auto"))["near_keys"] == "cpu"
    for each in with_float64(attend, tensors, torch.randn(2, 2, 150, 5), torch.float32, "auto"):
        assert_close(*each, factor=8.0)


@torch.no_grad()
def error(mechanism, q, k, v, mask):
    exact = exact_attention(q, k, v, mask, causal=mechanism.causal, scale=SCALE)
    return ((mechanism(q, k, v, mask) - exact) * mask[:, None, :, None]).square().sum((0, 2, 3))


@over_kinds
@over_forms
@pytest.mark.parametrize("exact", [{"window": 8}, {"window": 8, "sinks": 5}], ids=str)
@torch.no_grad()
def test_calibration_leaves_no_head_worse_than_its_exact_keys_alone(kind, causal, exact):
    q, k, v = drawn(150, 150)
    q, k, mask = 2 * q, k + 0.5, torch.arange(150) >= torch.tensor([[40], [0]])
    mechanism = made(kind, causal=causal, fit=False, **exact)
    mechanism.calibrate(q, k, v, mask)
    fitted = error(mechanism, q, k, v, mask)
    for other in (-40.0, mechanism.far_weight + 0.5, mechanism.far_weight - 0.5):
        mechanism.far_weight.copy_(torch.as_tensor(other))
        assert (fitted <= error(mechanism, q, k, v, mask) * 1.0001).all()
        mechanism.calibrate(q, k, v, mask)


@over_kinds
@torch.no_grad()
def test_inputs_without_far_keys_leave_the_factor_alone(kind):
    mechanism = made(kind, window=20)
    before = mechanism.far_weight.clone()
    mechanism.calibrate(*torch.randn(3, 1, 2, 15, SIZE))
    assert torch.equal(mechanism.far_weight, before)


@over_kinds
def test_without_exact_keys_nothing_is_added(kind):
    mechanism = kind(2, SIZE, causal=False, scale=SCALE)
    assert not mechanism.has_exact_part
    assert not mechanism.takes_calibration
    assert "far_weight" not in mechanism.state_dict()


@pytest.mark.parametrize(
    ("kind", "changed", "message"),
    [
        *(
            (kind, {"causal": True, "sinks": 4}, "Say with 'window' how many of the last keys are exact")
            for kind in KINDS
        ),
        *((kind, {"causal": True, "window": 4, "global_tokens": [3]}, "this layer is causal") for kind in KINDS),
        (LshAttention, {"variant": "shared", "window": 4}, "'variant' is 'shared', which replaces the keys"),
        (LshAttention, {"dedup": False, "window": 4}, "'dedup' is false, and a pair counts once"),
        *((kind, {"window": -1}, "Setting 'window' is -1") for kind in KINDS),
    ],
)
def test_refuses_exact_keys_that_cannot_be_joined(kind, changed, message):
    with pytest.raises(ApproxError, match=message) as refused:
        kind(2, SIZE, scale=SCALE, **({"causal": False} | changed))
    assert refused.value.exit_code is (Exit.USAGE if "window" in message else Exit.UNSUPPORTED)
