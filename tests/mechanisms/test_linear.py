"""Linear attention: recurrent = chunked = parallel, and its own dropout."""

import pytest
import torch
from torch.nn import functional as F

from approx.mechanisms import MECHANISMS


def make(*, causal, **settings):
    return MECHANISMS["linear"](2, 8, causal=causal, scale=0.25, **settings)


def recurrent(q, k, v, eps=1e-6):
    """One token after another with the state (S, z), as a decoder would."""
    state, norm, out = torch.zeros(1, 2, 8, v.shape[-1]), torch.zeros(1, 2, 8), []
    for i in range(q.shape[2]):
        query, key = F.elu(q[:, :, i]) + 1, F.elu(k[:, :, i]) + 1
        state = state + key[..., :, None] * v[:, :, i, None, :]
        norm = norm + key
        out.append((query[..., None, :] @ state).squeeze(2) / ((query * norm).sum(-1, keepdim=True) + eps))
    return torch.stack(out, 2)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_recurrent_chunked_and_parallel_are_the_same(length):
    q, k, v = torch.randn(3, 1, 2, length, 8).unbind()
    chunked = make(causal=True)(q, k, v)
    torch.testing.assert_close(chunked, recurrent(q, k, v), atol=1e-5, rtol=1e-5)
    parallel = [make(causal=False)(q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1]) for i in range(length)]
    torch.testing.assert_close(chunked, torch.cat(parallel, 2), atol=1e-5, rtol=1e-5)


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
def test_dropout_takes_whole_keys_out_of_the_numerator_only(causal):
    q, k, _ = torch.randn(3, 1, 2, 20, 8).unbind()
    keys = torch.eye(20).expand(1, 2, 20, 20)
    weights = make(causal=causal)(q, k, keys)
    dropped = make(causal=causal)(q, k, keys, dropout=0.5)
    factor = torch.where(weights > 0, dropped / weights, 0.0).amax(2, keepdim=True)
    assert set(factor.round(decimals=3).flatten().tolist()) == {0.0, 2.0}
    torch.testing.assert_close(dropped, weights * factor.round())
