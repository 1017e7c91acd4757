"""The costs of mechanisms, against pairs of tokens counted by hand and against exact attention."""

import pytest
import torch

from approx.mechanisms import MECHANISMS
from approx.mechanisms.lsh import LshAttention
from forms import plain

HEADS, SIZE, LENGTH = 2, 8, 256
# Mechanism, whether causal, settings, keys per query for 256 queries, averaged over heads; blocks hold 64 queries.
# Other work counts as a fraction of a pair: multiplying two vectors of the head's size is half a pair.
KEYS = [
    ("full", False, {}, 256),
    ("full", True, {}, 256),
    *((name, False, {}, 256) for name in ("exact", "flash", "sdpa")),
    *((name, True, {}, 257 / 2) for name in ("exact", "flash", "sdpa")),
    ("exact-topk", True, {}, 256),
    ("local", False, {"left": 16, "right": 8}, 64 + 16 + 8),
    ("local", True, {"left": 16}, 64 + 16),
    ("local", False, {"left": 300, "right": 8}, 256),
    ("block", False, {"size": 32, "neighbours": 0}, 32),
    ("block", False, {"size": 32, "neighbours": 1}, 96),
    ("block", True, {"size": 32, "neighbours": 1}, 64),
    ("strided", False, {}, 3 * 16 + 16),
    ("strided", True, {}, 2 * 32 + 8),
    ("strided", False, {"stride": 10}, 3 * 10 + 26),
    ("strided", True, {"stride": 10, "step": 1}, 2 * 10),
    ("strided", False, {"stride": 10, "step": 2}, 26),
    ("strided", False, {"stride": 10, "mode": "heads"}, (3 * 10 + 26) / 2),
    ("strided", False, {"stride": 256}, 256),
    ("fixed", False, {"stride": 16, "summary": 2}, 16 + 2 * 15),
    ("fixed", True, {"stride": 16, "summary": 2}, 16 + 2 * 15 / 2),
    ("fixed", False, {"stride": None, "summary": 40, "step": 2}, 256),
    ("fixed", False, {"stride": 16, "summary": 2, "mode": "heads"}, 16 + 2 * 15 / 2),
    ("ltr", False, {}, 16 + 15),
    ("ltr", False, {"stride": 10, "summary": 2}, 10 + 2 * 25),
    ("ltr", False, {"stride": 10, "summary": 2, "step": 1}, 10),
    ("rtl", False, {"stride": 10, "summary": 2, "step": 2}, 10 + 2 * 25),
    ("ltr", False, {"stride": 10, "summary": 2, "both_directions": True}, 10 + 4 * 25),
    ("rtl", False, {"stride": 10, "summary": 2, "both_directions": True, "mode": "heads"}, 10 + 2 * 25 / 2),
    ("sinks", True, {"sinks": 4, "window": 28}, 63 + 28 + 4),
    ("sinks", True, {"sinks": 4, "window": 1000}, 256),
    ("longformer", False, {"window": 32, "global_tokens": [0, 9]}, 64 + 32 + 2 + 2),
    ("longformer", True, {"window": 32}, 64 + 16 + 1 + 1),
    ("longformer", False, {"window": 32, "global_tokens": "question"}, 64 + 32),
    ("bigbird", False, {"block": 16, "random": 1}, 6 * 16 + 2 * 16 * (256 - 6 * 16) / 256),
    ("clustered", False, {"clusters": 256}, 256),
    ("clustered", False, {"clusters": "auto", "bits": 31, "iterations": 3}, 32 / 2 + 3 * 100 * 32 / 16 + 100),
    ("clustered", False, {"clusters": None, "bits": 31, "iterations": 3}, 32 / 2 + 3 * 25 * 32 / 16 + 25),
    ("clustered", False, {"clusters": 10, "bits": 31, "iterations": 3}, 32 / 2 + 3 * 10 * 32 / 16 + 10),
    ("improved-clustered", False, {"clusters": 10, "bits": 15, "iterations": 1, "topk": 5}, 16 / 2 + 10 * 16 / 16 + 15),
    ("clustered", False, {"clusters": 10, "frozen": True}, 10 / 2 + 10),
    # Of far keys the mean is computed too, half a pair more; 16 pairs of blocks of queries and keys join the sums of rows.
    (
        "clustered",
        False,
        {"clusters": 8, "frozen": True, "window": 10},
        4 + 1.5 * (8 + 3 * 64) + 16 * 8 / 256 + 64 + 20,
    ),
    ("clustered", True, {"clusters": 8, "window": 10, "sinks": 2}, 4 + 1.5 * (8 + 2 * 64) + 16 * 8 / 256 + 64 + 10 + 2),
    ("improved-clustered", False, {"frozen": True, "topk": 5}, 100 / 2 + 100 + 5),
    ("clustered", True, {"clusters": 10, "chunk": 64}, 2 * 10 + 64),
    ("improved-clustered", True, {"clusters": 10, "chunk": 64, "topk": 5}, 2 * 10 + 5 + 64),
    ("improved-clustered", True, {"chunk": 256}, 256),
    ("linear", False, {}, 8),
    ("linear", True, {}, 8 + 64),
    ("linear", False, {"feature_map": "hedgehog"}, 16 + 8),
    ("linear", True, {"feature_map": "hedgehog"}, 16 + 8 + 64 * 3 / 2),
    ("linear", False, {"window": 10}, 8 + (128 + 20) * 3 / 2),
    ("linear", True, {"window": 10}, 8 + (128 + 10) * 3 / 2),
    ("linear", True, {"update": "delta", "feature_map": None, "gate": True, "sinks": 0}, 8 + 8 * 3 / 2 + 2 * 64),
    ("performer", False, {"features": 16, "kernel": "relu"}, 16 + 16),
    ("performer", True, {"features": 16, "kernel": "relu"}, 16 + 16 + 64 * 2),
    ("performer", False, {"features": 16}, 16 + 8 + 16),
    ("lsh", False, {"cluster": 256}, 256),
    ("lsh", True, {"cluster": 128}, 256),
    ("lsh", False, {"cluster": 16, "rounds": 3}, 3 * (1 + 16)),
    ("lsh", True, {"cluster": 16, "rounds": 3}, 3 * (16 + 2 * 16)),
    ("lsh", False, {"cluster": 16, "rounds": 3, "window": 10, "sinks": 2}, 3 * (1 + 16) + 64 + 20 + 2),
    ("lsh", False, {"cluster": 16, "rounds": 3, "variant": "shared"}, 3 * (64 / 2 + 2 * 16)),
    ("adaptive-span", False, {"max_span": 20, "ramp": 12}, 64 + 2 * 64),
    ("adaptive-span", True, {"max_span": 60, "ramp": 12}, 64 + 128),
    ("adaptive-span", True, {}, 257 / 2),
    ("adaptive-span", False, {}, 256),
]
OUTPUTS = HEADS * LENGTH * SIZE
# Mechanism, whether causal, settings, four-byte numbers in memory besides the inputs; masks use one byte each.
NUMBERS = [
    ("full", False, {}, 2 * HEADS * 256 * 256),
    ("sdpa", True, {}, HEADS * 256),
    ("flash", False, {}, HEADS * 256),
    ("exact", True, {}, 2 * 256 * 256),
    ("exact-topk", False, {}, 2 * HEADS * 64 * 256),
    ("local", False, {"left": 16, "right": 8}, OUTPUTS + 64 * 88 / 4),
    ("local", True, {"left": 16}, OUTPUTS + 64 * 80 / 4),
    ("block", False, {"size": 32, "neighbours": 1}, OUTPUTS),
    ("block", True, {"size": 32, "neighbours": 1}, OUTPUTS + 32 * 64 / 4),
    ("strided", False, {"stride": 10}, 9 * OUTPUTS),
    ("strided", True, {"stride": 10, "step": 1}, OUTPUTS),
    ("strided", True, {"stride": 10, "mode": "heads"}, OUTPUTS),
    ("fixed", False, {"stride": 16, "summary": 2}, OUTPUTS + 2 * HEADS * SIZE * 46 + 16 * 46 / 4),
    ("ltr", False, {"stride": 10, "summary": 2}, OUTPUTS + 2 * HEADS * SIZE * 60 + 10 * 60 / 4),
    ("sinks", True, {"sinks": 4, "window": 28}, OUTPUTS + 2 * HEADS * SIZE * 95 + 64 * 95 / 4),
    ("longformer", False, {"window": 32}, OUTPUTS + 2 * HEADS * SIZE * 97 + 64 * 97 / 4),
    ("bigbird", False, {"block": 16, "random": 1}, OUTPUTS + 2 * HEADS * SIZE * 96),
    ("clustered", False, {"clusters": 256}, HEADS * 256),
    ("clustered", False, {"clusters": 10, "bits": 31}, HEADS * 256 * (10 + 32)),
    ("clustered", False, {"clusters": 10, "frozen": True}, HEADS * 256 * 10),
    ("improved-clustered", False, {"clusters": 10, "frozen": True}, HEADS * 256 * 3 * 10),
    ("improved-clustered", False, {"clusters": 10, "bits": 31}, HEADS * 256 * (10 + 32)),
    ("clustered", True, {"clusters": 10, "chunk": 64}, HEADS * 256 * (3 * 64 + 4 * 10)),
    ("clustered", True, {"clusters": 10, "chunk": 256}, HEADS * 256 * 3 * 256),
    ("linear", False, {}, HEADS * SIZE * (2 * 256 + SIZE)),
    ("linear", True, {}, HEADS * SIZE * (2 * 256 + 4 * SIZE)),
    ("linear", False, {"window": 10}, HEADS * (SIZE * (2 * 256 + 8 * SIZE) + 2 * 64 * 148)),
    ("linear", False, {"feature_map": "hedgehog"}, HEADS * 2 * SIZE * (2 * 256 + SIZE)),
    ("performer", False, {"features": 16, "kernel": "relu"}, OUTPUTS + HEADS * 16 * (2 * 64 + SIZE)),
    ("performer", True, {"features": 16}, 3 * OUTPUTS + HEADS * 16 * (2 * 64 + SIZE)),
    ("lsh", False, {"cluster": 256}, HEADS * 256),
    ("lsh", False, {"cluster": 16, "rounds": 3}, 4 * OUTPUTS + HEADS * 256 * 3 * 56 / 4),
    ("lsh", True, {"cluster": 16, "rounds": 3}, 4 * OUTPUTS + HEADS * 256 * 3 * 160 / 4),
    ("lsh", False, {"cluster": 16, "rounds": 3, "variant": "shared"}, 4 * OUTPUTS + HEADS * 256 * 3 * 100 / 4),
    ("adaptive-span", False, {"max_span": 20, "ramp": 12}, OUTPUTS + HEADS * 64 * 192),
    ("adaptive-span", True, {}, OUTPUTS),
]


def make(name, causal, settings):
    return MECHANISMS[name](HEADS, SIZE, causal=causal, scale=0.5, **plain(name, settings))


@pytest.mark.parametrize(("name", "causal", "settings", "keys"), KEYS)
def test_attention_costs_two_products_for_each_pair_of_tokens(name, causal, settings, keys):
    # A product of two vectors has as many multiplications as additions, and there are two products, q k and w v.
    assert make(name, causal, settings).flops(LENGTH) == 4 * HEADS * SIZE * LENGTH * keys


@pytest.mark.parametrize(("name", "causal", "settings", "numbers"), NUMBERS)
def test_memory_is_the_peak_of_temporaries(name, causal, settings, numbers):
    assert make(name, causal, settings).memory(LENGTH) == 4 * numbers


def test_exact_attention_keeps_the_scores_of_512_queries_at_most():
    assert make("exact", False, {}).memory(1024) == 4 * 2 * 512 * 1024


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_single_token_costs_no_more_than_one_of_many(name):
    mechanism = make(name, not MECHANISMS[name].supports_bidirectional, {})
    assert 0 < mechanism.flops(1) <= mechanism.flops(LENGTH) / 2
    assert 0 < mechanism.memory(1) <= mechanism.memory(LENGTH)


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("length", [16, 17, 31, 32, 33, 64])
def test_lsh_costs_what_exact_attention_costs_as_long_as_it_is_exact(causal, length):
    full = MECHANISMS["full"](HEADS, SIZE, causal=causal, scale=0.5)
    lsh = LshAttention(HEADS, SIZE, causal=causal, scale=0.5, cluster=16, rounds=2)
    q, k, v = torch.randn(3, 4, HEADS, length, SIZE).unbind()
    exact = torch.allclose(lsh(q, k, v), full(q, k, v), atol=1e-5)
    assert exact is (lsh.flops(length) == full.flops(length))
