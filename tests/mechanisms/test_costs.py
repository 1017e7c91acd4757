"""What a mechanism says it costs: pairs of tokens counted by hand, and the cost of exact attention where it is exact."""

import pytest
import torch

from approx.mechanisms import MECHANISMS
from approx.mechanisms.lsh import LshAttention

HEADS, SIZE, LENGTH = 2, 8, 256
# Mechanism, whether causal, settings, keys that each of 256 queries meets as a mean over heads; blocks are of 64 queries.
KEYS = [
    ("full", False, {}, 256),
    ("exact", False, {}, 256),
    ("exact", True, {}, 257 / 2),
    ("flash", True, {}, 257 / 2),
    ("sdpa", True, {}, 257 / 2),
    ("exact-topk", True, {}, 256),
    ("local", False, {"left": 16, "right": 8}, 64 + 16 + 8),
    ("local", True, {"left": 16}, 64 + 16),
    ("local", False, {"left": 300, "right": 8}, 256),
    ("block", False, {"size": 32, "neighbours": 0}, 32),
    ("block", False, {"size": 32, "neighbours": 1}, 96),
    ("block", True, {"size": 32, "neighbours": 1}, 64),
    ("sinks", True, {"sinks": 4, "window": 28}, 63 + 28 + 4),
    ("sinks", True, {"sinks": 4, "window": 1000}, 256),
    ("clustered", False, {"clusters": 256}, 256),
    ("lsh", False, {"cluster": 256}, 256),
    ("lsh", True, {"cluster": 128}, 256),
    ("bigbird", False, {"block": 16, "random": 1}, 6 * 16 + 2 * 16 * (256 - 6 * 16) / 256),
]


@pytest.mark.parametrize(("name", "causal", "settings", "keys"), KEYS)
def test_attention_costs_two_products_for_each_pair_of_tokens(name, causal, settings, keys):
    mechanism = MECHANISMS[name](HEADS, SIZE, causal=causal, scale=0.5, **settings)
    # A product of two vectors of the head's size is as many multiplications as additions; there are two, q k and w v.
    assert mechanism.flops(LENGTH) == 4 * HEADS * SIZE * LENGTH * keys


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("length", [16, 17, 31, 32, 33, 64])
def test_lsh_costs_what_exact_attention_costs_as_long_as_it_is_exact(causal, length):
    full = MECHANISMS["full"](HEADS, SIZE, causal=causal, scale=0.5)
    lsh = LshAttention(HEADS, SIZE, causal=causal, scale=0.5, cluster=16, rounds=2)
    q, k, v = torch.randn(3, 4, HEADS, length, SIZE).unbind()
    exact = torch.allclose(lsh(q, k, v), full(q, k, v), atol=1e-5)
    assert exact is (lsh.flops(length) == full.flops(length))
