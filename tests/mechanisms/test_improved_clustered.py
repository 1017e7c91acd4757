"""Improved clustered attention against its dense formula, and the gain over plain clustered attention."""

import pytest
import torch

from approx.mechanisms.clustered import ClusteredAttention
from approx.mechanisms.full import FullAttention
from approx.mechanisms.improved_clustered import ImprovedClusteredAttention
from approx_kernels.clustering import cluster_queries


def dense_formula(q, k, v, groups, *, clusters, topk, scale):
    """m softmax(q k_top) v_top + sum of the remaining centroid weights times v, for one head, all dense."""
    member = torch.nn.functional.one_hot(groups, clusters).to(q.dtype)
    means = (member.T @ q) / member.sum(0).clamp(min=1)[:, None]
    shared = (scale * means @ k.T).softmax(-1)
    top = torch.zeros_like(shared, dtype=torch.bool).scatter(1, shared.topk(topk).indices, True)
    mass = (shared * top).sum(1, keepdim=True)
    own = (scale * q @ k.T).masked_fill(~top[groups], float("-inf")).softmax(-1)
    return mass[groups] * (own @ v) + (shared * ~top)[groups] @ v


@pytest.mark.parametrize(("queries", "keys", "clusters", "topk"), [(60, 60, 7, 5), (90, 41, 3, 40), (33, 70, 30, 1)])
def test_it_is_its_formula_forward_and_backward(queries, keys, clusters, topk):
    q, grad = torch.randn(2, 1, 2, queries, 8, dtype=torch.float64).unbind()
    k, v = torch.randn(2, 1, 2, keys, 8, dtype=torch.float64).unbind()
    mechanism = ImprovedClusteredAttention(2, 8, causal=False, scale=0.35, clusters=clusters, topk=topk)
    groups = cluster_queries(q[0], mechanism.planes, mechanism.draws, clusters=clusters, iterations=10)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = mechanism(*inputs)
    settings = {"clusters": clusters, "topk": topk, "scale": 0.35}
    heads = [dense_formula(q[0, h], k[0, h], v[0, h], groups[h], **settings) for h in range(2)]
    expected = torch.stack(heads)[None]
    torch.testing.assert_close(out, expected)
    # The mass is differentiated: without its gradient this fails.
    for found, wanted in zip(
        torch.autograd.grad(out, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        torch.testing.assert_close(found, wanted)


def test_one_crowded_cluster_among_empty_ones():
    q, k, v = torch.randn(3, 1, 1, 100, 8, dtype=torch.float64).unbind()
    q[:, :, 3:] = q[:, :, :1]
    mechanism = ImprovedClusteredAttention(1, 8, causal=False, scale=0.35, clusters=20, topk=6)
    groups = cluster_queries(q[0], mechanism.planes, mechanism.draws, clusters=20, iterations=10)
    assert groups.unique().numel() < 5
    expected = dense_formula(q[0, 0], k[0, 0], v[0, 0], groups[0], clusters=20, topk=6, scale=0.35)
    torch.testing.assert_close(mechanism(q, k, v)[0, 0], expected)


def test_it_is_closer_to_exact_than_plain_and_more_keys_are_closer_still():
    centres = torch.randn(1, 2, 10, 16).repeat_interleave(30, 2)
    q = centres + 0.5 * torch.randn(1, 2, 300, 16)
    k, v = torch.randn(2, 1, 2, 300, 16).unbind()
    exact = FullAttention(2, 16, causal=False, scale=0.5)(q, k, v)
    plain = ClusteredAttention(2, 16, causal=False, scale=0.5)(q, k, v)
    errors = [float((plain - exact).norm())]
    for topk in (8, 32, 128, 300):
        improved = ImprovedClusteredAttention(2, 16, causal=False, scale=0.5, topk=topk)
        errors.append(float((improved(q, k, v) - exact).norm()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-4 * errors[0]
