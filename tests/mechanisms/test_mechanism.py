"""Settings: what constructors accept, reject and store."""

import pytest
import torch

from approx.errors import ApproxError, Exit
from approx.mechanisms import MECHANISMS
from approx.mechanisms.local import LocalAttention
from forms import make as small

DEFAULTS = {
    "full": {},
    "sdpa": {},
    "exact": {},
    "flash": {},
    "clustered": {
        "clusters": "auto",
        "bits": 63,
        "iterations": 3,
        "hash_bias": True,
        "seed": 0,
        "frozen": False,
        "chunk": 256,
        "window": 0,
        "sinks": 0,
        "global_tokens": "none",
        "separator": None,
    },
    "improved-clustered": {
        "clusters": None,
        "topk": 32,
        "bits": 63,
        "iterations": 5,
        "hash_bias": True,
        "seed": 0,
        "frozen": False,
        "chunk": 256,
    },
    "linear": {
        "feature_map": None,
        "eps": 1e-6,
        "scale_inputs": False,
        "window": None,
        "sinks": None,
        "global_tokens": "auto",
        "separator": None,
        "features": None,
        "gate": True,
        "update": "sum",
    },
    "performer": {
        "features": 64,
        "orthogonal": True,
        "kernel": "softmax",
        "estimator": "aderf",
        "floor": None,
        "seed": 0,
        "redraw_every": 0,
        "window": None,
        "sinks": None,
        "global_tokens": "auto",
        "separator": None,
        "learned": True,
    },
    "exact-topk": {"topk": 32},
    "local": {"left": 128, "right": 128},
    "block": {"size": 128, "neighbours": 0, "shift": "alternate"},
    "strided": {"stride": None, "mode": "merged", "step": None},
    "fixed": {"stride": 128, "summary": 8, "mode": "merged", "step": None},
    "ltr": {"stride": None, "summary": 1, "both_directions": False, "mode": "merged", "step": None},
    "rtl": {"stride": None, "summary": 1, "both_directions": False, "mode": "merged", "step": None},
    "bigbird": {"block": 64, "random": 3, "compatible": False, "seed": 0},
    "sinks": {"sinks": 4, "window": 1020},
    "lsh": {
        "variant": "asymmetric",
        "rounds": 4,
        "cluster": 64,
        "buckets": 4,
        "seed": 0,
        "dedup": None,
        "window": 0,
        "sinks": 0,
        "global_tokens": "none",
        "separator": None,
    },
    "longformer": {"window": 512, "global_tokens": "first", "separator": None},
    "adaptive-span": {"max_span": 1024, "ramp": 32, "start": "longest", "keep": 0.99},
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
    *((name, "clusters", wrong) for name in ("clustered", "improved-clustered") for wrong in (-3, 2.5, "many", [25])),
    ("linear", "feature_map", "gelu"),
    ("linear", "feature_map", ["elu"]),
    ("linear", "window", -1),
    ("linear", "window", 64.0),
    ("linear", "eps", 0.0),
    ("linear", "eps", float("nan")),
    ("linear", "eps", "1e-6"),
    ("linear", "scale_inputs", None),
    ("linear", "update", "rule"),
    ("performer", "features", 0),
    ("performer", "features", 256.0),
    ("performer", "orthogonal", "yes"),
    ("performer", "kernel", "exp"),
    ("performer", "estimator", "best"),
    ("performer", "floor", -0.1),
    ("performer", "floor", 1.5),
    ("performer", "floor", True),
    ("performer", "seed", 1.5),
    ("performer", "seed", 2**63),
    ("performer", "redraw_every", -1),
    ("performer", "redraw_every", 2.0),
    ("exact-topk", "topk", 0),
    ("local", "left", -1),
    ("local", "right", 1.5),
    ("block", "size", 0),
    ("block", "neighbours", -1),
    ("block", "shift", 128),
    ("block", "shift", "half"),
    ("strided", "stride", 0),
    ("strided", "mode", "product"),
    ("strided", "mode", ["heads"]),
    ("strided", "step", 3),
    ("fixed", "stride", 0),
    ("fixed", "summary", 0),
    ("fixed", "summary", 129),
    ("fixed", "step", 0),
    ("ltr", "summary", 0),
    ("ltr", "step", True),
    ("ltr", "both_directions", 1),
    ("rtl", "step", 3),
    ("rtl", "stride", 1.0),
    ("bigbird", "block", 0),
    ("bigbird", "random", -1),
    ("bigbird", "compatible", 1),
    ("bigbird", "seed", 0.5),
    ("sinks", "sinks", -1),
    ("sinks", "window", 0),
    ("lsh", "variant", "reformer"),
    ("lsh", "rounds", 0),
    ("lsh", "cluster", 0),
    ("lsh", "buckets", 6),
    ("lsh", "seed", "0"),
    ("lsh", "dedup", 1),
    ("longformer", "window", 0),
    ("longformer", "global_tokens", "last"),
    ("longformer", "separator", -1),
    ("longformer", "global_tokens", []),
    ("longformer", "global_tokens", [0, -1]),
    *(("longformer", "global_tokens", wrong) for wrong in ([3, 3], (0,), None, [True])),
    ("adaptive-span", "max_span", 0),
    ("adaptive-span", "ramp", 0),
    ("adaptive-span", "start", "shortest"),
    ("adaptive-span", "keep", 0.0),
    ("adaptive-span", "keep", 1.01),
    ("adaptive-span", "keep", float("nan")),
]
# Keys per query among 16,384 and among 8,192 tokens: some patterns have more in longer sequences.
MORE_KEYS = {"strided": 512 / 364, "fixed": 1144 / 632, "ltr": 255 / 181, "rtl": 255 / 181, "bigbird": 636 / 632}


def make(name, heads=2, head_dim=8, **settings):
    """The bidirectional form, or the causal one if there is no other."""
    causal = not MECHANISMS[name].supports_bidirectional
    return MECHANISMS[name](heads, head_dim, causal=causal, scale=0.5, **settings)


@pytest.mark.parametrize("name", MECHANISMS)
def test_settings_are_the_keywords_of_the_constructor(name):
    mechanism = make(name)
    assert MECHANISMS[name].defaults() == DEFAULTS[name]
    # A default of None may stand for a number that follows from the form.
    assert mechanism.settings.keys() == DEFAULTS[name].keys()
    assert {(key, repr(value)) for key, value in DEFAULTS[name].items() if value is not None} <= {
        (key, repr(value)) for key, value in mechanism.settings.items()
    }
    again = make(name, **mechanism.settings)
    assert again.settings == mechanism.settings


@pytest.mark.parametrize(("name", "setting", "value"), WRONG, ids=lambda part: str(part))
def test_a_wrong_setting_is_named_with_its_value_and_what_is_allowed(name, setting, value):
    with pytest.raises(ApproxError) as error:
        make(name, **{setting: value})
    assert error.value.exit_code is Exit.USAGE
    assert f"'{setting}'" in str(error.value)
    assert repr(value) in str(error.value)
    assert "allowed is" in str(error.value)


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_mechanism_declares_its_facts(name):
    mechanism = MECHANISMS[name]
    assert "arXiv" in mechanism.source
    assert mechanism.exact_when.endswith(".")
    # Whether some settings add parameters; test_linear checks which.
    assert mechanism.trainable or not list(make(name).parameters())
    assert mechanism.supports_causal or not mechanism.supports_decode
    assert mechanism.decode_state in ("cache", "ring", "recurrent")
    assert mechanism.compiles == "whole" or mechanism.compiles.endswith(".")
    assert mechanism.gradient in ("exact", "through weights, not choices")
    assert mechanism.padding == "any"


@pytest.mark.parametrize(("name", "causal"), [("full", False), ("strided", True), ("bigbird", False)])
def test_a_transform_over_samples_gives_what_a_batch_gives(name, causal):
    mechanism = small(name, causal, heads=2, size=8)
    q, k, v = torch.randn(3, 3, 1, 2, 13, 8).unbind()
    with torch.no_grad():
        batched = torch.func.vmap(mechanism)(q, k, v)
        expected = mechanism(q[:, 0], k[:, 0], v[:, 0])
    torch.testing.assert_close(batched[:, 0], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", MECHANISMS)
def test_costs_grow_with_length_and_only_exact_ones_quadruple(name):
    mechanism = make(name, 12, 64)
    growth = mechanism.flops(16384) / mechanism.flops(8192) / MORE_KEYS.get(name, 1)
    assert growth == pytest.approx(4 if name in ("full", "sdpa", "exact", "flash", "exact-topk") else 2, rel=1e-3)
    assert mechanism.flops(16384) <= MECHANISMS["full"](12, 64, causal=False, scale=0.125).flops(16384)
    assert 0 < mechanism.memory(8192) < mechanism.memory(16384)


def test_printing_a_model_shows_settings():
    mechanism = LocalAttention(2, 8, causal=True, scale=0.5, left=7)
    assert "left=7" in repr(torch.nn.Sequential(mechanism))
