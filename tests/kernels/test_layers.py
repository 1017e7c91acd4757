"""Layers are computed by a product of somebody else only for as long and where that was asked for."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from approx_kernels.half_products import BY_INPUT, BY_OUTPUT
from approx_kernels.layers import NEVER, layers_by

WORTH = {BY_OUTPUT: [2, 6], BY_INPUT: NEVER}


@pytest.fixture
def counted():
    """A product, and the rows of the calls that came through it."""
    rows: list[int] = []

    def product(x, weight, bias, layout):
        rows.append(len(x))
        return F.linear(x, weight if layout == BY_OUTPUT else weight.t(), bias)

    return product, rows


@torch.no_grad()
def test_only_so_many_rows_of_plain_tensors_are_computed_by_it(counted):
    product, rows_seen = counted
    layer, other = nn.Linear(8, 5), nn.Linear(8, 5)
    with layers_by(product, [(layer, BY_OUTPUT), (other, BY_INPUT)], WORTH) as held:
        assert held
        for rows in (1, 2, 6, 7):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))
            other(x)
        strided = torch.randn(8, 3).t()
        torch.testing.assert_close(layer(strided), F.linear(strided, layer.weight, layer.bias))
        layer.bfloat16()(torch.randn(2, 8).bfloat16())
        with torch.enable_grad():
            assert layer.float()(torch.randn(2, 8)).requires_grad
        with pytest.raises(RuntimeError):
            layer(torch.randn(2, 9))
    assert rows_seen == [2, 6, 3, 2]
    layer(torch.randn(2, 8))
    assert len(rows_seen) == 4


@torch.no_grad()
def test_a_layer_is_put_back_after_an_error_and_one_with_a_forward_of_its_own_keeps_it(counted):
    product, rows = counted
    layer, own = nn.Linear(8, 5), nn.Linear(8, 5)
    own.forward = lambda input: input
    heard = []
    layer.register_forward_hook(lambda *_: heard.append(1))
    layers = nn.Sequential(layer, own, nn.Linear(6, 5))
    # The last one does not fit.
    with pytest.raises(RuntimeError), layers_by(product, [(each, BY_OUTPUT) for each in layers], WORTH):
        layers(torch.randn(3, 8))
    x = layer(torch.randn(3, 8))
    assert (rows, heard) == ([3], [1, 1])
    assert "forward" not in vars(layer)
    assert own(x) is x
