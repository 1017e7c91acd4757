"""Clustered attention: how the work is cut cannot matter, and its precision."""

import pytest
import torch

from approx_kernels.clustered import clustered_attention, improved
from approx_kernels.clustering import draw_planes
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
        monkeypatch.setattr(improved, "_CACHED", numbers)
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
