"""Each mechanism at its exact limit equals exact attention."""

import pytest
import torch

from approx.mechanisms import MECHANISMS
from approx.mechanisms.linear import LinearAttention
from forms import plain

FORMS = [
    pytest.param(name, causal, id=f"{name}-{'causal' if causal else 'bidirectional'}")
    for name, mechanism in MECHANISMS.items()
    for causal in (False, True)
    if mechanism.exact_settings(1) is not None
    and (mechanism.supports_causal if causal else mechanism.supports_bidirectional)
]


@pytest.mark.parametrize(("name", "causal"), FORMS)
@pytest.mark.parametrize("length", [1, 7, 64, 130, 530])
@pytest.mark.parametrize("masked", [False, True], ids=["all real", "masked"])
@pytest.mark.sample(30)
def test_the_exact_limit_is_exact_forward_and_backward(name, causal, length, masked):
    q, k, v, grad = torch.randn(4, 2, 3, length, 16).unbind()
    mask = torch.rand(2, length) < 0.8 if masked else torch.ones(2, length, dtype=torch.bool)
    mask[:, 0] = True
    settings = MECHANISMS[name].exact_settings(length)
    assert settings is not None
    exact = MECHANISMS["full"](3, 16, causal=causal, scale=0.25)
    limit = MECHANISMS[name](3, 16, causal=causal, scale=0.25, **settings)
    real = mask[:, None, :, None]
    results = []
    for mechanism in (exact, limit):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = mechanism(*inputs, mask if masked else None) * real
        results.append([out, *torch.autograd.grad(out, inputs, grad)])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("name", "causal"), FORMS)
@pytest.mark.parametrize("padding", [(0, 0), (37, 0), (0, 41), (37, 41)], ids=["none", "left", "right", "both sides"])
@pytest.mark.sample(50)
def test_the_exact_limit_is_exact_for_the_real_queries_of_fewer_than_there_are_keys(name, causal, padding):
    q, (k, v) = torch.randn(2, 3, 200, 16), torch.randn(2, 2, 3, 300, 16)
    mask = torch.ones(2, 300, dtype=torch.bool)
    mask[0, : padding[0]] = mask[0, 300 - padding[1] :] = False
    exact = MECHANISMS["full"](3, 16, causal=causal, scale=0.25)
    limit = MECHANISMS[name](3, 16, causal=causal, scale=0.25, **MECHANISMS[name].exact_settings(300) or {})
    # The queries are the last tokens. Outputs of right padding are undefined; patterns return 0.
    real = mask[:, None, 100:, None]
    torch.testing.assert_close(limit(q, k, v, mask) * real, exact(q, k, v, mask) * real, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("feature_map", ["elu", "relu", "softmax", "t2r", "hedgehog"])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_a_window_over_everything_leaves_nothing_to_any_feature_map(feature_map, causal):
    q, k, v = torch.randn(3, 2, 3, 130, 16).unbind()
    settings = plain("linear", {"feature_map": feature_map, "window": 130})
    linear = LinearAttention(3, 16, causal=causal, scale=0.25, **settings)
    exact = MECHANISMS["full"](3, 16, causal=causal, scale=0.25)
    torch.testing.assert_close(linear(q, k, v), exact(q, k, v), atol=1e-5, rtol=1e-5)


def test_shorter_inputs_are_exact_under_the_settings_of_longer_ones():
    q, k, v = torch.randn(3, 1, 2, 20, 8).unbind()
    for name, mechanism in MECHANISMS.items():
        if (settings := mechanism.exact_settings(50)) is not None:
            causal = not mechanism.supports_bidirectional
            out = mechanism(2, 8, causal=causal, scale=0.3, **settings)(q, k, v)
            exact = MECHANISMS["full"](2, 8, causal=causal, scale=0.3)(q, k, v)
            torch.testing.assert_close(out, exact, atol=1e-5, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
