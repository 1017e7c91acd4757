"""Tiny decoders with varied output, their prompts, and their generation."""

from typing import Any

import torch

from approx.conversion import surgery
from approx.planning.plan import Plan, Rule
from approx.planning.positions import example_inputs
from forms import CAUSAL, KINDS, SELF_ONLY, SMALL
from zoo import tiny

DECODERS = ("GPT2LMHeadModel", "LlamaForCausalLM", "WhisperForConditionalGeneration")
DECODING = [name for name in CAUSAL if name not in SELF_ONLY]
BOUNDED = [name for name in CAUSAL if KINDS[name].decode_state != "cache"]
NEW = 8
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "sampling": {"do_sample": True, "temperature": 1.5},
}


def rule(name, layers="all", **more):
    return Rule(name.split()[0], layers, SMALL.get(name, {}), **more)


def decoder(architecture, *rules, **changes):
    """A model with weights large enough for varied output."""
    spread = "init_std" if architecture.startswith("Whisper") else "initializer_range"
    model = tiny(architecture, seed=3, **{spread: 0.6}, **changes)
    # The embedding of padding is 0, so all scores of its queries and keys are tied at 0.
    table = model.get_input_embeddings().weight.data
    table[0] = -table[1]
    if rules:
        surgery.convert(model, Plan(rules), calibration=example_inputs(model, 24))
    return model


def prompts(model):
    """Three prompts of different lengths, padded on the left; speech for Whisper."""
    if model.main_input_name == "input_features":
        inputs = example_inputs(model, 6, batch=2)
        return {"input_features": inputs["input_features"], "decoder_input_ids": inputs["decoder_input_ids"]}
    inputs = example_inputs(model, 9, batch=3)
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[1, :4] = mask[2, :7] = 0
    return {"input_ids": inputs["input_ids"] * mask, "attention_mask": mask}


def generated(model, inputs, **ways):
    """Generated tokens, and the logits of every step."""
    torch.manual_seed(1)
    # Without an end token every row runs to the full length.
    ways = {"max_new_tokens": NEW, "min_new_tokens": NEW, "pad_token_id": 0} | ways
    output = model.generate(**inputs, return_dict_in_generate=True, output_logits=True, **ways)
    return output.sequences, torch.stack(output.logits)


def assert_same(actual, expected):
    (tokens, logits), (other_tokens, other_logits) = actual, expected
    assert torch.equal(tokens, other_tokens)
    # Single tokens may be summed in another order than many, and large weights amplify the rounding.
    torch.testing.assert_close(logits, other_logits, rtol=1e-4, atol=5e-4)
    assert tokens[:, -NEW:].unique().numel() > 1
