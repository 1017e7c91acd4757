"""Scores so large that a rounding of them is more than any exponential bears: the largest takes all the weight."""

from collections.abc import Callable

import pytest
import torch

from approx_kernels.ops.adaptive_span.api import adaptive_span_attention
from approx_kernels.ops.clustered.api import causal_clustered_attention, clustered_attention
from approx_kernels.ops.clustering.api import draw_centroids, draw_planes
from approx_kernels.ops.exact.api import exact_attention
from approx_kernels.ops.exact.compiled import compiled_attention, compiled_few
from approx_kernels.ops.patterns.api import local_attention
from approx_kernels.ops.topk.api import topk_attention
from c_sources import needs_compiler

pytestmark = needs_compiler
HEADS, LENGTH, SIZE = 2, 200, 32
PLANES, DRAWS = draw_planes(SIZE, bits=16, bias=True, clusters=25, seed=0)
CENTROIDS, SELECTORS = draw_centroids(HEADS, SIZE, clusters=25, seed=0)


def compiled(q, k, v, impl, causal):
    if impl == "cpu":
        return compiled_attention(q, k, v, causal=causal, scale=1.0)
    return exact_attention(q, k, v, causal=causal, scale=1.0, impl=impl)


def clustered(q, k, v, impl, topk):
    how = {"planes": PLANES, "draws": DRAWS, "clusters": 25, "iterations": 3, "topk": topk}
    return clustered_attention(q, k, v, **how, scale=1.0, impl=impl)


OPS: dict[str, Callable[..., torch.Tensor]] = {
    "exact": lambda q, k, v, impl: compiled(q, k, v, impl, False),
    "exact causal": lambda q, k, v, impl: compiled(q, k, v, impl, True),
    "local": lambda q, k, v, impl: local_attention(q, k, v, left=40, right=30, scale=1.0, impl=impl),
    "topk": lambda q, k, v, impl: topk_attention(q, k, v, topk=16, causal=False, scale=1.0, impl=impl),
    "spans without an end": lambda q, k, v, impl: adaptive_span_attention(
        q, k, v, spans=torch.tensor([30.0, torch.inf]), ramp=8, causal=False, scale=1.0, impl=impl
    ),
    "clustered": lambda q, k, v, impl: clustered(q, k, v, impl, None),
    "improved-clustered": lambda q, k, v, impl: clustered(q, k, v, impl, 8),
    "causal clustered": lambda q, k, v, impl: causal_clustered_attention(
        q, k, v, centroids=CENTROIDS, selectors=SELECTORS, chunk=16, topk=8, scale=1.0, impl=impl
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1e8, 1e10, 1e20, 1e34])
@pytest.mark.parametrize("op", OPS)
def test_large_scores_give_numbers(op, size, dtype):
    q, k, v, grad = (torch.randn(1, HEADS, LENGTH, SIZE).to(dtype) for _ in range(4))
    q, k = (x * (size / SIZE**0.5) ** 0.5 for x in (q, k))
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = OPS[op](*inputs, "cpu")
    # Of means of many queries no key is far the best, so what is right depends on their last bits.
    if "clustered" not in op:
        exact = OPS[op](*(x.double() for x in (q, k, v)), "reference")
        torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.02)
    assert out.isfinite().all()
    assert out.abs().max() <= v.abs().max() * 1.01
    gradients = torch.autograd.grad(out, inputs, grad)
    if op == "causal clustered" and size > 1e10:
        return  # its derivatives by queries grow with the scores, beyond every float
    assert all(x.isfinite().all() for x in gradients)
    # Weights are between 0 and 1, so no value gets more than all that comes back.
    assert (gradients[2].abs() <= 1.02 * grad.abs().sum(2, keepdim=True)).all()


@pytest.mark.parametrize("size", [1e8, 1e20])
def test_few_queries_handle_large_scores(size):
    q, k, v = (torch.randn(1, HEADS, n, SIZE) for n in (2, LENGTH, LENGTH))
    q, k = (x * (size / SIZE**0.5) ** 0.5 for x in (q, k))
    exact = exact_attention(*(x.double() for x in (q, k, v)), causal=True, scale=1.0, impl="reference")
    out = compiled_few(q, k, v, None, causal=True, scale=1.0)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("span", [torch.inf, 1e30, 0.0])
def test_spans_of_any_size_are_distances(span):
    q, k, v = (torch.randn(1, HEADS, LENGTH, SIZE).requires_grad_() for _ in range(3))
    spans = torch.tensor([span, 5.0])
    outs = [
        adaptive_span_attention(q, k, v, spans=spans, ramp=8, causal=True, scale=0.3, impl=impl)
        for impl in ("cpu", "reference")
    ]
    torch.testing.assert_close(*outs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("span", [-1.0, -torch.inf, torch.nan])
@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_rejects_invalid_spans(span, impl):
    q = torch.zeros(1, HEADS, 4, SIZE)
    with pytest.raises(ValueError, match="expected distances, from 0 on"):
        adaptive_span_attention(q, q, q, spans=torch.tensor([span, 5.0]), ramp=8, causal=True, scale=0.3, impl=impl)
