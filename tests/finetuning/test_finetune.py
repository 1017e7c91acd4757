"""Training in memory, from beginning to end: it learns, keeps the best step, stops, and resumes to the bit."""

import copy
import json
import math
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from approx.conversion import surgery
from approx.errors import ApproxError, Exit
from approx.finetuning import finetune as finetuning
from approx.finetuning import trainer
from approx.finetuning.finetune import BudgetMetError, finetune
from approx.finetuning.options import FinetuneStage
from approx.finetuning.trainer import Measure, Outcome
from approx.planning.plan import Plan
from tiny_classifier import tiny_tokenizer
from tiny_training import ROWS, interrupt, masking_tokenizer, model_of, options_of, trained
from zoo import tiny


def test_learns_a_task_and_reports_the_training(sst2, tmp_path):
    model, reported = model_of(), []
    done = trained(
        model,
        tmp_path / "work",
        options_of(sst2, recover=["transfer", "task"], steps=40),
        progress=lambda what, n, total: reported.append((what, n, total)),
    )
    assert [phase.mode for phase in done.phases] == ["transfer", "task"]
    assert done.measure == "accuracy"
    assert done.after == 1.0
    assert done.before < 1.0
    assert done.helped
    assert not any("did not help" in note for note in done.notes)
    transfer, task = done.phases
    assert transfer.measure == "loss"
    losses = [point["loss"] for point in task.curve if "loss" in point]
    assert losses[-1] < 0.5 * losses[0]
    validated = [point["step"] for point in task.curve if "validation" in point]
    # The start, and every five steps.
    assert validated == list(range(0, 45, 5))
    assert all(point["learning_rate"] >= 0 for point in task.curve if "learning_rate" in point)
    assert transfer.parameters == sum(p.numel() for name, p in model.named_parameters() if ".mechanism." in name)
    assert task.parameters == sum(p.numel() for p in model.parameters())
    assert task.tokens == 40 * 8 * 6
    assert (task.steps, task.ended) == (40, "steps")
    assert any(what.startswith("task | loss") and "tokens/s" in what and "left" in what for what, _, _ in reported)
    assert list(dict.fromkeys((what.partition(" | ")[0], total) for what, _, total in reported)) == [
        ("read the data", 1),
        ("score before training", 1),
        ("transfer", 40),
        ("task", 40),
        ("score after training", 1),
    ]
    assert {n for what, n, _ in reported if " | " not in what} == {0}
    assert all(p.requires_grad for p in model.parameters())
    assert not model.training
    assert (done.examples, done.held_out, done.steps, done.recover) == (72, 8, 80, ["transfer", "task"])
    # A finished mode leaves its weights, for a resumption, but no checkpoint.
    assert len(list((tmp_path / "work").glob("*/finished.safetensors"))) == 2
    assert not list((tmp_path / "work").glob("*/checkpoint-*"))
    assert None not in done.options.values()
    json.dumps(done.to_data(), allow_nan=False)


def test_the_weights_of_the_best_step_are_kept(sst2, tmp_path, monkeypatch):
    from approx.finetuning import finetune

    # Before training, and before the first step.
    values = iter([0.5, 0.5, 0.9, 0.6, 0.6])
    monkeypatch.setattr(finetune, "predict", lambda *args, **more: [])
    original = finetune._measure

    def measured(*args: Any, **more: Any) -> Any:
        made = original(*args, **more)
        made.value = lambda: next(values, 0.9)
        return made

    monkeypatch.setattr(finetune, "_measure", measured)
    states = {}
    model = model_of(None)

    def watch(what: str, n: int, total: int) -> None:
        if what.startswith("task"):
            states[n] = copy.deepcopy(model.state_dict())

    done = trained(model, tmp_path / "work", options_of(sst2, steps=15), progress=watch)
    assert done.phases[0].best_step == 5
    assert all(torch.equal(x, states[5][name]) for name, x in model.state_dict().items())
    assert any(not torch.equal(x, states[15][name]) for name, x in model.state_dict().items())


# One of each kind; tests/finetuning/test_learning.py has all of them, in every family.
@pytest.mark.parametrize("mechanism", ["clustered", "performer"])
@pytest.mark.sample(0)
def test_the_loss_goes_down_with_the_settings_of_training(mechanism, sst2, tmp_path):
    settings = {"performer": {"redraw_every": 3}, "linear": {"feature_map": "hedgehog"}}.get(mechanism, {})
    model = model_of(mechanism, **settings)
    done = trained(model, tmp_path / "work", options_of(sst2, steps=40, evaluate_every=40))
    losses = [point["loss"] for point in done.phases[0].curve if "loss" in point]
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])


@pytest.mark.parametrize("recover", [["task"], ["distill", "task"]])
def test_training_changes_no_setting_of_the_model(recover, sst2, tmp_path):
    model = model_of()
    before = model.config.to_dict()
    assert before["use_cache"]
    trained(model, tmp_path / "work", options_of(sst2, recover=recover, steps=2))
    # What a checkpoint is saved with.
    saved = {"architectures", "auto_map", "dtype"}
    after = model.config.to_dict()
    assert {name for name in {*before, *after} if before.get(name) != after.get(name)} <= saved


def test_a_time_budget_ends_training_and_its_learning_rate_falls_until_then(sst2, tmp_path):
    done = trained(
        model_of(), tmp_path / "work", options_of(sst2, steps=100_000, time_budget="3s", evaluate_every=50_000)
    )
    phase = done.phases[0]
    assert phase.ended == "time"
    assert 0 < phase.steps < 100_000
    assert "validation" in phase.curve[-1]


def test_without_progress_it_ends_early(sst2, tmp_path):
    done = trained(model_of(), tmp_path / "work", options_of(sst2, steps=200, learning_rate=1e-12, patience=2))
    assert (done.phases[0].ended, done.phases[0].steps) == ("patience", 10)


def test_a_budget_that_is_met_ends_training_or_refuses_it(sst2, tmp_path):
    # The last word decides, which the first token sees in two steps alone once it is converted.
    lines = ["sentence\tlabel", *(f"the film is {row.partition(' ')[0]}\t{row[-1]}" for row in ROWS)]
    (Path(sst2) / "train.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    base = model_of(None)
    assert trained(base, tmp_path / "base", options_of(sst2, steps=60)).after == 1.0
    same_weights, other = copy.deepcopy(base), copy.deepcopy(base)
    surgery.convert(other, Plan.of("local", left=2, right=2))
    done = trained(other, tmp_path / "work", options_of(sst2, steps=500, budget="loss<=0"))
    assert (done.exact, done.after) == (1.0, 1.0)
    assert done.before is not None
    assert done.before < 1.0
    assert done.phases[0].ended == "budget"
    assert done.phases[0].steps < 500
    surgery.convert(same_weights, Plan.of("local", left=31, right=31))
    with pytest.raises(ApproxError, match="met before training") as caught:
        trained(same_weights, tmp_path / "met", options_of(sst2, budget="loss<=0.5"))
    assert caught.value.exit_code == Exit.REFUSED
    assert not (tmp_path / "met").exists()


def test_nan_loss_ends_training_with_one_line_and_keeps_the_last_state(sst2, tmp_path):
    model = model_of()

    def spoil(what: str, n: int, total: int) -> None:
        if " | " in what and n == 7:
            with torch.no_grad():
                model.classifier.weight.fill_(math.nan)

    with pytest.raises(
        ApproxError, match=r"The loss of 'task' is nan at step 8; the state after step 5 is kept"
    ) as caught:
        trained(model, tmp_path / "work", options_of(sst2), progress=spoil)
    assert caught.value.exit_code == Exit.VERIFICATION


def test_adapters_leave_a_model_as_trainable_as_it_was(sst2, tmp_path):
    pytest.importorskip("peft")
    model = model_of()
    trained(model, tmp_path / "work", options_of(sst2, recover=["lora", "task"], steps=2))
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any("lora" in name for name in model.state_dict())


@pytest.mark.parametrize(("mode", "during"), [("transfer", 0.0), ("distill", 0.0), ("task", 0.5)])
def test_no_layer_is_dropped_where_layers_are_compared(mode, during, sst2, tmp_path):
    model, seen = model_of(), []
    model.config.layerdrop = 0.5
    options = options_of(sst2, recover=[mode], steps=1, evaluate_every=1)
    trained(model, tmp_path / "work", options, progress=lambda what, *_: seen.append((what, model.config.layerdrop)))
    assert {share for what, share in seen if " | " in what} == {during}
    assert model.config.layerdrop == 0.5


def test_a_failure_leaves_the_weights_without_adapters(sst2, tmp_path):
    pytest.importorskip("peft")
    model = model_of()
    before = copy.deepcopy(model.state_dict())

    def fail(what: str, n: int, total: int) -> None:
        if " | " in what and n == 3:
            raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        trained(model, tmp_path / "work", options_of(sst2, recover=["lora", "distill"]), progress=fail)
    assert model.state_dict().keys() == before.keys()
    adapted = [name for name in before if "attention" in name and ".mechanism." not in name]
    assert adapted
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in adapted)


@pytest.mark.parametrize(
    ("reach", "share", "note"),
    [(1, 1.0, ""), (6, 0.0, "approximate on 0 % of the training inputs; .* Train on longer")],
)
def test_inputs_that_stay_exact_are_counted(sst2, tmp_path, reach, share, note):
    model = model_of("local", left=reach, right=reach)
    done = trained(model, tmp_path / "work", options_of(sst2, steps=1))
    assert done.approximated == share
    about_lengths = [each for each in done.notes if "approximate on" in each]
    assert len(about_lengths) == bool(note)
    assert re.search(note, " ".join(about_lengths))


def test_the_shortest_input_that_is_approximated_is_named(sst2, tmp_path):
    lines = [
        "sentence\tlabel",
        *(f"{row.partition(chr(9))[0]}{' the film' * (number % 3)}\t1" for number, row in enumerate(ROWS)),
    ]
    (Path(sst2) / "train.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    done = trained(model_of("local", left=6, right=6), tmp_path / "work", options_of(sst2, steps=1))
    assert done.approximated == pytest.approx(2 / 3, abs=0.05)
    note, *_ = done.notes
    assert "--min-length 8 leaves those out." in note
    longer = options_of(sst2, steps=1, min_length=8)
    assert trained(model_of("local", left=6, right=6), tmp_path / "longer", longer).approximated == 1.0


def test_reporting_needs_its_package_before_any_work(sst2, tmp_path, monkeypatch):
    monkeypatch.setattr("approx.evaluation.tracking.find_spec", lambda name: None)
    with pytest.raises(
        ApproxError, match=r"Reporting to trackio needs the package trackio.*pip install trackio"
    ) as caught:
        trained(model_of(), tmp_path / "work", options_of(sst2, report_to="trackio"))
    assert caught.value.exit_code == Exit.MISSING
    assert not (tmp_path / "work").exists()


def test_a_batch_that_cannot_be_shared_evenly_is_refused(sst2, tmp_path):
    with pytest.raises(ApproxError, match="multiple of 3"):
        trained(model_of(), tmp_path / "work", options_of(sst2, accumulate=3))


@pytest.mark.parametrize("count", [None, 4])
def test_fsdp_is_refused_for_a_model_in_memory(count, sst2, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "TRUE")
    if count is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(count))
    with pytest.raises(ApproxError, match=f"FSDP is requested .* --nproc-per-node {count or 1} ") as refused:
        trained(model_of(), tmp_path / "work", options_of(sst2))
    assert refused.value.exit_code == Exit.UNSUPPORTED
    assert not (tmp_path / "work").exists()


def test_random_features_are_drawn_again_while_it_trains(sst2, tmp_path):
    model = model_of("performer", features=8, redraw_every=2)
    seen: dict[str, set[float]] = {name: set() for name in model.state_dict() if name.endswith("projection")}

    def note(what: str, n: int, total: int) -> None:
        for name, sums in seen.items() if " | " in what else ():
            sums.add(float(model.state_dict()[name].sum()))

    trained(model, tmp_path / "work", options_of(sst2, steps=4, evaluate_every=4), progress=note)
    assert seen
    # Before step 2, from there on, and from step 4 on.
    assert all(len(sums) == 3 for sums in seen.values())


def test_a_penalty_keeps_the_last_step_since_scores_prefer_long_spans(sst2, tmp_path):
    model = model_of("adaptive-span", max_span=16, ramp=1)
    trained(model, tmp_path / "before", options_of(sst2, steps=20, penalty=0.0))
    mechanism = model.bert.encoder.layer[0].attention.self.mechanism
    # The penalty alone is learned.
    options = options_of(sst2, steps=6, penalty=1e4, learning_rate=1e-12, mechanism_learning_rate=1.0, evaluate_every=1)
    healing = trained(model, tmp_path / "work", options)
    (outcome,) = healing.phases
    assert outcome.best_step == outcome.steps == 6
    assert mechanism.spans.max() == 0
    assert healing.before is not None
    assert healing.after is not None
    assert healing.after < healing.before


@pytest.mark.slow
def test_spans_get_shorter_with_their_penalty(sst2, tmp_path):
    def spans(penalty: float) -> float:
        model = model_of("adaptive-span", max_span=16, ramp=4)
        trained(model, tmp_path / f"work{penalty}", options_of(sst2, steps=25, penalty=penalty, evaluate_every=25))
        layers = [layer.attention.self.mechanism for layer in model.bert.encoder.layer]
        return float(sum(layer.spans.sum() for layer in layers))

    free, light, heavy = spans(0.0), spans(1e-3), spans(1.0)
    assert heavy < light
    assert heavy < free


@pytest.mark.parametrize(
    "options",
    [{}, {"recover": ["transfer"]}, {"recover": ["distill"], "distill": {"logits": 0.0, "attention": 1.0}}],
    ids=str,
)
@pytest.mark.sample(1)
def test_recomputed_layers_give_the_same_weights(options, sst2, tmp_path):
    model, other = model_of(), model_of()
    trained(model, tmp_path / "one", options_of(sst2, steps=3, evaluate_every=3, **options))
    trained(other, tmp_path / "other", options_of(sst2, steps=3, evaluate_every=3, recompute=True, **options))
    for name, x in model.state_dict().items():
        assert torch.allclose(x, other.state_dict()[name], atol=1e-5), name
    assert not other.is_gradient_checkpointing


def test_outside_the_main_thread_it_trains_without_its_signals(sst2, tmp_path):
    done: list[Any] = []
    thread = threading.Thread(
        target=lambda: done.append(trained(model_of(), tmp_path / "work", options_of(sst2, steps=2)))
    )
    thread.start()
    thread.join()
    assert done[0].phases[0].steps == 2


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM"])
@pytest.mark.sample(1)
def test_text_continues_pre_training(architecture, tmp_path, corpus):
    model, tokenizer = tiny(architecture), masking_tokenizer()
    settings = {"left": 4, "right": 4} if "Bert" in architecture else {"left": 4}
    surgery.convert(model, Plan.of("local", **settings))  # type: ignore[arg-type]  # settings are keywords of any kind
    mode = "mlm" if "Bert" in architecture else "clm"
    options = FinetuneStage(
        recover=[mode], text=[corpus], length=16, steps=20, batch_size=8, learning_rate=5e-3, evaluate_every=20
    )
    done = finetune(model, tokenizer, options, folder=tmp_path / "work")
    assert set(done.options) >= {"text", "length"}
    assert done.recover == [mode]
    assert done.before is not None
    assert done.after is not None
    assert done.after < 0.8 * done.before


def test_a_model_without_a_score_ends_in_evaluation_mode_and_names_its_loss(tmp_path, corpus):
    options = FinetuneStage(recover=["distill"], text=[corpus], length=16, steps=1, batch_size=4)
    done = finetune(model := model_of(), tiny_tokenizer(), options, folder=tmp_path / "work")
    assert not model.training
    assert (done.measure, done.exact, done.before, done.after) == ("loss", None, None, None)


@pytest.mark.sample(0)
def test_an_order_of_labels_that_scores_far_better_is_still_noted_after_a_resumption(sst2, tmp_path):
    (Path(sst2) / "train.tsv").write_text("\n".join(["sentence\tlabel", *ROWS * 4]) + "\n", encoding="utf-8")
    base = model_of()
    learnt = trained(base, tmp_path / "base", options_of(sst2, steps=40))
    assert learnt.after > 0.9
    with torch.no_grad():
        for parameter in base.classifier.parameters():
            parameter.copy_(parameter.flip(0))

    options = options_of(sst2, steps=4, learning_rate=1e-9, batch_size=72)
    interrupt(copy.deepcopy(base), tmp_path / "work", options)
    done = trained(base, tmp_path / "work", options, resume=True)
    assert "with the labels in another order: set --labels" in " ".join(done.notes)


def test_reports_options_as_plain_data(tmp_path):
    rows = [f'{{"text": "film {row}", "label": {row % 2}}}' for row in range(20)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    options = FinetuneStage(
        task="text-classification",
        data=str(tmp_path / "train.jsonl"),
        settings={"labels": ("negative", "positive")},
        steps=1,
        batch_size=4,
    )
    (tmp_path / "train.jsonl").write_text("\n".join(rows).replace(": 0", ': "negative"').replace(": 1", ': "positive"'))
    done = trained(model_of(None), tmp_path / "work", options)
    assert done.options["settings"] == {"labels": ["negative", "positive"]}
    assert json.loads(json.dumps(done.to_data())) == done.to_data()


def test_time_that_a_mode_does_not_need_is_that_of_the_next(sst2, tmp_path, monkeypatch):
    limits: list[Any] = []
    took = iter([4.0, 45.0, 1.0])

    def train(model: Any, phase: Any, *more: Any, **options: Any) -> Outcome:
        limits.append(phase.seconds)
        more[2].mkdir(parents=True)
        return Outcome(phase.mode, 1, 1, 1, 1, next(took), "loss", [], "steps")

    monkeypatch.setattr("approx.finetuning.finetune.train", train)
    options = options_of(sst2, recover=["transfer", "distill", "task"], time_budget="70s")
    trained(model_of(), tmp_path / "work", options)
    assert limits == pytest.approx([30.0, 36.0, 30.0])


@pytest.mark.parametrize(
    ("name", "lower", "exact", "before", "budget", "met"),
    [
        # Points are hundredths of a share, and the metric's own unit otherwise.
        ("accuracy", False, 0.9, 0.8951, "loss<=0.5", True),
        ("accuracy", False, 0.9, 0.8949, "loss<=0.5", False),
        ("accuracy", False, 0.9, 0.95, "loss<=0", True),
        ("perplexity", True, 20.0, 20.49, "loss<=0.5", True),
        ("perplexity", True, 20.0, 20.51, "loss<=0.5", False),
        ("perplexity", True, 20.0, 19.0, "loss<=0", True),
    ],
)
def test_a_budget_is_a_loss_against_exact_attention_on_the_worse_side(
    sst2, tmp_path, monkeypatch, name, lower, exact, before, budget, met
):
    model = model_of("local", left=1, right=1)
    layer = model.bert.encoder.layer[0].attention.self.mechanism
    # With exact attention, every input is too short for the mechanism.
    measure = Measure(name, lower, lambda: exact if layer.exact_below > 1000 else before)
    monkeypatch.setattr("approx.finetuning.finetune._measure", lambda *words: measure)

    def stop(what: str, n: int, total: int) -> None:
        if " | " in what:
            raise ZeroDivisionError

    with pytest.raises(BudgetMetError if met else ZeroDivisionError) as caught:
        trained(model, tmp_path / "work", options_of(sst2, budget=budget), progress=stop)
    if isinstance(caught.value, BudgetMetError):
        healing = caught.value.healing
        assert (healing.exact, healing.before, healing.after, healing.phases) == (exact, before, before, [])
        assert (healing.measure, healing.examples, healing.held_out, healing.steps) == (name, 72, 8, 0)
        assert f"{before:.4f} on 8 held-out examples, {exact:.4f} with exact attention" in str(caught.value)


def test_training_that_does_not_help_keeps_the_weights_it_began_with(sst2, tmp_path):
    model = model_of()
    before = copy.deepcopy(model.state_dict())
    done = trained(model, tmp_path / "work", options_of(sst2, steps=4, learning_rate=1e-9, evaluate_every=2))
    assert ([phase.best_step for phase in done.phases], done.helped) == ([0], False)
    assert done.phases[0].curve[0] == {"step": 0, "validation": done.before}
    assert "Training did not help: no step was better" in done.notes[-1]
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_weights_that_score_worse_than_those_before_training_are_not_kept(sst2, tmp_path, monkeypatch):
    model = model_of()
    before = copy.deepcopy(model.state_dict())
    # Of the model as converted, with exact attention, and after training: transfer goes by its own loss.
    values = iter([0.8, 0.9, 0.6])
    monkeypatch.setattr("approx.finetuning.finetune._measure", lambda *words: Measure("f1", False, values.__next__))
    done = trained(model, tmp_path / "work", options_of(sst2, recover=["transfer"], steps=4))
    assert done.phases[0].best_step > 0
    assert (done.before, done.after, done.helped) == (0.8, 0.8, False)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    # Eight examples may score that much less by chance, while the loss of transfer fell.
    values = iter([0.8, 0.9, 0.7])
    done = trained(model, tmp_path / "other", options_of(sst2, recover=["transfer"], steps=4))
    assert (done.after, done.helped) == (0.7, True)


@pytest.mark.parametrize(
    ("scores", "kept"), [([0.5, 0.9, 0.6, 0.7], True), ([0.5, 0.9, 0.5, 0.7], True), ([0.5, 0.9, 0.3, 0.7], False)]
)
def test_mechanisms_are_fitted_to_training_inputs_unless_they_score_worse(scores, kept, sst2, tmp_path, monkeypatch):
    model = model_of("performer", features=8, window=2)
    converted_, seen = copy.deepcopy(model.state_dict()), []
    values = iter(scores)
    monkeypatch.setattr("approx.finetuning.finetune._measure", lambda *words: Measure("f1", False, values.__next__))
    original = finetuning.calibrate

    def noted(fitted: Any, inputs: Any) -> None:
        seen.append(inputs)
        original(fitted, inputs)

    monkeypatch.setattr(finetuning, "calibrate", noted)

    options = options_of(sst2, recover=["distill"], steps=2, learning_rate=1e-9, mechanism_learning_rate=1e-9)
    interrupt(model, tmp_path / "work", options)
    (inputs,) = seen
    assert set(inputs) == {"input_ids", "token_type_ids", "attention_mask"}
    assert len(inputs["input_ids"]) == 16
    start = load_file(tmp_path / "work" / "start.safetensors")
    changed = {name for name, x in converted_.items() if not torch.equal(x, start[name])}
    assert bool(changed) is kept
    assert all(".mechanism." in name for name in changed)
    # It is not fitted again when it goes on, and ends as it was fitted where no step is better.
    monkeypatch.setattr("approx.finetuning.finetune._measure", lambda *words: Measure("f1", False, lambda: 0.1))
    done = trained(again := model_of("performer", features=8, window=2), tmp_path / "work", options, resume=True)
    assert len(seen) == 1
    assert all(torch.equal(x, start[name]) for name, x in again.state_dict().items())
    assert done.fitted == ("16 training inputs" if kept else None)
    text = (
        "fitted to 16 training inputs before the first step, with f1" if kept else "they scored worse before the first"
    )
    assert any(text in note for note in done.notes)


def test_mechanisms_that_cannot_be_fitted_to_training_inputs_stay_as_they_were_converted(sst2, tmp_path, monkeypatch):
    def fail(model: Any, inputs: Any) -> None:
        model.bert.encoder.layer[0].attention.self.mechanism.projection.data.zero_()
        raise ApproxError("The calibration batch did not reach 1 layers.")

    monkeypatch.setattr(finetuning, "calibrate", fail)
    done = trained(model := model_of("performer", features=8, window=2), tmp_path / "work", options_of(sst2, steps=1))
    assert done.fitted is None
    assert "They cannot be fitted to 16 training inputs: The calibration batch did not reach" in done.notes[0]
    assert model.bert.encoder.layer[0].attention.self.mechanism.projection.abs().max() > 0


def test_a_converted_model_learns_from_its_exact_self_by_default(sst2, tmp_path):
    quick = {"recover": None, "steps": 1, "batch_size": 4, "evaluate_every": 1}
    for mechanism, recover in (("linear", ["transfer", "distill"]), ("local", ["distill"]), (None, ["task"])):
        done = trained(model_of(mechanism), tmp_path / str(mechanism), options_of(sst2, **quick))
        assert done.recover == recover


@pytest.mark.slow
def test_validation_takes_a_tenth_of_a_time_budget_at_most(sst2, tmp_path, monkeypatch):
    (Path(sst2) / "train.tsv").write_text("\n".join(["sentence\tlabel", *ROWS * 4]) + "\n", encoding="utf-8")
    clock, used = [0.0], []

    class Slow:
        def __init__(self, count: int) -> None:
            self.count = count

        def __call__(self) -> float:
            used.append(self.count)
            clock[0] += 0.25 * self.count
            return 1.0 - len(used) / 1000

    monkeypatch.setattr(
        "approx.finetuning.finetune._measure",
        lambda model, read: Measure("f1", True, Slow(len(read.validated.examples))),
    )
    times = SimpleNamespace(**vars(time) | {"perf_counter": lambda: clock[0], "monotonic": lambda: clock[0]})
    for module in (finetuning, trainer):
        monkeypatch.setattr(module, "time", times)

    def progress(what: str, n: int, total: int) -> None:
        clock[0] += 4.0 if " | " in what else 0.0

    options = options_of(sst2, steps=1000, evaluate_every=None, time_budget="160s", validation=1000)
    done = trained(model_of(), tmp_path / "work", options, progress=progress)
    # Two validations of 32 examples in 16 of 160 seconds.
    assert used[-1] == done.held_out == 32
    assert "Only 32 of the" not in " ".join(done.notes)
    (phase,) = done.phases
    assert phase.ended == "time"
    assert len([point for point in phase.curve if "validation" in point]) == 2
    used.clear()
    clock[0] = 0.0
    options = options_of(sst2, steps=1000, evaluate_every=None, time_budget="100s", validation=1000)
    done = trained(model_of(), tmp_path / "less", options, progress=progress)
    assert used[-1] == done.held_out == 20
    assert "Only 20 of the 32 held-out examples are validated on" in " ".join(done.notes)
    # Three tenths of the time for a few, which are at least four.
    for budget, count in (("20s", 12), ("4s", 4)):
        used.clear()
        clock[0] = 0.0
        options = options_of(sst2, steps=1000, evaluate_every=None, time_budget=budget, validation=1000)
        assert trained(model_of(), tmp_path / budget, options, progress=progress).held_out == count


def test_a_budget_needs_a_converted_model_with_a_score(sst2, tmp_path, corpus):
    with pytest.raises(ApproxError, match=r"loss<=1 is a loss of score .* this model is exact already. Leave it out"):
        trained(model_of(None), tmp_path / "work", options_of(sst2, budget="loss<=1"))
    options = FinetuneStage(recover=["distill"], text=[corpus], length=16, steps=1, budget="loss<=1")
    with pytest.raises(ApproxError, match="this model has no score on these examples"):
        finetune(model_of(), tiny_tokenizer(), options, folder=tmp_path / "work")
