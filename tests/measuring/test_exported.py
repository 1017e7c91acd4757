"""Exported folders are measured like checkpoints: the same tasks, records and reports, in their own runtime."""

from typing import Any

import pytest
import torch

from approx import api
from approx.checkpoints import checkpoint, exported
from approx.conversion import export
from approx.conversion.convert import convert
from approx.errors import ApproxError, Exit
from approx.planning.plan import Plan
from approx.planning.positions import example_inputs

NEEDLE = {"task": "needle", "limit": 6, "settings": {"length": 64}, "fresh": True}


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The embedded model as ONNX, in float32 and int8."""
    folder = tmp_path_factory.mktemp("programs")
    export.export("quickstart", folder / "exact-onnx", format="onnx")
    export.export("quickstart", folder / "exact-int8", format="onnx", quantize="int8")
    return folder


def test_a_program_behaves_like_its_model(programs):
    program, model = exported.load(programs / "exact-onnx").model, checkpoint.load("quickstart").model
    inputs = example_inputs(model, 33, batch=3, padded=9)
    with torch.no_grad():
        torch.testing.assert_close(program(**inputs).logits, model(**inputs)["logits"], atol=1e-4, rtol=1e-4)
    assert (type(program).__name__, program.main_input_name) == (type(model).__name__, model.main_input_name)
    # What a tokenizer leaves out has its usual value; what is unknown is refused.
    one = {"input_ids": inputs["input_ids"][:1]}
    torch.testing.assert_close(program(**one)[0], program(**one, token_type_ids=torch.zeros_like(one["input_ids"]))[0])
    with pytest.raises(ApproxError, match="takes input_ids, attention_mask, token_type_ids, but got input_ids, places"):
        program(**one, places=one["input_ids"])
    with pytest.raises(ApproxError, match=r"has 2100 tokens, but .*exact-onnx was exported with 2048 positions"):
        program(input_ids=torch.zeros(1, 2100, dtype=torch.long))
    with pytest.raises(ApproxError, match="does not generate"):
        program.generate()


def test_programs_are_scored_on_the_same_examples(programs, tmp_path):
    record = api.evaluate(
        str(programs / "exact-int8"), against="quickstart", beside=[str(programs / "exact-onnx")], **NEEDLE
    )
    (quality,) = record.quality
    int8, float32 = quality.variants
    assert (int8.name, float32.name) == ("exact-int8", "exact-onnx")
    # The same answers as in PyTorch.
    assert float32.scores == quality.base.scores
    assert record.checkpoint.runtime is None
    runtimes = [str(variant.runtime) for variant in record.variants]
    assert all(one.startswith("onnxruntime ") for one in runtimes)
    assert [one.rpartition(", ")[2] for one in runtimes] == ["int8", "float32"]
    assert all(variant.verified for variant in record.variants)
    api.report([record], tmp_path / "report")
    assert "onnxruntime" in (tmp_path / "report" / "report.md").read_text()


def test_programs_are_timed_without_a_ceiling(programs):
    folders = [str(programs / name) for name in ("exact-int8", "exact-onnx")]
    record = api.bench(folders[0], [16], against=folders[1], rounds=3, seconds=0.0)
    (row,) = record.speed
    assert row.baseline == record.checkpoint.runtime
    assert row.ceiling is None
    assert row.default is None
    assert [one.name for one in row.variants] == ["exact-int8"]
    median = row.variants[0].median_ms
    assert median is not None
    assert median > 0


def test_programs_of_torch_export_and_stock_checkpoints_are_measured_too(tmp_path):
    convert("quickstart", tmp_path / "exact", Plan.of("exact"))
    for form in ("torch-export", "stock"):
        export.export(tmp_path / "exact", tmp_path / form, format=form)
    record = api.evaluate(
        str(tmp_path / "stock"), against="quickstart", beside=[str(tmp_path / "torch-export")], **NEEDLE
    )
    (quality,) = record.quality
    assert [variant.scores for variant in quality.variants] == [quality.base.scores] * 2
    stock, program = record.variants
    assert stock.runtime is None
    assert str(program.runtime) == f"torch {torch.__version__}, float32"


@pytest.mark.slow
def test_a_converted_program_says_how_much_it_approximates(programs, tmp_path):
    convert("quickstart", tmp_path / "linear", Plan.of("linear", window=4))
    export.export(tmp_path / "linear", tmp_path / "linear-onnx", format="onnx")
    program = api.evaluate(str(tmp_path / "linear-onnx"), against=str(programs / "exact-onnx"), **NEEDLE)
    model = api.evaluate(str(tmp_path / "linear"), **NEEDLE)
    one, other = (record.quality[0].variants[0] for record in (program, model))
    assert one.approximated == other.approximated
    assert one.scores == other.scores
    assert program.variants[0].layers == model.variants[0].layers
    with pytest.raises(ApproxError, match=r"exact attention cannot be restored\. Name its base with --against"):
        api.evaluate(str(tmp_path / "linear-onnx"), **NEEDLE)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"runtime": "tensorrt"}, "runtime 'tensorrt' is unknown; allowed for .*: onnxruntime, openvino"),
        ({"dtype": "bfloat16"}, "Leave out --dtype and --device"),
        ({"seeds": 2, "against": "exact-onnx"}, "--seeds changes a model"),
        ({"extend_base": True, "against": "exact-onnx"}, "--extend-base changes a model"),
        ({"beside": ["exact-onnx"]}, "Name it with --against"),
        ({"beside": ["exact-int8"], "against": "exact-onnx"}, "Two of the models are called exact-int8"),
    ],
)
def test_refuses_what_a_program_cannot_do(programs, options, words):
    folders: dict[str, Any] = {
        key: [str(programs / name) for name in value] if key == "beside" else value for key, value in options.items()
    }
    if "against" in folders:
        folders["against"] = str(programs / folders["against"])
    with pytest.raises(ApproxError, match=words):
        api.evaluate(str(programs / "exact-int8"), **NEEDLE, **folders)


def test_refuses_other_uses(programs):
    with pytest.raises(ApproxError, match="--runtime onnxruntime runs exported programs, but quickstart is none"):
        api.evaluate("quickstart", runtime="onnxruntime", **NEEDLE)
    with pytest.raises(ApproxError, match="--mode generate changes a model or its cache"):
        api.bench(str(programs / "exact-onnx"), [16], mode="generate")
    with pytest.raises(ApproxError, match="is an exported program, which only evaluate and bench take") as refused:
        checkpoint.load(programs / "exact-onnx")
    assert refused.value.exit_code == Exit.UNAVAILABLE
