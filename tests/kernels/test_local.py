"""Local attention equals dense attention under its mask, however the work is cut."""

from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from approx_kernels.dispatch.implementation import chosen
from approx_kernels.ops.patterns import reference
from approx_kernels.ops.patterns.api import local_attention
from c_sources import needs_compiler
from closeness import assert_close, at_real_queries, with_float64


def shown(queries, keys, mask, left, right):
    """Which keys each query sees, [B or 1, 1, L, S]."""
    away = torch.arange(keys) - torch.arange(keys - queries, keys)[:, None]
    seen = ((away >= -left) & (away <= right))[None, None]
    return seen if mask is None else seen & mask[:, None, None]


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (64, 64), (129, 129), (17, 129), (129, 17)])
@pytest.mark.parametrize(("left", "right"), [(0, 0), (9, 4), (0, 5), (70, 20), (500, 500)])
@pytest.mark.parametrize("masked", [False, True], ids=["all real", "masked"])
def test_it_is_dense_attention_under_its_mask_however_it_is_cut(monkeypatch, queries, keys, left, right, masked):
    q, k, v = inputs = [torch.randn(2, 3, n, 8).double().requires_grad_() for n in (queries, keys, keys)]
    mask, grad = torch.rand(2, keys) < 0.7 if masked else None, torch.randn(2, 3, queries, 8).double()
    seen = shown(queries, keys, mask, left, right)
    dense = ((0.3 * q @ k.mT).masked_fill(~seen, -1e30).softmax(-1) * seen) @ v
    expected = at_real_queries(dense, mask)
    wanted = torch.autograd.grad(expected, inputs, grad)
    for block in (64, 5):
        monkeypatch.setattr(reference, "_BLOCK", block)
        out = local_attention(q, k, v, mask, left=left, right=right, scale=0.3, impl="reference")
        out = at_real_queries(out, mask)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(torch.autograd.grad(out, inputs, grad), wanted)


def test_the_window_is_inclusive_on_both_sides():
    keys = torch.eye(30)[None, None]
    seen = local_attention(torch.zeros(1, 1, 30, 4), torch.zeros(1, 1, 30, 4), keys, left=3, right=2, scale=1.0)
    assert seen[0, 0, 10].nonzero().flatten().tolist() == [7, 8, 9, 10, 11, 12]
    assert seen[0, 0, 0].nonzero().flatten().tolist() == [0, 1, 2]
    assert seen[0, 0, 29].nonzero().flatten().tolist() == [26, 27, 28, 29]


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [None, "arbitrary", "nobody"])
@given(
    queries=st.integers(1, 210),
    keys=st.integers(1, 210),
    left=st.integers(0, 150),
    right=st.integers(0, 150),
    size=st.integers(1, 40),
    values=st.integers(1, 40),
)
@settings(max_examples=12)
@example(queries=97, keys=97, left=2**40, right=2**40, size=64, values=64)
@example(queries=129, keys=17, left=128, right=128, size=8, values=24)
@example(queries=17, keys=129, left=70, right=0, size=8, values=24)
@pytest.mark.sample(3)
def test_c_equals_the_reference(dtype, kind, queries, keys, left, right, size, values):
    # Values of one sign, as sums that cancel say nothing; as projections lay heads out.
    q, grad = (torch.randn(2, queries, 2, width).to(dtype) for width in (size, values))
    k, v = (torch.randn(2, keys, 2, width).to(dtype) for width in (size, values))
    mask = None if kind is None else torch.rand(2, keys) < (0.7 if kind == "arbitrary" else 0.0)
    q, k, v, grad = (x.transpose(1, 2) for x in (q, k, v.abs(), grad))
    attend = partial(local_attention, key_mask=mask, left=left, right=right, scale=0.3)
    for name, actual, plain, exact in with_float64(attend, (q, k, v), grad, dtype):
        if name in ("out", "dv"):
            assert_close(name, actual, plain, exact, factor=4.0)
        else:
            # Differences that nearly cancel if a query sees one or two keys, so compare errors with their terms.
            terms = uncancelled(q.double(), k.double(), v.double(), grad.double(), mask, left, right)[name]
            error, rounding = ((x.double() - exact).square().mean().sqrt() for x in (actual, plain))
            assert error <= 4.0 * max(rounding, torch.finfo(dtype).eps * terms), name


def uncancelled(q, k, v, grad, mask, left, right):
    """Root mean squares of the gradients of queries and keys as they would be if no term cancelled another."""
    seen = shown(q.shape[2], k.shape[2], mask, left, right)
    weights = (0.3 * q @ k.mT).masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()
    changes = grad.square() @ v.square().mT
    terms = (0.3 * weights).square() * (changes + (weights * changes).sum(-1, keepdim=True))
    return {"dq": (terms @ k.square()).mean().sqrt(), "dk": (terms.mT @ q.square()).mean().sqrt()}


@needs_compiler
def test_c_runs_where_it_can_and_is_refused_elsewhere():
    q = torch.randn(1, 2, 5, 4)
    local_attention(q, q, q, left=1, right=1, scale=1.0)
    assert chosen()["local_attention"] == "cpu"
    with pytest.raises(ValueError, match="float64; allowed are"):
        local_attention(*(q.double() for _ in range(3)), left=1, right=1, scale=1.0, impl="cpu")
