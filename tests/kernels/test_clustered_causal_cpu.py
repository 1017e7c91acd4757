"""Causal clustered attention in C against its specification: closeness, decoding, threads, and what it refuses."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from approx_kernels.dispatch.implementation import chosen
from approx_kernels.ops.clustered.api import causal_clustered_attention
from approx_kernels.ops.clustering.api import draw_centroids
from c_sources import needs_compiler
from closeness import assert_close

pytestmark = needs_compiler
CENTROIDS, SELECTORS = draw_centroids(2, 24, clusters=12, seed=0)
FITTED = {"centroids": CENTROIDS, "selectors": SELECTORS, "scale": 0.3}


def attend(impl: str, dtype: torch.dtype, *arguments: Any, **settings: Any) -> tuple[torch.Tensor, ...]:
    """The output and the gradients, on inputs that are rounded to 16 bits, so that every dtype chooses the same keys."""
    *tensors, grad, mask = arguments
    q, k, v = inputs = tuple(x.bfloat16().to(dtype).requires_grad_() for x in tensors)
    out = causal_clustered_attention(q, k, v, mask, impl=impl, **settings)
    assert chosen()["causal_clustered_attention"] == impl
    return out, *torch.autograd.grad(out, inputs, grad.bfloat16().to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@settings(max_examples=10)
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 150), st.integers(1, 150)),
    square=st.booleans(),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    clusters=st.sampled_from([1, 5, 33]),
    chunk=st.sampled_from([1, 7, 64, 100]),
    topk=st.sampled_from([None, 1, 7, 40]),
    fill=st.sampled_from([None, 0.0, 0.7]),
    seed=st.integers(0, 1000),
)
def test_is_as_accurate_as_the_reference(dtype, shape, square, sizes, clusters, chunk, topk, fill, seed):
    torch.manual_seed(seed)
    batch, heads, length, keys = shape
    keys = length if square else keys
    # Heads laid out as by projections, and values of one sign, so that sums do not cancel.
    q, k = (torch.randn(batch, n, heads, sizes[0]).transpose(1, 2) for n in (length, keys))
    v, grad = torch.rand(batch, heads, keys, sizes[1]), torch.randn(batch, heads, length, sizes[1])
    mask = None if fill is None else torch.rand(batch, keys) < fill
    centroids, selectors = draw_centroids(heads, sizes[0], clusters=clusters, seed=seed)
    way = {"centroids": centroids, "selectors": selectors, "chunk": chunk, "topk": topk, "scale": 0.3}
    exact = attend("reference", torch.float64, q, k, v, grad, mask, **way)
    plain, made = (attend(impl, dtype, q, k, v, grad, mask, **way) for impl in ("reference", "cpu"))
    for name, actual, reference, right in zip("oqkv", made, plain, exact, strict=True):
        assert_close(name, actual, reference, right, factor=4.0)


def test_far_scores_and_keys_that_lose_their_place_change_nothing():
    # Scores rise along the sequence: every key takes the place of an earlier one, and all peaks move on.
    q = torch.randn(1, 2, 400, 24).abs()
    k = torch.arange(1.0, 401)[None, None, :, None] * torch.rand(1, 2, 400, 24) / 10
    v = torch.rand(1, 2, 400, 24)
    centroids, selectors = draw_centroids(2, 24, clusters=12, seed=0)
    way = {"centroids": centroids.abs(), "selectors": selectors, "chunk": 70, "topk": 32, "scale": 0.3}
    exact = attend("reference", torch.float64, q, k, v, v, None, **way)
    plain, made = (attend(impl, torch.float32, q, k, v, v, None, **way) for impl in ("reference", "cpu"))
    for name, actual, reference, right in zip("oqkv", made, plain, exact, strict=True):
        assert_close(name, actual, reference, right, factor=4.0)


@pytest.mark.parametrize("topk", [None, 16], ids=["plain", "improved"])
@pytest.mark.parametrize("new", [1, 3, 40])
def test_new_queries_on_a_cache_equal_the_whole_sequence(topk, new):
    q, k, v = torch.randn(3, 2, 2, 200, 24).unbind()
    whole = causal_clustered_attention(q, k, v, chunk=30, topk=topk, **FITTED, impl="cpu")
    last = causal_clustered_attention(q[:, :, -new:], k, v, chunk=30, topk=topk, **FITTED, impl="cpu")
    torch.testing.assert_close(last, whole[:, :, -new:])


def test_threads_and_neighbours_change_no_bit():
    tensors = torch.randn(4, 3, 2, 200, 24).unbind()
    way = {"chunk": 30, "topk": 16, **FITTED}
    first, threads = attend("cpu", torch.float32, *tensors, None, **way), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        others = attend("cpu", torch.float32, *tensors, None, **way)
    finally:
        torch.set_num_threads(threads)
    alone = attend("cpu", torch.float32, *(x[1:2] for x in tensors), None, **way)
    for each, other, single in zip(first, others, alone, strict=True):
        assert torch.equal(other, each)
        assert torch.equal(single, each[1:2])


@pytest.mark.parametrize("topk", [None, 16], ids=["plain", "improved"])
def test_unseen_keys_have_no_gradient(topk):
    q, k, v, grad = torch.randn(4, 1, 2, 200, 24).unbind()
    grad[:, :, 77:] = 0
    _, *grads = attend("cpu", torch.float32, q, k, v, grad, None, chunk=30, topk=topk, **FITTED)
    # The first query sees only itself.
    assert all(x[:, :, 77:].eq(0).all() and x[:, :, 1:77].ne(0).all() for x in grads)


def test_gradients_may_arrive_in_any_layout():
    q, k, v = torch.randn(3, 1, 2, 90, 24).unbind()
    way = {"chunk": 30, "topk": 7, "impl": "cpu", **FITTED}
    inputs = [x.requires_grad_() for x in (q, k, v)]
    expanded = torch.autograd.grad(causal_clustered_attention(q, k, v, **way).sum(), inputs)
    whole = torch.autograd.grad(causal_clustered_attention(q, k, v, **way), inputs, torch.ones(1, 2, 90, 24))
    assert all(map(torch.equal, expanded, whole))


@pytest.mark.parametrize("topk", [None, 4])
def test_nan_reaches_later_queries(topk):
    q, k, v = torch.randn(3, 1, 2, 80, 24).unbind()
    k[:, :, 40, 3] = float("nan")
    out = causal_clustered_attention(q, k, v, chunk=10, topk=topk, **FITTED, impl="cpu")
    assert out[:, :, 40:].isnan().any(-1).all()
    assert not out[:, :, :40].isnan().any()


def test_refuses_unsupported_arguments_explicitly_and_auto_uses_the_reference():
    q = torch.randn(1, 2, 40, 24, dtype=torch.float64)
    way = {"chunk": 8, "topk": 4, **FITTED}
    with pytest.raises(ValueError, match="float64"):
        causal_clustered_attention(q, q, q, impl="cpu", **way)
    causal_clustered_attention(q, q, q, **way)
    assert chosen()["causal_clustered_attention"] == "reference"
