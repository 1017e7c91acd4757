"""Linear layers of 16-bit models in float32 where processors have no instructions for 16 bits."""

import pytest
import torch
from torch import nn

from approx.conversion import widened as module
from approx.conversion.widened import widened
from zoo import tiny


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_at_least_as_close_to_float64_and_keep_the_dtype(dtype):
    torch.manual_seed(0)
    layer, x = nn.Linear(512, 64).to(dtype), torch.randn(3, 512).to(dtype)
    exact = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
    with torch.inference_mode():
        plain = layer(x)
        with module._Widened():
            wide = layer(x)
    assert wide.dtype == dtype
    assert (wide - exact).norm() <= (plain - exact).norm() * 1.001
    # Only the rounding of the output is left.
    assert (wide - exact).abs().max() <= torch.finfo(dtype).eps * exact.abs().max()


def test_only_models_in_16_bits_are_widened_and_only_inside(monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    inside = []
    monkeypatch.setattr(module._Widened, "__enter__", lambda self: inside.append(True))
    monkeypatch.setattr(module._Widened, "__exit__", lambda self, *error: inside.append(False))
    model = tiny("BertForSequenceClassification")
    with widened(model):
        assert inside == []
    with widened(model.bfloat16()):
        assert inside == [True]
    assert inside == [True, False]


def test_a_processor_with_the_instructions_computes_in_16_bits(monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    model = tiny("BertForSequenceClassification").bfloat16()
    with widened(model) as mode:
        assert mode is None
