"""From folder to folder: what convert writes, what it checks first, and what revert restores."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from approx.checkpoints import checkpoint
from approx.checkpoints.history import read_receipt
from approx.checkpoints.manifest import MANIFEST, check_seal, seal
from approx.conversion import convert, surgery, verify
from approx.errors import ApproxError, Exit
from approx.mechanisms import MECHANISMS
from approx.planning.plan import Plan, Rule
from forms import ELU
from tiny_classifier import tiny_model, tiny_tokenizer
from tiny_speech import recogniser, speech_processor
from zoo import FAMILIES, OTHER_HEADS, UNNAMED, difference, outputs, tiny

PLAN = Plan((Rule("improved-clustered", "all", {"clusters": 4}), Rule("linear", "1", ELU)))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "base"
    torch.manual_seed(0)
    tiny_model(2, ["bad", "good"]).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (folder / "training_args.bin").write_bytes(b"private")
    return folder


@pytest.fixture(scope="module")
def converted(base):
    """Folder and receipt of a conversion with all checks, including the reload in a fresh process."""
    steps = []
    receipt = convert.convert(base, base.parent / "converted", PLAN, max_length=100, progress=steps.append)
    return base.parent / "converted", receipt, steps


def test_the_folder_is_whole_and_ordinary(converted, base):
    folder, _, steps = converted
    check_seal(folder)
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md", MANIFEST, convert.RECEIPT} <= names
    assert "training_args.bin" not in names
    assert {path.name for path in folder.parent.iterdir()} == {"base", "converted"}
    assert steps[0] == "reading the config"
    assert steps[-1] == "reloading in a fresh process"
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "approx_bert"
    assert "max_position_embeddings" in config
    assert json.loads((folder / "tokenizer_config.json").read_text())["model_max_length"] == 100


def test_every_check_passed_and_is_in_the_receipt(converted):
    folder, receipt, _ = converted
    assert [(check.name, check.passed) for check in receipt.checks] == [
        ("exact limit equals the base", True),
        ("padding cannot matter", True),
        ("no leak from the future", None),
        ("base weights are bit-equal", True),
        ("reload without approx is bit-equal", True),
    ]
    stored = read_receipt(folder)
    assert stored is not None
    assert stored.model_dump() | {"notes": []} == receipt.model_dump()
    assert receipt.errors.keys() == {0, 1}
    assert receipt.errors[1] > receipt.errors[0] >= 0
    assert receipt.positions == (32, 100)
    assert receipt.notes == []


def test_the_history_names_the_base_by_its_hash_and_nothing_private(converted, base):
    folder, _, _ = converted
    (entry,) = json.loads((folder / "config.json").read_text())["approx"]["history"]
    sha256 = checkpoint.load(base).weights_sha256
    assert entry["base"] == {"name": "base", "revision": None, "weights_sha256": sha256, "adapter": None}
    assert entry["plan"] == PLAN.to_data()
    assert entry["max_length"] == 100
    for path in folder.iterdir():
        assert str(base.parent).encode() not in path.read_bytes(), path.name


def test_card_says_how_the_model_was_made_and_how_to_load_it(converted):
    text = (converted[0] / "README.md").read_text()
    # Neither skips keys, so there is no captured mass.
    for layer, settings in enumerate(("improved-clustered | clusters = 4", "linear |")):
        (row,) = (line for line in text.splitlines() if line.startswith(f"| {layer} | {settings}"))
        assert row.endswith(f" | {converted[1].errors[layer]:.3f} | – |")
    assert "AutoModelForSequenceClassification.from_pretrained" in text
    assert "trust_remote_code=True" in text


def test_converted_folder_opens_as_converted(converted):
    opened = checkpoint.load(converted[0])
    assert opened.source.converted
    assert opened.source.stock_class is transformers.BertForSequenceClassification
    assert len(checkpoint.processor(opened.source)("the film is good")["input_ids"]) == 6


def test_revert_gives_the_base_back_to_the_last_bit(converted, base):
    out = base.parent / "reverted"
    convert.revert(converted[0], out)
    first, second = load_file(base / "model.safetensors"), load_file(out / "model.safetensors")
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    configs = [json.loads((folder / "config.json").read_text()) for folder in (base, out)]
    assert configs[0] == configs[1]
    assert not list(out.glob("*.py"))
    model = transformers.AutoModelForSequenceClassification.from_pretrained(out)
    assert type(model) is transformers.BertForSequenceClassification
    assert json.loads((out / "tokenizer_config.json").read_text())["model_max_length"] == 32
    with pytest.raises(ApproxError, match="not a converted checkpoint"):
        convert.revert(base, base.parent / "twice")


def test_a_converted_folder_is_not_converted_again(converted):
    with pytest.raises(ApproxError, match="converted already") as caught:
        convert.convert(converted[0], converted[0].parent / "twice", PLAN)
    assert caught.value.exit_code == Exit.REFUSED


def test_an_existing_folder_is_refused_before_any_work(converted, base):
    steps = []
    with pytest.raises(ApproxError, match="--force") as caught:
        convert.convert(base, converted[0], PLAN, progress=steps.append)
    assert caught.value.exit_code == Exit.REFUSED
    assert steps == []


@pytest.mark.parametrize(
    ("place", "length", "words"),
    [("file/out", None, "cannot be written"), ("out", 32, "already takes 32 positions"), ("out", 0, "larger number")],
)
def test_refuses_bad_outputs_and_lengths_before_it_reads_weights(place, length, words, base, tmp_path):
    (tmp_path / "file").write_text("")
    steps = []
    with pytest.raises(ApproxError, match=words) as caught:
        convert.convert(base, tmp_path / place, PLAN, max_length=length, progress=steps.append)
    assert caught.value.exit_code == Exit.USAGE
    assert "loading the weights" not in steps
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_force_never_deletes_the_source(converted, base, tmp_path):
    run = shutil.copytree(base, tmp_path / "run")
    inside = shutil.copytree(base, run / "checkpoint-500")
    away = shutil.copytree(converted[0], run / "converted")
    for make_folder in (
        lambda: convert.convert(run, run, PLAN, force=True),
        lambda: convert.convert(inside, run, PLAN, force=True),
        lambda: convert.revert(away, run, force=True),
    ):
        with pytest.raises(ApproxError, match="was not written by approx") as caught:
            make_folder()
        assert caught.value.exit_code == Exit.REFUSED


@pytest.mark.parametrize("name", ["weights", "code"])
def test_a_converted_folder_that_was_changed_is_refused(name, converted, tmp_path):
    folder = shutil.copytree(converted[0], tmp_path / "copy")
    path = folder / {"weights": "model.safetensors", "code": "approx_mechanisms_linear.py"}[name]
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(ApproxError, match=path.name) as caught:
        checkpoint.load(folder)
    assert caught.value.exit_code == Exit.UNAVAILABLE


def test_a_mechanism_that_lets_padding_through_is_not_written(base, tmp_path, monkeypatch):
    mechanism = MECHANISMS["local"]
    honest = mechanism.forward
    monkeypatch.setattr(mechanism, "forward", lambda self, q, k, v, mask=None, **more: honest(self, q, k, v, **more))
    out = tmp_path / "out"
    with pytest.raises(ApproxError, match="padding cannot matter") as caught:
        convert.convert(base, out, Plan.of("local", left=30, right=30))
    assert caught.value.exit_code == Exit.VERIFICATION
    assert {path.name for path in tmp_path.iterdir()} == {"out.failed"}
    results = json.loads((tmp_path / "out.failed" / convert.RECEIPT).read_text())["checks"]
    assert "padding cannot matter" in {check["name"] for check in results if check["passed"] is False}


def test_a_failure_while_writing_leaves_the_existing_folder(base, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("old")
    seal(tmp_path / "out")

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert, "copy_companions", full)
    with pytest.raises(ApproxError, match="No space left") as caught:
        convert.convert(base, tmp_path / "out", PLAN, force=True)
    assert caught.value.exit_code == Exit.UNAVAILABLE
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    assert (tmp_path / "out" / "config.json").read_text() == "old"


@pytest.mark.parametrize("architecture", [*FAMILIES, *OTHER_HEADS, *UNNAMED])
@pytest.mark.sample(8)
def test_the_checks_hold_on_every_family(architecture, tmp_path):
    # Without a fresh process: all families go through one together in test_persistence.
    model = tiny(architecture)
    before = dict(model.state_dict())
    plan = Plan.of("local", left=3, right=3)
    results = [verify.exact_limit(model, plan)]
    surgery.convert(model, plan)
    results += [verify.padding(model), verify.causality(model)]
    model.save_pretrained(tmp_path)
    results.append(verify.weights(tmp_path, before))
    assert [check for check in results if check.passed is False] == []
    assert sum(check.passed is True for check in results) >= 2


def test_experts_pass_every_check_and_are_stored_unchanged(tmp_path):
    # Stock files hold experts separately, but the model and the converted folder hold them in one tensor.
    tiny("MixtralForCausalLM").save_pretrained(tmp_path / "base")
    receipt = convert.convert(tmp_path / "base", tmp_path / "converted", Plan.of("linear", **ELU))
    assert {check.name: check.passed for check in receipt.checks}["reload without approx is bit-equal"]
    convert.revert(tmp_path / "converted", tmp_path / "reverted")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "reverted"))
    assert any(".experts.3." in name for name in first)
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_exact_limit_raises_no_warnings_about_speed(caplog):
    caplog.set_level("INFO", "approx_kernels")
    # C runs the plan, which has no window, but not the wide window of the exact limit.
    assert verify.exact_limit(tiny("BertModel"), Plan.of("linear", **ELU)).passed
    assert not [line for line in caplog.messages if "plain PyTorch" in line]


def test_each_check_detects_its_fault(tmp_path):
    model = tiny("GPT2LMHeadModel")
    surgery.convert(model, Plan.of("local", left=3, right=3))
    before = dict(model.state_dict())
    model.save_pretrained(tmp_path)
    assert verify.weights(tmp_path, before).passed
    before["transformer.h.0.ln_1.weight"] = before["transformer.h.0.ln_1.weight"] + 1e-7
    assert verify.weights(tmp_path, before).passed is False
    for site in model.config.approx["sites"]:
        model.base_model.get_submodule(site).mechanism.causal = False
    assert verify.causality(model).passed is False


def test_a_head_that_tells_padding_by_a_token_is_checked_without_one(tmp_path):
    model = tiny("GPT2ForSequenceClassification", pad_token_id=None)
    plan = Plan.of("local", left=3)
    assert verify.exact_limit(model, plan).passed
    surgery.convert(model, plan)
    assert verify.padding(model).passed
    assert verify.causality(model).passed
    model.save_pretrained(tmp_path)
    assert verify.fresh_process(tmp_path, model).passed


def test_the_real_checkpoint_converts_and_comes_back(shared_checkpoints, tmp_path):
    folder = shared_checkpoints / "minilm-sst2"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there")
    receipt = convert.convert(folder, tmp_path / "out", Plan.of("improved-clustered"), max_length=1000)
    assert all(check.passed is not False for check in receipt.checks)
    assert max((receipt.errors or {1: 1.0}).values()) < 0.5
    model, stock = checkpoint.load(tmp_path / "out").model, checkpoint.load(folder).model
    surgery.revert(model)
    assert difference(outputs(model), outputs(stock)) == 0.0


def test_copies_a_processor_whose_class_only_the_config_names(tmp_path):
    texts, sounds = tmp_path / "texts", tmp_path / "sounds"
    tiny("GPT2LMHeadModel").save_pretrained(texts)
    letters = ["<|endoftext|>", *"abcdefghijklmnopqrstuvwxyz"]
    (texts / "vocab.json").write_text(json.dumps({letter: index for index, letter in enumerate(letters)}))
    (texts / "merges.txt").write_text("#version: 0.2\n")
    recogniser().save_pretrained(sounds)
    settings = speech_processor(sounds).feature_extractor.to_dict()
    del settings["feature_extractor_type"]
    (sounds / "preprocessor_config.json").write_text(json.dumps(settings))
    for base, auto, inputs in (
        (texts, transformers.AutoTokenizer, "abba"),
        (sounds, transformers.AutoProcessor, np.ones(4000)),
    ):
        out = base.with_name(f"{base.name}-converted")
        convert.convert(base, out, Plan.of("local", left=3))
        before, after = auto.from_pretrained(base), auto.from_pretrained(out)
        assert type(after) is type(before)
        assert f"= {auto.__name__}.from_pretrained(" in (out / "README.md").read_text()
        read, wanted = (dict(reader(inputs, return_tensors="pt")) for reader in (after, before))
        assert read.keys() == wanted.keys()
        assert all(torch.equal(read[key], wanted[key]) for key in wanted)
        convert.revert(out, base.with_name(f"{base.name}-reverted"))
        assert type(auto.from_pretrained(base.with_name(f"{base.name}-reverted"))) is type(before)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "texts-converted").eos_token == "<|endoftext|>"


def test_converts_whisper_of_16_bits_whose_decoder_has_fewer_positions_than_its_encoder(tmp_path):
    model = tiny("WhisperForConditionalGeneration", max_source_positions=60, max_target_positions=24).half()
    model.save_pretrained(tmp_path / "base")
    made = convert.convert(tmp_path / "base", tmp_path / "out", Plan.of("clustered", layers="0-1", clusters=4))
    assert all(check.passed is not False for check in made.checks)
    assert {x.dtype for x in load_file(tmp_path / "out" / "model.safetensors").values()} >= {torch.float16}
