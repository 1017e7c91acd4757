"""Settings of each mode, from the options, the data and the model; nothing is trained."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from approx.conversion import surgery
from approx.errors import ApproxError, Exit
from approx.finetuning.finetune import measure_of, prepare_training, with_adapters
from approx.finetuning.options import FinetuneStage
from approx.finetuning.trainer import Distill, Measure, Supervised, Transfer, head_parameters, mechanism_parameters
from approx.planning.plan import Plan
from tiny_classifier import tiny_tokenizer
from tiny_training import masking_tokenizer, model_of, set_dropout, write_sst2
from typed import known
from zoo import tiny


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_sst2(tmp_path_factory.mktemp("data"))


def prepared(data, model=None, **options):
    stage = FinetuneStage(**{"task": "glue/sst2", "data": data, **options})
    return prepare_training(model or model_of(), tiny_tokenizer(), stage)


# 80 examples, 8 of them held out: 72 are trained on.
@pytest.mark.parametrize(
    ("recover", "options", "expected"),
    [
        # batch, rate, rate of mechanisms, steps, validations every
        ("transfer", {}, (8, 2e-4, 2e-2, 400, 40)),
        ("distill", {}, (16, 1e-4, 1e-3, 200, 20)),
        ("task", {}, (32, 5e-5, 5e-4, 200, 20)),
        # --learning-rate is that of the base's weights.
        ("transfer", {"learning_rate": 0.5}, (8, 2e-4, 2e-2, 400, 40)),
        ("transfer", {"mechanism_learning_rate": 0.5}, (8, 2e-4, 2e-2, 400, 40)),
        ("task", {"learning_rate": 0.5}, (32, 0.5, 5e-4, 200, 20)),
        ("task", {"mechanism_learning_rate": 0.5}, (32, 5e-5, 0.5, 200, 20)),
        # What is set for a mode comes before what is set for all.
        ("transfer", {"steps": 50, "transfer": {"learning_rate": 0.5, "steps": 30}}, (8, 5e-3, 0.5, 30, 4)),
        ("distill", {"batch_size": 4, "distill": {"batch_size": 8, "learning_rate": 0.5}}, (8, 0.5, 1e-3, 200, 20)),
        ("distill", {"distill": {"mechanism_learning_rate": 0.5}, "transfer": {"steps": 3}}, (16, 1e-4, 0.5, 200, 20)),
        # Validations of eight inputs take a tenth of the time of steps at most, three times as long for an input.
        ("task", {"batch_size": 8, "epochs": 2}, (8, 5e-5, 5e-4, 18, 5)),
        ("task", {"batch_size": 8, "epochs": 0.01}, (8, 5e-5, 5e-4, 1, 1)),
        ("task", {"steps": 25}, (32, 5e-5, 5e-4, 25, 3)),
        ("task", {"steps": 25, "epochs": 9, "evaluate_every": 7}, (32, 5e-5, 5e-4, 25, 7)),
    ],
)
def test_mode_has_defaults_that_options_override(data, recover, options, expected):
    (phase,) = prepared(data, recover=[recover], **options).phases
    found = (phase.batch_size, phase.learning_rate, phase.mechanism_learning_rate, phase.steps, phase.evaluate_every)
    assert found == (expected[0], pytest.approx(expected[1]), pytest.approx(expected[2]), *expected[3:])
    assert phase.mode == recover
    assert isinstance(phase.objective, {"transfer": Transfer, "distill": Distill, "task": Supervised}[recover])


@pytest.mark.parametrize(
    ("mode", "architecture", "rate"), [("clm", "GPT2LMHeadModel", 2e-4), ("mlm", "BertForMaskedLM", 1e-4)]
)
def test_pre_training_has_its_own_defaults_and_the_time_of_transfer(mode, architecture, rate, corpus):
    model, tokenizer = tiny(architecture), masking_tokenizer()
    surgery.convert(model, Plan.of("linear", feature_map="hedgehog"))
    stage = FinetuneStage(recover=["transfer", mode], text=[corpus], length=16, time_budget="80s")
    transfer, phase = prepare_training(model, tokenizer, stage).phases
    assert (transfer.seconds, phase.seconds) == (40.0, 40.0)
    assert (phase.batch_size, phase.learning_rate, phase.mechanism_learning_rate) == (
        16,
        rate,
        pytest.approx(10 * rate),
    )


@pytest.mark.parametrize(
    ("mode", "architecture", "task"), [("mlm", "GPT2LMHeadModel", "mlm"), ("clm", "BertForMaskedLM", "lm")]
)
def test_a_text_is_read_as_the_mode_asks_and_refused_where_the_head_does_not_fit(mode, architecture, task, corpus):
    tokenizer = masking_tokenizer()
    with pytest.raises(ApproxError, match=rf"^{task}\b") as caught:
        prepare_training(tiny(architecture), tokenizer, FinetuneStage(recover=[mode], text=[corpus], length=16))
    assert caught.value.exit_code == Exit.UNSUPPORTED


def many(folder, times):
    """The same rows, several times."""
    file = Path(write_sst2(folder), "train.tsv")
    head, *rows = file.read_text().splitlines()
    file.write_text("\n".join([head, *rows * times]) + "\n")
    return str(file.parent)


# A tenth is held out.
@pytest.mark.parametrize(("times", "batch", "steps"), [(4, 1, 72 * 4), (4, 2, 200), (30, 1, 2000)])
def test_steps_are_those_of_one_pass_within_bounds(tmp_path, times, batch, steps):
    (phase,) = prepared(many(tmp_path, times), recover=["task"], batch_size=batch).phases
    assert phase.steps == steps


@pytest.mark.parametrize(
    ("steps", "batch", "used", "every"),
    # 100 held out at most: of three tenths of the inputs that are trained on, two validations.
    [(1000, 8, 100, 100), (100, 8, 100, 100), (50, 8, 60, 50), (1, 8, 16, 1)],
)
def test_fewer_examples_are_validated_on_where_few_are_trained_on(steps, batch, used, every, tmp_path):
    made = prepared(many(tmp_path, 20), recover=["task"], steps=steps, batch_size=batch, validation=100)
    assert (len(made.data.validated.examples), made.phases[0].evaluate_every) == (used, every)
    whole = [example.id for example in made.data.held_out.examples]
    chosen = [whole.index(example.id) for example in made.data.validated.examples]
    # From all parts of the list.
    assert chosen == sorted(set(chosen))
    assert max(chosen) >= len(whole) - len(whole) // used - 1
    assert bool(made.notes) is (used < 100)


@pytest.mark.parametrize(
    ("instructions", "asked", "expected"),
    [
        ("AVX512 and AMX", None, [True, True, False]),
        ("AVX512 and BF16", None, [True, True, False]),
        ("AVX512", None, [False, False, False]),
        ("AVX512 and AMX", False, [False, False, False]),
        ("AVX2", True, [True, True, True]),
    ],
)
def test_bfloat16_is_chosen_where_the_processor_has_it_and_activations_are_compared(
    instructions, asked, expected, data, monkeypatch
):
    monkeypatch.setattr("approx.finetuning.finetune.findings.instructions", lambda: instructions)
    modes = ["transfer", "distill", "task"]
    assert [phase.bfloat16 for phase in prepared(data, recover=modes, bfloat16=asked).phases] == expected
    if asked is None:
        half = model_of().half()
        assert not any(phase.bfloat16 for phase in prepared(data, half, recover=modes).phases)


def test_distillation_after_transfer_is_short_and_gentle(data):
    transfer, distill = prepared(data, recover=["transfer", "distill"]).phases
    assert (distill.steps, distill.learning_rate, distill.mechanism_learning_rate) == (100, 2e-5, pytest.approx(2e-4))
    assert (transfer.warm_up, transfer.weight_decay) == (0.06, 0.01)
    # With a time budget, it takes what time there is.
    assert prepared(data, recover=["transfer", "distill"], time_budget="9h").phases[1].steps == 200
    own = prepared(data, distill={"steps": 7, "warm_up": 0.5, "weight_decay": 0.0}).phases[1]
    assert (own.steps, own.warm_up, own.weight_decay) == (7, 0.5, 0.0)


@pytest.mark.parametrize(
    ("recover", "options", "modes"),
    [
        (["transfer"], {}, ["transfer", "distill"]),
        (["transfer"], {"projections": True}, ["transfer", "task"]),
        (["transfer", "task"], {}, ["transfer", "task"]),
    ],
)
def test_weights_that_were_trained_are_no_teacher_by_default(recover, options, modes, data):
    model = model_of()
    done = {
        "action": "finetune",
        "approx": "0",
        "base": {"name": "b", "revision": None, "weights_sha256": "w"},
        "recover": recover,
        "options": options,
    }
    figures = dict.fromkeys(("examples", "held_out", "steps", "seed"), 1) | {"seconds": 1.0, "task": None}
    figures |= {"data_sha256": "d", "measure": "loss", "exact": None, "before": None, "after": None}
    model.config.approx["history"] = [done | figures]
    assert [phase.mode for phase in prepared(data, model).phases] == modes
    stage = FinetuneStage(task="glue/sst2", data=data)
    taught = prepare_training(model, tiny_tokenizer(), stage, model_of(None))
    assert [phase.mode for phase in taught.phases] == ["transfer", "distill"]
    with pytest.raises(ApproxError, match="--teacher has an effect only with the mode 'distill'"):
        prepare_training(model, tiny_tokenizer(), stage.model_copy(update={"recover": ["task"]}), model_of(None))


def test_options_reach_every_mode(data):
    options = {"accumulate": 2, "patience": 3, "penalty": 0.25, "recompute": True, "bfloat16": True, "seed": 5}
    options |= {"warm_up": 0.25, "weight_decay": 0.5}
    for phase in prepared(data, recover=["transfer", "task"], **options).phases:
        assert {name: getattr(phase, name) for name in options} == options
        assert (phase.seconds, phase.report_to) == (math.inf, None)
    (plain,) = prepared(data, recover=["task"]).phases
    assert (plain.accumulate, plain.patience, plain.penalty, plain.recompute, plain.bfloat16) == (
        1,
        None,
        0.0,
        False,
        False,
    )


def test_time_is_shared_among_modes_by_their_weight(data):
    phases = prepared(data, recover=["transfer", "distill", "task"], time_budget="70s").phases
    assert [phase.seconds for phase in phases] == pytest.approx([30, 10, 30])
    # Adapters are not a mode.
    pytest.importorskip("peft")
    adapted = prepared(data, recover=["transfer", "lora", "task"], time_budget="80s").phases
    assert [(phase.mode, phase.seconds) for phase in adapted] == [("transfer", 40.0), ("task", 40.0)]


def test_each_mode_trains_its_own_parameters(data):
    model = model_of()
    of_mechanisms, every = mechanism_parameters(model), [name for name, _ in model.named_parameters()]
    transfer, distill = prepared(data, model, recover=["transfer", "distill"]).phases
    assert transfer.trained == of_mechanisms
    assert distill.trained == every
    (head,) = prepared(data, model, recover=["task"], train="head").phases
    assert set(head.trained) == {*of_mechanisms, *head_parameters(model)}
    (projections,) = prepared(data, model, recover=["transfer"], projections=True).phases
    assert set(projections.trained) - set(of_mechanisms) == {
        f"bert.encoder.layer.{layer}.attention.self.{name}.{kind}"
        for layer in (0, 1)
        for name in ("query", "key", "value")
        for kind in ("weight", "bias")
    }


def test_after_lora_a_mode_trains_adapters_at_a_higher_rate_and_the_head_of_the_task(data):
    pytest.importorskip("peft")
    model = model_of()
    made = prepared(data, model, recover=["distill", "lora", "task"])
    first, second = made.phases
    assert made.adapted == {"task"}
    assert (first.learning_rate, second.learning_rate) == (1e-4, pytest.approx(5e-4))
    assert second.mechanism_learning_rate == pytest.approx(5e-3)
    assert set(second.trained) == {*mechanism_parameters(model), *head_parameters(model)}
    (distilled,) = prepared(data, model, recover=["lora", "distill"]).phases
    assert distilled.trained == mechanism_parameters(model)
    (phase,) = prepared(data, model, recover=["lora", "task"], learning_rate=0.5).phases
    assert (phase.learning_rate, phase.mechanism_learning_rate) == (0.5, pytest.approx(5e-3))
    whole = with_adapters(model, second, made, FinetuneStage(recover=["lora", "task"]))
    assert set(whole.trained) > set(second.trained)
    assert all(".lora_" in name for name in set(whole.trained) - set(second.trained))


def test_spans_have_a_small_default_penalty(data):
    spans = {"max_span": 16, "ramp": 4}
    penalties = [
        prepared(data, model_of("adaptive-span", **spans), recover=["task"], **options).phases[0].penalty
        for options in ({}, {"penalty": 0.0}, {"penalty": 2.0})
    ]
    assert penalties == [1e-6, 0.0, 2.0]
    assert prepared(data, model_of("local"), recover=["task"]).phases[0].penalty == 0.0
    with pytest.raises(ApproxError, match="--penalty weighs the spans of a converted model"):
        prepared(data, model_of(None), recover=["task"], penalty=1.0)
    assert prepared(data, model_of(None), recover=["task"], penalty=0.0).phases[0].penalty == 0.0


def test_batches_carry_labels_only_where_a_mode_reads_them(data):
    for recover, options, labelled in (
        (["transfer"], {}, False),
        (["distill"], {}, False),
        (["distill"], {"distill": {"labels": 0.5}}, True),
        (["transfer", "task"], {}, True),
    ):
        assert prepared(data, recover=recover, **options).data.labelled is labelled


def test_uses_the_teacher_of_the_arguments(data):
    model, teacher = model_of(), model_of(None)
    stage = FinetuneStage(task="glue/sst2", data=data, recover=["distill"])
    phase = prepare_training(model, tiny_tokenizer(), stage, teacher).phases[0]
    assert isinstance(phase.objective, Distill)
    assert phase.objective._teacher is teacher


def test_measures_the_metric_or_a_distance_from_the_teacher(data):
    model = model_of()
    made = prepared(data, model, recover=["transfer", "distill", "task"])
    transfer, distill, task = made.phases
    assert measure_of(task, made, model) is made.measure
    assert measure_of(distill, made, model).name == "loss"
    # A budget of score ends a training.
    made.measure.enough = 0.9
    assert measure_of(distill, made, model) is made.measure
    assert measure_of(transfer, made, model).name == "loss"
    assert (made.measure.name, made.measure.lower_is_better) == ("accuracy", False)
    loss = measure_of(transfer, made, model)
    assert (loss.name, loss.lower_is_better) == ("loss", True)
    # The mean over the held-out inputs, whatever batch they come in, in evaluation mode.
    every = made.data.held_out.examples
    assert len(every) == 8
    encodings = [made.data.task.encode(example, made.data.processor, None)[0] for example in every]
    batch = made.data.task.collate(encodings, made.data.processor)
    model.train()
    assert loss.value is not None
    assert loss.value() == pytest.approx(float(transfer.objective.loss(model.eval(), model, batch)), rel=1e-5)
    model.train()
    loss.value()
    assert model.training


@pytest.mark.parametrize("batch_size", [1, 3, 8, 100])
def test_a_held_out_loss_is_the_mean_over_inputs_in_batches_of_any_size(data, batch_size):
    model = model_of(None)
    set_dropout(model, 0.5)
    made = prepared(data, model, recover=["task"])
    phase = replace(made.phases[0], mode="transfer", batch_size=batch_size)
    losses = []
    for example in made.data.held_out.examples:
        ids = made.data.task.encode(example, made.data.processor, None)[0]["input_ids"]
        with torch.no_grad():
            logits = model.eval()(input_ids=torch.tensor([ids])).logits.double()
        losses.append(-float(logits.log_softmax(-1)[0, example.label]))
    model.train()
    assert known(measure_of(phase, made, model).value)() == pytest.approx(sum(losses) / 8, rel=1e-5)


def test_processes_share_the_held_out_batches_and_weigh_them_by_their_inputs(data, monkeypatch):
    model = model_of(None)
    made = prepared(data, model, recover=["task"])
    phase = replace(made.phases[0], mode="transfer", batch_size=3)
    whole = known(measure_of(phase, made, model).value)()
    parts: list[tuple[float, int]] = []
    values = []
    for rank in (0, 1):
        monkeypatch.setattr("approx.evaluation.evaluate.place", lambda rank=rank: (rank, 2))
        monkeypatch.setattr("approx.evaluation.evaluate.gather", lambda part: parts.append(part) or parts)
        values.append(known(measure_of(phase, made, model).value)())
    # Batches of 3, 3 and 2 inputs, dealt in turn.
    assert [count for _, count in parts] == [5, 3]
    assert values[-1] == pytest.approx(whole, rel=1e-6)


def test_the_metric_is_that_of_the_held_out_examples(data):
    model = model_of(None)
    made = prepared(data, model, recover=["task"])
    right = 0
    for example in made.data.held_out.examples:
        encoding = made.data.task.encode(example, made.data.processor, None)[0]
        with torch.no_grad():
            right += int(model.eval()(input_ids=torch.tensor([encoding["input_ids"]])).logits.argmax()) == example.label
    assert made.measure.value is not None
    assert made.measure.value() == right / 8


def test_held_out_examples_are_scored_at_the_length_that_is_trained(data, tmp_path):
    model = model_of(None)
    (tmp_path / "SST-2").mkdir()
    rows = [f"{'good ' * (row % 5)}{'bad ' * 12}{'fine film ' * 3}\t{row % 2}" for row in range(80)]
    (tmp_path / "SST-2" / "train.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    with torch.no_grad():
        model.classifier.weight.mul_(30)
    made = prepared(str(tmp_path / "SST-2"), model, recover=["task"], length=8)
    right = 0
    for example in made.data.held_out.examples:
        ids = tiny_tokenizer()(example.inputs["text"], truncation=True, max_length=8)["input_ids"]
        with torch.no_grad():
            right += int(model.eval()(input_ids=torch.tensor([ids])).logits.argmax()) == example.label
    assert known(made.measure.value)() == right / 8


@pytest.mark.parametrize(
    ("reach", "share", "shortest", "notes"), [(1, 1.0, 6, 0), (3, 1.0, 6, 0), (5, 0.0, None, 1), (6, 0.0, None, 1)]
)
def test_inputs_that_the_mechanisms_approximate_are_counted(data, reach, share, shortest, notes):
    made = prepared(data, model_of("local", left=reach, right=reach), recover=["task"])
    assert (made.approximated, made.approximates_from, len(made.notes)) == (share, shortest, notes)
    assert prepared(data, model_of(None), recover=["task"]).approximated is None


@pytest.mark.parametrize(
    ("lower", "enough", "value", "suffices"),
    [
        (True, None, 0.0, False),
        (True, 0.5, 0.5, True),
        (True, 0.5, 0.51, False),
        (True, 0.5, 0.49, True),
        (False, 0.5, 0.5, True),
        (False, 0.5, 0.49, False),
        (False, 0.5, 0.51, True),
    ],
)
def test_a_value_suffices_on_its_own_side_of_the_budget(lower, enough, value, suffices):
    assert Measure("m", lower, None, enough).suffices(value) is suffices


def test_names_missing_packages_before_it_reads_data(data, monkeypatch):
    monkeypatch.setattr("approx.finetuning.finetune.find_spec", lambda name: None)
    with pytest.raises(
        ApproxError, match=r"Training needs the package accelerate. Install it: pip install 'accelerate>="
    ) as caught:
        prepared("nowhere", recover=["task"])
    assert caught.value.exit_code == Exit.MISSING


@pytest.mark.parametrize(("architecture", "language"), [("BertForMaskedLM", "mlm"), ("GPT2LMHeadModel", "lm")])
def test_a_text_is_read_as_the_head_predicts_it(architecture, language, corpus):
    model, tokenizer = tiny(architecture), masking_tokenizer()
    surgery.convert(model, Plan.of("local", left=2))
    stage = FinetuneStage(recover=["distill"], text=[corpus], length=16)
    assert prepare_training(model, tokenizer, stage).data.task.name == language


def test_measures_the_loss_on_text_without_a_matching_head(corpus):
    model, tokenizer = tiny("BertForSequenceClassification"), tiny_tokenizer()
    surgery.convert(model, Plan.of("local", left=2))
    made = prepare_training(model, tokenizer, FinetuneStage(recover=["distill"], text=[corpus], length=16))
    assert made.measure.value is None
    measured = measure_of(made.phases[0], made, model)
    assert (measured.name, measured.lower_is_better) == ("loss", True)
    assert known(measured.value)() > 0


def test_an_input_that_is_nearly_always_approximated_needs_no_note(data):
    made = prepared(data, recover=["task"])
    for share, shortest, note in (
        (0.81, 7, []),
        (0.8, 7, ["approximate on 80 % of the training inputs", "--min-length 7 leaves those out."]),
        (0.0, None, ["approximate on 0 % of the training inputs", "Train on longer inputs."]),
    ):
        found = replace(made, approximated=share, approximates_from=shortest).notes
        assert len(found) == bool(note)
        assert all(words in found[0] for words in note)


def test_passes_over_the_examples_are_rounded_to_whole_steps(data):
    for epochs, steps in ((0.5, 1), (1.0, 2), (1.8, 4), (3.0, 6)):
        (phase,) = prepared(data, recover=["task"], epochs=epochs).phases
        # Two batches of 32 out of 72 inputs.
        assert phase.steps == steps
