"""Exported programs: they compute what the model computes at lengths they were not traced at; the rest is refused."""

import json
import sys

import pytest
import torch
from torch.export import load

from approx.checkpoints import checkpoint
from approx.conversion import convert, export, surgery
from approx.errors import ApproxError, Exit
from approx.mechanisms import MECHANISMS
from approx.planning.plan import Plan
from approx.planning.positions import example_inputs
from forms import KINDS, SMALL, has_form
from zoo import tiny

# Two blocks of queries and more.
POSITIONS = {"BertForSequenceClassification": "max_position_embeddings", "GPT2LMHeadModel": "n_positions"}
FAST = ("BertForSequenceClassification", "local")
CASES = [
    pytest.param(family, name, marks=[pytest.mark.slow] * ((family, name) != FAST))
    for family in POSITIONS
    for name in (*MECHANISMS, "linear fading", "linear delta")
    if KINDS[name].compiles == "whole" and has_form(name, causal=family[0] == "G")
]


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Converts a family with a mechanism, once."""
    folder = tmp_path_factory.mktemp("models")

    def converted(family, name):
        if not (folder / family / name).exists():
            tiny(family, **{POSITIONS[family]: 300}).save_pretrained(folder / family / "base")
            convert.convert(
                folder / family / "base", folder / family / name, Plan.of(name.split()[0], **SMALL.get(name, {}))
            )
        return folder / family / name

    return converted


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_program_takes_any_batch_and_length(family, name, converted, tmp_path):
    folder = converted(family, name)
    made = export.export(folder, tmp_path / "program", lengths=[2, 64, 290])
    assert list(made.largest_relative_difference) == ["1 x 2", "3 x 64", "2 x 290"]
    assert json.loads((tmp_path / "program" / export.CHECK).read_text())["inputs"] == ["input_ids", "attention_mask"]
    model = checkpoint.load(folder).model
    inputs = example_inputs(model, 129, batch=4, padded=30)
    program = load(tmp_path / "program" / "model.pt2").module()
    with torch.no_grad():
        actual, expected = program(**inputs)[0], model(**inputs)[0]
    real = inputs["attention_mask"].bool() if expected.dim() == 3 else slice(None)
    assert torch.allclose(actual[real], expected[real], atol=1e-5)
    # What is exported approximates.
    for module in model.modules():
        module.exact_below = 2**40
    with torch.no_grad():
        exact = model(**inputs)[0]
    assert torch.allclose(exact[real], expected[real], atol=1e-6) == KINDS[name].always_exact


@pytest.mark.slow
def test_onnx_runtime_computes_the_same(converted, tmp_path):
    made = export.export(converted(*FAST), tmp_path / "onnx", format="onnx", lengths=[5, 64, 200])
    assert max(made.largest_relative_difference.values()) < 1e-4
    assert {"model.onnx", "config.json", export.CHECK} <= {path.name for path in (tmp_path / "onnx").iterdir()}


def test_shapes_that_depend_on_the_data_are_refused():
    model = tiny("BertModel")
    surgery.convert(model, Plan.of("clustered", clusters=3))
    with pytest.raises(ApproxError, match=r"clustered cannot be exported: .*Convert with one of .*local") as refused:
        export.refuse_unexportable(model)
    assert refused.value.exit_code == Exit.UNSUPPORTED


def test_a_plan_that_switches_by_length_is_refused():
    model = tiny("BertModel")
    surgery.convert(model, Plan.of("local", left=3, right=3))
    export.refuse_unexportable(model)
    for module in model.modules():
        if hasattr(module, "exact_below"):
            module.exact_below = 10
    with pytest.raises(ApproxError, match="inputs below 10 tokens keep exact attention"):
        export.refuse_unexportable(model)


def test_discards_a_program_that_computes_something_else(tmp_path, monkeypatch):
    tiny("BertModel").save_pretrained(tmp_path / "base")
    honest = export._torch_runner
    monkeypatch.setattr(export, "_torch_runner", lambda path: lambda inputs: honest(path)(inputs) * 1.01)
    with pytest.raises(ApproxError, match=r"differs from .* at 1 x 12: 1\.0e-02") as wrong:
        export.export(tmp_path / "base", tmp_path / "program")
    assert wrong.value.exit_code == Exit.VERIFICATION
    assert not (tmp_path / "program").exists()


def test_refuses_bad_options_before_any_work(tmp_path, monkeypatch):
    with pytest.raises(ApproxError, match="There is no format 'tflite'"):
        export.export("quickstart", tmp_path / "program", format="tflite")
    with pytest.raises(ApproxError, match="three lengths of 2 or more tokens, 2,048 at most; --lengths gave 1, 5, 9"):
        export.export("quickstart", tmp_path / "program", lengths=[1, 5, 9])
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ApproxError, match=r"pip install 'approx-attention\[onnx\]'") as missing:
        export.export("quickstart", tmp_path / "program", format="onnx")
    assert missing.value.exit_code == Exit.MISSING
