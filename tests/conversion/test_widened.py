"""Models of 16 bits in float32: linear layers on processors without 16-bit instructions, whole models to compare."""

import copy

import pytest
import torch
from torch import nn

from approx.conversion import clean_process as module
from approx.conversion import surgery, verify
from approx.conversion.clean_process import in_float32, widened
from approx.planning.plan import Plan
from approx.planning.positions import example_inputs
from zoo import FAMILIES, tiny


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.sample(8)
def test_a_model_of_16_bits_computes_as_if_loaded_in_float32(architecture, dtype):
    model = tiny(architecture).to(dtype)
    surgery.exchange(model, Plan.of("linear"))
    inputs = example_inputs(model, 24, batch=2)
    wide = {name: x.float() if x.is_floating_point() else x for name, x in inputs.items()}
    with torch.inference_mode():
        with in_float32(model):
            out = model(**inputs)[0]
        assert model(**inputs)[0].dtype == dtype
        assert torch.equal(out, copy.deepcopy(model).float()(**wide)[0])
    assert {tensor.dtype for tensor in model.base_model.parameters()} >= {dtype}


def test_a_model_of_32_bits_is_left_alone():
    with in_float32(tiny("BertForSequenceClassification")) as mode:
        assert mode is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_exact_limit_of_a_model_of_16_bits_is_checked_in_float32(dtype):
    check = verify.exact_limit(tiny("LlamaForCausalLM").to(dtype), Plan.of("local", left=4))
    assert check.passed
    assert float(check.detail.split()[-1]) < 2e-6
