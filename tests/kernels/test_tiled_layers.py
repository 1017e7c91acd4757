"""Layers of float32 on tiles of bfloat16: as exact as PyTorch's, whatever the shape and the numbers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from approx_kernels import tiled_layers
from approx_kernels.half_products import BY_INPUT, BY_OUTPUT
from approx_kernels.layers import NEVER, NOWHERE
from approx_kernels.tiled_layers import tiled_linear, worth_tiles

needs_tiles = pytest.mark.skipif(
    not tiled_layers.usable(), reason="this processor has no tiles for bfloat16, or there is no C compiler"
)


@needs_tiles
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 150),
    inside=st.one_of(st.integers(1, 140), st.integers(740, 1700)),
    out=st.integers(1, 300),
    biased=st.booleans(),
    layout=st.sampled_from([BY_OUTPUT, BY_INPUT]),
    seed=st.integers(0, 9),
)
def test_layers_are_as_exact_as_those_of_pytorch(rows, inside, out, biased, layout, seed):
    torch.manual_seed(seed)
    # Rows of sizes far apart, and none of them rounded away beside another.
    x = torch.randn(rows, inside) * torch.logspace(-12, 12, rows)[:, None]
    weight, bias = torch.randn(out, inside), torch.randn(out) if biased else None
    found = tiled_linear(x, weight if layout == BY_OUTPUT else weight.t().contiguous(), bias, layout)
    assert (found.dtype, found.shape) == (torch.float32, (rows, out))
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    size = F.linear(x.double().abs(), weight.double().abs(), None if bias is None else bias.double().abs())
    # Each term is rounded once, and then a sum of many.
    assert ((found - exact).abs() <= 5e-7 * size).all()


@needs_tiles
@pytest.mark.parametrize("layout", [BY_OUTPUT, BY_INPUT])
def test_no_bit_of_a_number_is_left_out(layout):
    # Integers of 24 bits on one side and powers of 2 on the other: every sum is exact.
    x = (2**24 - torch.arange(1, 65)).float()[:, None] * torch.eye(64)
    weight = torch.eye(64) * torch.tensor([2.0**power for power in range(-32, 32)])[:, None]
    assert torch.equal(tiled_linear(x, weight, None, layout), x @ weight)
    assert torch.equal(tiled_linear(weight, x.t().contiguous(), None, layout), weight @ x)


@needs_tiles
def test_many_rows_and_few_rows_and_any_number_of_threads_give_the_same():
    x, weight, before = torch.randn(2100, 70), torch.randn(300, 70), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(tiled_linear(x, weight, None, BY_OUTPUT))
    finally:
        torch.set_num_threads(before)
    found.append(
        torch.cat([tiled_linear(x[:700], weight, None, BY_OUTPUT), tiled_linear(x[700:], weight, None, BY_OUTPUT)])
    )
    assert all(torch.equal(each, found[0]) for each in found)


@needs_tiles
def test_what_is_not_finite_stays_so_in_its_row_alone():
    x, weight = torch.randn(40, 50), torch.randn(30, 50)
    x[3, 7], x[20, 9] = torch.nan, torch.inf
    found = tiled_linear(x, weight, None, BY_OUTPUT)
    lost = torch.zeros(40, dtype=torch.bool)
    lost[[3, 20]] = True
    assert torch.equal(~found.isfinite().all(1), lost)
    assert not found[lost].isfinite().any()


def test_nothing_is_asked_of_the_machine_where_there_is_nothing_to_gain(monkeypatch):
    worth = {layout: [64, 10**6] for layout in NOWHERE}
    monkeypatch.setattr(tiled_layers, "find", lambda *_, **__: {"rows": worth})
    monkeypatch.setattr(tiled_layers, "obstacle", lambda: None)
    assert worth_tiles(64, "cpu", torch.float32) == NOWHERE
    with torch.no_grad():
        assert worth_tiles(64, "cpu", torch.float32) == worth
        assert worth_tiles(63, "cpu", torch.float32) == NOWHERE
        assert worth_tiles(64, "cuda", torch.float32) == NOWHERE
        assert worth_tiles(64, "cpu", torch.bfloat16) == NOWHERE
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert worth_tiles(64, "cpu", torch.float32) == NOWHERE
        monkeypatch.setattr(tiled_layers, "obstacle", lambda: "none here")
        assert worth_tiles(64, "cpu", torch.float32) == NOWHERE


@needs_tiles
@pytest.mark.parametrize(("error", "expected"), [(2e-7, [64, 2**31]), (2e-6, NEVER)])
def test_a_probe_takes_what_is_faster_and_as_exact(monkeypatch, error, expected):
    took = iter([each for _ in range(2) for _ in tiled_layers.ROWS for each in (2.0, 1.0)])
    monkeypatch.setattr(tiled_layers, "_REPEATS", 1)
    monkeypatch.setattr(tiled_layers, "_seconds", lambda *_: next(took))
    computed = tiled_linear
    monkeypatch.setattr(tiled_layers, "tiled_linear", lambda *given: computed(*given) * (1 + error))
    found = tiled_layers.measure()
    assert found["rows"] == {BY_OUTPUT: expected, BY_INPUT: expected}
    assert found["gains"][BY_INPUT] == {"64": 2.0, "128": 2.0, "512": 2.0}
