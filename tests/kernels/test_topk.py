"""Exact top-k attention: dense attention over each query's largest scores."""

import pytest
import torch

from approx_kernels.topk import reference, topk_attention


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("masked", [False, True], ids=["all real", "masked"])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 63), (129, 129), (17, 129), (129, 17)])
@pytest.mark.parametrize("block", [64, 5])
def test_it_equals_attention_over_the_kept_keys(monkeypatch, causal, masked, queries, keys, block):
    monkeypatch.setattr(reference, "_BLOCK", block)
    q, k, v = (torch.randn(2, 3, n, 8).double().requires_grad_() for n in (queries, keys, keys))
    mask, grad = torch.rand(2, keys) < (0.7 if masked else 2), torch.randn(2, 3, queries, 8).double()
    allowed = mask[:, None, None].expand(2, 3, queries, keys)
    allowed = allowed.tril(keys - queries) if causal else allowed
    scores = (0.3 * q @ k.transpose(-2, -1)).masked_fill(~allowed, -1e9)
    place = scores.argsort(-1, descending=True).argsort(-1)
    kept = allowed & (place < 6)
    expected = (scores.masked_fill(~kept, -1e9).softmax(-1) * kept) @ v
    found = topk_attention(q, k, v, mask if masked else None, topk=6, causal=causal, scale=0.3)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(
        torch.autograd.grad(found, (q, k, v), grad), torch.autograd.grad(expected, (q, k, v), grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_equal_scores_do_not_add_keys():
    q, keys = torch.zeros(1, 1, 4, 2), torch.eye(9)[None, None]
    weights = topk_attention(q, torch.ones(1, 1, 9, 2), keys, topk=3, causal=False, scale=1.0)
    assert (weights > 0).sum(-1).eq(3).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 1, 4))
