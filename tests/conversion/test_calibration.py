"""Calibration: fitting mechanisms to inputs during conversion, and measuring the error of each layer on them."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from approx.conversion import surgery, verify
from approx.conversion.calibration import calibrate, weaken
from approx.conversion.verify import layer_damage, not_measured
from approx.errors import ApproxError
from approx.mechanisms import MECHANISMS
from approx.planning.plan import Plan, Rule
from approx.planning.positions import example_inputs
from forms import SMALL
from zoo import outputs, tiny


def mechanisms(model):
    return [model.base_model.get_submodule(path).mechanism for path in model.config.approx["sites"]]


@pytest.mark.parametrize("heads", ["all", "1,3"])
@pytest.mark.parametrize(
    ("name", "settings", "fitted"),
    [
        ("adaptive-span", {"start": "calibrated", "max_span": 40, "ramp": 4, "keep": 0.5}, "fraction"),
        ("clustered", {"clusters": 3, "frozen": True}, "centroids"),
    ],
)
def test_each_layer_is_calibrated_on_what_reaches_it(name, settings, fitted, heads, tmp_path):
    model = tiny("BertModel").train()
    plan = Plan.of(name, heads=heads, exact_below=30, **settings)
    surgery.convert(model, plan, calibration=example_inputs(model, 24, batch=2, padded=5))
    assert model.training
    assert [each.exact_below for each in mechanisms(model)] == [30 if heads == "all" else 0] * 3
    state = {key: tensor.clone() for key, tensor in model.state_dict().items() if key.endswith(fitted)}
    assert len(state) == 3
    # Calibrating the last layer again on the same batch gives the same result.
    model.eval()
    seen = []
    last = mechanisms(model)[2]
    last = last if heads == "all" else next(each for each in last.groups if each.needs_calibration)
    last.register_forward_pre_hook(lambda _, args: seen.append(args))
    for each in (m for m in model.modules() if hasattr(m, "exact_below")):
        each.exact_below = 0
    with torch.no_grad():
        model(**example_inputs(model, 24, batch=2, padded=5))
        last.calibrate(*seen[0])
    name = next(key for key in state if ".layer.2." in key)
    assert torch.equal(model.state_dict()[name], state[name])
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[key], tensor) for key, tensor in state.items())


def test_missing_calibration_leaves_the_model_unchanged():
    model, base = tiny("BertModel"), tiny("BertModel")
    plan = Plan.of("clustered", frozen=True)
    # The second is not an input of BERT.
    for calibration, error in ((None, ApproxError), ({"pixels": torch.zeros(1)}, ValueError)):
        with pytest.raises(error, match="'calibration'" if calibration is None else "input_ids"):
            surgery.convert(model, plan, calibration=calibration)
        assert type(model) is type(base)
        assert model.state_dict().keys() == base.state_dict().keys()
    assert verify.exact_limit(model, plan).passed


def test_the_captured_mass_is_that_of_the_window():
    model = tiny("BertModel")
    surgery.convert(model, Plan.of("local", "0", left=2, right=1))
    inputs = example_inputs(model, 20, batch=2, padded=6)
    seen = []
    handle = mechanisms(model)[0].register_forward_pre_hook(lambda _, args: seen.append(args))
    outputs(model, inputs)
    handle.remove()
    ((q, k, _, mask),) = seen
    by_hand = []
    for row, length in enumerate((20, 14)):
        assert mask[row].sum() == length
        for head in range(4):
            for i in range(length):
                scores = (q[row, head, i] @ k[row, head, :length].T * 8**-0.5).softmax(0)
                by_hand.append(scores[max(0, i - 2) : i + 2].sum())
    damage = layer_damage(model, inputs)
    assert damage.keys() == {0}
    assert damage[0].captured_mass == pytest.approx(float(torch.stack(by_hand).mean()), abs=1e-6)


def test_the_error_is_relative_to_the_size_of_the_output():
    errors = []
    for size in (1.0, 1e-3):
        model = tiny("BertModel")
        with torch.no_grad():
            for parameter in model.encoder.layer[0].attention.self.value.parameters():
                parameter *= size
        surgery.convert(model, Plan.of("local", "0", left=2, right=1))
        errors.append(layer_damage(model, example_inputs(model, 20))[0].error)
    assert errors[0] > 0.1
    assert errors[1] == pytest.approx(errors[0], rel=1e-3)


def test_the_captured_mass_bounds_the_error():
    # Scores as peaked as those of trained models, so that the bound is not trivial.
    q, k, v = torch.randn(3, 2, 4, 50, 8)
    q, k = 3 * q, 3 * k
    exact = MECHANISMS["full"](4, 8, causal=False, scale=8**-0.5)
    for name in ("local", "bigbird", "exact-topk"):
        mechanism = MECHANISMS[name](4, 8, causal=False, scale=8**-0.5, **SMALL[name])
        mass = (exact.weights(q, k) * (mechanism.weights(q, k) > 0)).sum(-1)
        error = (mechanism(q, k, v) - exact(q, k, v)).norm(dim=-1)
        bound = 2 * (1 - mass) * v.norm(dim=-1).amax(-1, keepdim=True)
        assert bool((error <= bound + 1e-5).all())
        assert 0 < mass.mean() < 1


def test_mass_is_counted_for_the_heads_that_leave_keys_out():
    model = tiny("BertModel")
    surgery.convert(
        model,
        Plan(
            (
                Rule("linear", "0"),
                Rule("local", "1", {"left": 1, "right": 1}, heads="0"),
                Rule("local", "2", exact_below=99),
            )
        ),
    )
    damage = layer_damage(model, example_inputs(model, 20))
    assert damage[0].captured_mass is None
    # A window of 3 of 20 keys, with nearly even weights.
    assert damage[1].captured_mass == pytest.approx(3 / 20, abs=0.05)
    assert damage[2] == (0.0, 1.0, 20)
    assert [one.tokens for one in damage.values()] == [20, 20, 20]
    # Observing has no side effects.
    assert not any(module._forward_hooks for module in model.modules() if isinstance(module, nn.Module))


def test_the_receipt_says_how_long_the_inputs_were_also_where_a_layer_stayed_exact():
    model = tiny("BertModel")
    plan = Plan((Rule("local", "0", {"left": 2, "right": 2}), Rule("local", "1", exact_below=30)))
    receipt = surgery.convert(model, plan)
    receipt.lost(layer_damage(model, example_inputs(model, 20, batch=2)), "random tokens")
    assert receipt.measured_at == {0: 20, 1: 20}
    assert receipt.measured_on == "20 tokens a row, random tokens"
    assert receipt.errors is not None
    assert (receipt.errors[0] > 0, receipt.errors[1]) == (True, 0.0)


def test_layers_whose_damage_cannot_be_seen_are_named_with_the_reason():
    model = tiny("BertModel")
    local = {"left": 2, "right": 2}, {"left": 70, "right": 70}
    rules = Rule("local", "0", local[0]), Rule("local", "1", local[1]), Rule("local", "2", local[0], exact_below=30)
    surgery.convert(model, Plan(rules))
    never, short = not_measured(model, {0: 20, 1: 20, 2: 20})
    assert never.startswith("With these settings layers 1 are exact on fewer than 72 tokens")
    assert "no more than 64: they never approximate" in never
    assert short.startswith("With these settings layers 2 are exact on fewer than 30 tokens")
    assert "measured on 20" in short
    assert len(not_measured(model, {0: 4, 1: 40, 2: 40})) == 1
    assert len(not_measured(model, {0: 3, 1: 40, 2: 40})) == 2


def test_a_mechanism_that_must_be_finetuned_says_so():
    model = tiny("BertModel")
    receipt = surgery.convert(model, Plan.of("lsh", variant="shared", heads="0"))
    (warning,) = receipt.warnings
    assert "fine-tuned" in warning
    surgery.revert(model)
    assert surgery.convert(model, Plan.of("lsh")).warnings == []


@pytest.mark.parametrize("name", ["linear", "performer", "lsh"])
def test_far_parts_that_are_too_strong_together_are_weakened_together(name, monkeypatch):
    model = tiny("LlamaForCausalLM", max_position_embeddings=256)
    for layer in model.model.layers:
        # Random weights attend to all keys nearly alike, which no far part could spoil.
        layer.self_attn.q_proj.weight.data.mul_(8.0)
        layer.self_attn.k_proj.weight.data.mul_(8.0)
    inputs = example_inputs(model, 192)
    with torch.no_grad():
        exact = model.model(**inputs)[0]
    surgery.exchange(model, Plan.of(name, window=8, sinks=1))
    # As if each layer's own fit had been much too strong.
    kind = type(mechanisms(model)[0])
    fit = kind.calibrate

    def too_strong(self: Any, *tensors: Any, **more: Any) -> None:
        fit(self, *tensors, **more)
        weaken(self, 4.0)

    def apart() -> float:
        with torch.no_grad():
            return float((model.model(**inputs)[0] - exact).square().sum())

    monkeypatch.setattr(kind, "calibrate", too_strong)
    with monkeypatch.context() as alone:
        alone.setattr("approx.conversion.calibration._fit_together", lambda *words: None)
        calibrate(model, inputs)
        before = apart()
    calibrate(model, inputs)
    assert apart() < 0.9 * before


def test_far_parts_of_encoders_are_left_as_fitted_since_inputs_may_be_shorter(monkeypatch):
    model = tiny("BertModel")
    surgery.exchange(model, Plan.of("linear", window=4))
    kind = type(mechanisms(model)[0])
    fit, fitted = kind.calibrate, []

    def noted(self: Any, *tensors: Any, **more: Any) -> None:
        fit(self, *tensors, **more)
        weaken(self, 4.0)
        fitted.append(copy.deepcopy(self.state_dict()))

    monkeypatch.setattr(kind, "calibrate", noted)
    calibrate(model, example_inputs(model, 60))
    kept = [mechanism.state_dict() for mechanism in mechanisms(model)]
    assert all(torch.equal(a[name], b[name]) for a, b in zip(fitted, kept, strict=True) for name in b)


def test_layers_that_the_calibration_text_is_too_short_for_have_no_error():
    model = tiny("BertModel")
    surgery.convert(model, Plan((Rule("linear", exact_below=30), Rule("linear", "0"))))
    errors = {layer: lost.error for layer, lost in layer_damage(model, example_inputs(model, 20)).items()}
    assert errors[0] > 0
    assert errors[1] == errors[2] == 0.0
