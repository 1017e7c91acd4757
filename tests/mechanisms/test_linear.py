"""Linear attention: its formula, what is learned, and dropout, also that of random features."""

import pytest
import torch
from torch.nn import functional as F

from approx.mechanisms import MECHANISMS
from approx.mechanisms.linear import LinearAttention
from forms import plain


def make(*, causal, **settings):
    return LinearAttention(2, 8, causal=causal, scale=0.25, **plain("linear", settings))


def test_more_queries_than_keys_leaves_the_first_ones_without_any():
    q, k, v = torch.randn(1, 2, 9, 8), *torch.randn(2, 1, 2, 4, 8).unbind()
    out = make(causal=True)(q, k, v)
    assert out[:, :, :5].eq(0).all()
    torch.testing.assert_close(out[:, :, 5:], make(causal=True)(q[:, :, 5:], k, v))


def test_it_is_its_formula_and_scaled_inputs_scale_both():
    q, k, v = torch.randn(3, 1, 2, 30, 8).unbind()
    for scaled in (False, True):
        factor = 0.5 if scaled else 1.0
        weights = (F.elu(factor * q) + 1) @ (F.elu(factor * k) + 1).transpose(-2, -1)
        expected = weights @ v / (weights.sum(-1, keepdim=True) + 1e-3)
        out = make(causal=False, eps=1e-3, scale_inputs=scaled)(q, k, v)
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("linear", {}),
        ("performer", {"estimator": "positive", "floor": 0.0}),
        ("performer", {"estimator": "positive", "floor": 0.0, "kernel": "relu"}),
    ],
)
def test_dropout_takes_whole_keys_out_of_the_numerator_only(name, settings, causal):
    q, k, _ = torch.randn(3, 1, 2, 20, 8).unbind()
    keys = torch.eye(20).expand(1, 2, 20, 20)
    mechanism = MECHANISMS[name](2, 8, causal=causal, scale=0.25, **plain(name, settings))
    weights, dropped = mechanism(q, k, keys), mechanism(q, k, keys, dropout=0.5)
    factor = torch.where(weights > 1e-6, dropped / weights, 0.0).amax(2, keepdim=True)
    assert set(factor.round(decimals=3).flatten().tolist()) == {0.0, 2.0}
    torch.testing.assert_close(dropped, weights * factor.round())


@pytest.mark.parametrize(
    ("settings", "learned"),
    [
        ({}, {}),
        ({"feature_map": "relu"}, {}),
        ({"feature_map": "softmax"}, {}),
        ({"feature_map": "t2r"}, {"query_map": (2, 9, 8), "key_map": (2, 9, 8)}),
        ({"feature_map": "hedgehog"}, {"query_map": (2, 8, 8), "key_map": (2, 8, 8)}),
        ({"window": 3}, {"mix": (2,)}),
    ],
    ids=str,
)
def test_settings_say_what_can_be_learned(settings, learned):
    mechanism = make(causal=True, **settings)
    assert {name: tuple(p.shape) for name, p in mechanism.named_parameters()} == learned
    assert set(mechanism.state_dict()) == set(learned)


@pytest.mark.parametrize("causal", [False, True])
def test_learned_maps_start_as_the_identity_and_the_mix_at_a_tenth(causal):
    q, k, v = torch.randn(3, 1, 2, 30, 8).unbind()
    plain = make(causal=causal, feature_map="relu")(q, k, v)
    torch.testing.assert_close(make(causal=causal, feature_map="t2r")(q, k, v), plain)
    weights = make(causal=causal, feature_map="hedgehog", eps=1e-12).weights(q, k)
    both = [torch.cat([x.softmax(-1), (-x).softmax(-1)], -1) for x in (q, k)]
    expected = both[0] @ both[1].transpose(-2, -1)
    expected = expected.tril() if causal else expected
    torch.testing.assert_close(weights, expected / expected.sum(-1, keepdim=True))
    (mix,) = make(causal=causal, window=2).parameters()
    torch.testing.assert_close(mix.sigmoid(), torch.full((2,), 0.1))


def test_warns_of_necessary_fine_tuning_without_a_window():
    assert "until it is fine-tuned" in (make(causal=False).warning or "")
    assert make(causal=False, window=4).warning is None


def test_heads_learn_separately():
    q, k, v = torch.randn(3, 1, 2, 30, 8).unbind()
    mechanism = make(causal=False, feature_map="hedgehog", window=4)
    for gradient in torch.autograd.grad(mechanism(q, k, v)[:, 1].sum(), list(mechanism.parameters())):
        assert gradient[0].eq(0).all()
        assert gradient[1].ne(0).any()


def test_a_16_bit_model_computes_its_maps_in_float32():
    q, k, v = torch.randn(3, 1, 2, 30, 8).bfloat16().unbind()
    narrow = make(causal=True, feature_map="hedgehog", window=4).bfloat16()
    wide = make(causal=True, feature_map="hedgehog", window=4)
    wide.load_state_dict(narrow.state_dict())
    torch.testing.assert_close(narrow(q, k, v), wide(q, k, v), atol=0.02, rtol=0.02)
