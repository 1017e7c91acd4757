"""Fused exact attention: bit-equal to PyTorch's default where nothing is masked."""

import torch
from torch.nn import functional as F

from approx.mechanisms import MECHANISMS


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
