"""Clustered attention: what members of a cluster share, and the number of clusters."""

import pytest
import torch

from approx.mechanisms.clustered import ClusteredAttention, ImprovedClusteredAttention
from approx.mechanisms.exact import FullAttention
from approx_kernels.ops.clustered.api import default_clusters
from approx_kernels.ops.clustered.reference import wanted_clusters
from approx_kernels.ops.clustering.api import cluster_queries, nearest_centroids

both = pytest.mark.parametrize("kind", [ClusteredAttention, ImprovedClusteredAttention])


def make(kind=ClusteredAttention, **settings):
    return kind(2, 8, causal=False, scale=0.35, **settings)


def groups_of(mechanism, q, clusters):
    assignments = cluster_queries(
        q, mechanism.planes, mechanism.draws, clusters=clusters, iterations=mechanism.iterations
    )
    assert assignments.shape == q.shape[:2]
    return assignments


def test_members_share_what_their_mean_query_attends_to():
    q, k, v = torch.randn(3, 1, 2, 60, 8, dtype=torch.float64).unbind()
    mechanism = make(clusters=7)
    out = mechanism(q, k, v)
    for head, groups in enumerate(groups_of(mechanism, q[0], 7)):
        for cluster in groups.unique():
            members = groups == cluster
            mean = q[0, head, members].mean(0)
            expected = (0.35 * k[0, head] @ mean).softmax(0) @ v[0, head]
            torch.testing.assert_close(out[0, head, members], expected.expand(int(members.sum()), -1))


def test_gradients_pass_through_mean_queries_but_not_through_the_grouping():
    q, k, v, grad = torch.randn(4, 1, 2, 60, 8, dtype=torch.float64).unbind()
    mechanism = make(clusters=7)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    dq, *others = torch.autograd.grad(mechanism(*inputs), inputs, grad)
    expected = [torch.zeros_like(x) for x in others]
    for head, groups in enumerate(groups_of(mechanism, q[0].detach(), 7)):
        for cluster in groups.unique():
            members = groups == cluster
            mean, *own = (x.detach().requires_grad_() for x in (q[0, head, members].mean(0), k[0, head], v[0, head]))
            out = (0.35 * own[0] @ mean).softmax(0) @ own[1]
            share, *slopes = torch.autograd.grad(out, (mean, *own), grad[0, head, members].sum(0))
            torch.testing.assert_close(dq[0, head, members], (share / members.sum()).expand(members.sum(), -1))
            for total, slope in zip(expected, slopes, strict=True):
                total[0, head] += slope
    torch.testing.assert_close(others, expected)


RULES = {"auto": [25, 25, 26, 75, 100, 100, 100], None: [25, 25, 25, 25, 25, 25, 100]}


@both
@pytest.mark.parametrize("rule", RULES)
def test_clusters_follow_the_real_length_of_each_sample(kind, rule):
    lengths = (1, 51, 52, 150, 201, 512, 513)
    assert [default_clusters(length, rule) for length in lengths] == RULES[rule]
    assert wanted_clusters(torch.tensor(lengths), rule).tolist() == RULES[rule]
    q, k, v = torch.randn(3, 2, 2, 540, 8).unbind()
    mask = torch.arange(540) < torch.tensor([[150], [540]])
    out = make(kind, clusters=rule)(q, k, v, mask)
    for sample, length in enumerate((150, 540)):
        few, own = {"auto": (75, 100), None: (25, 100)}[rule][sample], slice(sample, sample + 1)
        tensors = [x[own, :, :length] for x in (q, k, v)]
        torch.testing.assert_close(out[own, :, :length], make(kind, clusters=few)(*tensors))
        assert not torch.allclose(out[own, :, :length], make(kind, clusters=few + 1)(*tensors))


@both
def test_a_short_sample_is_exact_next_to_a_long_one(kind):
    q, k, v = torch.randn(3, 2, 2, 60, 8).unbind()
    mask = torch.arange(60)[None] < torch.tensor([[60], [9]])
    exact = FullAttention(2, 8, causal=False, scale=0.35)(q, k, v, mask)
    out = make(kind, clusters=9, **({"topk": 3} if kind is ImprovedClusteredAttention else {}))(q, k, v, mask)
    torch.testing.assert_close(out[1, :, :9], exact[1, :, :9], atol=1e-6, rtol=1e-5)
    assert out[1, :, 9:].eq(0).all(), "padded queries receive nothing"
    assert not torch.allclose(out[0], exact[0], atol=1e-2)


@both
def test_a_16_bit_model_keeps_its_clusters_through_a_state_dict(kind):
    q, k, v = torch.randn(3, 1, 2, 60, 8).bfloat16().unbind()
    mechanism, other = make(kind, clusters=4).bfloat16(), make(kind, clusters=4, seed=9).bfloat16()
    other.load_state_dict(mechanism.state_dict())
    assert mechanism.draws.dtype == torch.int64
    assert torch.equal(other(q, k, v), mechanism(q, k, v))


@both
def test_autocast_changes_no_cluster(kind):
    q, k, v = torch.randn(3, 1, 2, 300, 8).unbind()
    mechanism = make(kind)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = mechanism(q, k, v)
    torch.testing.assert_close(inside, mechanism(q, k, v))


def test_frozen_members_share_what_their_mean_query_attends_to():
    q, k, v = torch.randn(3, 1, 2, 60, 8, dtype=torch.float64).unbind()
    mechanism = make(clusters=7, frozen=True).double()
    mechanism.calibrate(*torch.randn(3, 2, 2, 50, 8, dtype=torch.float64))
    out = mechanism(q, k, v)
    for head, groups in enumerate(nearest_centroids(q[0], mechanism.selectors)):
        for cluster in groups.unique():
            members = groups == cluster
            expected = (0.35 * k[0, head] @ q[0, head, members].mean(0)).softmax(0) @ v[0, head]
            torch.testing.assert_close(out[0, head, members], expected.expand(int(members.sum()), -1))


@both
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_calibration_sees_real_tokens_only_and_is_saved(kind, causal):
    q, k, v = torch.randn(3, 2, 2, 60, 8).unbind()
    mask = torch.rand(2, 60) < 0.7
    first, other, loaded = (kind(2, 8, causal=causal, scale=0.35, clusters=9, frozen=True, chunk=9) for _ in "abc")
    random = first.centroids.clone()
    first.calibrate(q, k, v, mask)
    other.calibrate(*(x.masked_fill(~mask[:, None, :, None], 1e3) for x in (q, k, v)), mask)
    loaded.load_state_dict(first.state_dict())
    assert not torch.equal(first.centroids, random)
    for mechanism in (other, loaded):
        assert torch.equal(mechanism(q, k, v), first(q, k, v))
    first.calibrate(q, k, v, torch.zeros_like(mask))
    assert torch.equal(first(q, k, v), loaded(q, k, v)), "nothing to see, nothing changed"
    first.redraw(0)
    assert torch.equal(first.centroids, random)


@both
def test_hash_planes_need_no_calibration(kind):
    assert not make(kind).needs_calibration
    assert make(kind, frozen=True).needs_calibration
    assert kind(2, 8, causal=True, scale=0.35).needs_calibration
    assert sorted(make(kind).state_dict()) == ["draws", "planes"]
    assert {name: x.shape for name, x in make(kind, frozen=True).state_dict().items()} == {
        "centroids": (2, 100, 8),
        "selectors": (2, 100, 9),
    }
