"""Which parameters are trained, adapters, and modes that a model cannot use."""

import sys

import pytest
import torch

from approx.conversion import surgery
from approx.errors import ApproxError, Exit
from approx.finetuning.options import Lora
from approx.finetuning.trainer import (
    add_adapters,
    attention_layers,
    check_modes,
    chosen_parameters,
    default_modes,
    mechanism_parameters,
    remove_adapters,
)
from approx.planning.plan import Plan
from approx.planning.positions import example_inputs
from forms import HEDGEHOG
from zoo import tiny

BLOCKS = {
    "BertForSequenceClassification": (
        ["bert.encoder.layer.0.attention.self.query", "bert.encoder.layer.0.attention.self.key"],
        ["bert.encoder.layer.0.attention.output.dense"],
    ),
    "GPT2LMHeadModel": (["transformer.h.0.attn.c_attn"], ["transformer.h.0.attn.c_proj"]),
    "LlamaForCausalLM": (
        ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"],
        ["model.layers.0.self_attn.o_proj"],
    ),
    "Wav2Vec2ForCTC": (
        ["wav2vec2.encoder.layers.0.attention.q_proj"],
        ["wav2vec2.encoder.layers.0.attention.out_proj"],
    ),
}


def sample(model):
    return example_inputs(model, 16, batch=2, padded=0, device=model.device)


@pytest.mark.parametrize("architecture", BLOCKS)
def test_the_layers_of_an_attention_block_are_those_that_run_around_it(architecture):
    model = tiny(architecture)
    layers = attention_layers(model, sample(model))
    before, after = BLOCKS[architecture]
    assert set(before) <= set(layers["before"])
    assert set(after) <= set(layers["after"])
    assert len(layers["after"]) == 3
    assert not any(
        "mlp" in name or "intermediate" in name or "pre_classifier" in name for kind in layers.values() for name in kind
    )


def test_trains_the_chosen_parameters_and_always_the_mechanisms():
    model = tiny("BertForSequenceClassification")
    surgery.convert(model, Plan.of("linear", **HEDGEHOG))
    of_mechanisms, inputs = set(mechanism_parameters(model)), sample(model)
    assert len(of_mechanisms) == 6
    everything = {name for name, _ in model.named_parameters()}
    assert set(chosen_parameters(model, "all", inputs)) == everything
    head = set(chosen_parameters(model, "head", inputs))
    assert head == of_mechanisms | {"classifier.weight", "classifier.bias"}
    attention = set(chosen_parameters(model, "attention", inputs))
    assert of_mechanisms < attention < everything
    assert all(".attention." in name for name in attention)


def test_the_feature_encoder_of_speech_stays_as_it_is():
    model = tiny("Wav2Vec2ForCTC")
    assert not any("feature_extractor" in name for name in chosen_parameters(model, "all", sample(model)))


def test_refuses_to_train_a_missing_head():
    model = tiny("BertModel")
    with pytest.raises(ApproxError, match="has no task head to train"):
        chosen_parameters(model, "head", sample(model))


@pytest.mark.parametrize("architecture", BLOCKS)
def test_adapters_change_nothing_at_first_and_are_merged_without_a_trace(architecture):
    pytest.importorskip("peft")
    model = tiny(architecture)
    surgery.convert(model, Plan.of("linear", **HEDGEHOG))
    inputs, keys = sample(model), set(model.state_dict())
    with torch.inference_mode():
        first = model(**inputs)[0]
    names = add_adapters(model, Lora(rank=2), inputs, seed=0)
    assert names
    with torch.inference_mode():
        assert torch.equal(model(**inputs)[0], first)
        for name in names:
            model.get_parameter(name).add_(0.05)
        trained = model(**inputs)[0]
        remove_adapters(model, merge=True)
        merged = model(**inputs)[0]
    assert not torch.allclose(first, trained, atol=1e-4)
    assert torch.allclose(trained, merged, atol=1e-5)
    assert set(model.state_dict()) == keys


def test_adds_adapters_to_the_named_targets():
    pytest.importorskip("peft")
    model = tiny("BertForSequenceClassification")
    names = add_adapters(model, Lora(targets=["query"]), sample(model), seed=0)
    assert len(names) == 6
    assert all(".query." in name for name in names)
    with pytest.raises(ApproxError, match=r"qeury.*It has:.*query"):
        add_adapters(tiny("BertForSequenceClassification"), Lora(targets=["qeury"]), sample(model), seed=0)


def test_adapters_need_their_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    model = tiny("BertForSequenceClassification")
    with pytest.raises(ApproxError, match=r"needs the package peft .*pip install 'accelerate>=\S+ 'peft>=") as caught:
        add_adapters(model, Lora(), sample(model), seed=0)
    assert caught.value.exit_code == Exit.MISSING


@pytest.mark.parametrize(
    ("modes", "mechanism", "text", "message"),
    [
        (["transfer"], "local", False, "local has none"),
        (["transfer"], "local", False, r"or let it train the projections \(--projections\)"),
        (["task", "lora"], "linear", False, "'lora' comes last"),
        (["lora"], "linear", False, "'lora' comes last"),
        (["mlm"], "linear", False, "'mlm' continues pre-training on plain text"),
        (["task", "task"], "linear", False, "names a mode twice"),
        (["clm"], "linear", False, "plain text"),
        (["task"], "linear", True, "needs labels"),
        (["transfer"], None, False, "is exact already"),
        (["distill"], None, False, "is exact already"),
    ],
)
def test_a_mode_that_cannot_be_used_is_refused_with_what_would_do(modes, mechanism, text, message):
    model = tiny("BertForSequenceClassification")
    if mechanism is not None:
        surgery.convert(model, Plan.of(mechanism))
    with pytest.raises(ApproxError, match=message):
        check_modes(modes, model, text=text, projections=False)


def test_projections_make_transfer_possible_without_parameters_of_a_mechanism():
    model = tiny("BertForSequenceClassification")
    surgery.convert(model, Plan.of("local"))
    check_modes(["transfer"], model, text=False, projections=True)


def test_default_modes_fit_mechanisms_first_where_possible():
    exact, local, learned = (tiny("BertForSequenceClassification") for _ in range(3))
    surgery.convert(local, Plan.of("local"))
    surgery.convert(learned, Plan.of("linear", **HEDGEHOG))
    for text, causal, last in ((False, False, "task"), (True, False, "mlm"), (True, True, "clm")):
        assert default_modes(exact, text=text, causal=causal, taught=False) == [last]
        assert default_modes(local, text=text, causal=causal, taught=False) == ["distill"]
        assert default_modes(learned, text=text, causal=causal, taught=False) == ["transfer", "distill"]


def test_adapters_are_drawn_from_the_seed_alone_and_scaled_as_asked():
    pytest.importorskip("peft")
    drawn = []
    for seed in (3, 3, 4):
        model = tiny("BertForSequenceClassification")
        torch.manual_seed(seed + len(drawn))
        before = torch.random.get_rng_state()
        names = add_adapters(model, Lora(rank=4, alpha=6.0, dropout=0.25, targets=["value"]), sample(model), seed=seed)
        assert torch.equal(torch.random.get_rng_state(), before)
        drawn.append(torch.cat([model.get_parameter(name).detach().flatten() for name in names]))
        first = model.bert.encoder.layer[0].attention.self.value
        assert first.lora_A["default"].weight.shape == (4, 32)
        assert first.lora_dropout["default"].p == 0.25
        # Output is the base's and 6 / 4 of the adapter's.
        x = torch.randn(5, 32)
        with torch.no_grad():
            first.lora_B["default"].weight.normal_()
            added = 1.5 * x @ first.lora_A["default"].weight.T @ first.lora_B["default"].weight.T
            torch.testing.assert_close(first.eval()(x), first.get_base_layer()(x) + added)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_adapters_that_are_not_merged_leave_the_weights_of_before():
    pytest.importorskip("peft")
    model = tiny("BertForSequenceClassification")
    before = {name: x.clone() for name, x in model.state_dict().items()}
    for name in add_adapters(model, Lora(), sample(model), seed=0):
        model.get_parameter(name).data.add_(0.1)
    remove_adapters(model, merge=False)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_looking_for_layers_leaves_a_model_as_it_was():
    model = tiny("GPT2LMHeadModel").train()
    state = torch.random.get_rng_state()
    layers = attention_layers(model, sample(model))
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert layers == {
        "before": [f"transformer.h.{layer}.attn.c_attn" for layer in range(3)],
        "after": [f"transformer.h.{layer}.attn.c_proj" for layer in range(3)],
    }
