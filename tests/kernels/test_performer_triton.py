"""Performer attention by kernels against its specification in float64, forward and every gradient.

Under Triton's interpreter, which takes a second for a few dozen tokens, or on a GPU where there is one.
"""

from functools import partial
from typing import Any

import pytest
import torch
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import triton_cases
from approx_kernels.dispatch.implementation import chosen
from approx_kernels.ops.linear import triton as cutting
from approx_kernels.ops.performer import triton as launching
from approx_kernels.ops.performer import triton_launches as launches
from approx_kernels.ops.performer.api import draw_projection, performer_attention, performer_decode
from closeness import assert_close, at_real_queries
from triton_cases import DEVICE, ON_DEVICE, by_direction, draw, multiplies_bfloat16, spoilt

pytest.importorskip("triton")

pytestmark = ON_DEVICE
KERNEL = pytest.mark.parametrize("kernel", ["softmax", "relu"])


def projection(size, features=24):
    return draw_projection(size, features=features, orthogonal=True, seed=0).to(DEVICE)


def attend(q, k, v, key_mask=None, *, impl: Any = "triton", features=24, rows=None, **how):
    rows = projection(q.shape[3], features) if rows is None else rows
    out = performer_attention(q, k, v, key_mask, projection=rows, scale=0.25, impl=impl, **how)
    return at_real_queries(out, key_mask)


run = partial(triton_cases.run, attend)


def check(tensors, key_mask=None, factor=4.0, **how):
    # Sums over tiles round differently from a single sum.
    triton_cases.check(attend, tensors, key_mask, factor=factor, **how)


def mask(keys):
    """Samples with holes, with a first half that is padding, and without keys."""
    place = torch.arange(keys, device=DEVICE)
    return torch.stack([place % 3 != 1, place >= keys // 2, place < 0])


def risen(length, *steps):
    """Inputs whose keys are far below zero in all logarithms, and from each of some places on at another height."""
    q, k, v = draw(length, length)
    k[:, :, 1:] = k[:, :, :1] + k[:, :, 1:] / 20
    for place, height in steps:
        # A key of length n has logarithms about -n^2 / 2, in its direction higher ones.
        k[:, :, place:] = torch.nn.functional.normalize(k[:, :, place:], dim=-1) * (2 * height / 0.25) ** 0.5
    return [q, k, v]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fill outputs, sums and saved tensors with NaN before kernels run; a few tokens have several segments."""
    monkeypatch.setattr(launches, "empty", spoilt(launches.empty))
    for name in ("_fake_forward", "_fake_backward"):
        monkeypatch.setattr(launching, name, spoilt(getattr(launching, name), -9))
    monkeypatch.setattr(cutting, "LEAST", 64)


@pytest.mark.slow
@KERNEL
@by_direction
@pytest.mark.parametrize(("length", "keys"), [(37, 37), (1, 100), (20, 150), (70, 37)])
def test_lengths(kernel, causal, length, keys):
    check(draw(length, keys, values=32), kernel=kernel, causal=causal)


@KERNEL
@by_direction
@pytest.mark.sample(1)
def test_key_masks(kernel, causal):
    check(draw(45, 45, batch=3), mask(45), kernel=kernel, causal=causal)


def of_each_head(heads, size=16, features=24) -> dict[str, Any]:
    """Rows and weights of heads that differ."""
    rows = torch.stack([draw_projection(size, features=features, orthogonal=True, seed=seed) for seed in range(heads)])
    return {"rows": rows.to(DEVICE), "offsets": torch.randn(heads, features).to(DEVICE)}


@pytest.mark.slow
@by_direction
@pytest.mark.sample(1)
def test_rows_and_weights_of_each_head(causal):
    per_head = of_each_head(2)
    tensors = draw(9, 40, heads=2, batch=2)
    check(tensors, causal=causal, **per_head)
    # The weights of one head do not affect others.
    changed = per_head | {
        "offsets": per_head["offsets"] + 2 * torch.arange(2, device=DEVICE)[:, None] * per_head["offsets"]
    }
    one, other = (attend(*tensors, causal=causal, **each) for each in (per_head, changed))
    assert torch.equal(one[:, 0], other[:, 0])
    assert not torch.equal(one[:, 1], other[:, 1])


@pytest.mark.slow
def test_rows_of_each_head_without_weights_in_half_precision_and_with_masks():
    rows: Any = {"rows": of_each_head(2)["rows"]}
    check(draw(70, 70, heads=2, dtype=torch.float16), causal=True, **rows)
    check(draw(45, 45, heads=2, batch=3), mask(45), causal=True, kernel="relu", **rows)
    check([x.repeat(1, 2, 1, 1) for x in risen(70, (0, 90), (40, 2))], causal=True, **of_each_head(2))


@pytest.mark.slow
@pytest.mark.parametrize(("size", "values"), [(32, 128), (64, 64), (80, 16), (96, 96), (128, 32)])
def test_head_sizes(size, values):
    check(draw(20, 20, size=size, values=values), causal=True, features=16)


@pytest.mark.slow
@by_direction
@pytest.mark.parametrize("features", [1, 16, 50])
def test_numbers_of_features(causal, features):
    check(draw(20, 37, heads=2), causal=causal, features=features)


@by_direction
@pytest.mark.sample(1)
def test_half_precision(causal):
    check(draw(70, 70, dtype=torch.float16), causal=causal)


@multiplies_bfloat16
@KERNEL
@by_direction
def test_bfloat16(kernel, causal):
    check(draw(300, 300, size=64, dtype=torch.bfloat16), kernel=kernel, causal=causal, features=256)


@pytest.mark.slow
@by_direction
@pytest.mark.parametrize(("size", "dtype"), [(80, torch.float16), (128, torch.float16), (80, torch.float32)], ids=str)
def test_tiles_of_other_heads(causal, size, dtype):
    check(draw(40, 40, size=size, dtype=dtype), causal=causal)


# Rises per chunk of 32 tokens, and the keys in each chunk that raise the maximum.
RISES = {
    "at once": (((0, 300), (1, 2)), [[1], [], []]),
    "in the middle of a chunk": (((0, 110), (17, 2)), [[17], [], []]),
    "in a later chunk": (((0, 90), (40, 2)), [[], [8], []]),
    "twice": (((0, 500), (35, 250), (44, 2)), [[], [3, 12], []]),
    "and falls again": (((0, 90), (40, 2), (41, 90)), [[], [8], []]),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", RISES)
def test_keys_that_rise_far_above_all_earlier_ones(what):
    steps, expected = RISES[what]
    tensors = risen(70, *steps)
    check(tensors, causal=True)
    *_, rises, _, _ = launching.performer_forward(*tensors, projection(16), None, None, True, False, "softmax", 0.25)
    assert [[place for place in range(32) if bits >> place & 1] for bits in rises[0, 0].tolist()] == expected


@pytest.mark.slow
def test_rises_under_a_key_mask_and_with_few_queries():
    q, k, v = (x.repeat(3, 1, 1, 1) for x in risen(70, (0, 150), (40, 2)))
    check([q[:, :, 38:], k, v], mask(70), causal=True)


@pytest.mark.slow
def test_rises_in_half_precision():
    # Gradients are differences of keys that are much longer than they; s comes of outputs of 16 bits, as in flash attention.
    # Tensor cores truncate features to 10 bits (TF32); the interpreter does not.
    check([x.half() for x in risen(70, (0, 150), (40, 2))], causal=True, factor=40.0 if DEVICE == "cpu" else 80.0)


def test_exponents_are_right_where_they_are_large():
    # Logarithms of +-30, as one rounding of the projection to 16 bits would move by a tenth.
    q, k, v = draw(40, 40, dtype=torch.float16)
    # Tensor cores truncate features to 10 bits (TF32); the interpreter does not.
    check([q * 8, k * 8, v], causal=False, factor=4.0 if DEVICE == "cpu" else 16.0)


@pytest.mark.slow
@KERNEL
@pytest.mark.parametrize(("past", "future"), [(1.0, 3.0), (1.0, 100.0), (30.0, 0.01)])
@pytest.mark.parametrize("cut", [0, 31, 32])
def test_later_keys_change_no_bit_of_a_query(kernel, past, future, cut):
    q, k, v = draw(70, 70)
    later = (torch.arange(70, device=DEVICE) > cut)[:, None]
    q, k, v = (x * past for x in (q, k, v))
    changed = [torch.where(later, x / past * -future + future, x) for x in (q, k, v)]
    real = (torch.arange(70, device=DEVICE) % 5 != 2)[None]
    before, after = (attend(*x, key_mask=real, kernel=kernel, causal=True, features=16) for x in ((q, k, v), changed))
    assert torch.equal(before[:, :, : cut + 1], after[:, :, : cut + 1])


@pytest.mark.slow
@by_direction
def test_large_inputs_overflow_nothing(causal):
    tensors = [x * 60 for x in draw(37, 37)]
    assert all(torch.isfinite(x).all() for x in run(tensors, causal=causal))


@by_direction
@pytest.mark.sample(0)
def test_masked_keys_and_values_are_not_read(causal):
    q, k, v = draw(45, 45, batch=3)
    real = mask(45)
    for x in (k, v):
        x.masked_fill_(~real[:, None, :, None], torch.nan)
    computed = run([q, k, v], real, "triton", causal=causal)
    assert all(torch.isfinite(x).all() for x in computed)
    assert all((x[2] == 0).all() for x in computed)
    assert all((x[0, 0, 1::3] == 0).all() for x in computed[2:])


@by_direction
@pytest.mark.sample(1)
def test_strides_do_not_matter(causal):
    triton_cases.check_strides(attend, heads=2, causal=causal)


@pytest.mark.slow
@by_direction
def test_it_repeats_bit_by_bit(causal):
    triton_cases.check_repeats(attend, length=70, causal=causal)


@pytest.mark.parametrize(("kernel", "causal", "whole"), [("softmax", True, True), ("relu", False, False)])
@pytest.mark.sample(0)
def test_the_operator_passes_opcheck(kernel, causal, whole):
    q, k, v = (x.requires_grad_() for x in draw(17, 17))
    opcheck(launching.performer_forward.operator, (q, k, v, projection(16), None, None, causal, whole, kernel, 0.25))


@pytest.mark.slow
@KERNEL
def test_it_compiles_without_a_break(kernel):
    how = {"rows": projection(16), "kernel": kernel, "causal": True}
    triton_cases.check_compiles(attend, draw(37, 37, batch=3), mask(37), **how)


@pytest.mark.sample(0)
def test_operations_are_counted():
    q, k, v = (x.requires_grad_() for x in draw(20, 30, values=32, heads=2))
    with FlopCounterMode(display=False) as counter:
        out = attend(q, k, v, causal=True)
        forward = counter.get_total_flops()
        out.sum().backward()
    pairs = 20 * 30 * (24 + 32)
    assert forward == 2 * 2 * (24 * 48 * (20 + 30) + 20 * 24 * 16 + pairs)
    features = 24 * (20 * (5 * 16 + 2 * 32) + 30 * (3 * 16 + 3 * 32))
    assert counter.get_total_flops() - forward == 2 * 2 * (features + 3 * pairs)


@KERNEL
@pytest.mark.parametrize(("length", "keys"), [(70, 70), (9, 70)])
@pytest.mark.sample(1)
def test_a_prompt_leaves_the_state_that_tokens_follow(kernel, length, keys):
    q, k, v = draw(length, keys, batch=3)
    how: Any = {"projection": projection(16), "kernel": kernel, "scale": 0.25}
    wide = [x.double() for x in (q, k, v)]
    computed, plain, exact = (
        performer_decode(*tensors, key_mask=mask(keys), **how, impl=impl)
        for tensors, impl in (((q, k, v), "triton"), ((q, k, v), "reference"), (wide, "reference"))
    )
    outs = [at_real_queries(each[0], mask(keys)) for each in (computed, plain, exact)]
    assert_close("out", outs[0], outs[1], outs[2], factor=4.0)
    assert computed[1].keys() == plain[1].keys()
    for name in computed[1]:
        torch.testing.assert_close(computed[1][name], plain[1][name], rtol=1e-4, atol=1e-4)


REFUSED = {
    "a state": (
        lambda q, how: performer_decode(q, q, q, None, {}, **how),
        "expected the dictionary that the last call returned",
    ),
    "queries alone": (lambda q, how: performer_decode(q, q[:, :, :2], q[:, :, :2], **how), "5 queries and 2 keys"),
    "gradients": (lambda q, how: performer_decode(q.requires_grad_(), q, q, **how), "no_grad"),
    "dropout": (lambda q, how: performer_attention(q, q, q, **how, causal=True, dropout=0.1), "drop no keys"),
    "a learned projection": (
        lambda q, how: performer_attention(
            q, q, q, **(how | {"projection": how["projection"].requires_grad_()}), causal=True
        ),
        "no gradient of the projection",
    ),
    "a head size": (
        lambda q, how: performer_attention(*(q[..., :12],) * 3, **(how | {"projection": projection(12)}), causal=True),
        "head size is 12; allowed",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refuses_unsupported_forms(what):
    call, said = REFUSED[what]
    with pytest.raises(ValueError, match=said):
        call(draw(5, 5)[0], {"projection": projection(16), "scale": 0.25, "impl": "triton"})


@pytest.mark.skipif(DEVICE == "cuda", reason="there auto takes the kernels")
def test_the_interpreter_runs_only_on_request():
    attend(*draw(5, 5), impl="auto", causal=True)
    assert chosen()["performer_attention"] != "triton"


def test_a_prompt_with_rows_and_weights_of_each_head():
    per_head = of_each_head(2)
    how: Any = {"projection": per_head["rows"], "offsets": per_head["offsets"], "scale": 0.25}
    tensors = draw(40, 40, heads=2)
    (out, state), (expected, expected_state) = (
        performer_decode(*tensors, **how, impl=impl) for impl in ("triton", "reference")
    )
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    for name in expected_state:
        torch.testing.assert_close(state[name], expected_state[name], rtol=1e-4, atol=1e-4)
