"""The flash kernels against their specification in float64: windows, lists of blocks, masks, spans, and every gradient."""

from functools import partial

import pytest
import torch
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import triton_cases
from approx_kernels.gpu.launch import configuration
from approx_kernels.ops.flash import triton as launching
from approx_kernels.ops.flash.api import block_list, flash, flash_attention, list_tile
from closeness import assert_close
from triton_cases import DEVICE, HALF, ON_DEVICE, multiplies_bfloat16, spoilt

pytest.importorskip("triton")

pytestmark = ON_DEVICE
draw = partial(triton_cases.draw, heads=2)


def run(tensors, impl, **how):
    """Outputs, finite log-sum-exps, and the gradients of both in everything that has one."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    spans = {"spans": leaves[3]} if len(leaves) > 3 else {}
    out, lse = flash(*leaves[:3], scale=0.3, impl=impl, **spans, **how)
    generator = torch.Generator().manual_seed(1)
    grads = (torch.randn(x.shape, generator=generator).to(x.device, x.dtype) for x in (out, lse))
    seen = lse > -torch.inf
    total = torch.stack([(x * g)[keep].sum() for x, g, keep in zip((out, lse), grads, (..., seen), strict=True)]).sum()
    return [out, lse.masked_fill(~seen, 0), *torch.autograd.grad(total, leaves)], seen


def check(tensors, **how):
    wide, seen = run([x.double() for x in tensors], "reference", **how)
    plain, _ = run(tensors, "reference", **how)
    computed, reference = run(tensors, "triton", **how)
    assert torch.equal(seen, reference)
    for name, *each in zip(("out", "lse", "dq", "dk", "dv", "dspans"), computed, plain, wide, strict=False):
        # Scores are converted to base 2, and sums are rescaled with every tile, which adds a few roundings.
        assert_close(name, *each, factor=6.0)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fill the outputs of kernels with NaN, or indices out of range, before they run."""
    monkeypatch.setattr(launching, "_fake_forward", spoilt(launching._fake_forward))
    monkeypatch.setattr(launching, "_fake_backward", spoilt(launching._fake_backward))
    monkeypatch.setattr(torch, "empty_like", spoilt(torch.empty_like))


KINDS = {"dense": {}, "causal": {"right": 0}, "window": {"left": 9, "right": 3}, "before itself": {"right": -1}}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.sample(1)
def test_windows(name):
    check(draw(37, 37), **KINDS[name])


@pytest.mark.parametrize("right", [30, 62])
@pytest.mark.sample(1)
def test_windows_that_end_a_key_before_a_tile_does(right):
    # The window of a tile's first query ends before the last key of a tile, which shows an error of one tile.
    check(draw(right + 9, right + 9, heads=1), right=right)


@pytest.mark.parametrize(("length", "keys"), [(1, 50), (20, 41), (41, 20)])
@pytest.mark.sample(1)
def test_other_numbers_of_keys_than_of_queries(length, keys):
    check(draw(length, keys), right=0)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("size", [32, 64, 80, 96, 128])
@pytest.mark.sample(3)
def test_head_sizes(size, dtype):
    check(draw(20, 20, size=size, values=16 if size == 80 else size, heads=1, dtype=dtype))


@pytest.mark.parametrize("size", [80, 128])
@pytest.mark.sample(1)
def test_wide_heads_in_tiles_for_smaller_cards(size):
    with configuration(-1):
        check(draw(70, 70, size=size, values=size, heads=1, dtype=HALF), right=0)


@pytest.mark.parametrize(("size", "dtype"), [(64, HALF), (80, HALF), (128, HALF), (128, torch.float32)], ids=str)
@pytest.mark.sample(1)
def test_lists_and_masks_of_every_head_size(size, dtype):
    tensors = draw(70, 70, size=size, values=size, heads=1, batch=2, dtype=dtype)
    real = torch.arange(70, device=DEVICE) < torch.tensor([[70], [33]], device=DEVICE)
    blocks = block_list(lambda i, j: pairs(i, j) | (j < 64), 70, 70, tile=list_tile(*tensors[1:]), device=DEVICE)
    check(tensors, blocks=blocks, key_mask=real)
    check(tensors, key_mask=real, left=40)


def test_half_precision():
    check(draw(37, 37, dtype=torch.float16), right=0)


@multiplies_bfloat16
def test_bfloat16():
    check(draw(300, 300, size=64, dtype=torch.bfloat16), right=0)


def test_tiles_for_smaller_cards():
    with configuration(-1):
        check(draw(70, 70, heads=1, dtype=torch.float16), right=0)


def mask(kind, keys):
    position = torch.arange(keys, device=DEVICE)
    rows = {
        "right": [position < 20, position < keys],
        "left": [position >= 7, position >= 0],
        "holes": [position % 3 != 0, position % 2 == 0],
        "nobody": [position < 0, position < 9],
    }
    return torch.stack(rows[kind])


@pytest.mark.parametrize("kind", ["right", "left", "holes", "nobody"])
@pytest.mark.sample(1)
def test_key_masks(kind):
    check(draw(37, 37, heads=1, batch=2), key_mask=mask(kind, 37), right=0)


@pytest.mark.slow
def test_padding_is_not_read():
    tensors = draw(37, 37, heads=1, batch=2)
    right = mask("right", 37)
    for x in tensors:
        x[0, :, 20:] = torch.nan
    computed, _ = run(tensors, "triton", key_mask=right)
    assert all(torch.isfinite(x).all() for x in computed)


def test_packed_samples_are_independent():
    check(draw(50, 50, heads=1), lengths=[20, 1, 29], right=0)


@pytest.mark.parametrize("right", [0, None])
@pytest.mark.sample(1)
def test_spans(right):
    spans = torch.tensor([3.0, 20.5], device=DEVICE)
    check([*draw(37, 37), spans], right=right, ramp=5)


def pairs(i, j):
    return ((i - j).abs() < 4) | (j % 16 == 0)


LISTS = {
    "a pattern": pairs,
    "pairs that count more than once": lambda i, j: pairs(i, j) * 1 + (j < 16),
    "heads that differ": lambda i, j: torch.stack([pairs(i, j), j <= i]),
}


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.sample(1)
def test_lists_of_blocks(name):
    check(draw(50, 50), blocks=block_list(LISTS[name], 50, 50, tile=32, device=DEVICE))


def test_a_list_under_a_key_mask():
    blocks = block_list(pairs, 37, 37, tile=32, device=DEVICE)
    check(draw(37, 37, heads=1, batch=2), blocks=blocks, key_mask=mask("holes", 37))


def test_a_block_list_equals_its_pattern():
    i, j = torch.arange(30)[:, None] + 20, torch.arange(50)
    counted = block_list(LISTS["pairs that count more than once"], 30, 50, tile=16).counts()
    assert torch.equal(counted[0], LISTS["pairs that count more than once"](i, j).int())


def test_strides_do_not_matter():
    triton_cases.check_strides(flash_attention, heads=2, causal=False, scale=0.3)


# In the interpreter, programs run one after another.
@pytest.mark.sample(0)
def test_it_repeats_bit_by_bit():
    triton_cases.check_repeats(flash_attention, causal=True, scale=0.3)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.sample(1)
def test_the_operator_passes_opcheck(apart):
    q, k, v = (x.requires_grad_() for x in draw(17, 17, heads=1))
    blocks = block_list(pairs, 17, 17, tile=32, device=DEVICE).tensors
    spans = torch.tensor([3.0], device=DEVICE, requires_grad=True)
    rest = 0, 4, 0.3, 0, apart
    opcheck(launching.flash_forward.operator, (q, k, v, None, None, spans, blocks, launching.ENDLESS, *rest))


@pytest.mark.slow
def test_it_compiles_without_a_break():
    how = {"causal": True, "scale": 0.3}
    triton_cases.check_compiles(flash_attention, draw(17, 17, heads=1, batch=2), mask("left", 17), **how)


@pytest.mark.parametrize(("right", "pairs"), [(None, 20 * 20), (0, 20 * 21 // 2)])
def test_operations_are_counted(right, pairs):
    q, k, v = (x.requires_grad_() for x in draw(20, 20, values=32))
    with FlopCounterMode(display=False) as counter:
        out = flash(q, k, v, scale=0.3, right=right, impl="triton")[0]
        forward = counter.get_total_flops()
        out.sum().backward()
    assert forward == 2 * 2 * pairs * (16 + 32)
    assert counter.get_total_flops() - forward == 2 * 2 * pairs * (4 * 16 + 3 * 32)


def test_without_kernels_it_is_pytorchs_attention():
    q, k, v = (x.cpu() for x in draw(20, 20))
    computed = flash_attention(q, k, v, causal=True, scale=0.3)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
    assert torch.equal(computed, expected)


REFUSED = {
    "on the cpu": (lambda: flash(*(x.cpu() for x in draw(20, 20)), scale=0.3, impl="triton"), "need CUDA tensors"),
    "head size": (
        lambda: flash(*draw(20, 20, size=24), scale=0.3, impl="triton"),
        "head size is 24; allowed are 16, 32",
    ),
    "dtype": (lambda: flash(*draw(20, 20, dtype=torch.float64), scale=0.3, impl="triton"), "allowed are float16"),
    "dropout": (lambda: flash_attention(*draw(20, 20), causal=True, scale=0.3, dropout=0.1, impl="triton"), "dropout"),
    "lengths": (lambda: flash(*draw(20, 20), scale=0.3, lengths=[9, 10]), "2 that sum to 19"),
    "an empty sample": (lambda: flash(*draw(20, 20), scale=0.3, lengths=[20, 0]), "a length is 0; expected 1 or more"),
    "no diagonal": (lambda: block_list(lambda i, j: (j < i) | (j < 3), 20, 20, tile=16), "position 3"),
    "a tile": (lambda: block_list(pairs, 20, 20, tile=24), "allowed are 16, 32"),
    "another list": (
        lambda: flash(*draw(20, 20), scale=0.3, blocks=block_list(pairs, 20, 21, tile=32, device=DEVICE)),
        "21 keys",
    ),
    "another tile": (
        lambda: flash(
            *draw(20, 20), scale=0.3, blocks=block_list(pairs, 20, 20, tile=16, device=DEVICE), impl="triton"
        ),
        "take 32",
    ),
    "list and window": (
        lambda: flash(*draw(20, 20), scale=0.3, right=0, blocks=block_list(pairs, 20, 20, tile=32, device=DEVICE)),
        "together",
    ),
    "spans": (lambda: flash(*draw(20, 20), scale=0.3, spans=torch.ones(3)), r"spans has shape \[3\]; expected \[2\]"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_rejects_impossible_arguments(what, monkeypatch):
    if what == "on the cpu":
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    call, said = REFUSED[what]
    with pytest.raises(ValueError, match=said):
        call()
