"""Exact top-k attention: dense attention over each query's largest scores."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from approx_kernels.ops.topk import reference
from approx_kernels.ops.topk.api import topk_attention
from c_sources import needs_compiler
from closeness import assert_close, at_real_queries, equal_and_falling_scores, with_float64


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("masked", [False, True], ids=["all real", "masked"])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 63), (129, 129), (17, 129), (129, 17)])
@pytest.mark.parametrize("block", [64, 5])
def test_equals_attention_over_the_kept_keys(monkeypatch, causal, masked, queries, keys, block):
    monkeypatch.setattr(reference, "_BLOCK", block)
    q, k, v = (torch.randn(2, 3, n, 8).double().requires_grad_() for n in (queries, keys, keys))
    mask, grad = torch.rand(2, keys) < (0.7 if masked else 2), torch.randn(2, 3, queries, 8).double()
    allowed = mask[:, None, None].expand(2, 3, queries, keys)
    allowed = allowed.tril(keys - queries) if causal else allowed
    scores = (0.3 * q @ k.transpose(-2, -1)).masked_fill(~allowed, -1e9)
    place = scores.argsort(-1, descending=True).argsort(-1)
    allowed_keys = allowed & (place < 6)
    expected = (scores.masked_fill(~allowed_keys, -1e9).softmax(-1) * allowed_keys) @ v
    actual = topk_attention(q, k, v, mask if masked else None, topk=6, causal=causal, scale=0.3)
    actual, expected = (at_real_queries(x, mask) for x in (actual, expected))
    torch.testing.assert_close(actual, expected)
    for ours, theirs in zip(
        torch.autograd.grad(actual, (q, k, v), grad), torch.autograd.grad(expected, (q, k, v), grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_equal_scores_do_not_add_keys():
    q, keys = torch.zeros(1, 1, 4, 2), torch.eye(9)[None, None]
    weights = topk_attention(q, torch.ones(1, 1, 9, 2), keys, topk=3, causal=False, scale=1.0)
    assert (weights > 0).sum(-1).eq(3).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 1, 4))


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@settings(max_examples=12)
@given(
    queries=st.integers(1, 210),
    keys=st.integers(1, 210),
    square=st.booleans(),
    causal=st.booleans(),
    fill=st.sampled_from([None, 0.0, 0.7]),
    topk=st.sampled_from([1, 7, 32, 300]),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    seed=st.integers(0, 1000),
)
def test_c_equals_the_reference(dtype, queries, keys, square, causal, fill, topk, sizes, seed):
    torch.manual_seed(seed)
    keys = queries if square else keys
    # Values of one sign, so that sums do not cancel; heads laid out as by projections.
    q, grad = (torch.randn(2, queries, 2, width).to(dtype) for width in sizes)
    k, v = (torch.randn(2, keys, 2, width).to(dtype) for width in sizes)
    mask = None if fill is None else torch.rand(2, keys) < fill
    q, k, v, grad = (x.transpose(1, 2) for x in (q, k, v.abs(), grad))

    def attend(q, k, v, impl):
        return at_real_queries(topk_attention(q, k, v, mask, topk=topk, causal=causal, scale=0.3, impl=impl), mask)

    out, *slopes = with_float64(attend, (q, k, v), grad, dtype)
    assert_close(*out, factor=4.0)
    for (name, actual, plain, exact), like in zip(slopes, (q, k, v), strict=True):
        # Gradients of a query that keeps one or two keys nearly cancel, so compare errors with their terms.
        error, rounding = ((x.double() - exact).square().mean().sqrt() for x in (actual, plain))
        terms = like.double().square().mean().sqrt() * grad.double().square().mean().sqrt()
        assert error <= 4.0 * max(rounding, torch.finfo(dtype).eps * terms), name


@needs_compiler
@pytest.mark.parametrize("keys", [257, 259, 262, 266])
def test_c_finds_the_largest_scores_of_rows_of_any_length(keys):
    q, k, v = equal_and_falling_scores(64, keys)
    actual, expected = (
        topk_attention(q, k, v, topk=6, causal=False, scale=0.5, impl=impl)[:, :, 1::2] for impl in ("cpu", "reference")
    )
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@needs_compiler
def test_nan_is_not_hidden_by_c():
    q, k, v = torch.randn(3, 1, 2, 90, 8).unbind()
    k[:, :, 40, 3] = float("nan")
    out = topk_attention(q, k, v, topk=4, causal=True, scale=0.3, impl="cpu")
    assert out[:, :, 40:].isnan().all()
    assert not out[:, :, :40].isnan().any()


def test_names_cases_that_c_does_not_support():
    q = torch.randn(1, 1, 4, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match="float64"):
        topk_attention(q, q, q, topk=2, causal=False, scale=1.0, impl="cpu")
    assert topk_attention(q, q, q, topk=2, causal=False, scale=1.0).shape == q.shape
