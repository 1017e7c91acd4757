"""The fused form of exact attention against the oracle."""

import pytest
import torch

from approx_kernels.exact import exact_attention
from closeness import assert_close


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("masked", [False, True], ids=["all real", "masked"])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 63), (17, 17), (129, 129), (63, 129), (129, 17)])
@pytest.mark.parametrize("size", [24, 64])
def test_fused_equals_reference_forward_and_backward(causal, masked, queries, keys, size):
    grad = torch.randn(2, 3, queries, 16)
    tensors = torch.randn(2, 3, queries, size), torch.randn(2, 3, keys, size), torch.randn(2, 3, keys, 16)
    mask = torch.rand(2, keys) < 0.7 if masked else None

    def run(impl: str, dtype):
        q, k, v = (x.to(dtype).requires_grad_() for x in tensors)
        out = exact_attention(q, k, v, mask, causal=causal, scale=0.3, impl=impl)
        return out, *torch.autograd.grad(out, (q, k, v), grad.to(dtype))

    names = ("output", "gradient of q", "gradient of k", "gradient of v")
    fused, plain, exact = run("auto", torch.float32), run("reference", torch.float32), run("reference", torch.float64)
    for each in zip(names, fused, plain, exact, strict=True):
        assert_close(*each, factor=4.0)


def test_a_masked_key_is_as_if_it_were_not_there():
    q, k, v = torch.randn(3, 1, 2, 10, 8).unbind()
    mask = torch.tensor([[True] * 6 + [False] * 4])
    impls: tuple[str, ...] = ("reference", "auto", "cpu")
    for impl in impls:
        out = exact_attention(q, k, v, mask, causal=False, scale=0.3, impl=impl)
        shorter = exact_attention(q, k[:, :, :6], v[:, :, :6], causal=False, scale=0.3, impl=impl)
        # What padded queries receive has no meaning.
        torch.testing.assert_close(out[:, :, :6], shorter[:, :, :6])
