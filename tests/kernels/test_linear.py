"""Linear attention: how the work is cut cannot matter."""

import pytest
import torch

from approx_kernels.linear import linear_attention, reference
from closeness import assert_close


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (63, 63), (129, 129), (17, 129), (129, 63)])
def test_chunks_and_blocks_of_heads_change_nothing(monkeypatch, causal, queries, keys):
    tensors = torch.randn(2, 3, queries, 24), torch.randn(2, 3, keys, 24), torch.randn(2, 3, keys, 16)
    grad, mask = torch.randn(2, 3, queries, 16), torch.rand(2, keys) < 0.7
    results = {}
    for cut, dtype in (((64, 2**17), torch.float64), ((8, 1), torch.float32), ((64, 2**17), torch.float32)):
        monkeypatch.setattr(reference, "_CHUNK", cut[0])
        monkeypatch.setattr(reference, "_CACHED", cut[1])
        q, k, v = (x.to(dtype).requires_grad_() for x in tensors)
        out = linear_attention(q, k, v, mask, causal=causal, eps=1e-6)
        results[cut, dtype] = (out, *torch.autograd.grad(out, (q, k, v), grad.to(dtype)))
    exact, small, usual = results.values()
    for name, actual, plain, wanted in zip("oqkv", small, usual, exact, strict=True):
        assert_close(name, actual, plain, wanted, factor=4.0)


def test_numbers_of_a_long_sequence_stay_small_in_float16():
    # The sums reach 2^17, beyond float16: they are float32 inside.
    q, k, v = (torch.ones(1, 1, 70_000, 1, dtype=torch.float16) for _ in range(3))
    for causal in (False, True):
        out = linear_attention(q, k, v, causal=causal, eps=1e-6)
        torch.testing.assert_close(out, torch.ones_like(out))
