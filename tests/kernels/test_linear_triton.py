"""The kernels of linear attention against their specification in float64, forward and every gradient."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import triton_cases
from approx_kernels.dispatch.implementation import chosen
from approx_kernels.gpu.launch import configuration
from approx_kernels.ops.flash import triton as flash_launching
from approx_kernels.ops.linear import triton as launching
from approx_kernels.ops.linear.api import linear_attention, linear_decode
from closeness import assert_close, at_real_queries
from triton_cases import DEVICE, ON_DEVICE, by_direction, multiplies_bfloat16, spoilt

pytest.importorskip("triton")

pytestmark = ON_DEVICE
draw = partial(triton_cases.draw, heads=2)


def attend(q, k, v, *mix, key_mask=None, impl: Any = "triton", **how):
    form = {"mix": mix[0]} if mix else {}
    return at_real_queries(linear_attention(q, k, v, key_mask, impl=impl, **form, **how), key_mask)


run = partial(triton_cases.run, attend)


def check(tensors, key_mask=None, factor=4.0, **how):
    # Sums over tiles round differently from a single sum; the gradient of a share is the difference of two sums.
    triton_cases.check(attend, tensors, key_mask, factor=(factor, factor, factor, factor, 16.0), **how)


def holes(keys):
    """Two samples: keys missing here and there, and none at all."""
    return torch.stack([torch.arange(keys, device=DEVICE) % 3 != 1, torch.zeros(keys, dtype=torch.bool, device=DEVICE)])


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fill outputs, sums and saved tensors with NaN before kernels run; a few tokens have several segments."""
    for name in ("empty_rows", "empty_gradients", "_fake_sums"):
        monkeypatch.setattr(launching, name, spoilt(getattr(launching, name), 5))
    monkeypatch.setattr(launching, "LEAST", 64)
    monkeypatch.setattr(flash_launching, "_fake_forward", spoilt(flash_launching._fake_forward, 5))


@by_direction
@pytest.mark.parametrize(("length", "keys"), [(37, 37), (1, 150), (20, 150), (150, 90)])
@pytest.mark.sample(2)
def test_lengths(causal, length, keys):
    check(draw(length, keys, values=32, heads=1), causal=causal, input_scale=-0.7)


@by_direction
@pytest.mark.parametrize("feature_map", ["relu", "softmax"])
@pytest.mark.sample(2)
def test_feature_maps(causal, feature_map):
    check(draw(70, 70, heads=1), causal=causal, feature_map=feature_map)


@pytest.mark.parametrize("feature_map", ["t2r", "hedgehog"])
@pytest.mark.sample(1)
def test_learned_maps_get_gradients(feature_map):
    tensors, rows = draw(37, 37, heads=1), 17 if feature_map == "t2r" else 16
    drawn = torch.randn(2, 1, rows, 16).to(DEVICE)
    grads = {}
    for impl, dtype in (("triton", torch.float32), ("reference", torch.float32), ("reference", torch.float64)):
        maps = [x.to(dtype).requires_grad_() for x in drawn.unbind()]
        inputs: Any = [x.to(dtype) for x in tensors]
        out = linear_attention(*inputs, causal=True, feature_map=feature_map, maps=(maps[0], maps[1]), impl=impl)
        grads[impl, dtype] = torch.autograd.grad(out.square().sum(), maps)
    for name, *each in zip(("query map", "key map"), *grads.values(), strict=True):
        assert_close(name, *each, factor=4.0)


@pytest.mark.slow
@by_direction
@pytest.mark.parametrize("window", [0, 5])
def test_many_features_are_summed_in_parts(causal, window, monkeypatch):
    monkeypatch.setattr(launching, "FEATURES", 20)
    tensors = [*draw(37, 60, size=32, heads=1, batch=2), *([mix(1)] if window else [])]
    # All relu features of a part may be 0.
    check(tensors, holes(60), causal=causal, feature_map="relu", window=window, scale=0.3)


@pytest.mark.sample(0)
def test_the_largest_heads_have_twice_as_many_features():
    maps = torch.randn(2, 1, 128, 128).to(DEVICE) / 8
    check(draw(20, 20, size=128, values=128, heads=1), causal=True, feature_map="hedgehog", maps=(maps[0], maps[1]))


@pytest.mark.slow
@pytest.mark.parametrize(("size", "values"), [(32, 128), (64, 64), (80, 16), (96, 96), (128, 32)])
def test_head_sizes(size, values):
    check(draw(20, 20, size=size, values=values, heads=1), causal=True)


@by_direction
@pytest.mark.sample(1)
def test_half_precision(causal):
    check(draw(37, 70, dtype=torch.float16), causal=causal)


@multiplies_bfloat16
@by_direction
def test_bfloat16(causal):
    check(draw(300, 300, size=64, dtype=torch.bfloat16), causal=causal)


@pytest.mark.sample(0)
def test_sums_may_be_greater_than_a_float16():
    # Different numbers, so that gradients do not all cancel.
    # Tensor cores truncate features to 10 bits (TF32); the interpreter does not.
    factor = 4.0 if DEVICE == "cpu" else 8.0
    check([30 * x.abs() for x in draw(150, 150, heads=1, dtype=torch.float16)], causal=True, factor=factor)


@pytest.mark.slow
@by_direction
@pytest.mark.parametrize(("size", "dtype"), [(16, torch.float16), (128, torch.float16), (16, torch.float32)], ids=str)
def test_tiles_for_smaller_cards(causal, size, dtype):
    with configuration(-1):
        check(draw(40, 40, size=size, heads=1, dtype=dtype), causal=causal)


@by_direction
@pytest.mark.parametrize("feature_map", ["elu", "softmax"])
@pytest.mark.sample(1)
def test_key_masks(causal, feature_map):
    check(draw(37, 37, heads=1, batch=2), holes(37), causal=causal, feature_map=feature_map)


def mix(heads):
    return torch.tensor([0.3, 0.8], device=DEVICE)[:heads]


@pytest.mark.slow
@by_direction
@pytest.mark.parametrize(("length", "keys", "window"), [(37, 37, 5), (20, 90, 30), (90, 20, 5), (1, 50, 7)])
def test_windows(causal, length, keys, window):
    # The gradient of one share alone may be all but 0 by chance.
    check([*draw(length, keys, values=32), mix(2)], causal=causal, window=window, scale=0.3)


@by_direction
@pytest.mark.sample(0)
def test_windows_under_a_key_mask(causal):
    tensors = [*draw(37, 37, heads=1, batch=2), mix(1)]
    check(tensors, holes(37), causal=causal, window=3, scale=0.3, feature_map="softmax")


def test_windows_in_half_precision():
    check([*draw(37, 37, heads=1, dtype=torch.float16), mix(1)], causal=True, window=9, scale=0.3)


@by_direction
@pytest.mark.sample(1)
def test_a_window_over_everything_is_softmax_attention(causal):
    q, k, v = draw(20, 20)
    computed = linear_attention(q, k, v, causal=causal, window=20, mix=mix(2), scale=0.3, impl="triton")
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3)
    torch.testing.assert_close(computed, expected)


def test_keys_of_a_window_count_once():
    # Without eps, and with values that say which keys were seen, of which the far ones are weighed alike.
    q, k, _ = draw(30, 30, heads=1)
    how: Any = {"causal": False, "window": 4, "mix": mix(1), "eps": 0.0, "impl": "triton"}
    seen = linear_attention(q * 0, k * 0, torch.eye(30, 32, device=DEVICE)[None, None], **how)[0, 0, :, :30]
    away = (torch.arange(30, device=DEVICE)[:, None] - torch.arange(30, device=DEVICE)).abs()
    weights = torch.where(away <= 4, 0.3, 16.0)
    torch.testing.assert_close(seen, weights / weights.sum(1, keepdim=True))


@by_direction
@pytest.mark.sample(1)
def test_masked_keys_and_values_are_not_read(causal):
    q, k, v = draw(37, 37, heads=1, batch=2)
    mask = holes(37)
    for x in (k, v):
        x.masked_fill_(~mask[:, None, :, None], torch.nan)
    computed = run([q, k, v], mask, causal=causal)
    assert all(torch.isfinite(x).all() for x in computed)
    assert all((x[1] == 0).all() for x in computed)
    assert all((x[0, 0, 1::3] == 0).all() for x in computed[2:])


@by_direction
@pytest.mark.sample(1)
def test_strides_do_not_matter(causal):
    triton_cases.check_strides(attend, heads=2, causal=causal)


@pytest.mark.slow
@by_direction
def test_it_repeats_bit_by_bit(causal):
    triton_cases.check_repeats(attend, causal=causal)


@pytest.mark.sample(0)
def test_the_operator_passes_opcheck():
    q, k, v = (x.requires_grad_() for x in draw(17, 17, heads=1))
    opcheck(launching.linear_forward.operator, (q, k, v, None, True, True, "elu", 1.0, 1e-6))


@pytest.mark.slow
@pytest.mark.parametrize("window", [0, 5])
def test_it_compiles_without_a_break(window):
    how: Any = {"causal": True, "window": window, "mix": mix(1)}
    triton_cases.check_compiles(attend, draw(17, 17, heads=1, batch=2), holes(17), **how)


def test_operations_are_counted():
    q, k, v = (x.requires_grad_() for x in draw(20, 30, values=32))
    with FlopCounterMode(display=False) as counter:
        out = linear_attention(q, k, v, causal=True, impl="triton")
        forward = counter.get_total_flops()
        out.sum().backward()
    assert forward == 2 * 2 * 16 * 32 * (20 + 30)
    assert counter.get_total_flops() - forward == 2 * 2 * 16 * 32 * (2 * 20 + 3 * 30)


@pytest.mark.parametrize(("feature_map", "features"), [("elu", 128), ("softmax", 128), ("softmax", 20)])
@pytest.mark.sample(1)
def test_decoding_overwrites_the_sums(feature_map, features, monkeypatch):
    monkeypatch.setattr(launching, "FEATURES", features)
    q, k, v = draw(23, 23, size=32, batch=2)
    mask = holes(23)
    whole = linear_attention(q.double(), k.double(), v.double(), mask, causal=True, feature_map=feature_map)
    plain = linear_attention(q, k, v, mask, causal=True, feature_map=feature_map, impl="reference")
    state: Any = None
    computed, places = [], set()
    for piece in (slice(0, 20), *(slice(n, n + 1) for n in range(20, 23))):
        inputs: Any = [x[:, :, piece] for x in (q, k, v)]
        out, state = linear_decode(
            inputs[0], inputs[1], inputs[2], mask[:, piece], state, feature_map=feature_map, impl="triton"
        )
        computed.append(out)
        places.add(state["sums"].data_ptr())
    assert_close("out", *(at_real_queries(x, mask) for x in (torch.cat(computed, 2), plain, whole)), factor=4.0)
    assert len(places) == 1
    after = linear_decode(q, k, v, mask, feature_map=feature_map, impl="reference")[1]["sums"]
    torch.testing.assert_close(state["sums"], after)


REFUSED = {
    "tokens after a state": (
        lambda q: linear_decode(q, q, q, None, {"sums": torch.zeros(1, 2, 16, 17)}, impl="triton"),
        "one at a time",
    ),
    "gradients": (lambda q: linear_decode(q.requires_grad_(), q, q, impl="triton"), "no_grad"),
    # The shares lie where q does: elsewhere they would be refused first, for their device.
    "a window": (lambda q: linear_decode(q, q, q, window=3, mix=mix(2), impl="triton"), "no keys of a window"),
    "dropout": (lambda q: linear_attention(q, q, q, causal=True, dropout=0.1, impl="triton"), "drop no keys"),
    "head size": (
        lambda q: linear_attention(*(q[..., :12],) * 3, causal=True, impl="triton"),
        "head size is 12; allowed",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refuses_unsupported_forms(what):
    call, said = REFUSED[what]
    with pytest.raises(ValueError, match=said):
        call(draw(5, 5)[0])


@pytest.mark.skipif(DEVICE == "cuda", reason="there auto takes the kernels")
def test_the_interpreter_runs_only_on_request():
    linear_attention(*draw(5, 5), causal=True)
    assert chosen()["linear_attention"] != "triton"
