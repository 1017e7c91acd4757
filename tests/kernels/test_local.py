"""Local attention: how the work is cut cannot matter."""

import pytest
import torch

from approx_kernels.local import local_attention, reference


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (63, 63), (129, 129), (17, 129), (129, 17)])
@pytest.mark.parametrize("masked", [False, True], ids=["all real", "masked"])
def test_blocks_change_nothing(monkeypatch, queries, keys, masked):
    q = torch.randn(2, 3, queries, 24, requires_grad=True)
    k = torch.randn(2, 3, keys, 24, requires_grad=True)
    v = torch.randn(2, 3, keys, 16, requires_grad=True)
    grad = torch.randn(2, 3, queries, 16)
    mask = torch.rand(2, keys) < 0.7 if masked else None
    results = []
    for block in (1000, 64, 5):
        monkeypatch.setattr(reference, "_BLOCK", block)
        out = local_attention(q, k, v, mask, left=9, right=4, scale=0.3)
        results.append((out, *torch.autograd.grad(out, (q, k, v), grad)))
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


def test_the_window_is_inclusive_on_both_sides():
    keys = torch.eye(30)[None, None]
    seen = local_attention(torch.zeros(1, 1, 30, 4), torch.zeros(1, 1, 30, 4), keys, left=3, right=2, scale=1.0)
    assert seen[0, 0, 10].nonzero().flatten().tolist() == [7, 8, 9, 10, 11, 12]
    assert seen[0, 0, 0].nonzero().flatten().tolist() == [0, 1, 2]
    assert seen[0, 0, 29].nonzero().flatten().tolist() == [26, 27, 28, 29]
