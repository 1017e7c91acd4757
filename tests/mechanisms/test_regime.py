"""Each mechanism knows the length from which it approximates: it differs from exact attention at that length but not below."""

from typing import Any

import pytest
import torch

from approx.mechanisms import MECHANISMS
from approx.mechanisms.local import LocalAttention
from approx.mechanisms.mechanism import HeadGroups

HEADS, SIZE = 4, 16
# Above float32 rounding, and below the change of one key in a thousand under the first step of a ramp.
ROUNDING = 1e-5
SETTINGS = {
    "exact-topk": [{"topk": 5}],
    "clustered": [
        {"clusters": 4, "chunk": 6},
        {"chunk": 1},
        {"clusters": 30},
        {"frozen": True, "clusters": 7},
        {"clusters": 4, "window": 7},
        {"clusters": 4, "window": 3, "sinks": 2},
        {"clusters": 30, "window": 1},
    ],
    "improved-clustered": [
        {"clusters": 4, "topk": 6, "chunk": 3},
        {"clusters": 9, "topk": 6, "chunk": 12},
        {"topk": 30},
        {"clusters": 5, "topk": 3, "frozen": True},
    ],
    "linear": [
        {"window": 1},
        {"window": 9},
        {"feature_map": "hedgehog", "eps": 1e-9},
        {"feature_map": "softmax", "window": 5},
    ],
    "performer": [{"features": 16}, {"kernel": "relu"}],
    "local": [{"left": 4, "right": 2}, {"left": 2, "right": 6}, {"left": 0, "right": 0}],
    "block": [{"size": 5}, {"size": 5, "shift": 2}, {"size": 4, "neighbours": 2, "shift": 3}, {"size": 1}],
    "strided": [
        {"stride": 3},
        {"stride": 6, "step": 1},
        {"stride": 6, "step": 2},
        {"step": 1},
        {"step": 2},
        {"stride": 5, "mode": "heads"},
        {"stride": 1},
    ],
    "fixed": [
        {"stride": 6, "summary": 2},
        {"stride": 6, "summary": 6},
        {"stride": 6, "summary": 2, "step": 1},
        {"stride": 6, "summary": 2, "step": 2},
        {"stride": 6, "summary": 6, "step": 2},
        {"stride": 6, "summary": 2, "mode": "heads"},
        {"stride": None, "summary": 1},
        {"stride": None, "summary": 3},
        {"stride": None, "summary": 3, "step": 1},
        {"stride": None, "summary": 3, "step": 2},
        {"stride": None, "summary": 1, "step": 2},
    ],
    "ltr": [
        {"stride": 6, "summary": 2},
        {"stride": 6, "summary": 5},
        {"stride": 6, "summary": 6},
        {"summary": 3},
        *({"stride": 6, "summary": 2, "step": step} for step in (1, 2)),
        {"stride": 6, "summary": 6, "step": 2},
        {"summary": 2, "step": 2},
        {"stride": 6, "summary": 2, "both_directions": True},
        {"stride": 6, "summary": 3, "both_directions": True},
        {"stride": 7, "summary": 3, "both_directions": True},
        {"summary": 2, "both_directions": True},
        *({"stride": 6, "summary": 2, "both_directions": True, "step": step} for step in (1, 2, 3, 4)),
        {"stride": 6, "summary": 2, "both_directions": True, "mode": "heads"},
    ],
    "longformer": [
        {"window": 4},
        {"window": 1},
        {"window": 5, "global_tokens": [0, 1, 5]},
        {"window": 4, "global_tokens": [2]},
        {"window": 4, "global_tokens": [3, 4]},
        {"window": 4, "global_tokens": "separator", "separator": 1},
        {"window": 4, "global_tokens": "question", "separator": 1},
    ],
    "bigbird": [
        {"block": 3, "random": 0},
        {"block": 3, "random": 2},
        {"block": 3, "random": 2, "compatible": True},
        {"block": 3, "random": 0, "compatible": True},
        {"block": 1, "random": 1},
    ],
    "sinks": [{"sinks": 2, "window": 4}, {"sinks": 0, "window": 1}],
    "lsh": [
        {"cluster": 4, "rounds": 1},
        {"cluster": 4, "rounds": 3},
        {"cluster": 5, "dedup": True, "rounds": 1},
        {"cluster": 4, "variant": "shared", "rounds": 2},
        {"cluster": 4, "rounds": 1, "window": 2},
        {"cluster": 4, "rounds": 1, "window": 7, "sinks": 2},
    ],
    "adaptive-span": [{"max_span": 3, "ramp": 2}, {"max_span": 7, "ramp": 40}, {"start": "calibrated", "max_span": 9}],
}
SETTINGS["rtl"] = SETTINGS["ltr"]
CASES = [
    pytest.param(name, causal, settings, id=f"{name}-{'causal' if causal else 'bidirectional'}-{settings}")
    for name, kind in MECHANISMS.items()
    for causal in (False, True)
    if (kind.supports_causal if causal else kind.supports_bidirectional)
    for settings in ({}, *SETTINGS.get(name, []))
    if not (causal and settings.get("global_tokens") in ("separator", "question"))
]


def make(name, causal, settings) -> Any:
    mechanism = MECHANISMS[name](HEADS, SIZE, causal=causal, scale=0.25, **settings)
    if mechanism.needs_calibration:
        with torch.no_grad():
            mechanism.calibrate(*torch.randn(3, 2, HEADS, 90, SIZE))
    return mechanism


def damage(mechanism, length):
    """Largest difference from exact attention in each head, among three random inputs without a separator."""
    q, k, v = torch.randn(3, 3, HEADS, length, SIZE)
    tokens = {"tokens": torch.zeros(3, length, dtype=torch.long)} if mechanism.reads_tokens else {}
    exact = MECHANISMS["full"](HEADS, SIZE, causal=mechanism.causal, scale=0.25)
    with torch.no_grad():
        return (mechanism(q, k, v, **tokens) - exact(q, k, v)).abs().amax((0, 2, 3))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "causal", "settings"), CASES)
def test_all_heads_differ_at_that_length_and_not_before(name, causal, settings):
    mechanism = make(name, causal, settings)
    start = mechanism.approximates_from()
    if start is None:
        assert max(damage(mechanism, length).max() for length in (1, 2, 7, 33, 70, 130)) < ROUNDING
        return
    shorter = range(max(1, start - 12), start)
    assert all(damage(mechanism, length).min() < ROUNDING for length in shorter), "it approximates before"
    for length in (start, start + 1, start + 5, 2 * start):
        assert damage(mechanism, length).min() > ROUNDING, f"some head is exact at {length}"


@pytest.mark.parametrize(("name", "causal", "settings"), CASES)
@pytest.mark.sample(4)
def test_some_head_differs_at_that_length_and_none_before(name, causal, settings):
    mechanism = make(name, causal, settings)
    start = mechanism.differs_from()
    if start is None:
        assert mechanism.approximates_from() is None
        return
    assert all(damage(mechanism, length).max() < ROUNDING for length in range(max(1, start - 12), start))
    assert damage(mechanism, start).max() > ROUNDING


def test_the_trained_spans_count_and_not_the_longest_one_that_is_allowed():
    mechanism = make("adaptive-span", False, {"max_span": 50})
    assert mechanism.approximates_from() == 52
    with torch.no_grad():
        mechanism.fraction.copy_(torch.tensor([0.1, 0.2, 0.0, 0.13]))
    assert mechanism.approximates_from() == 12
    assert mechanism.differs_from() == 2


def test_heads_that_take_steps_in_turn_wait_for_the_last_step_that_a_head_takes():
    heads = {"stride": 9, "mode": "heads"}
    assert MECHANISMS["strided"](2, 8, causal=True, scale=1.0, **heads).approximates_from() == 10
    assert MECHANISMS["strided"](2, 8, causal=True, scale=1.0, **heads).differs_from() == 2
    assert MECHANISMS["fixed"](1, 8, causal=True, scale=1.0, **heads).approximates_from() == 10
    assert MECHANISMS["ltr"](1, 8, causal=False, scale=1.0, **heads).approximates_from() == 2


def test_groups_of_heads_wait_for_the_last_group_that_approximates():
    def local(left):
        return LocalAttention(1, SIZE, causal=True, scale=0.25, left=left)

    exact = MECHANISMS["sdpa"](2, SIZE, causal=True, scale=0.25)
    mixed = HeadGroups([([0], local(3)), ([1, 2], exact), ([3], local(20))])
    assert mixed.approximates_from() == 22
    assert mixed.differs_from() == 5
    assert damage(mixed, 21)[3] < ROUNDING
    assert (damage(mixed, 22) > ROUNDING).tolist() == [True, False, False, True]
    assert HeadGroups([([0, 1], exact)]).approximates_from() is None
