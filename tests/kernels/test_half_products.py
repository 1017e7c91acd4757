"""Products of 16 bits in float32: which ones, how exactly, and that everything else is left to PyTorch."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from approx_kernels import half_products as room
from approx_kernels.half_products import BY_INPUT, BY_OUTPUT

half_products = partial(room.half_products, layouts=(BY_OUTPUT, BY_INPUT))
# The relative error of rounding once.
ROUNDOFF = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.fixture(autouse=True)
def worth_it_from_eight_rows(monkeypatch):
    monkeypatch.setattr(room, "least_rows", lambda dtype: {BY_OUTPUT: 8, BY_INPUT: 8})


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def rounded_once(found: Tensor, exact: Tensor) -> bool:
    # Beside the rounding stands what float32 has lost by then where large terms cancel.
    budget = ROUNDOFF[found.dtype] * exact.abs() + 1e-6 * exact.abs().max()
    return bool(((found.double() - exact).abs() <= budget).all())


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(0, 9),
    inside=st.integers(1, 70),
    out=st.integers(1, 140),
    biased=st.booleans(),
    dtype=st.sampled_from(room.DTYPES),
    seed=st.integers(0, 9),
)
def test_layers_are_rounded_once_whatever_the_blocks(rows, inside, out, biased, dtype, seed):
    x, weight, bias = drawn((2, rows, inside), (out, inside), (out,), dtype=dtype, seed=seed)
    exact = F.linear(x.double(), weight.double(), bias.double() if biased else None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "least_rows", lambda dtype: {BY_OUTPUT: 0, BY_INPUT: 0})
        patch.setattr(room, "_BLOCK_ROWS", 5)
        patch.setattr(room, "_BLOCK_WEIGHTS", 64)
        with half_products(8, "cpu", dtype):
            found = F.linear(x, weight, bias if biased else None)
            as_gpt2 = torch.addmm(bias, x.flatten(0, 1), weight.t().contiguous()) if biased else None
    assert (found.dtype, found.shape) == (dtype, exact.shape)
    assert not exact.numel() or rounded_once(found, exact)
    # Another layout adds up in another order.
    if as_gpt2 is not None and exact.numel():
        assert rounded_once(as_gpt2, exact.flatten(0, 1))


@pytest.mark.parametrize("dtype", room.DTYPES)
def test_products_and_convolutions_are_rounded_once(dtype):
    a, b, sound, kernel, image, filters = drawn(
        (2, 9, 33), (2, 33, 7), (2, 4, 50), (6, 2, 5), (1, 3, 12, 12), (4, 3, 3, 3), dtype=dtype
    )
    calls = [
        lambda a, b, *_: torch.matmul(a, b),
        lambda a, b, *_: a @ b,
        lambda a, b, *_: a.bmm(b),
        lambda a, b, *_: torch.mm(a[0], b[0]),
        lambda a, b, sound, kernel, *_: F.conv1d(sound, kernel, stride=2, padding=1, groups=2),
        lambda a, b, sound, kernel, image, filters: F.conv2d(image, weight=filters, bias=filters[:, 0, 0, 0]),
    ]
    given_ = (a, b, sound, kernel, image, filters)
    for call in calls:
        with half_products(8, "cpu", dtype) as held:
            found = call(*given_)
        assert held
        assert found.dtype == dtype
        assert rounded_once(found, call(*(x.double() for x in given_)))


@pytest.mark.parametrize("shape", [(2, 11), (1,), ()])
@pytest.mark.parametrize("dtype", room.DTYPES)
def test_gradients_are_rounded_once_also_outside_of_the_context(dtype, shape, monkeypatch):
    monkeypatch.setattr(room, "least_rows", lambda dtype: {BY_OUTPUT: 1, BY_INPUT: 1})
    x, weight, bias, grad = drawn((*shape, 30), (20, 30), (20,), (*shape, 20), dtype=dtype)
    leaves = [each.requires_grad_() for each in (x, weight, bias)]
    wide = [each.detach().double().requires_grad_() for each in leaves]
    with half_products(8, "cpu", dtype):
        made = F.linear(*leaves)
    found = torch.autograd.grad(made, leaves, grad)
    exact = torch.autograd.grad(F.linear(*wide), wide, grad.double())
    assert all(rounded_once(one, other) for one, other in zip(found, exact, strict=True))


def test_only_the_gradients_asked_for_are_made():
    x, weight = drawn((8, 4), (3, 4))
    weight.requires_grad_()
    with half_products(8, "cpu", torch.bfloat16):
        F.linear(x, weight).sum().backward()
    assert weight.grad is not None
    assert x.grad is None


class Other(Tensor):
    pass


def test_what_is_not_a_plain_product_of_16_bits_is_left_to_pytorch(monkeypatch):
    monkeypatch.setattr(room, "_linear", lambda *_: pytest.fail("computed here"))
    x, weight, bias = drawn((8, 4), (3, 4), (3,))
    with half_products(8, "cpu", torch.bfloat16):
        assert F.linear(x.float(), weight.float()).dtype == torch.float32
        assert F.linear(x.as_subclass(Other), weight).shape == (8, 3)
        assert torch.addmm(bias, x, weight.t(), beta=0.5).shape == (8, 3)
        assert torch.addmm(x[:, :3], x, weight.t()).shape == (8, 3)
        assert F.linear(x, weight[0]).shape == (8,)
        out = x.new_empty(8, 3)
        assert torch.mm(x, weight.t(), out=out) is out
        with torch.autocast("cpu", torch.bfloat16):
            assert F.linear(x, weight).shape == (8, 3)
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            F.linear(x, torch.zeros(3, 5, dtype=torch.bfloat16))
    assert torch.equal(out, x @ weight.t())


@pytest.mark.parametrize(
    ("rows", "device", "dtype"),
    [(7, "cpu", torch.bfloat16), (8, "cpu", torch.float32), (8, "cuda", torch.float16), (8, "meta", torch.bfloat16)],
)
def test_where_it_loses_or_means_nothing_it_does_not_hold(rows, device, dtype):
    with half_products(rows, device, dtype) as held:
        assert not held


def test_it_does_not_hold_under_autocast_nor_where_the_probe_found_no_gain(monkeypatch):
    with torch.autocast("cpu", torch.bfloat16), half_products(64, "cpu", torch.bfloat16) as held:
        assert not held
    monkeypatch.setattr(room, "least_rows", lambda dtype: {BY_OUTPUT: None, BY_INPUT: None})
    with half_products(64, "cpu", torch.bfloat16) as held:
        assert not held


def test_a_compiled_graph_has_them_too_entered_within_or_around():
    @torch.compile(backend="eager", fullgraph=True)
    def within(x, weight):
        with half_products(8, "cpu", torch.bfloat16) as held:
            return F.linear(x, weight), held

    around = torch.compile(F.linear, backend="eager", fullgraph=True)
    x, weight = drawn((8, 40), (30, 40))
    once = F.linear(x.float(), weight.float()).bfloat16()
    out, held = within(x, weight)
    assert held
    assert torch.equal(out, once)
    with half_products(8, "cpu", torch.bfloat16):
        assert torch.equal(around(x, weight), once)


def test_it_is_worth_it_from_where_it_only_gains_in_each_layout(monkeypatch):
    wide = {True: {1: 2.0, 8: 2.0, 64: 0.5, 512: 0.1}, False: {1: 0.5, 8: 0.5, 64: 0.5, 512: 0.95}}

    def took(product, x, weight, now):
        return wide[weight.is_contiguous()][len(x)] if product is room._linear else 1.0

    monkeypatch.setattr(room, "_seconds", took)
    assert room.measure(torch.bfloat16)["rows"] == {BY_OUTPUT: 64, BY_INPUT: None}


def test_each_product_is_decided_by_its_own_rows_and_layout(monkeypatch):
    computed: list[tuple[int, bool]] = []
    plain = room._linear
    monkeypatch.setattr(room, "least_rows", lambda dtype: {BY_OUTPUT: 8, BY_INPUT: 2})
    monkeypatch.setattr(
        room, "_linear", lambda x, w, b=None: computed.append((len(x), w.is_contiguous())) or plain(x, w, b)
    )
    weight, bias, wide = drawn((3, 4), (3,), (4, 3))
    with half_products(2, "cpu", torch.bfloat16) as held:
        assert held
        for rows in (1, 2, 8):
            (x,) = drawn((rows, 4))
            F.linear(x, weight)
            torch.addmm(bias, x, wide)
            torch.addmm(bias, x, weight.t())
    assert computed == [(2, False), (8, True), (8, False), (8, True)]
    with half_products(1, "cpu", torch.bfloat16) as held:
        assert not held
    with room.half_products(7, "cpu", torch.bfloat16, layouts=(BY_OUTPUT,)) as held:
        assert not held


def test_the_probe_leaves_the_random_state():
    before = torch.random.get_rng_state()
    finding = room.measure(torch.float16)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert set(finding["gains"][BY_INPUT]) == {"1", "8", "64", "512"}
