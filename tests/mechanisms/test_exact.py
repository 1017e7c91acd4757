"""Exact attention: the reference against the definition, the fused form against PyTorch's, and exact top-k."""

import math
from typing import Any

import torch
from torch.nn import functional as F

from approx.mechanisms import MECHANISMS

TOPK: Any = MECHANISMS["exact-topk"]


def test_it_is_the_definition():
    q, k, v = torch.randn(3, 1, 1, 6, 4, dtype=torch.float64).unbind()
    mask = torch.tensor([[True, False, True, True, True, False]])
    for causal in (False, True):
        out = MECHANISMS["full"](1, 4, causal=causal, scale=0.7)(q, k, v, mask)
        # Outputs of padded queries are undefined.
        for i in mask[0].nonzero()[:, 0].tolist():
            seen = [j for j in range(6) if mask[0, j] and (j <= i or not causal)]
            mass = {j: math.exp(0.7 * float(q[0, 0, i] @ k[0, 0, j])) for j in seen}
            expected = sum(mass[j] * v[0, 0, j] for j in seen) / sum(mass.values())
            torch.testing.assert_close(out[0, 0, i], expected)


def test_without_a_mask_it_is_the_default_bit_for_bit():
    q, k, v = torch.randn(3, 2, 4, 50, 16).unbind()
    for causal in (False, True):
        out = MECHANISMS["sdpa"](4, 16, causal=causal, scale=0.25)(q, k, v)
        assert torch.equal(out, F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.25))


def test_several_new_queries_on_top_of_a_cache_see_all_of_the_past():
    q, k, v = torch.randn(3, 1, 2, 12, 8).unbind()
    whole = MECHANISMS["sdpa"](2, 8, causal=True, scale=0.3)
    torch.testing.assert_close(whole(q[:, :, -3:], k, v), whole(q, k, v)[:, :, -3:])
    top_left = F.scaled_dot_product_attention(q[:, :, -3:], k, v, is_causal=True, scale=0.3)
    assert not torch.allclose(top_left, whole(q, k, v)[:, :, -3:]), "PyTorch has changed its alignment"


def test_the_error_falls_with_every_key_and_ends_at_none():
    q, k, v = torch.randn(3, 1, 2, 60, 8).unbind()
    exact = MECHANISMS["full"](2, 8, causal=False, scale=0.35)(q, k, v)
    errors = [
        (TOPK(2, 8, causal=False, scale=0.35, topk=topk)(q, k, v) - exact).norm().item() for topk in (1, 2, 8, 30, 60)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-5 < errors[-2]


def test_one_key_is_the_value_of_the_largest_score():
    q, k, v = torch.randn(3, 1, 2, 60, 8).unbind()
    best = (q @ k.transpose(-2, -1)).argmax(-1, keepdim=True).expand(-1, -1, -1, 8)
    out = TOPK(2, 8, causal=False, scale=0.35, topk=1)(q, k, v)
    torch.testing.assert_close(out, v.gather(2, best))
