"""Adapters of PEFT are refused with the remedy, or merged on request, and are part of the identity of a model."""

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
import transformers

from approx import api
from approx.checkpoints import checkpoint
from approx.conversion import convert
from approx.conversion.verify import verify
from approx.errors import ApproxError, Exit
from approx.planning.plan import Plan
from zoo import error_of, tiny

PLAN = Plan.of("local", left=8)
INPUTS = {"input_ids": torch.arange(5, 29)[None]}


def trained(model, seed=0, **changes):
    """The model with an adapter that does something."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **changes)
    return peft.get_peft_model(model, config)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tiny("LlamaForCausalLM").save_pretrained(folder)
    return folder


@pytest.fixture
def both(base, tmp_path):
    """A checkpoint with an adapter next to its weights."""
    folder = Path(shutil.copytree(base, tmp_path / "both"))
    trained(tiny("LlamaForCausalLM")).save_pretrained(str(folder))
    return folder


@pytest.fixture
def alone(base, tmp_path):
    """The folder of an adapter, which names its base."""
    model = transformers.LlamaForCausalLM.from_pretrained(base)
    trained(model).save_pretrained(tmp_path / "alone")
    return tmp_path / "alone"


def logits(model):
    with torch.no_grad():
        return model(**INPUTS).logits


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize(
    "opened",
    [
        lambda folder: api.load(folder),
        lambda folder: api.inspect(str(folder)),
        lambda folder: api.plan(str(folder), PLAN, [128]),
        lambda folder: api.evaluate(str(folder), "needle", settings={"length": 32}, limit=2),
        lambda folder: api.bench(str(folder), [16]),
        lambda folder: api.generate(str(folder), ["a"]),
        lambda folder: api.search(str(folder), length=32, budget="kl<=0.1", task="needle"),
        lambda folder: api.finetune(str(folder), folder.parent / "healed", text=[str(folder / "config.json")]),
        lambda folder: convert.convert(folder, folder.parent / "out", PLAN),
    ],
    ids=["load", "inspect", "plan", "evaluate", "bench", "generate", "search", "finetune", "convert"],
)
def test_every_command_refuses_an_adapter_next_to_the_weights(both, opened, installed, monkeypatch):
    if not installed:
        monkeypatch.setattr("transformers.integrations.peft.is_peft_available", lambda: False)
    error = error_of(lambda: opened(both))
    assert error is not None
    assert error.exit_code == Exit.REFUSED
    assert all(word in str(error) for word in (str(both), "LORA", "--merge-adapter"))
    assert {path.name for path in both.parent.iterdir()} == {"both"}


@pytest.mark.slow
def test_merges_an_adapter_on_request(both, base, tmp_path):
    expected = logits(peft.PeftModel.from_pretrained(tiny("LlamaForCausalLM"), str(both)).merge_and_unload())
    opened = checkpoint.load(both, merge_adapter=True)
    assert torch.allclose(logits(opened.model), expected, atol=1e-6)
    assert (logits(opened.model) - logits(tiny("LlamaForCausalLM"))).abs().max() > 1e-3
    assert any("merged" in note for note in opened.notes)
    assert opened.weights_sha256 != checkpoint.load(base).weights_sha256
    assert not any("lora" in name for name in opened.model.state_dict())

    convert.convert(both, tmp_path / "out", Plan.of("sdpa"), merge_adapter=True)
    assert not list((tmp_path / "out").glob("adapter*"))
    made = checkpoint.load(tmp_path / "out")
    assert torch.allclose(logits(made.model), expected, atol=1e-6)
    (step,) = made.model.config.approx["history"]
    assert step["base"]["adapter"] == "LORA"
    assert step["base"]["weights_sha256"] == opened.weights_sha256
    assert "LORA adapter merged" in (tmp_path / "out" / "README.md").read_text()


def test_another_adapter_is_another_model(both, tmp_path):
    before = checkpoint.load(both, merge_adapter=True).weights_sha256
    written = (both / "adapter_config.json").read_text()
    (both / "adapter_config.json").write_text(json.dumps(json.loads(written) | {"lora_alpha": 64}))
    stronger = checkpoint.load(both, merge_adapter=True).weights_sha256
    (both / "adapter_config.json").write_text(written)
    assert checkpoint.load(both, merge_adapter=True).weights_sha256 == before
    trained(tiny("LlamaForCausalLM"), seed=1).save_pretrained(both)
    assert len({before, stronger, checkpoint.load(both, merge_adapter=True).weights_sha256}) == 3


def test_an_adapter_alone_is_named_with_its_base(alone, base):
    error = error_of(lambda: api.inspect(str(alone)))
    assert error is not None
    assert error.exit_code == Exit.REFUSED
    assert all(word in str(error) for word in ("LORA adapter", str(base), "--merge-adapter"))
    facts = api.inspect(str(alone), merge_adapter=True)
    assert facts.architecture == "LlamaForCausalLM"
    merged = checkpoint.load(alone, merge_adapter=True).model
    assert (logits(merged) - logits(tiny("LlamaForCausalLM"))).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("changes", "code", "word"),
    [
        ({"base_model_name_or_path": "acme/absent"}, Exit.UNAVAILABLE, "acme/absent"),
        ({"base_model_name_or_path": None}, Exit.UNAVAILABLE, "does not name its base"),
        ({"peft_type": "PREFIX_TUNING"}, Exit.UNSUPPORTED, "PREFIX_TUNING"),
        ({"peft_type": 3}, Exit.UNSUPPORTED, "adapter"),
        ({"target_modules": ["k_proj"]}, Exit.UNAVAILABLE, "merge_and_unload()"),
        ({"r": 3}, Exit.UNAVAILABLE, "merge_and_unload()"),
    ],
)
def test_refuses_what_cannot_be_merged(alone, changes, code, word):
    config = json.loads((alone / "adapter_config.json").read_text())
    (alone / "adapter_config.json").write_text(json.dumps(config | changes))
    error = error_of(lambda: checkpoint.load(alone, merge_adapter=True, offline=True))
    assert error is not None
    assert error.exit_code == code, error
    assert word in str(error)
    assert "\n" not in str(error)


def test_names_an_adapter_without_weights(alone):
    (alone / "adapter_model.safetensors").unlink()
    error = error_of(lambda: checkpoint.load(alone, merge_adapter=True))
    assert error is not None
    assert error.exit_code == Exit.UNAVAILABLE
    assert "adapter_model.safetensors" in str(error)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 20000])
def test_names_a_damaged_adapter_config(alone, text):
    (alone / "adapter_config.json").write_text(text)
    error = error_of(lambda: api.inspect(str(alone)))
    assert error is not None
    assert error.exit_code == Exit.UNAVAILABLE
    assert "adapter_config.json" in str(error)


def test_takes_the_head_from_the_adapter(tmp_path):
    tiny("LlamaModel").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForSequenceClassification"]}))
    model = transformers.LlamaForSequenceClassification.from_pretrained(tmp_path)
    trained(model, task_type="SEQ_CLS").save_pretrained(tmp_path)
    opened = checkpoint.load(tmp_path, merge_adapter=True)
    assert torch.equal(opened.model.score.weight, model.get_parameter("score.modules_to_save.default.weight"))
    assert not any("newly initialised" in note for note in opened.notes)


def test_a_converted_folder_with_an_added_adapter_is_another_model(base, tmp_path):
    convert.convert(base, tmp_path / "out", PLAN)
    (tmp_path / "sub").mkdir()
    trained(tiny("LlamaForCausalLM")).save_pretrained(tmp_path / "sub")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copyfile(tmp_path / "sub" / name, tmp_path / "out" / name)
    for opened in (checkpoint.load, verify):
        with pytest.raises(ApproxError, match="LORA") as caught:
            opened(tmp_path / "out")
        assert caught.value.exit_code == Exit.REFUSED
    assert checkpoint.load(tmp_path / "out", merge_adapter=True).source.converted
