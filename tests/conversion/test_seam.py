"""The seam alone: what surgery changes of a model, and exact attention by it in a model that is not converted."""

import pytest
import torch

from approx.conversion import surgery
from approx.conversion.inputs import example_inputs
from approx.conversion.plan import Plan
from approx.conversion.seam import IMPLEMENTATION, fastest_exact
from approx_kernels import findings
from conversion.zoo import difference, outputs, tiny


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ["BertModel", "GPT2LMHeadModel", "LlamaForCausalLM"])
def test_nothing_but_attention_is_changed(architecture, dtype, grad, monkeypatch):
    model = tiny(architecture).to(dtype).eval()
    # As many rows as a long text has, and as few as a step of decoding.
    calls = [example_inputs(model, length, batch=batch) for batch, length in ((8, 64), (1, 1))]

    def logits() -> list[torch.Tensor]:
        with torch.set_grad_enabled(grad):
            return [model(**inputs)[0].detach() for inputs in calls]

    before, layers = logits(), {name: type(module) for name, module in model.named_modules()}
    surgery.convert(model, Plan.of("sdpa"))
    # Nothing of the machine could be a reason to compute another layer differently.
    monkeypatch.setattr(findings, "machine", pytest.fail)
    for found, expected in zip(logits(), before, strict=True):
        assert torch.equal(found, expected)
    kept = {name: type(module) for name, module in model.named_modules() if name and ".mechanism" not in name}
    assert kept == {name: kind for name, kind in layers.items() if name}
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("architecture", ["BertModel", "GPT2Model", "LlamaModel", "WhisperModel"])
def test_a_model_that_is_not_converted_attends_exactly_by_the_seam(architecture):
    model = tiny(architecture).eval()
    sound = architecture == "WhisperModel"
    inputs = example_inputs(model, 20, batch=1 if sound else 2, padded=0 if sound else 5)
    before, stock = outputs(model, inputs), model.config._attn_implementation
    with fastest_exact(model):
        assert model.config._attn_implementation == IMPLEMENTATION
        after = outputs(model, inputs)
    assert model.config._attn_implementation == stock
    mask = inputs.get("attention_mask", torch.ones(1, 1)).bool()
    real = mask if mask.shape == before[0].shape[:2] else slice(None)
    assert difference([before[0][real]], [after[0][real]]) < 1e-5
