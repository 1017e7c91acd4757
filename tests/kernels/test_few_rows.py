"""Layers of few rows in C: as exact as PyTorch's, whatever the shape, and only for as long and where they were asked for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from approx_kernels import few_rows as room
from approx_kernels.c_language import DTYPES, library
from approx_kernels.few_rows import few_rows_linear, worth_rows
from approx_kernels.few_rows_c import SOURCE
from approx_kernels.half_products import BY_INPUT, BY_OUTPUT
from approx_kernels.layers import NEVER
from closeness import assert_close

pytestmark = pytest.mark.skipif(isinstance(library(SOURCE), str), reason="there is no C compiler here")
WORTH = {BY_OUTPUT: [2, 6], BY_INPUT: NEVER}


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 13),
    inside=st.integers(1, 140),
    out=st.integers(1, 600),
    biased=st.booleans(),
    layout=st.sampled_from([BY_OUTPUT, BY_INPUT]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 9),
)
def test_layers_are_as_exact_as_those_of_pytorch(rows, inside, out, biased, layout, dtype, seed):
    torch.manual_seed(seed)
    x, weight = torch.randn(2, rows, inside).to(dtype), torch.randn(out, inside).to(dtype)
    bias = torch.randn(out).to(dtype) if biased else None
    lies = weight if layout == BY_OUTPUT else weight.t().contiguous()
    found = few_rows_linear(x, lies, bias, layout)
    assert (found.dtype, found.shape) == (dtype, (2, rows, out))
    if rows:
        # Plainly in float32 and rounded once, which is what is promised of 16 bits.
        plain = F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(dtype)
        exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        assert_close(layout, found, plain, exact, factor=4.0)


@pytest.mark.parametrize("layout", [BY_OUTPUT, BY_INPUT])
def test_threads_change_nothing(layout):
    x, weight = torch.randn(9, 300), torch.randn(300, 300)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(few_rows_linear(x, weight, None, layout))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(each, found[0]) for each in found)


def test_nothing_is_asked_of_the_machine_where_there_is_nothing_to_gain(monkeypatch):
    monkeypatch.setattr(room, "find", lambda *_, **__: {"rows": WORTH})
    never = {BY_OUTPUT: NEVER, BY_INPUT: NEVER}
    assert worth_rows(2, "cpu", torch.float32) == never
    with torch.no_grad():
        assert worth_rows(2, "cpu", torch.float32) == WORTH
        assert worth_rows(room.ROWS[-1] + 1, "cpu", torch.float32) == never
        assert worth_rows(2, "cuda", torch.float32) == never
        assert worth_rows(2, "cpu", torch.float64) == never
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert worth_rows(2, "cpu", torch.float32) == never


def test_a_probe_finds_from_and_up_to_how_many_rows(monkeypatch):
    # One dip is noise; what lies behind a loss is not worth it.
    gains = [1.0, 3.0, 1.05, 2.0, 0.9, 3.0]
    took = iter([each for gain in gains for each in (gain, 1.0)] + [1.0, 2.0] * len(room.ROWS))
    monkeypatch.setattr(room, "_REPEATS", 1)
    monkeypatch.setattr(room, "_seconds", lambda *_: next(took))
    found = room.measure(torch.float32)
    assert found["rows"] == {BY_OUTPUT: [2, 8], BY_INPUT: NEVER}
    assert list(found["gains"][BY_OUTPUT].values()) == gains
