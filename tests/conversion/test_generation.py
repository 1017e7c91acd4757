"""generate() on converted decoders gives the same tokens with and without a cache."""

from typing import Any

import pytest
import torch

from approx.conversion import surgery
from approx.conversion.inputs import example_inputs
from approx.conversion.plan import Plan
from conversion.zoo import CAUSAL, tiny

DECODERS = ("GPT2LMHeadModel", "LlamaForCausalLM", "WhisperForConditionalGeneration")
SETTINGS: dict[str, dict[str, Any]] = {"local": {"left": 4}}
WAYS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "sampling": {"do_sample": True, "temperature": 1.5},
}


def decoder(architecture):
    """A model whose weights are large enough for it to say different things."""
    spread = "init_std" if architecture.startswith("Whisper") else "initializer_range"
    return tiny(architecture, seed=3, **{spread: 0.6})


def prompts(model):
    """Three prompts of different lengths, padded on the left as decoders want it; speech for Whisper."""
    if model.main_input_name == "input_features":
        inputs = example_inputs(model, 6, batch=2)
        return {"input_features": inputs["input_features"], "decoder_input_ids": inputs["decoder_input_ids"]}
    inputs = example_inputs(model, 9, batch=3)
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[1, :4] = mask[2, :7] = 0
    return {"input_ids": inputs["input_ids"] * mask, "attention_mask": mask}


def generated(model, inputs, **ways):
    torch.manual_seed(1)
    # Without an end token every row runs to the full length.
    return model.generate(**inputs, max_new_tokens=12, min_new_tokens=12, pad_token_id=0, **ways)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mechanism", CAUSAL)
@pytest.mark.parametrize("architecture", DECODERS)
def test_the_cache_changes_no_token(architecture, mechanism, way):
    model = decoder(architecture)
    layers = "2-3" if architecture.startswith("Whisper") else "1-2"
    inputs = prompts(model)
    plan = Plan.of(mechanism, layers=layers, **SETTINGS.get(mechanism, {}))
    surgery.convert(model, plan, calibration=example_inputs(model, 24))
    with_cache = generated(model, inputs, use_cache=True, **WAYS[way])
    without = generated(model, inputs, use_cache=False, **WAYS[way])
    assert torch.equal(with_cache, without)
    assert len(set(with_cache[0, -12:].tolist())) > 1


@pytest.mark.parametrize("mechanism", ["full", "sdpa"])
@pytest.mark.parametrize("architecture", DECODERS)
def test_exact_mechanisms_generate_what_the_base_generates(architecture, mechanism):
    model = decoder(architecture)
    inputs = prompts(model)
    before = generated(model, inputs)
    surgery.convert(model, Plan.of(mechanism))
    assert torch.equal(generated(model, inputs), before)


@pytest.mark.parametrize("architecture", DECODERS[:2])
def test_left_padding_changes_no_token(architecture):
    model = decoder(architecture)
    surgery.convert(model, Plan.of("local", left=4))
    inputs = prompts(model)
    together = generated(model, inputs)
    alone = generated(model, {key: tensor[1:2, 4:] for key, tensor in inputs.items()})
    assert torch.equal(together[1, 4:], alone[0])


@pytest.mark.parametrize("mechanism", CAUSAL)
def test_a_prompt_read_in_chunks_gives_the_same_logits(mechanism):
    model = tiny("LlamaForCausalLM")
    plan = Plan.of(mechanism, **SETTINGS.get(mechanism, {}))
    surgery.convert(model, plan, calibration=example_inputs(model, 24))
    tokens = example_inputs(model, 12)["input_ids"]
    with torch.no_grad():
        whole = model(tokens).logits
        first = model(tokens[:, :5], use_cache=True)
        second = model(tokens[:, 5:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(torch.cat([first.logits, second], 1), whole)
