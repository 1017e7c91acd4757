"""Models in PyTorch with weights rounded by torchao: products in 8 bits, outputs close to float32, records that say so."""

import json
import sys

import pytest
import torch
from torch import nn

from approx import api, recipe
from approx.conversion.convert import convert
from approx.conversion.verify import difference
from approx.errors import ApproxError, Exit
from approx.evaluation import record
from approx.measuring.measure import open_pair
from approx.measuring.quantised import quantise
from approx.pipeline.run import run
from approx.planning.plan import Plan
from approx.planning.positions import example_inputs
from approx.publishing.summary import hindrance, joined
from tiny_decoder import save, tiny_gpt2
from tiny_study import tiny_checkpoint, tiny_data, tiny_recipe

NEEDLE = {"task": "needle", "limit": 6, "settings": {"length": 64}, "fresh": True}


@pytest.fixture(scope="module")
def linear(tmp_path_factory) -> str:
    """The embedded model with `linear`, whose `hedgehog` maps are layers with weights of their own."""
    folder = tmp_path_factory.mktemp("converted") / "linear"
    convert("quickstart", folder, Plan.of("linear", window=4, feature_map="hedgehog"))
    return str(folder)


def stored(module: nn.Module) -> dict[str, str]:
    """The weights of linear layers by name -> the dtype that they are stored in."""
    return {
        name: str(getattr(part.weight, "qdata", part.weight).dtype)
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear)
    }


def test_layers_of_the_model_are_int8_and_parameters_of_mechanisms_are_not(linear):
    opened = open_pair(linear, None, "cpu", "auto", offline=True, quantize="int8")
    plain = open_pair(linear, None, "cpu", "auto", offline=True)
    for label, one in opened.items():
        model, float32 = one.model, plain[label].model
        assert set(stored(model).values()) == {"torch.int8"}
        own = {name: each for name, each in model.named_parameters() if ".mechanism." in name}
        assert bool(own) == (label != "exact")
        assert all(torch.equal(each, float32.get_parameter(name)) for name, each in own.items())
        inputs = example_inputs(model, 40, batch=3, padded=9)
        with torch.no_grad():
            found, expected = model(**inputs)["logits"], float32(**inputs)["logits"]
        assert 0 < difference(found, expected) < 0.2
        assert one.runtime is not None
        assert one.runtime.endswith(", int8")


def test_layers_of_gpt2_and_its_head_are_rounded_and_embeddings_are_not(tmp_path):
    folder = str(save(tiny_gpt2(), tmp_path / "gpt2"))
    (rounded,) = open_pair(folder, None, "cpu", "auto", offline=True, quantize="int8").values()
    (plain,) = open_pair(folder, None, "cpu", "auto", offline=True).values()
    kept = stored(rounded.model)
    assert {name.rpartition(".")[2] for name in kept} == {"c_attn", "c_proj", "c_fc", "lm_head"}
    assert set(kept.values()) == {"torch.int8"}
    assert torch.equal(rounded.model.transformer.wte.weight, plain.model.transformer.wte.weight)
    inputs = example_inputs(plain.model, 20)
    with torch.no_grad():
        assert 0 < difference(rounded.model(**inputs)["logits"], plain.model(**inputs)["logits"]) < 0.2
    row = api.bench(folder, [8], mode="generate", new_tokens=2, rounds=3, seconds=0.0, quantize="int8").speed[0]
    assert row.dtype == "float32 with int8 weights"


def test_records_say_so_and_stay_apart_from_float32(linear, tmp_path):
    int8, float32 = (api.evaluate(linear, quantize=quantize, **NEEDLE) for quantize in ("int8", None))
    assert int8.quality[0].base.scores == float32.quality[0].base.scores
    runtime = str(int8.checkpoint.runtime)
    assert "torchao" in runtime
    assert int8.variants[0].runtime == runtime
    assert f"runs in {runtime}" in int8.quality[0].notes
    assert float32.checkpoint.runtime is None
    assert "their models run in" in str(hindrance(int8, float32))
    assert len(joined([int8, float32])) == 2
    api.report([int8, float32], tmp_path / "report")
    assert runtime in (tmp_path / "report" / "report.md").read_text()
    timed = api.bench(linear, [16], rounds=3, seconds=0.0, quantize="int8", max_length=4096)
    assert timed.speed[0].dtype == "float32 with int8 weights"
    assert len(joined([int8, timed])) == 1


def test_a_recipe_measures_in_int8_what_it_converted_in_float32(tmp_path):
    file = tiny_recipe(tmp_path / "tiny.yaml", tiny_checkpoint(tmp_path / "base"), tiny_data(tmp_path))
    file.write_text(file.read_text() + "quantize: int8\n")
    made = run(recipe.read(file), tmp_path / "run")
    assert "torchao" in str(made.checkpoint.runtime)
    assert [row.dtype for row in made.speed] == ["float32 with int8 weights"]
    assert record.load(tmp_path / "run" / "record.json").variants[0].runtime == made.checkpoint.runtime
    (weights,) = (tmp_path / "run" / "converted").glob("*/model.safetensors")
    assert weights.stat().st_size >= (tmp_path / "base" / "model.safetensors").stat().st_size


def test_a_loaded_model_is_copied(linear):
    (loaded,) = (one.model for one in open_pair("quickstart", None, "cpu", "auto", offline=True).values())
    before = {name: value.clone() for name, value in loaded.state_dict().items()}
    made = api.evaluate(loaded, processor=linear, quantize="int8", **NEEDLE)
    assert "torchao" in str(made.checkpoint.runtime)
    assert set(stored(loaded).values()) == {"torch.float32"}
    assert all(torch.equal(value, before[name]) for name, value in loaded.state_dict().items())


def test_refuses_what_cannot_be_rounded(tmp_path, monkeypatch):
    with pytest.raises(ApproxError, match="precision 'int4' is unknown; --quantize takes int8"):
        api.evaluate("quickstart", quantize="int4", **NEEDLE)
    with pytest.raises(ApproxError, match="computes on the CPU only, but the device is 'cuda'") as refused:
        api.bench("quickstart", [16], quantize="int8", device="cuda")
    assert refused.value.exit_code == Exit.UNSUPPORTED
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "approx_export.json").write_text(json.dumps({"format": "onnx"}))
    with pytest.raises(ApproxError, match=r"program is an exported program, whose precision its export chose"):
        api.evaluate(str(tmp_path / "program"), quantize="int8", runtime="onnxruntime", **NEEDLE)
    (rounded,) = open_pair("quickstart", None, "cpu", "auto", True, quantize="int8").values()
    with pytest.raises(ApproxError, match="has no linear layers with float weights"):
        quantise(rounded, "int8")
    rounded.source.raw["quantization_config"] = {"quant_method": "torchao"}
    with pytest.raises(ApproxError, match="is quantised already"):
        quantise(rounded, "int8")
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(
        ApproxError, match=r"--quantize int8 needs torchao, which cannot be imported\. Install: pip install '"
    ) as missing:
        api.evaluate("quickstart", quantize="int8", **NEEDLE)
    assert missing.value.exit_code == Exit.MISSING
