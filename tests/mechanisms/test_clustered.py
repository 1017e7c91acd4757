"""Clustered attention: what members of a cluster share, and the number of clusters."""

import pytest
import torch

from approx.mechanisms.clustered import ClusteredAttention, ImprovedClusteredAttention
from approx.mechanisms.exact import FullAttention
from approx_kernels.ops.clustered.api import default_clusters
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


def test_the_gradient_of_a_query_is_its_share_of_the_mean_querys():
    q, k, v, grad = torch.randn(4, 1, 2, 60, 8, dtype=torch.float64).unbind()
    mechanism = make(clusters=7)
    q.requires_grad_()
    (dq,) = torch.autograd.grad(mechanism(q, k, v), q, grad)
    for head, groups in enumerate(groups_of(mechanism, q[0].detach(), 7)):
        for cluster in groups.unique():
            members = groups == cluster
            mean = q[0, head, members].detach().mean(0).requires_grad_()
            out = (0.35 * k[0, head] @ mean).softmax(0) @ v[0, head]
            (expected,) = torch.autograd.grad(out, mean, grad[0, head, members].sum(0))
            torch.testing.assert_close(dq[0, head, members], (expected / members.sum()).expand(members.sum(), -1))


@both
def test_default_clusters_follow_the_real_length_of_each_sample(kind):
    assert [default_clusters(n) for n in (1, 512, 513, 4096)] == [25, 25, 100, 100]
    q, k, v = torch.randn(3, 1, 2, 540, 8).unbind()
    mask = torch.arange(540)[None] < 500
    out = make(kind)(q, k, v, mask)[:, :, :500]
    torch.testing.assert_close(out, make(kind, clusters=25)(q, k, v, mask)[:, :, :500])
    assert not torch.allclose(out, make(kind, clusters=100)(q, k, v, mask)[:, :, :500])
    torch.testing.assert_close(make(kind)(q, k, v), make(kind, clusters=100)(q, k, v))


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
def test_redraw_is_explicit_and_changes_the_clusters(kind):
    q, k, v = torch.randn(3, 1, 2, 60, 8).unbind()
    mechanism, other = make(kind, clusters=4), make(kind, clusters=4, seed=1)
    first = mechanism(q, k, v)
    mechanism.redraw(1)
    assert mechanism.settings["seed"] == 1
    assert not torch.equal(mechanism(q, k, v), first)
    assert torch.equal(mechanism(q, k, v), other(q, k, v))


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
