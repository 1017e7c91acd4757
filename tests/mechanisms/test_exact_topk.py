"""Exact top-k attention: more keys are closer to exact."""

import torch

from approx.mechanisms.exact import FullAttention
from approx.mechanisms.exact_topk import ExactTopkAttention


def test_the_error_falls_with_every_key_and_ends_at_none():
    q, k, v = torch.randn(3, 1, 2, 60, 8).unbind()
    exact = FullAttention(2, 8, causal=False, scale=0.35)(q, k, v)
    errors = [
        (ExactTopkAttention(2, 8, causal=False, scale=0.35, topk=topk)(q, k, v) - exact).norm().item()
        for topk in (1, 2, 8, 30, 60)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-5 < errors[-2]


def test_one_key_is_the_value_of_the_largest_score():
    q, k, v = torch.randn(3, 1, 2, 60, 8).unbind()
    best = (q @ k.transpose(-2, -1)).argmax(-1, keepdim=True).expand(-1, -1, -1, 8)
    out = ExactTopkAttention(2, 8, causal=False, scale=0.35, topk=1)(q, k, v)
    torch.testing.assert_close(out, v.gather(2, best))
