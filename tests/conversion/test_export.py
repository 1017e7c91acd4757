"""Exported programs: they compute what the model computes at lengths they were not traced at; the rest is refused."""

import collections
import json
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.export import Dim, load

from approx.checkpoints import checkpoint, exported
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
    if (KINDS[name].compiles == "whole" or KINDS[name].always_exact) and has_form(name, causal=family[0] == "G")
]
# Settings that are not the defaults, with windows and numbers of keys that some inputs exceed and others do not reach.
SETTINGS = [
    ("exact", {}),
    ("full", {}),
    ("local", {"left": 3, "right": 70}),
    ("local", {"left": 0, "right": 0}),
    ("exact-topk", {"topk": 40}),
    ("linear", {}),
    ("linear", {"window": 100, "sinks": 1}),
    ("linear", {"window": 0, "sinks": 0}),
    ("linear", {"window": 8, "global_tokens": "first"}),
    ("linear", {"window": 8, "global_tokens": [0, 3, 9]}),
    ("linear", {"features": 256, "window": 16, "sinks": 3}),
    ("linear", {"feature_map": "relu", "window": 20}),
    ("linear", {"feature_map": "t2r", "gate": False}),
    ("linear", {"feature_map": "hedgehog", "gate": False, "window": 64}),
    ("linear", {"feature_map": "hedgehog", "gate": False, "window": 5, "scale_inputs": True}),
    ("linear", {"feature_map": "elu", "gate": False, "window": 130, "eps": 1e-3}),
    ("linear", {"feature_map": "gated", "window": 16, "sinks": 2}),
    ("linear", {"update": "delta", "window": 16, "sinks": 2}),
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
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if family[0] == "B" else [])]
    assert json.loads((tmp_path / "program" / export.EXPORTED).read_text())["inputs"] == names
    model = checkpoint.load(folder).model
    inputs = example_inputs(model, 129, batch=4, padded=30)
    if family[0] == "B":
        inputs["token_type_ids"] = torch.randint(2, inputs["input_ids"].shape)
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


class Masked(torch.nn.Module):
    """A mechanism whose mask has the integers of a tokenizer."""

    def __init__(self, mechanism):
        super().__init__()
        self.mechanism = mechanism

    def forward(self, q, k, v, mask):
        return self.mechanism(q, k, v, mask.bool())


def built(name: str, settings: dict[str, Any], causal: bool) -> Any:
    """The mechanism, or None if it has no such form."""
    try:
        return MECHANISMS[name](4, 8, causal=causal, scale=8**-0.5, **settings).eval()
    except ApproxError:
        return None


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "settings", "causal"),
    [
        (name, settings, causal)
        for name, settings in SETTINGS
        for causal in (False, True)
        if built(name, settings, causal)
    ],
)
def test_settings_and_lengths_of_a_mechanism(name, settings, causal):
    mechanism = built(name, settings, causal)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)

    def inputs(batch, length):
        tensors = [torch.randn(batch, 4, length, 8, generator=generator) for _ in "qkv"]
        mask = torch.ones(batch, length, dtype=torch.long)
        mask[-1, length - length // 4 :], mask[0, : length // 5] = 0, 0
        return *tensors, mask

    free = {0: Dim.DYNAMIC, 2: Dim.DYNAMIC}
    with torch.no_grad():
        shapes = (free, free, free, {0: Dim.DYNAMIC, 1: Dim.DYNAMIC})
        program = torch.export.export(Masked(mechanism), inputs(2, 100), dynamic_shapes=shapes).module()
        for batch, length in ((1, 2), (2, 17), (1, 64), (2, 65), (3, 129), (1, 290)):
            q, k, v, mask = inputs(batch, length)
            real = mask.bool()
            actual, expected = program(q, k, v, mask), mechanism(q, k, v, real)
            # Outputs of padding are undefined.
            pair = (x.transpose(1, 2)[real] for x in (actual, expected))
            torch.testing.assert_close(*pair, atol=1e-5, rtol=1e-4)


def operators(model, path):
    """How often each operator occurs in the ONNX program of a model."""
    import onnx

    model.config.use_cache = False
    with torch.no_grad(), export.quiet():
        export._save_onnx(export._program(model.eval()), model, path)
    return collections.Counter(node.op_type for node in onnx.load(path).graph.node)


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", POSITIONS)
@pytest.mark.parametrize("name", [None, "exact", "sdpa", "full", "flash"])
def test_exact_layers_are_the_operator_attention_of_onnx(family, name, tmp_path):
    model = tiny(family)
    if name is not None:
        surgery.convert(model, Plan.of(name))
    found = operators(model, tmp_path / "model.onnx")
    assert found["Attention"] == 3
    assert not found["Softmax"]
    run = export._runner(tmp_path / "model.onnx", "onnx")[0]
    with torch.no_grad():
        assert max(export._compare(model, run, *size).error for size in ((1, 2), (3, 17), (2, 64))) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name", "settings"),
    [
        ("BertForSequenceClassification", "linear", {"window": 16, "global_tokens": [0, 3]}),
        ("BertForSequenceClassification", "linear", {"feature_map": "hedgehog", "gate": False, "window": 16}),
        ("BertForSequenceClassification", "local", {"left": 3, "right": 20}),
        ("GPT2LMHeadModel", "linear", {"window": 16, "sinks": 3}),
        ("GPT2LMHeadModel", "linear", {"feature_map": "gated", "window": 16}),
        ("GPT2LMHeadModel", "exact-topk", {"topk": 20}),
    ],
)
def test_onnx_runtime_computes_the_same(family, name, settings, tmp_path):
    model = tiny(family, **{POSITIONS[family]: 300})
    surgery.convert(model, Plan.of(name, **settings))
    # A window is exact attention of blocks with the keys in their reach, whose number does not depend on the length.
    assert bool(operators(model, tmp_path / "model.onnx")["Attention"]) == (name == "local")
    run = export._runner(tmp_path / "model.onnx", "onnx")[0]
    with torch.no_grad():
        assert max(export._compare(model, run, *size).error for size in ((1, 2), (3, 65), (2, 290))) < 1e-4


def test_chosen_keys_do_not_make_a_program_quadratic(tmp_path):
    """As many keys are moved to the front as positions can choose, not as there are."""
    kind: Any = MECHANISMS["linear"]
    mechanism = kind(4, 8, causal=True, scale=1.0, window=16, sinks=3)
    q = torch.zeros(1, 4, 100, 8)
    with torch.no_grad():
        program = torch.export.export(mechanism, (q, q, q), dynamic_shapes=({2: Dim.DYNAMIC},) * 3)
    counts = [node.args[1] for node in program.graph.nodes if node.target is torch.ops.aten.topk.default]
    assert counts == [3]


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_onnx_in_both_precisions(quantize, tmp_path):
    tiny("BertForSequenceClassification").save_pretrained(tmp_path / "base")
    made = export.export(tmp_path / "base", tmp_path / "onnx", format="onnx", quantize=quantize, lengths=[5, 64, 33])
    error = max(made.largest_relative_difference.values())
    assert (error < 1e-4) == (quantize is None) == (made.relative_rms is None)
    assert made.equal_predictions is not None
    assert {"model.onnx", "config.json", export.EXPORTED} == {
        path.name for path in (tmp_path / "onnx").iterdir() if path.name != "approx_manifest.json"
    }
    report = json.loads((tmp_path / "onnx" / export.EXPORTED).read_text())
    assert report["quantize"] == quantize
    assert "onnxruntime" in report["versions"]
    import onnx

    nodes = {node.op_type for node in onnx.load(tmp_path / "onnx" / "model.onnx").graph.node}
    assert ("MatMulInteger" in nodes) == (quantize == "int8")


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_openvino_in_both_precisions(quantize, tmp_path):
    pytest.importorskip("openvino")
    pytest.importorskip("nncf")
    tiny("BertForSequenceClassification").save_pretrained(tmp_path / "base")
    made = export.export(tmp_path / "base", tmp_path / "program", format="openvino", quantize=quantize)
    assert max(made.largest_relative_difference.values()) < (0.3 if quantize else 1e-4)
    assert {"model.xml", "model.bin"} <= {path.name for path in (tmp_path / "program").iterdir()}
    assert ('element_type="u8"' in (tmp_path / "program" / "model.xml").read_text()) == (quantize == "int8")


def test_shapes_that_depend_on_the_data_are_refused():
    model = tiny("BertModel")
    surgery.convert(model, Plan.of("clustered", clusters=3))
    with pytest.raises(
        ApproxError, match=r"clustered cannot be exported: .*\(layers 0.2\)\. Convert with one of .*local"
    ) as refused:
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


def test_names_what_onnx_has_no_operator_for():
    model = tiny("GPT2LMHeadModel")
    surgery.convert(model, Plan.of("linear", update="delta"))
    export.refuse_unexportable(model)
    with pytest.raises(ApproxError, match="linear cannot be exported: ONNX has no operator"):
        export.refuse_unexportable(model, "onnx")


def test_discards_a_program_that_computes_something_else(tmp_path, monkeypatch):
    tiny("BertModel").save_pretrained(tmp_path / "base")
    honest = exported._torch

    def wrong(path):
        opened = honest(path)
        return replace(opened, run=lambda inputs: {name: x * 1.01 for name, x in opened.run(inputs).items()})

    monkeypatch.setattr(exported, "_torch", wrong)
    with pytest.raises(ApproxError, match=r"differs from .* at 1 x 12: 1\.0e-02") as refused:
        export.export(tmp_path / "base", tmp_path / "program")
    assert refused.value.exit_code == Exit.VERIFICATION
    assert not (tmp_path / "program").exists()


def test_refuses_bad_options_before_any_work(tmp_path, monkeypatch):
    with pytest.raises(ApproxError, match="There is no format 'tflite'"):
        export.export("quickstart", tmp_path / "program", format="tflite")
    with pytest.raises(ApproxError, match=r"'torch-export' takes no --quantize\. Use it with --format onnx"):
        export.export("quickstart", tmp_path / "program", quantize="int8")
    with pytest.raises(ApproxError, match="precision 'int4' is unknown; --quantize takes int8"):
        export.export("quickstart", tmp_path / "program", format="onnx", quantize="int4")
    with pytest.raises(ApproxError, match="three lengths of 2 or more tokens, 2,048 at most; --lengths gave 1, 5, 9"):
        export.export("quickstart", tmp_path / "program", lengths=[1, 5, 9])
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ApproxError, match=r"pip install 'onnx>=\S+ 'onnxruntime>=\S+ 'onnxscript>=") as missing:
        export.export("quickstart", tmp_path / "program", format="onnx")
    assert missing.value.exit_code == Exit.MISSING
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(ApproxError, match=r"needs onnxscript and openvino, .*pip install 'nncf>=\S+ 'onnx>="):
        export.export("quickstart", tmp_path / "program", format="openvino")


def test_refuses_a_quantised_checkpoint(tmp_path):
    tiny("BertModel").save_pretrained(tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ApproxError, match="is quantised, and programs are made from float weights") as refused:
        export.export(tmp_path / "base", tmp_path / "program")
    assert refused.value.exit_code == Exit.UNSUPPORTED
    assert not (tmp_path / "program").exists()


@pytest.mark.slow
def test_discards_an_int8_program_with_wrong_scales(tmp_path, monkeypatch):
    import onnx

    tiny("BertForSequenceClassification").save_pretrained(tmp_path / "base")
    honest = export._quantize_onnx

    def doubled(path, out, **how):
        honest(path, out, **how)
        program = onnx.load(out)
        scales = [each for each in program.graph.initializer if each.name.endswith("_scale")]
        assert scales
        for each in scales:
            each.CopyFrom(onnx.numpy_helper.from_array(2 * onnx.numpy_helper.to_array(each), each.name))
        onnx.save(program, out)

    monkeypatch.setattr(export, "_quantize_onnx", doubled)
    with pytest.raises(
        ApproxError, match=r"Rounded to int8, .* computes something else: its differences are \d"
    ) as refused:
        export.export(tmp_path / "base", tmp_path / "int8", format="onnx", quantize="int8", lengths=[5, 16, 24])
    assert refused.value.exit_code == Exit.VERIFICATION
    assert not (tmp_path / "int8").exists()


@pytest.mark.slow
def test_int8_leaves_the_maps_of_heads_as_they_are(tmp_path):
    """ONNX Runtime opens a program whose maps, which have three dimensions, are rounded, but cannot run it."""
    tiny("BertForSequenceClassification").save_pretrained(tmp_path / "base")
    convert.convert(tmp_path / "base", tmp_path / "linear", Plan.of("linear", window=4, feature_map="hedgehog"))
    made = export.export(tmp_path / "linear", tmp_path / "int8", format="onnx", quantize="int8", lengths=[5, 16, 24])
    assert made.relative_rms is not None
    assert 0 < made.relative_rms < 0.1
