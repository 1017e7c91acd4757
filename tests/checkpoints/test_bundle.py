"""A converted folder is an ordinary checkpoint: it loads bit for bit, and never with exact attention."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from approx.checkpoints import checkpoint
from approx.checkpoints.manifest import MANIFEST, check_seal
from approx.conversion import surgery
from approx.errors import ApproxError, Exit
from approx.mechanisms import MECHANISMS
from approx.planning.anatomy import anatomy
from approx.planning.plan import Plan, Rule
from approx.planning.positions import example_inputs
from approx_kernels.dispatch.implementation import implementation
from converted import auto_class, code, run
from tiny_classifier import tiny_model, tiny_tokenizer
from zoo import FAMILIES, OTHER_HEADS, difference, outputs, tiny

ROOT = Path(__file__).resolve().parents[2]


def mixed(architecture, **how):
    """A converted model that uses every mechanism its layers allow, one per layer."""
    model = tiny(architecture)
    names = ("GPT2", "Llama", "Whisper")
    causal = architecture.startswith(names)
    kinds = {name: kind for name, kind in MECHANISMS.items() if kind.supports_bidirectional}
    able = [name for name, kind in kinds.items() if kind.supports_causal or not causal]
    layers = [site.layer for site in anatomy(model.config, type(model)).convertible]
    chosen = [able[(len(architecture) + layer) % len(able)] for layer in layers]
    if architecture.startswith("GPT2"):
        chosen[:2] = ["sinks", "linear"]  # a ring and a recurrent state, which travel too
    plan = Plan(tuple(Rule(name, str(layer)) for layer, name in zip(layers, chosen, strict=True)))
    surgery.convert(model, plan, calibration=example_inputs(model, 24), **how)
    return model


ALL = (*FAMILIES, "LlamaForSequenceClassification")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernels", "architectures"), [(False, ALL), (True, ("GPT2LMHeadModel", "WhisperForConditionalGeneration"))]
)
def test_every_family_reloads_to_the_last_bit_where_approx_cannot_be_imported(kernels, architectures, tmp_path):
    expected = {}
    for architecture in architectures:
        model = mixed(architecture, bundle_kernels=kernels)
        model.save_pretrained(tmp_path / architecture)
        inputs = example_inputs(model, 20, batch=2, padded=0 if model.can_generate() else 6)
        save_file(inputs, tmp_path / f"{architecture}@{auto_class(architecture)}.inputs")
        expected[architecture] = (model, inputs)
    child = run("-P", Path(__file__).parent / "reload_without_approx.py", tmp_path, HF_MODULES_CACHE=tmp_path / "cache")
    assert child.returncode == 0, child.stderr[-2000:]
    reloaded, facts = load_file(tmp_path / "results.safetensors"), json.loads((tmp_path / "results.json").read_text())
    for architecture, (model, inputs) in expected.items():
        # A slim folder has nothing else; with kernels the same C runs there.
        with torch.no_grad(), implementation("auto" if kernels else "plain"):
            here = model(**inputs)[0]
        assert torch.equal(reloaded[f"{architecture}/reloaded"], here), architecture
        assert torch.equal(reloaded[f"{architecture}/saved again"], here), architecture
        assert code(tmp_path / "again" / architecture) == code(tmp_path / architecture)
        if model.can_generate():
            with implementation("auto" if kernels else "plain"):
                tokens = model.generate(**inputs, max_new_tokens=5, min_new_tokens=5, pad_token_id=0)
            assert torch.equal(reloaded[f"{architecture}/generated"], tokens), architecture
        fact = facts[architecture]
        assert fact["class"] == f"Approx{architecture}"
        assert fact["backbone"].startswith("Approx")
        assert "approx_seam" not in fact["untrusted"]
        assert "trust_remote_code" in fact["untrusted"], fact["untrusted"]
        # The model is in 16 bits, but the mechanisms' tensors are not.
        stored = {name: str(tensor.dtype) for name, tensor in model.state_dict().items() if ".mechanism." in name}
        assert {name: fact["dtypes"][name] for name in stored} == stored
        assert "torch.bfloat16" in fact["dtypes"].values()
        # A folder saved again by stock transformers also loads here.
        again = checkpoint.load(tmp_path / "again" / architecture)
        assert difference(outputs(again.model, inputs), outputs(model, inputs)) == 0.0


@pytest.mark.parametrize(
    "architecture", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHER_HEADS)]
)
@pytest.mark.sample(6)
def test_local_folders_load_without_a_trust_flag_and_save_again(architecture, tmp_path):
    model = mixed(architecture)
    before = outputs(model)
    model.save_pretrained(tmp_path / "first")
    auto = getattr(transformers, auto_class(architecture))
    loaded = auto.from_pretrained(tmp_path / "first")
    assert type(loaded) is type(model)
    assert difference(outputs(loaded), before) == 0.0
    loaded.save_pretrained(tmp_path / "second")
    check_seal(tmp_path / "second")
    first, second = (sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("first", "second"))
    assert first == second
    assert json.loads((tmp_path / "second" / "config.json").read_text())["model_type"].startswith("approx_")
    surgery.revert(loaded)
    loaded.save_pretrained(tmp_path / "base")
    base = checkpoint.load(tmp_path / "base").model
    assert type(base).__name__ == architecture
    tiny_base = tiny(architecture)
    assert base.state_dict().keys() == tiny_base.state_dict().keys()
    assert all(torch.equal(tensor, tiny_base.state_dict()[name]) for name, tensor in base.state_dict().items())


_IMPORT_APPROX_FIRST = """
import sys, pickle
import approx
assert "torch" not in sys.modules and "transformers" not in sys.modules
model = pickle.load(open(sys.argv[2], "rb"))
assert type(model).__name__ == "ApproxBertForSequenceClassification"
from transformers import AutoModelForSequenceClassification, pipeline
model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1])
answer = pipeline("text-classification", model=sys.argv[1])("the film is good")
assert answer[0]["label"] in ("LABEL_0", "LABEL_1"), answer
print("done", type(model).__name__)
"""


@pytest.mark.slow
def test_importing_approx_registers_the_families(tmp_path):
    model = tiny_model(2)
    surgery.convert(model, Plan.of("improved-clustered", clusters=4))
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model.pickle").write_bytes(pickle.dumps(model))
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    child = run("-c", _IMPORT_APPROX_FIRST, tmp_path / "model", tmp_path / "model.pickle", PYTHONPATH=path)
    assert "done ApproxBertForSequenceClassification" in child.stdout, child.stderr[-2000:]


def test_other_heads_load_from_a_folder(tmp_path):
    model = mixed("BertForSequenceClassification")
    model.save_pretrained(tmp_path)
    backbone = transformers.AutoModel.from_pretrained(tmp_path)
    assert difference(outputs(backbone)[:1], outputs(model.bert)[:1]) == 0.0
    head = transformers.AutoModelForQuestionAnswering.from_pretrained(tmp_path)
    assert type(head).__name__ == "ApproxBertForQuestionAnswering"


def test_a_model_of_the_config_alone_is_converted(tmp_path):
    model = mixed("BertModel")
    model.save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    fresh = transformers.AutoModel.from_config(config)
    assert fresh.state_dict().keys() == model.state_dict().keys()


def test_pipelines_work_on_converted_models(tmp_path):
    model = tiny_model(2, ["bad", "good"])
    tiny_tokenizer().save_pretrained(tmp_path)
    surgery.convert(model, Plan.of("local", left=2, right=2))
    model.save_pretrained(tmp_path)
    answer = transformers.pipeline("text-classification", model=str(tmp_path))("the film is not very good")
    with torch.no_grad():
        logits = model(**tiny_tokenizer()("the film is not very good", return_tensors="pt")).logits[0]
    assert answer[0]["label"] == ["bad", "good"][int(logits.argmax())]
    assert answer[0]["score"] == pytest.approx(float(logits.softmax(-1).max()), abs=1e-6)


def test_checkpoints_of_the_trainer_are_converted_ones(tmp_path):
    model = tiny_model(2)
    surgery.convert(model, Plan.of("improved-clustered", clusters=4))
    rows = [{**tiny_tokenizer()("the film is good"), "labels": 1}, {**tiny_tokenizer()("the film is bad"), "labels": 0}]
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, save_steps=1, use_cpu=True, report_to=[], disable_tqdm=True
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, processing_class=tiny_tokenizer())  # type: ignore[arg-type]  # any sequence of rows will do
    trainer.train()
    for step in (1, 2):
        opened = checkpoint.load(tmp_path / f"checkpoint-{step}")
        assert opened.source.converted
        assert opened.notes == []
    again = transformers.Trainer(model, arguments, train_dataset=rows, processing_class=tiny_tokenizer())  # type: ignore[arg-type]  # as above
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_missing_tensors_of_a_mechanism_are_refused(tmp_path):
    model = tiny("BertModel")
    surgery.convert(model, Plan.of("clustered", clusters=4))
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    rest = {name: tensor for name, tensor in tensors.items() if "1.attention.self.mechanism" not in name}
    save_file(rest, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ApproxError, match="2 tensors of its attention mechanisms") as caught:
        transformers.AutoModel.from_pretrained(tmp_path)
    assert caught.value.exit_code == Exit.UNAVAILABLE


def test_a_config_of_another_format_is_refused(tmp_path):
    model = mixed("BertModel")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for field in (None, {**config["approx"], "format": 99}):
        (tmp_path / "config.json").write_text(json.dumps({**config, "approx": field}))
        with pytest.raises(ApproxError, match="format 1"):
            transformers.AutoModel.from_pretrained(tmp_path)


def test_pushing_while_saving_is_refused(tmp_path):
    model = mixed("BertModel")
    with pytest.raises(ApproxError, match="call push_to_hub"):
        model.save_pretrained(tmp_path / "out", push_to_hub=True)
    assert not (tmp_path / "out").exists()


def test_only_the_main_process_writes(tmp_path):
    mixed("BertModel").save_pretrained(tmp_path, is_main_process=False)
    assert not (tmp_path / MANIFEST).exists()


def test_copies_only_needed_code(tmp_path):
    model = tiny("BertModel")
    surgery.convert(model, Plan.of("local"), bundle_kernels=True)
    model.save_pretrained(tmp_path)
    names = {path.name for path in tmp_path.glob("*.py")}
    assert "approx_mechanisms_local.py" in names
    assert not any("clustered" in name or "linear" in name for name in names)
    for path in tmp_path.glob("*.py"):
        lines = path.read_text().splitlines()
        assert not [line for line in lines if line.startswith(("from approx", "import approx"))]
