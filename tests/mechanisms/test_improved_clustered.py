"""Improved clustered attention against its dense formula, and the gain over plain clustered attention."""

import pytest
import torch

from approx.mechanisms.clustered import ClusteredAttention, ImprovedClusteredAttention
from approx.mechanisms.exact import FullAttention
from approx_kernels.ops.clustering.api import cluster_queries


def dense_formula(q, k, v, groups, *, clusters, topk, scale):
    """m softmax(q k_top) v_top + sum of the remaining centroid weights times v, for one head, all dense."""
    member = torch.nn.functional.one_hot(groups, clusters).to(q.dtype)
    means = (member.T @ q) / member.sum(0).clamp(min=1)[:, None]
    shared = (scale * means @ k.T).softmax(-1)
    top = torch.zeros_like(shared, dtype=torch.bool).scatter(1, shared.topk(topk).indices, True)
    mass = (shared * top).sum(1, keepdim=True)
    exact = (scale * q @ k.T).masked_fill(~top[groups], float("-inf")).softmax(-1)
    return mass[groups] * (exact @ v) + (shared * ~top)[groups] @ v


@pytest.mark.parametrize(("queries", "keys", "clusters", "topk"), [(60, 60, 7, 5), (90, 41, 3, 40), (33, 70, 30, 1)])
def test_it_is_its_formula_forward_and_backward(queries, keys, clusters, topk):
    q, grad = torch.randn(2, 1, 2, queries, 8, dtype=torch.float64).unbind()
    k, v = torch.randn(2, 1, 2, keys, 8, dtype=torch.float64).unbind()
    mechanism = ImprovedClusteredAttention(2, 8, causal=False, scale=0.35, clusters=clusters, topk=topk)
    groups = cluster_queries(
        q[0], mechanism.planes, mechanism.draws, clusters=clusters, iterations=mechanism.iterations
    )
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = mechanism(*inputs)
    settings = {"clusters": clusters, "topk": topk, "scale": 0.35}
    heads = [dense_formula(q[0, h], k[0, h], v[0, h], groups[h], **settings) for h in range(2)]
    expected = torch.stack(heads)[None]
    torch.testing.assert_close(out, expected)
    # This fails without the gradient of the mass.
    for actual, wanted in zip(
        torch.autograd.grad(out, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        torch.testing.assert_close(actual, wanted)


def test_one_crowded_cluster_among_empty_ones():
    q, k, v = torch.randn(3, 1, 1, 100, 8, dtype=torch.float64).unbind()
    q[:, :, 3:] = q[:, :, :1]
    mechanism = ImprovedClusteredAttention(1, 8, causal=False, scale=0.35, clusters=20, topk=6)
    groups = cluster_queries(q[0], mechanism.planes, mechanism.draws, clusters=20, iterations=mechanism.iterations)
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


def causal_formula(q, k, v, centroids, selectors, *, chunk, topk, scale):
    """Query by query and head by head: the chunk, the K keys of the centroid, and the rest."""
    rows, before = [], k.shape[0] - q.shape[0]
    for position, query in enumerate(q, before):
        start = position // chunk * chunk
        centroid = centroids[(selectors[:, :-1] @ query + selectors[:, -1]).argmax()]
        far = scale * k[:start] @ centroid
        top = far.topk(min(topk, start)).indices
        rest = torch.tensor([j for j in range(start) if j not in top], dtype=torch.int64)
        chosen = torch.cat([top, torch.arange(start, position + 1)])
        weights, values = (scale * k[chosen] @ query).exp(), v[chosen]
        if rest.numel():
            share = far[rest].softmax(0)
            mass = (far[rest].logsumexp(0) + scale * (query - centroid) @ (share @ k[rest])).exp()
            weights, values = torch.cat([weights, mass[None]]), torch.cat([values, (share @ v[rest])[None]])
        rows.append(weights @ values / weights.sum())
    return torch.stack(rows)


@pytest.mark.parametrize(("kind", "topk"), [(ClusteredAttention, 0), (ImprovedClusteredAttention, 5)])
@pytest.mark.parametrize(("queries", "keys", "chunk"), [(60, 60, 7), (31, 70, 9), (2, 50, 6), (1, 9, 8), (20, 20, 30)])
def test_the_causal_form_is_its_formula_forward_and_backward(kind, topk, queries, keys, chunk):
    q, grad = torch.randn(2, 1, 2, queries, 8, dtype=torch.float64).unbind()
    k, v = torch.randn(2, 1, 2, keys, 8, dtype=torch.float64).unbind()
    settings = {"chunk": chunk, "scale": 0.35}
    mechanism = kind(2, 8, causal=True, clusters=4, **settings, **({"topk": topk} if topk else {})).double()
    mechanism.calibrate(*torch.randn(3, 1, 2, 100, 8, dtype=torch.float64))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = mechanism(*inputs)
    fitted = mechanism.centroids, mechanism.selectors
    heads = [causal_formula(*(x[0, h] for x in inputs), *(x[h] for x in fitted), topk=topk, **settings) for h in (0, 1)]
    expected = torch.stack(heads)[None]
    torch.testing.assert_close(out, expected)
    grads, wanted = (torch.autograd.grad(x, inputs, grad) for x in (out, expected))
    torch.testing.assert_close(grads, wanted)


def test_the_causal_form_knows_nothing_of_what_follows_bit_for_bit():
    q, k, v = torch.randn(3, 1, 2, 150, 8).unbind()
    mechanism = ImprovedClusteredAttention(2, 8, causal=True, scale=0.35, clusters=12, topk=6, chunk=40)
    out = mechanism(q, k, v)
    for token in (0, 1, 39, 40, 41, 100, 148):
        other = [x.clone() for x in (q, k, v)]
        for x in other:
            x[:, :, token + 1] = 50.0
        changed = mechanism(*other)
        assert torch.equal(changed[:, :, : token + 1], out[:, :, : token + 1])
        assert not torch.equal(changed[:, :, token + 1], out[:, :, token + 1])


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_fitted_centroids_come_closer_than_random_ones(causal):
    centres = torch.randn(1, 2, 10, 16)
    calibration, q = (3 * centres[:, :, torch.randint(10, (400,))] + 0.3 * torch.randn(1, 2, 400, 16) for _ in "ab")
    k, v = torch.randn(2, 1, 2, 400, 16).unbind()
    exact = FullAttention(2, 16, causal=causal, scale=0.25)(q, k, v)
    mechanism = ImprovedClusteredAttention(2, 16, causal=causal, scale=0.25, clusters=30, chunk=40, frozen=True)
    assert mechanism.needs_calibration
    errors = [float((mechanism(q, k, v) - exact).norm())]
    mechanism.calibrate(calibration, k, v)
    errors.append(float((mechanism(q, k, v) - exact).norm()))
    assert errors[1] < 0.5 * errors[0]
