"""Clustered attention: how the work is cut cannot matter, and its precision."""

import pytest
import torch

from approx_kernels.ops.clustered import reference
from approx_kernels.ops.clustered.api import causal_clustered_attention, clustered_attention
from approx_kernels.ops.clustering.api import draw_centroids, draw_planes
from closeness import assert_close

PLANES, DRAWS = draw_planes(24, bits=63, bias=True, clusters=100, seed=0)
TENSORS = {"clusters": 12, "iterations": 5, "planes": PLANES, "draws": DRAWS, "scale": 0.3}


@pytest.mark.parametrize("n", [13, 17, 63, 129, 600])
@pytest.mark.parametrize("topk", [1, 32, 700])
def test_blocks_of_heads_and_of_tiles_change_nothing(monkeypatch, n, topk):
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 2, 3, n, 24).unbind())
    grad = torch.randn(2, 3, n, 24)
    results = []
    for numbers in (2**30, 1000):
        monkeypatch.setattr(reference, "CACHED", numbers)
        out = clustered_attention(q, k, v, topk=topk, **TENSORS)
        results.append((out, *torch.autograd.grad(out, (q, k, v), grad)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("topk", [None, 1, 32], ids=["plain", "top 1", "top 32"])
@pytest.mark.parametrize("n", [17, 129, 600])
def test_float32_is_as_close_to_float64_as_exact_attention_is(topk, n):
    q, k, v, grad = torch.randn(4, 2, 3, n, 24).unbind()
    results = {}
    for dtype in (torch.float32, torch.float64):
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = clustered_attention(*inputs, topk=topk, **TENSORS)
        results[dtype] = (out, *torch.autograd.grad(out, inputs, grad.to(dtype)))
    for name, actual, exact in zip("oqkv", results[torch.float32], results[torch.float64], strict=True):
        # Sums over hundreds of members and keys: a few roundings more than one.
        assert_close(name, actual, exact.float(), exact, factor=8.0)


def test_a_sample_is_computed_without_its_padding_bit_for_bit():
    q, k, v = torch.randn(3, 3, 2, 80, 24).unbind()
    mask = torch.rand(3, 80) < 0.6
    for topk in (None, 6):
        out = clustered_attention(q, k, v, mask, topk=topk, **TENSORS)
        for sample, real in enumerate(mask):
            alone = clustered_attention(*(x[sample : sample + 1, :, real] for x in (q, k, v)), topk=topk, **TENSORS)
            assert torch.equal(out[sample : sample + 1, :, real], alone)


CENTROIDS, SELECTORS = draw_centroids(3, 24, clusters=12, seed=0)
CAUSAL = {"centroids": CENTROIDS, "selectors": SELECTORS, "scale": 0.3}


@pytest.mark.parametrize("n", [13, 129, 600])
@pytest.mark.parametrize(("chunk", "topk"), [(40, None), (40, 8), (9, 8)])
def test_causal_blocks_change_nothing(monkeypatch, n, chunk, topk):
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 2, 3, n, 24).unbind())
    grad = torch.randn(2, 3, n, 24)
    results = []
    for numbers in (2**30, 1000):
        monkeypatch.setattr(reference, "CACHED", numbers)
        out = causal_clustered_attention(q, k, v, chunk=chunk, topk=topk, **CAUSAL, impl="reference")
        results.append((out, *torch.autograd.grad(out, (q, k, v), grad)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("topk", [None, 1, 32], ids=["plain", "top 1", "top 32"])
@pytest.mark.parametrize("n", [65, 600])
def test_causal_float32_is_as_close_to_float64_as_exact_attention_is(topk, n):
    q, k, v, grad = torch.randn(4, 2, 3, n, 24).unbind()
    results = {}
    for dtype in (torch.float32, torch.float64):
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = causal_clustered_attention(*inputs, chunk=64, topk=topk, **CAUSAL)
        results[dtype] = (out, *torch.autograd.grad(out, inputs, grad.to(dtype)))
    for name, actual, exact in zip("oqkv", results[torch.float32], results[torch.float64], strict=True):
        assert_close(name, actual, exact.float(), exact, factor=8.0)


def test_only_chosen_keys_of_a_query_have_gradients():
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 1, 12, 3, dtype=torch.float64).unbind())
    centroids, selectors = draw_centroids(1, 3, clusters=4, seed=0)

    def attend(q, k, v):
        torch.manual_seed(0)
        return causal_clustered_attention(
            q, k, v, centroids=centroids, selectors=selectors, chunk=3, topk=2, scale=0.3, dropout=0.3
        )

    assert torch.autograd.gradcheck(attend, (q, k, v))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"selectors": SELECTORS}, "Either planes"),
        ({"planes": None, "draws": None}, "Either planes"),
        ({"planes": None, "draws": None, "selectors": SELECTORS[:, :5]}, "selectors has shape"),
    ],
)
def test_requires_exactly_one_valid_clustering(changed, words):
    q = torch.randn(1, 3, 20, 24)
    with pytest.raises(ValueError, match=words):
        clustered_attention(q, q, q, topk=4, **(TENSORS | changed))
    with pytest.raises(ValueError, match="centroids has shape"):
        causal_clustered_attention(q[:, :2], q[:, :2], q[:, :2], chunk=8, topk=4, **CAUSAL)
