"""Layers of float32 as operators of a compiled graph: which become one, and that they and their gradients are the same."""

import pytest
import torch
from torch.library import opcheck
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from approx_kernels import compiled_layers as module
from approx_kernels.compiled_layers import compiled_layers, layer
from approx_kernels.half_products import BY_INPUT, BY_OUTPUT
from approx_kernels.layers import NEVER, NOWHERE
from approx_kernels.tiled_layers import usable

LAYOUTS = (BY_OUTPUT, BY_INPUT)
TILES = pytest.mark.skipif(not usable(), reason="this processor has no tiles for bfloat16, or there is no C compiler")


@pytest.fixture(autouse=True)
def nothing_gains(monkeypatch):
    monkeypatch.setattr(module, "found_tiles", lambda: NOWHERE)
    monkeypatch.setattr(module, "worth_tiles", lambda *_: NOWHERE)
    monkeypatch.setattr(module, "worth_switch", lambda *_: False)


def switch_gains_from(monkeypatch, rows):
    monkeypatch.setattr(module, "worth_switch", lambda *_: True)
    monkeypatch.setattr(module, "worth_rows", lambda *_: rows)


def targets(call, *inputs, switched=False, **more):
    """What `call` gives within the context, compiled, and the names of all that its graph calls."""
    called = []

    def keep(graph, examples):
        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    def within(*inputs):
        with compiled_layers(switched=switched):
            return call(*inputs)

    torch._dynamo.reset()
    out = torch.compile(within, backend=keep, fullgraph=True, **more)(*inputs)
    return out, sum("compiled_layers" in each for each in called)


@pytest.mark.parametrize("tiled", [False, pytest.param(True, marks=TILES)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_operator_and_its_gradients_are_those_of_a_layer(layout, biased, tiled, monkeypatch):
    if tiled:
        monkeypatch.setattr(module, "worth_tiles", lambda *_: {each: [1, 100] for each in LAYOUTS})
    torch.manual_seed(0)
    x = torch.randn(2, 40, 32, requires_grad=True)
    weight = torch.randn(*((48, 32) if layout == BY_OUTPUT else (32, 48)), requires_grad=True)
    bias = torch.randn(48, requires_grad=True) if biased else None
    inputs = [each for each in (x, weight, bias) if each is not None]
    wide = [each.detach().double().requires_grad_() for each in inputs]
    expected = F.linear(wide[0], wide[1] if layout == BY_OUTPUT else wide[1].t(), wide[2] if biased else None)
    found = layer(x, weight, bias, layout)
    slope = torch.randn_like(found)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    slopes = torch.autograd.grad(found, inputs, slope)
    for ours, theirs in zip(slopes, torch.autograd.grad(expected, wide, slope.double()), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_an_operator_of_pytorch(layout):
    x, weight, bias = torch.randn(2, 5, 8), torch.randn(8, 8), torch.randn(8)
    opcheck(layer.operator, (x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), layout))
    with FlopCounterMode(display=False) as counter:
        layer(x, weight, None, layout)
    assert counter.get_total_flops() == 2 * 10 * 8 * 8


def test_layers_with_rows_enough_become_operators_and_others_stay(monkeypatch):
    switch_gains_from(monkeypatch, 16)
    weight, bias = torch.randn(8, 6), torch.randn(8)
    other = weight.t().contiguous()
    for rows, each in ((15, 0), (16, 1)):
        x = torch.randn(rows, 6)
        out, found = targets(lambda x: (F.linear(x, weight, bias), torch.addmm(bias, x, other)), x)
        assert found == 2 * each
        for one in out:
            torch.testing.assert_close(one, F.linear(x, weight, bias))
    # Nothing of this is a layer of float32.
    x = torch.randn(20, 6)
    assert targets(lambda x: F.linear(x.double(), weight.double()), x)[1] == 0
    assert targets(lambda x: torch.addmm(x @ other, x, other), x)[1] == 0
    assert targets(lambda x: torch.addmm(bias, x, other, beta=2), x)[1] == 0
    with torch.autocast("cpu", torch.bfloat16):
        assert targets(lambda x: F.linear(x, weight), x)[1] == 0


def test_any_number_of_rows_goes_through_two_graphs(monkeypatch):
    switch_gains_from(monkeypatch, 16)
    weight, graphs = torch.randn(8, 6), []

    @torch.compile(backend=lambda graph, examples: graphs.append(1) or graph, fullgraph=True, dynamic=True)
    def within(x):
        with compiled_layers(switched=False):
            return F.linear(x, weight)

    torch._dynamo.reset()
    for rows in (3, 5, 20, 33, 64):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(within(x), F.linear(x, weight))
    assert len(graphs) == 2


def test_where_nothing_gains_or_the_switch_is_thrown_around_it_layers_stay(monkeypatch):
    x, weight = torch.randn(600, 6), torch.randn(8, 6)
    assert targets(lambda x: F.linear(x, weight), x)[1] == 0
    switch_gains_from(monkeypatch, 16)
    assert targets(lambda x: F.linear(x, weight), x)[1] == 1
    assert targets(lambda x: F.linear(x, weight), x, switched=True)[1] == 0
    monkeypatch.setattr(module, "usable", lambda: True)
    monkeypatch.setattr(module, "found_tiles", lambda: {BY_OUTPUT: [64, 10**6], BY_INPUT: NEVER})
    assert targets(lambda x: F.linear(x, weight), x, switched=True)[1] == 1
