"""Kernels of exact top-k attention against the reference in float64: choices, masks, odd numbers, and every gradient.

Under Triton's interpreter, which takes a second for a few dozen tokens, or on a GPU where there is one.
"""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import triton_cases
from approx_kernels.gpu.launch import Configuration
from approx_kernels.ops.topk import triton_launches
from approx_kernels.ops.topk.api import topk_attention
from approx_kernels.ops.topk.triton import topk_forward
from approx_kernels.ops.topk.triton_launches import Launches
from closeness import at_real_queries
from triton_cases import DEVICE, HALF, ON_DEVICE, by_direction, draw, spoilt

pytest.importorskip("triton")

pytestmark = ON_DEVICE


def attend(q, k, v, key_mask=None, *, topk=4, causal=False, impl: Any = "triton", **how):
    return topk_attention(q, k, v, key_mask, topk=topk, causal=causal, scale=0.3, impl=impl, **how)


def at_real(*tensors, key_mask=None, **how):
    return at_real_queries(attend(*tensors, key_mask=key_mask, **how), key_mask)


run = partial(triton_cases.run, at_real)
# Sums over parts, with scores in base 2, round a few times more than a single sum; how often depends on the processor
# where NumPy's products stand in for a GPU's.
check = partial(triton_cases.check, at_real, factor=10.0)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fill the outputs of kernels with NaN, or indices out of range, before they run."""
    monkeypatch.setattr(torch.Tensor, "new_empty", spoilt(torch.Tensor.new_empty))
    monkeypatch.setattr(torch, "empty_like", spoilt(torch.empty_like))


def mask(length):
    """Samples with holes, without padding, of one token and of none."""
    position = torch.arange(length, device=DEVICE)
    return torch.stack([position % 3 != 0, position < length, position == 4, position < 0])


@pytest.mark.slow
@settings(max_examples=6)
@given(
    queries=st.integers(1, 40),
    keys=st.integers(1, 50),
    square=st.booleans(),
    causal=st.booleans(),
    fill=st.sampled_from([None, 0.0, 0.2, 0.7]),
    topk=st.sampled_from([2, 7, 33, 300]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    seed=st.integers(0, 1000),
)
def test_equals_the_reference(queries, keys, square, causal, fill, topk, dtype, seed):
    torch.manual_seed(seed)
    q, k, v = draw(queries, queries if square else keys, batch=2, dtype=dtype)
    real = None if fill is None else torch.rand(2, k.shape[2]).to(DEVICE) < fill
    results = [
        run([x.to(wide) for x in (q, k, v)], real, impl, topk=topk, causal=causal)
        for impl, wide in (("triton", dtype), ("reference", dtype), ("reference", torch.float64))
    ]
    for name, computed, plain, exact in zip(("out", "dq", "dk", "dv"), *results, strict=True):
        # Gradients of a query that keeps one or two keys nearly cancel, so compare errors with their terms.
        error, rounding = ((x.double() - exact).square().mean().sqrt() for x in (computed, plain))
        assert error <= 6.0 * max(rounding, torch.finfo(dtype).eps), name


@pytest.mark.slow
@by_direction
def test_padding(causal):
    check(draw(35, 35, batch=4), mask(35), causal=causal)


@pytest.mark.slow
@pytest.mark.parametrize(("length", "keys"), [(9, 41), (41, 20)])
def test_other_numbers_of_keys_than_of_queries(length, keys):
    check(draw(length, keys, batch=2, heads=2), mask(keys)[:2], causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["float32", "16 bits"])
@pytest.mark.parametrize("size", [32, 80, 128])
def test_head_sizes(size, dtype):
    check(draw(17, 40, size=size, values=16 if size == 80 else size, dtype=dtype))


@pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter takes too long for so many")
def test_many_tokens():
    check(draw(3000, 3000, size=64, values=64, heads=2, batch=4, dtype=HALF), mask(3000), topk=32, causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("topk", [25, 10**9])
@by_direction
def test_keeping_all_keys_is_exact(topk, causal):
    (q, k, v), real = draw(25, 25, batch=2), mask(25)[[0, 3]]
    pairs = real[:, None, None].expand(2, 1, 25, 25)
    scores = (q @ k.mT * 0.3).masked_fill(~(pairs.tril() if causal else pairs), -torch.inf)
    computed = attend(q, k, v, real, topk=topk, causal=causal)
    torch.testing.assert_close(computed, scores.softmax(-1).nan_to_num() @ v)


def test_equal_scores_do_not_add_keys():
    q, k = torch.zeros(1, 1, 4, 16, device=DEVICE), torch.ones(1, 1, 70, 16, device=DEVICE)
    weights = attend(q, k, torch.eye(70, 80, device=DEVICE)[None, None], topk=33)
    torch.testing.assert_close(weights.sort(-1).values[..., -33:], torch.full((1, 1, 4, 33), 1 / 33, device=DEVICE))
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 1, 4, device=DEVICE))


def chosen(scores, topk, key_mask=None):
    """The chosen keys of some rows, and their scores."""
    rows, keys = scores.shape
    x = scores.new_zeros(1, 1, max(rows, keys), 16)
    launches = Launches(x[:, :, :rows], x[:, :, :keys], x[:, :, :keys], topk, False, 1.0)
    best = scores.new_empty(1, 1, rows, topk)
    top = best.new_empty(best.shape, dtype=torch.int32)
    launches.select(scores[None], 0, key_mask, top, best)
    return top[0, 0].long(), best[0, 0]


@pytest.fixture(params=[1024, 32], ids=["in registers", "not in registers"])
def registers(request, monkeypatch):
    """Rows that fit into registers, and rows that do not."""
    cut = Configuration({"BS": request.param, "BW": 16}, 1, 1)
    monkeypatch.setattr(triton_launches, "SELECT", {request.param: (cut,)})


@pytest.mark.slow
@pytest.mark.usefixtures("registers")
@pytest.mark.parametrize("topk", [1, 40])
def test_the_largest_are_chosen_to_the_last_bit(topk):
    bits = torch.randint(-(2**31), 2**31, (6, 83), dtype=torch.int32)
    scores = torch.cat([bits.view(torch.float32), torch.randint(-3, 3, (6, 83)) / 2]).nan_to_num(-0.0).to(DEVICE)
    top, best = chosen(scores, topk)
    assert torch.equal(scores.gather(1, top), best)
    assert torch.equal(best.sort(1, descending=True).values, scores.topk(topk).values)
    assert (top.diff(dim=1) > 0).all()


@pytest.mark.usefixtures("registers")
def test_keys_that_are_not_real_are_never_chosen():
    scores, real = torch.randn(5, 83).to(DEVICE), torch.arange(83).to(DEVICE) % 4 == 1
    scores[:, 1:40] = -torch.inf
    scores[:, ~real] = torch.nan
    top, _ = chosen(scores, 60, real[None].view(torch.uint8))
    expected = torch.cat([real.nonzero()[:, 0], torch.full((60 - 21,), -1, device=DEVICE)])
    assert torch.equal(top, expected.expand(5, -1))


@pytest.mark.slow
def test_nan_is_not_hidden_and_padding_not_read():
    q, k, v = draw(40, 40)
    k[:, :, 20] = torch.tensor([torch.nan, -torch.nan] * 8).to(DEVICE)
    out = attend(q, k, v, causal=True)
    assert out[:, :, 20:].isnan().all()
    assert not out[:, :, :20].isnan().any()
    v[:, :, 20] = torch.nan
    real = torch.arange(40, device=DEVICE)[None] != 20
    for causal in (False, True):
        assert all(torch.isfinite(x).all() for x in run([q, k, v], real, causal=causal))


@pytest.mark.sample(0)
def test_scores_far_below_zero_and_above():
    q, k, v = draw(23, 23)
    check([q + 6, k - 6, v], causal=True)
    check([q + 6, k + 6, v], causal=True)


@pytest.mark.slow
def test_some_queries_after_others_change_nothing(monkeypatch):
    tensors, real = draw(70, 75), mask(75)[:1]
    whole = run(tensors, real, causal=True)
    # 80 scores a row make whole tiles: NumPy rounds a row differently elsewhere in a tile.
    monkeypatch.setattr(triton_launches, "_SCORES", 64 * 80)
    assert all(torch.equal(*each) for each in zip(whole, run(tensors, real, causal=True), strict=True))


@pytest.mark.sample(0)
def test_memory_for_gradients_grows_with_the_kept_keys():
    selected = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: selected.append(x.shape) or x, lambda x: x):
        attend(*(x.requires_grad_() for x in draw(40, 60)), topk=3)
    assert sorted(selected) == sorted([(1, 1, 40, 16), (1, 1, 60, 16), (1, 1, 60, 16), (1, 1, 40), (1, 1, 40, 3)])


@pytest.mark.slow
def test_it_compiles_without_a_break():
    triton_cases.check_compiles(attend, draw(35, 35, batch=2), mask(35)[:2], causal=True)


@pytest.mark.sample(0)
def test_strides_do_not_matter():
    triton_cases.check_strides(attend)


@pytest.mark.slow
def test_it_repeats_bit_by_bit():
    triton_cases.check_repeats(attend, dtype=HALF, causal=True)


@pytest.mark.sample(0)
def test_operators_pass_opcheck():
    q, k, v = (x.requires_grad_() for x in draw(9, 12))
    opcheck(topk_forward.operator, (q, k, v, mask(12)[:1].view(torch.uint8), 3, True, 0.3))


@by_direction
@pytest.mark.sample(0)
def test_operations_are_counted(causal):
    q, k, v = (x.requires_grad_() for x in draw(20, 30, values=32))
    with FlopCounterMode(display=False) as counter:
        out = attend(q, k, v, causal=causal)
        forward = counter.get_total_flops()
        out.sum().backward()
    pairs, chosen = sum(range(11, 31)) if causal else 20 * 30, 20 * 4
    assert forward == 2 * (pairs * 16 + chosen * 32)
    assert counter.get_total_flops() - forward == 2 * (chosen * (2 * 16 + 32) + pairs * 2 * (16 + 32))


def test_names_cases_without_a_kernel():
    with pytest.raises(ValueError, match=r"no dropout, and 0\.1 was asked for\. Set the attention dropout to 0"):
        attend(*draw(9, 9), dropout=0.1)
    with pytest.raises(ValueError, match="head size is 24; allowed are"):
        attend(*draw(9, 9, size=24))
