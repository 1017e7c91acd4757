"""A converted model has separate configs: the original ones do not change."""

from typing import Any

import pytest
import torch
import transformers

from approx.checkpoints import checkpoint, families
from approx.conversion import convert, surgery
from approx.errors import ApproxError
from approx.planning.plan import Plan
from zoo import FAMILIES, difference, outputs, tiny

PLAN = Plan.of("local", left=3, right=3)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_models_of_one_config_are_converted_one_by_one(architecture):
    first = tiny(architecture)
    config = first.config
    settings, implementation = config.to_dict(), config._attn_implementation
    second = type(first)(config).eval()
    second.load_state_dict(first.state_dict())
    before = outputs(first)
    surgery.convert(first, PLAN)
    assert type(config) is type(first).config_class.__mro__[1] is type(second.config)
    assert (config.to_dict(), config._attn_implementation) == (settings, implementation)
    assert difference(outputs(second), before) == 0.0
    after = outputs(first)
    surgery.convert(second, PLAN)
    assert difference(outputs(second), after) == 0.0
    surgery.revert(second)
    assert (second.config.to_dict(), type(second.config)) == (settings, type(config))
    assert families.is_converted(first)
    assert difference(outputs(first), after) == 0.0


def test_longer_positions_leave_the_original_config_unchanged():
    model = tiny("BertModel")
    config = model.config
    surgery.convert(model, PLAN, max_length=100)
    assert (config.max_position_embeddings, model.config.max_position_embeddings) == (64, 100)
    assert type(config)(**config.to_dict()).to_dict() == config.to_dict()


def llava() -> Any:
    size: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    text = transformers.LlamaConfig(**size, vocab_size=101, max_position_embeddings=64)
    seen = transformers.CLIPVisionConfig(**size, image_size=24, patch_size=8)
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(text_config=text, vision_config=seen)
    ).eval()


def test_what_shares_a_config_before_shares_it_afterwards():
    model = llava()
    config = model.config
    text = config.text_config
    names = [name for name, module in model.named_modules() if getattr(module, "config", None) is config.text_config]
    assert len(names) > 3
    surgery.convert(model, PLAN)
    assert model.config is model.model.config is not config
    assert model.config.text_config is not text
    assert all(model.get_submodule(name).config is model.config.text_config for name in names)
    # The dispatch reads the config part that a layer holds, so all layers must share the switched one.
    assert model.config.text_config._attn_implementation == "approx_v1"
    assert "approx_v1" not in {config._attn_implementation, config.text_config._attn_implementation}
    inputs = {"input_ids": torch.randint(5, 90, (1, 20))}
    changed = outputs(model, inputs)
    surgery.revert(model)
    assert type(model.config) is transformers.LlavaConfig
    assert difference(outputs(model, inputs), changed) > 1e-5
    assert not hasattr(model.config, "approx")


def test_a_plan_that_does_not_fit_leaves_the_config_alone():
    model = tiny("BertModel")
    config = model.config
    with pytest.raises(ApproxError):
        surgery.convert(model, Plan.of("sinks"))
    assert model.config is config
    assert torch.equal(outputs(model)[0], outputs(tiny("BertModel"))[0])


@pytest.mark.slow
def test_a_folder_of_several_models_of_which_one_reads_text_is_converted_and_loads(tmp_path):
    llava().save_pretrained(tmp_path / "base")
    convert.convert(tmp_path / "base", tmp_path / "out", PLAN)
    made, base = (checkpoint.load(tmp_path / name).model for name in ("out", "base"))
    inputs = {"input_ids": torch.randint(5, 90, (1, 20))}
    assert families.is_converted(made)
    assert made.config.text_config.vocab_size == 101
    assert difference(outputs(made, inputs), outputs(base, inputs)) > 1e-5
    surgery.convert(base, PLAN)
    assert difference(outputs(made, inputs), outputs(base, inputs)) == 0.0
