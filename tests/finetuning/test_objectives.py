"""The objectives of training, against plain computations of them."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig
from transformers.utils.generic import ModelOutput

import forms
from approx.conversion import surgery
from approx.conversion.calibration import mechanisms
from approx.finetuning.options import Distillation
from approx.finetuning.trainer import (
    Distill,
    Supervised,
    Transfer,
    attention_layers,
    exactly,
    mechanism_parameters,
    relative_error,
    teacher_of,
)
from approx.planning.plan import Plan, Rule
from approx.planning.positions import example_inputs
from approx.seam.observe import observe
from tiny_training import set_dropout
from zoo import tiny

HEDGEHOG = {**forms.HEDGEHOG, "window": 2}


def converted(architecture: str, mechanism: str = "linear", **settings):
    model = tiny(architecture)
    surgery.convert(model, Plan.of(mechanism, **settings))
    return model


def error_of(outputs: torch.Tensor, target: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The squared error at real tokens, relative to the target's energy around its mean; [B, L, D] or [B, H, L, E]."""
    outputs, target = (
        (x if x.dim() == 3 else x.transpose(1, 2).flatten(2)).flatten(0, 1)[mask.flatten().bool()]
        for x in (outputs, target)
    )
    return (outputs - target).square().sum() / (target - target.mean(0)).square().sum()


def inputs_of(model, length: int = 24):
    return example_inputs(model, length, batch=2, padded=6, device=model.device)


@torch.no_grad()
def calls_of(model, inputs) -> list[Any]:
    """The calls of attention in evaluation mode."""
    calls: list[Any] = []
    with observe(model, calls.append):
        model.eval()(**inputs)
    return calls


@pytest.mark.parametrize(
    ("architecture", "joint", "match"),
    [
        ("BertForSequenceClassification", False, "outputs"),
        ("GPT2LMHeadModel", True, "outputs"),
        ("LlamaForCausalLM", False, "weights"),
        ("Wav2Vec2ForCTC", True, "weights"),
    ],
)
def test_transfer_lowers_the_error_of_every_layer_and_trains_nothing_else(architecture, joint, match):
    model = converted(architecture, **HEDGEHOG)
    trained = mechanism_parameters(model)
    inputs = inputs_of(model)
    objective = Transfer(model, joint=joint, match=match)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(12):
        loss = objective.loss(model, model, inputs)
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None for name, p in model.named_parameters() if name in trained)
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.9 * losses[0]
    changed = {name for name, x in model.state_dict().items() if not torch.equal(x, before[name])}
    assert changed == set(trained)


def test_a_layer_that_computes_exact_attention_has_no_error():
    model = converted("BertForSequenceClassification", feature_map="hedgehog", window=64)
    for joint in (False, True):
        loss = Transfer(model, joint=joint, match="outputs").loss(model, model, inputs_of(model))
        assert float(loss) < 1e-10


def test_layer_by_layer_each_layer_sees_what_the_base_would_feed_it():
    """Spoiling the first layer's map changes its own error and no other's; jointly it changes the later ones too."""
    model = converted("BertForSequenceClassification", **HEDGEHOG)
    inputs, trained = inputs_of(model), mechanism_parameters(model)
    first = [name for name in trained if ".layer.0." in name]

    def gradients(joint: bool) -> dict[str, torch.Tensor]:
        model.zero_grad()
        Transfer(model, joint=joint, match="outputs").loss(model, model, inputs).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if name in trained and name not in first}

    alone, together = gradients(False), gradients(True)
    with torch.no_grad():
        for name in first:
            model.get_parameter(name).add_(torch.randn_like(model.get_parameter(name)))
    alone_after, together_after = gradients(False), gradients(True)
    assert all(torch.allclose(alone[name], alone_after[name]) for name in alone)
    assert any(not torch.allclose(together[name], together_after[name]) for name in together)


def test_projections_are_compared_with_the_outputs_they_began_with():
    """Were their targets to move with them, making every query small would be a perfect answer."""
    model = converted("GPT2LMHeadModel", **HEDGEHOG)
    inputs = inputs_of(model)
    layers = attention_layers(model, inputs)
    names = [f"{layer}.weight" for layer in layers["before"]]
    objective = Transfer(model, joint=False, match="outputs", projections=names)
    with torch.no_grad():
        for name in names:
            model.get_parameter(name).mul_(0)
    loss = objective.loss(model, model, inputs)
    assert float(loss) > 0.5
    loss.backward()
    assert all(model.get_parameter(name).grad is not None for name in names)


def test_padding_counts_in_no_loss():
    model = converted("BertForSequenceClassification", **HEDGEHOG)
    teacher = teacher_of(model)
    inputs = inputs_of(model)
    other = {**inputs, "input_ids": inputs["input_ids"].clone()}
    other["input_ids"][-1, -6:] = 5
    for objective in (
        Transfer(model, joint=False, match="outputs"),
        Transfer(model, joint=True, match="weights"),
        Distill(teacher, Distillation(logits=1.0, hidden=1.0, attention=0.0)),
        Distill(teacher, Distillation(logits=0.0, hidden=0.0, attention=1.0)),
    ):
        assert float(objective.loss(model, model, other)) == pytest.approx(
            float(objective.loss(model, model, inputs)), rel=1e-4
        )


@pytest.mark.parametrize(
    "architecture",
    ["BertForSequenceClassification", "RobertaForQuestionAnswering", "GPT2LMHeadModel", "Wav2Vec2ForCTC"],
)
def test_a_student_that_is_its_teacher_has_no_distance_and_one_that_is_not_comes_nearer(architecture):
    model = converted(architecture, "local", left=1, right=1)
    teacher = teacher_of(model)
    assert teacher.config is not model.config
    inputs = inputs_of(model)
    objective = Distill(teacher, Distillation(logits=1.0, hidden=1.0, attention=1.0))
    with exactly(model):
        assert float(objective.loss(model, model, inputs)) < 1e-6
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(10):
        loss = objective.loss(model, model, inputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[0] > 1e-5
    assert losses[-1] < 0.9 * losses[0]
    assert all(p.grad is None for p in teacher.parameters())


def test_labels_can_be_part_of_a_distillation():
    model = converted("BertForSequenceClassification", "local", left=1, right=1)
    inputs = {**inputs_of(model), "labels": torch.tensor([0, 1])}
    teacher = teacher_of(model)
    alone = Distill(teacher, Distillation(logits=0.0, hidden=0.0, labels=2.0)).loss(model, model, inputs)
    assert float(alone) == pytest.approx(2 * float(Supervised().loss(model, model, inputs)), rel=1e-6)


def test_the_relative_error_leaves_out_what_does_not_count():
    outputs, target = (
        torch.tensor([[[1.0, 2.0], [3.0, 4.0], [9.0, 9.0]]]),
        torch.tensor([[[1.0, 4.0], [3.0, 8.0], [0.0, 0.0]]]),
    )
    real = torch.tensor([[[1.0], [1.0], [0.0]]])
    # Around the mean (2, 6) of the real tokens.
    assert float(relative_error(outputs, target, real)) == pytest.approx((4 + 16) / (1 + 4 + 1 + 4))
    assert float(relative_error(outputs, target, torch.zeros(1, 3, 1))) == 0.0
    # Of a target of nothing but zeros, which nothing can be relative to, an equal output has no error.
    assert float(relative_error(target[:, 2:], target[:, 2:])) == 0.0


def test_the_relative_error_does_not_count_what_all_tokens_have_in_common():
    outputs, target = torch.randn(2, 2, 3, 5, 4)
    plain = float(relative_error(outputs, target))
    assert float(relative_error(outputs + 2, target + 2)) == pytest.approx(plain, rel=1e-4)
    # A target without any difference between its tokens is what it would be divided by nothing.
    same = torch.full((1, 3, 2), 5.0)
    assert float(relative_error(same + 1, same)) == pytest.approx(1 / (0.01 * 25))


def test_padding_has_no_probability_among_the_places_of_an_answer():
    outputs, target = torch.randn(2, 3, 6) * 3
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0]])
    expected = []
    for row, length in enumerate((6, 3, 2)):
        p, q = ((x[row, :length].double() / 2).softmax(-1) for x in (target, outputs))
        expected.append(4 * float((p * (p / q).log()).sum()))
    pair = [Fixed(None, start_logits=x, end_logits=x) for x in (target, outputs)]
    loss = Distill(pair[0], Distillation(hidden=0.0)).loss(pair[1], pair[1], {"attention_mask": mask})
    assert float(loss) == pytest.approx(sum(expected) / 3, rel=1e-4)
    # As many classes as tokens are no places.
    classes = [Fixed(x) for x in (target, outputs)]
    loss = Distill(classes[0], Distillation(hidden=0.0)).loss(classes[1], classes[1], {"attention_mask": mask[:, :6]})
    whole = [(target.double() / 2).log_softmax(-1), (outputs.double() / 2).log_softmax(-1)]
    assert float(loss) == pytest.approx(float(4 * (whole[0].exp() * (whole[0] - whole[1])).sum(-1).mean()), rel=1e-4)


@pytest.mark.parametrize("architecture", ["BertForSequenceClassification", "GPT2LMHeadModel"])
def test_padding_counts_in_no_attention_output_of_an_exact_layer(architecture):
    model = tiny(architecture)
    surgery.convert(model, Plan((Rule("local", "0", settings={"left": 1}),)))
    teacher, inputs = teacher_of(model), inputs_of(model)
    calls = [calls_of(one, inputs) for one in (model, teacher)]
    assert any(call.mechanism is None for call in calls[0])
    errors = [float(error_of(x.output, y.output, inputs["attention_mask"])) for x, y in zip(*calls, strict=True)]
    loss = Distill(teacher, Distillation(logits=0.0, hidden=0.0, attention=1.0)).loss(model, model, inputs)
    assert float(loss.detach()) == pytest.approx(sum(errors) / len(errors), rel=1e-3)


def test_a_teacher_keeps_extended_positions():
    model = tiny("BertForSequenceClassification")
    surgery.convert(model, Plan.of("local", left=1, right=1), max_length=128)
    inputs = example_inputs(model, 100, batch=1, padded=0, device=model.device)
    loss = Distill(teacher_of(model), Distillation()).loss(model, model, inputs)
    assert torch.isfinite(loss)
    assert float(loss.detach()) > 0


def test_mechanisms_learn_jointly_on_inputs_that_they_would_leave_exact():
    model = converted("BertForSequenceClassification", **HEDGEHOG)
    for mechanism in mechanisms(model):
        mechanism.exact_below = 1000
    loss = Transfer(model, joint=True, match="outputs").loss(model, model, inputs_of(model))
    loss.backward()
    assert float(loss.detach()) > 0
    assert all(mechanism.exact_below == 1000 for mechanism in mechanisms(model))


class Fixed:
    """A model with fixed logits, which records its calls."""

    def __init__(self, logits: torch.Tensor | None, **more: torch.Tensor) -> None:
        self.outputs, self.calls = more if logits is None else {"logits": logits, **more}, []
        self.config = PreTrainedConfig()

    def eval(self):
        return self

    def requires_grad_(self, wanted: bool):
        return self

    def __call__(self, **inputs):
        self.calls.append(inputs)
        return ModelOutput(self.outputs)


@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0])
@pytest.mark.parametrize("shape", [(3, 4), (3, 6, 4)])
def test_outputs_are_distilled_by_their_divergence_times_the_squared_temperature(temperature, shape):
    outputs, target = torch.randn(2, *shape)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]])
    p, q = ((x.double() / temperature).softmax(-1) for x in (target, outputs))
    apart = temperature**2 * (p * (p / q).log()).sum(-1)
    expected = apart.mean() if len(shape) == 2 else apart[mask.bool()].mean()
    weights = Distillation(logits=0.5, hidden=0.0, temperature=temperature)
    loss = Distill(Fixed(target), weights).loss(Fixed(outputs), Fixed(outputs), {"attention_mask": mask})
    assert float(loss) == pytest.approx(0.5 * float(expected), rel=1e-5)


def test_a_single_number_is_distilled_by_its_squared_error_and_two_heads_by_their_mean():
    outputs, target = torch.tensor([[1.0], [4.0]]), torch.tensor([[3.0], [5.0]])
    plain = Distillation(hidden=0.0)
    assert float(Distill(Fixed(target), plain).loss(Fixed(outputs), Fixed(outputs), {})) == pytest.approx(2.5)
    two = [Fixed(x, start_logits=torch.zeros(2, 3)) for x in (target, outputs)]
    assert float(Distill(two[0], plain).loss(two[1], two[1], {})) == pytest.approx(1.25)


def test_targets_are_read_only_where_labels_count():
    outputs, targets = torch.randn(2, 3), {"labels", "start_positions", "end_positions"}
    inputs = {"input_ids": torch.ones(2, 4), **dict.fromkeys(targets, torch.tensor([0, 1]))}
    teacher, student = Fixed(outputs), Fixed(outputs, loss=torch.tensor(0.25))
    assert float(Distill(teacher, Distillation(hidden=0.0)).loss(student, student, inputs)) == pytest.approx(
        0.0, abs=1e-6
    )
    assert [set(one.calls[0]) for one in (teacher, student)] == [{"input_ids"}] * 2
    loss = Distill(teacher, Distillation(hidden=0.0, labels=3.0)).loss(student, student, inputs)
    assert float(loss) == pytest.approx(0.75, abs=1e-6)
    assert [set(one.calls[1]) for one in (teacher, student)] == [{"input_ids"}, {"input_ids", *targets}]


@pytest.mark.parametrize("part", ["hidden", "attention"])
def test_each_part_is_a_mean_over_layers_by_its_weight(part):
    model = converted("BertForSequenceClassification", "local", left=1, right=1)
    teacher, inputs = teacher_of(model), inputs_of(model)
    others: dict[str, Any] = {"logits": 0.0, "hidden": 0.0, "attention": 0.0}
    once, thrice = (
        float(Distill(teacher, Distillation(**{**others, part: weight})).loss(model, model, inputs))
        for weight in (1.0, 3.0)
    )
    assert thrice == pytest.approx(3 * once, rel=1e-5)
    if part == "hidden":
        with torch.no_grad():
            outputs, target = (one(**inputs, output_hidden_states=True).hidden_states[1:] for one in (model, teacher))
    else:
        outputs, target = ([call.output for call in calls_of(one, inputs)] for one in (model, teacher))
    errors = [float(error_of(x, y, inputs["attention_mask"])) for x, y in zip(outputs, target, strict=True)]
    assert once == pytest.approx(sum(errors) / 3, rel=1e-4)


def test_transfer_with_projections_compares_what_mechanisms_make_of_their_own_inputs_with_the_base():
    model = converted("BertForSequenceClassification", **HEDGEHOG)
    inputs = inputs_of(model)
    names = [f"{layer}.weight" for layer in attention_layers(model, inputs)["before"]]
    loss = Transfer(model, joint=False, match="outputs", projections=names).loss(model, model, inputs)
    outputs = calls_of(model, inputs)
    with exactly(model):
        targets = calls_of(model, inputs)
    real = inputs["attention_mask"][:, None, :, None]
    errors = [relative_error(one.output, other.output, real) for one, other in zip(outputs, targets, strict=True)]
    assert float(loss.detach()) == pytest.approx(float(torch.stack(errors).mean()), rel=1e-4)


@pytest.mark.parametrize("architecture", ["BertForSequenceClassification", "GPT2LMHeadModel", "LlamaForCausalLM"])
@pytest.mark.parametrize("joint", [False, True])
def test_outputs_are_compared_with_exact_attention_on_the_same_inputs(architecture, joint):
    model = converted(architecture, **HEDGEHOG)
    inputs = inputs_of(model)
    objective = Transfer(model, joint=joint, match="outputs")
    loss = float(objective.loss(model, model, inputs).detach())
    with nullcontext() if joint else exactly(model):
        calls = calls_of(model, inputs)
    errors = []
    for call in calls:
        k, v = (x.repeat_interleave(call.q.shape[1] // x.shape[1], 1) for x in (call.k, call.v))
        seen = call.mask[:, None, None].expand(-1, 1, call.q.shape[2], -1)
        seen = seen.tril() if call.mechanism.causal else seen
        scores = (call.q @ k.transpose(2, 3) * call.mechanism.scale).masked_fill(~seen, float("-inf"))
        with torch.no_grad():
            mine = call.mechanism(call.q, call.k, call.v, call.mask)
        errors.append(float(error_of(mine, scores.softmax(-1).nan_to_num() @ v, call.mask)))
    assert len(errors) == 3
    assert loss == pytest.approx(sum(errors) / 3, rel=1e-3)


@pytest.mark.parametrize("architecture", ["BertForSequenceClassification", "LlamaForCausalLM"])
def test_weights_are_compared_with_the_softmax_over_visible_keys(architecture):
    model = converted(architecture, **HEDGEHOG)
    inputs = inputs_of(model)
    with exactly(model):
        calls = calls_of(model, inputs)
    expected = []
    for call in calls:
        keys = call.k.repeat_interleave(call.q.shape[1] // call.k.shape[1], 1)
        scores = (call.q @ keys.transpose(2, 3)) * call.mechanism.scale
        seen = call.mask[:, None, None].expand_as(scores).clone()
        if call.mechanism.causal:
            seen &= torch.ones_like(seen).tril()
        target = scores.masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num(0.0)
        with torch.no_grad():
            weights = call.mechanism.weights(call.q, call.k, call.mask)
        apart = (target * (target.clamp(min=1e-6).log() - weights.clamp(min=1e-6).log())).sum(-1)
        real = call.mask[:, None].expand_as(apart)
        expected.append(float(apart[real].mean()))
    loss = float(Transfer(model, joint=False, match="weights").loss(model, model, inputs).detach())
    assert loss == pytest.approx(sum(expected) / len(expected), rel=1e-3)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_labels_that_do_not_exclude_each_other_are_distilled_one_by_one(temperature):
    outputs, target = torch.randn(2, 5, 4) * 3
    teacher = Fixed(target)
    teacher.config.problem_type = "multi_label_classification"
    p, q = ((x.double() / temperature).sigmoid() for x in (target, outputs))
    each = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    loss = Distill(teacher, Distillation(hidden=0.0, temperature=temperature)).loss(Fixed(outputs), Fixed(outputs), {})
    assert float(loss) == pytest.approx(float(temperature**2 * each.sum(-1).mean()), rel=1e-4)


def test_a_teacher_uses_no_dropout_and_learns_nothing():
    model = converted("BertForSequenceClassification", "local", left=1, right=1)
    teacher, inputs = teacher_of(model), inputs_of(model)
    set_dropout(teacher, 0.5)
    losses = []
    for _ in range(2):
        objective = Distill(teacher.train(), Distillation(attention=1.0))
        losses.append(float(objective.loss(model, model, inputs).detach()))
    assert losses[0] == losses[1]
    assert not any(parameter.requires_grad for parameter in teacher.parameters())


@pytest.mark.parametrize("joint", [False, True])
def test_transfer_is_without_dropout_in_a_model_that_is_training(joint):
    model = converted("BertForSequenceClassification", **HEDGEHOG)
    set_dropout(model, 0.5)
    inputs, objective = inputs_of(model), Transfer(model, joint=joint, match="outputs")
    expected = float(objective.loss(model.eval(), model, inputs).detach())
    assert float(objective.loss(model.train(), model, inputs).detach()) == pytest.approx(expected, rel=1e-6)
    assert model.training


def test_the_targets_of_joint_transfer_do_not_move_towards_the_outputs():
    model = converted("BertForSequenceClassification", **HEDGEHOG)
    inputs, trained = inputs_of(model), mechanism_parameters(model)
    Transfer(model, joint=True, match="outputs").loss(model, model, inputs).backward()
    found = {name: model.get_parameter(name).grad.clone() for name in trained}
    model.zero_grad()
    calls: list[Any] = []
    with observe(model, calls.append):
        model(**inputs)
    terms = []
    for call in calls:
        scores = (call.q @ call.k.transpose(2, 3) * call.mechanism.scale).masked_fill(
            ~call.mask[:, None, None], float("-inf")
        )
        terms.append(error_of(call.output, (scores.softmax(-1) @ call.v).detach(), call.mask))
    torch.stack(terms).mean().backward()
    assert all(torch.allclose(found[name], model.get_parameter(name).grad, rtol=1e-3, atol=1e-7) for name in trained)


@pytest.mark.parametrize("match", ["outputs", "weights"])
def test_without_padding_every_query_counts_once(match):
    model = converted("GPT2LMHeadModel", **HEDGEHOG)
    inputs = example_inputs(model, 16, batch=2, padded=0, device=model.device)
    plain = {"input_ids": inputs["input_ids"]}
    masked = {**plain, "attention_mask": torch.ones_like(plain["input_ids"])}
    objective = Transfer(model, joint=False, match=match)
    losses = [objective.loss(model, model, one) for one in (plain, masked)]
    assert float(losses[0].detach()) == pytest.approx(float(losses[1].detach()), rel=1e-6)
    alone = [objective.loss(model, model, {"input_ids": row[None]}).detach() for row in plain["input_ids"]]
    if match == "weights":
        assert float(losses[0].detach()) == pytest.approx(float(torch.stack(alone).mean()), rel=1e-4)


def test_mechanisms_of_groups_of_heads_are_fitted_each_to_its_own_heads():
    model = tiny("BertForSequenceClassification")
    rules = (Rule("linear", "0", heads="0-1", settings=HEDGEHOG), Rule("local", "0", heads="2-3", settings={"left": 1}))
    surgery.convert(model, Plan(rules))
    inputs = inputs_of(model)
    with exactly(model):
        calls = calls_of(model, inputs)
    (call,) = [one for one in calls if one.mechanism is not None]
    part = next(one for one in call.members() if list(one.mechanism.parameters()))
    with torch.no_grad():
        mine, target = part.mechanism(part.q, part.k, part.v, part.mask), call.output[:, :2]
    expected = float(error_of(mine, target, call.mask))
    loss = Transfer(model, joint=False, match="outputs").loss(model, model, inputs)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-3)
