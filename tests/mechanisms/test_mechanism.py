"""Settings: what a constructor takes, what it refuses, what it remembers."""

import pytest
import torch

from approx.errors import ApproxError, Exit
from approx.mechanisms import MECHANISMS
from approx.mechanisms.full import FullAttention
from approx.mechanisms.local import LocalAttention

DEFAULTS = {
    "full": {},
    "sdpa": {},
    "clustered": {"clusters": None, "bits": 63, "iterations": 10, "hash_bias": True, "seed": 0},
    "improved-clustered": {
        "clusters": None,
        "topk": 32,
        "bits": 63,
        "iterations": 10,
        "hash_bias": True,
        "seed": 0,
    },
    "linear": {"feature_map": "elu", "eps": 1e-6, "scale_inputs": False},
    "local": {"left": 128, "right": 128},
}

WRONG = [
    ("clustered", "clusters", 0),
    ("clustered", "clusters", 2.0),
    ("clustered", "clusters", True),
    ("clustered", "bits", 0),
    ("clustered", "bits", 64),
    ("clustered", "iterations", 0),
    ("clustered", "hash_bias", 1),
    ("clustered", "seed", -1),
    ("improved-clustered", "topk", 0),
    ("improved-clustered", "topk", "32"),
    ("improved-clustered", "clusters", -1),
    ("linear", "feature_map", "softmax"),
    ("linear", "eps", 0.0),
    ("linear", "eps", float("nan")),
    ("linear", "eps", "1e-6"),
    ("linear", "scale_inputs", None),
    ("local", "left", -1),
    ("local", "right", 1.5),
]


@pytest.mark.parametrize("name", MECHANISMS)
def test_settings_are_the_keywords_of_the_constructor(name):
    mechanism = MECHANISMS[name](2, 8, causal=False, scale=0.5)
    assert MECHANISMS[name].defaults() == mechanism.settings == DEFAULTS[name]
    again = MECHANISMS[name](2, 8, causal=False, scale=0.5, **mechanism.settings)
    assert again.settings == mechanism.settings


@pytest.mark.parametrize(("name", "setting", "value"), WRONG, ids=lambda part: str(part))
def test_a_wrong_setting_is_named_with_its_value_and_what_is_allowed(name, setting, value):
    with pytest.raises(ApproxError) as error:
        MECHANISMS[name](2, 8, causal=False, scale=0.5, **{setting: value})
    assert error.value.exit_code is Exit.USAGE
    assert f"'{setting}'" in str(error.value)
    assert repr(value) in str(error.value)
    assert "allowed is" in str(error.value)


@pytest.mark.parametrize("place", ["heads", "head_dim", "scale"])
def test_what_the_model_passes_is_checked_too(place):
    given = {"heads": 2, "head_dim": 8, "scale": 0.5} | {place: 0}
    with pytest.raises(ApproxError, match=f"'{place}' is 0"):
        FullAttention(**given, causal=False)


@pytest.mark.parametrize("name", [name for name, each in MECHANISMS.items() if not each.supports_causal])
def test_a_missing_causal_form_is_refused(name):
    with pytest.raises(ApproxError, match="no causal form yet") as error:
        MECHANISMS[name](2, 8, causal=True, scale=0.5)
    assert error.value.exit_code is Exit.UNSUPPORTED


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_mechanism_says_what_it_is(name):
    mechanism = MECHANISMS[name]
    assert "arXiv" in mechanism.source
    assert mechanism.exact_when.endswith(".")
    assert mechanism.trainable == any(True for _ in mechanism(2, 8, causal=False, scale=0.5).parameters())
    assert mechanism.supports_causal or not mechanism.supports_decode


@pytest.mark.parametrize("name", MECHANISMS)
def test_costs_grow_with_length_and_only_exact_ones_quadruple(name):
    mechanism = MECHANISMS[name](12, 64, causal=False, scale=0.125)
    growth = mechanism.flops(16384) / mechanism.flops(8192)
    assert growth == pytest.approx(4 if name in ("full", "sdpa") else 2, rel=1e-3)
    assert mechanism.flops(16384) <= MECHANISMS["full"](12, 64, causal=False, scale=0.125).flops(16384)
    assert 0 < mechanism.memory(8192) < mechanism.memory(16384)


def test_settings_show_when_a_model_is_printed():
    mechanism = LocalAttention(2, 8, causal=True, scale=0.5, left=7)
    assert "left=7" in repr(torch.nn.Sequential(mechanism))
