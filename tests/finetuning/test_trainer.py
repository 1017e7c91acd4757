"""One mode: rates, decay, penalties, counts, what the Trainer leaves behind, and a loss that nothing changes."""

import copy
import hashlib
import json
import math
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.utils import logging

from approx.errors import ApproxError, Exit
from approx.finetuning.finetune import prepare_training
from approx.finetuning.trainer import (
    Measure,
    Schedule,
    Watch,
    _hashes,
    _Trainer,
    disk_errors,
    dropout,
    last_complete,
    signals,
    train,
)
from approx.mechanisms import MECHANISMS
from forms import SMALL
from tiny_classifier import tiny_tokenizer
from tiny_training import model_of, options_of, set_dropout, trained, write_sst2
from zoo import tiny


def test_after_bfloat16_training_the_forward_pass_is_that_of_the_weights_again(sst2, tmp_path):
    model = model_of()
    trained(model, tmp_path / "work", options_of(sst2, steps=3, evaluate_every=3, bfloat16=True))
    inputs = {"input_ids": torch.arange(4, 12)[None]}
    fresh = type(model)(model.config).eval()
    fresh.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(model.eval()(**inputs).logits, fresh(**inputs).logits)


@pytest.mark.parametrize("bfloat16", [False, True])
def test_layers_run_in_bfloat16_and_the_model_keeps_its_dtype(bfloat16, sst2, tmp_path):
    model, kinds = model_of(), set()
    before = set(vars(model))
    hook = model.classifier.register_forward_hook(
        lambda module, args, output: kinds.add(output.dtype) if module.training else None
    )
    trained(model, tmp_path / "work", options_of(sst2, steps=2, bfloat16=bfloat16))
    hook.remove()
    assert kinds == {torch.bfloat16 if bfloat16 else torch.float32}
    # A mark that accelerate leaves.
    assert set(vars(model)) - before == {"_is_accelerate_prepared"}


def one_mode(model: Any, phase: Any, data: Any, measure: Measure, folder: Path) -> Any:
    return train(model, phase, data, measure, folder, resume=False, progress=lambda *words: None)


BIDIRECTIONAL = [name for name in sorted(MECHANISMS) if MECHANISMS[name].supports_bidirectional]


@pytest.mark.parametrize(
    "mechanism",
    [pytest.param(one, marks=() if one in ("clustered", "performer") else pytest.mark.slow) for one in BIDIRECTIONAL],
)
def test_the_first_loss_in_bfloat16_is_nearly_that_in_float32(mechanism, sst2, tmp_path):
    losses = []
    for bfloat16 in (False, True):
        model = model_of(mechanism, **SMALL.get(mechanism, {}))
        set_dropout(model, 0.0)
        options = options_of(sst2, recover=["distill"], steps=1, bfloat16=bfloat16)
        done = trained(model, tmp_path / str(bfloat16), options)
        losses += [point["loss"] for point in done.phases[0].curve if "loss" in point]
    assert losses[1] == pytest.approx(losses[0], rel=0.05, abs=1e-3)


def test_training_prints_nothing_and_leaves_the_log_level_of_the_user(sst2, tmp_path, capfd):
    level = logging.get_verbosity()
    logging.set_verbosity_info()
    before = logging.get_verbosity()
    try:
        trained(model_of(), tmp_path / "work", options_of(sst2, recover=["transfer", "task"], steps=3))
        assert logging.get_verbosity() == before
    finally:
        logging.set_verbosity(level)
    printed = capfd.readouterr()
    assert printed.out == ""
    # The bar of a training has its number of steps.
    assert "/3 [" not in printed.err


def test_dropout_goes_by_the_seed_and_not_by_what_was_drawn_before(sst2, tmp_path):
    weights = []
    for number, seed in enumerate((3, 3, 4)):
        model = model_of()
        prepared = prepare_training(model, tiny_tokenizer(), options_of(sst2, steps=1))
        # One input, so that its order tells nothing.
        data = replace(prepared.data, rows=prepared.data.rows[:1], encodings=prepared.data.encodings[:1])
        torch.manual_seed(number)
        one_mode(
            model,
            replace(prepared.phases[0], seed=seed),
            data,
            Measure("loss", True, iter([2.0, 1.0]).__next__),
            tmp_path / str(number),
        )
        weights.append(model.classifier.weight.detach())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_mode_that_can_train_nothing_is_refused(sst2, tmp_path):
    # Spans as long as every input hide nothing.
    model = model_of("adaptive-span", max_span=64, ramp=4)
    options = options_of(sst2, recover=["transfer"], steps=2, penalty=0.0)
    with pytest.raises(ApproxError, match="'transfer' trains changes its loss") as refused:
        trained(model, tmp_path / "work", options)
    assert refused.value.exit_code == Exit.UNSUPPORTED


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """A Trainer of a mode of 100 steps, that does not train; changes to its mode."""
    folder = tmp_path_factory.mktemp("trainer")
    model, stage = model_of(), options_of(write_sst2(folder), learning_rate=None, recover=["task"], steps=100)
    prepared = prepare_training(model, tiny_tokenizer(), stage)

    def make(**changes: Any) -> _Trainer:
        phase = replace(prepared.phases[0], **changes)
        return _Trainer(model, phase, prepared.data, prepared.measure, folder / "work", lambda *words: None)

    return make


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("cosine", [1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0.0]),
        ("linear", [1.0, 0.75, 0.5, 0.25, 0.0]),
        ("constant", [1.0] * 5),
        ("warmup_stable_decay", [1.0, 1.0, 1.0, 1.0, 0.0]),
    ],
)
def test_the_rate_falls_as_the_schedule_says_by_steps_or_by_time(schedule, rates, trainer, monkeypatch):
    made = trainer(warm_up=0.0, schedule=schedule)
    assert [made._rate(step) for step in (0, 25, 50, 75, 100)] == pytest.approx(rates, abs=1e-9)
    monkeypatch.setattr(made.watch, "share_of_time", lambda: 0.9)
    assert made._rate(0) == pytest.approx(
        {"cosine": (1 - math.cos(math.pi / 10)) / 2, "linear": 0.1, "constant": 1.0}.get(schedule, 0.5)
    )


def test_a_mode_has_a_schedule_of_its_own(sst2):
    stage = options_of(sst2, recover=["transfer", "distill"], schedule="linear", distill={"schedule": "constant"})
    made = prepare_training(model_of(), tiny_tokenizer(), stage)
    assert [phase.schedule for phase in made.phases] == ["linear", "constant"]


@pytest.mark.parametrize(
    ("mode", "share", "differ"),
    [("task", 0.0, False), ("task", 0.3, True), ("task", None, True), ("distill", None, False), ("distill", 0.3, True)],
)
def test_dropout_while_training_is_what_was_asked_for(mode, share, differ, sst2, tmp_path):
    model, seen = model_of(), set()
    inner = model.bert.encoder.layer[0]
    before = {name: module.p for name, module in model.named_modules() if isinstance(module, torch.nn.Dropout)}

    def look(module: Any, args: Any, output: Any) -> None:
        if module.training:
            seen.update(each.p for each in model.modules() if isinstance(each, torch.nn.Dropout))

    hook = inner.register_forward_hook(look)
    trained(model, tmp_path / "work", options_of(sst2, recover=[mode], steps=2, dropout=share))
    hook.remove()
    # The teacher, in evaluation mode, is not seen.
    share = (0.0 if mode == "distill" else 0.1) if share is None else share
    assert seen == {share}
    assert before == {name: module.p for name, module in model.named_modules() if isinstance(module, torch.nn.Dropout)}
    inputs = {"input_ids": torch.arange(4, 12)[None]}
    with dropout(model.train(), share), torch.no_grad():
        assert differ is not torch.equal(model(**inputs).logits, model(**inputs).logits)


def test_dropout_that_is_a_number_of_a_module_is_set_too_and_that_of_adapters_is_not():
    model = tiny("LlamaForCausalLM", attention_dropout=0.25)
    adapter = torch.nn.ModuleDict({"lora_dropout": torch.nn.Dropout(0.5)})
    model.model.layers[0].self_attn.q_proj.lora_dropout = adapter
    attention = model.model.layers[1].self_attn
    with dropout(model, 0.4):
        assert attention.attention_dropout == 0.4
        assert adapter["lora_dropout"].p == 0.5
    assert attention.attention_dropout == 0.25


def test_mechanisms_have_a_separate_rate_and_only_matrices_of_the_base_decay(trainer):
    made = trainer(learning_rate=1e-4, mechanism_learning_rate=1e-2)
    names = {id(parameter): name for name, parameter in made.trained.named_parameters()}
    found = {
        names[id(parameter)]: (group["lr"], group["weight_decay"])
        for group in made.create_optimizer().param_groups
        for parameter in group["params"]
    }
    assert found.keys() == dict(made.trained.named_parameters()).keys()
    for name, parameter in made.trained.named_parameters():
        of_mechanism = ".mechanism." in name
        assert found[name] == (
            1e-2 if of_mechanism else 1e-4,
            0.01 if parameter.dim() == 2 and not of_mechanism else 0.0,
        ), name


def test_only_what_a_mode_trains_is_optimised(trainer):
    made = trainer(trained=["classifier.weight"])
    (group,) = made.create_optimizer().param_groups
    assert [one is made.trained.classifier.weight for one in group["params"]] == [True]
    assert [name for name, one in made.trained.named_parameters() if one.requires_grad] == ["classifier.weight"]


def test_the_rate_rises_for_six_per_cent_of_the_steps_and_falls_to_nothing(trainer, monkeypatch):
    made = trainer(steps=100)
    rates = [made._rate(step) for step in range(101)]
    for step, rate in enumerate(rates):
        assert rate == pytest.approx(min(1.0, (step + 1) / 6) * 0.5 * (1 + math.cos(math.pi * step / 100)))
    assert rates[100] == pytest.approx(0.0)
    # Where time runs out sooner, it falls with the time.
    timed = trainer(steps=1000, seconds=10.0)
    # Its warm-up is a share of what really runs, from the end of the first validation.
    timed.watch.share_before = 0.1
    monkeypatch.setattr(timed.watch, "seconds", lambda: 1.3)
    assert timed._rate(2) == pytest.approx(0.5 * 0.5 * (1 + math.cos(math.pi * 0.13)))
    monkeypatch.setattr(timed.watch, "seconds", lambda: 5.0)
    assert timed._rate(100) == pytest.approx(0.5)
    monkeypatch.setattr(timed.watch, "seconds", lambda: 20.0)
    assert timed._rate(100) == pytest.approx(0.0)
    assert trainer(steps=100, warm_up=0.0)._rate(0) == 1.0
    # A training of one step begins at its full rate.
    assert trainer(steps=1)._rate(0) == pytest.approx(1.0)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_training_is_one_by_hand_in_float64(accumulate, sst2, tmp_path):
    """AdamW with two rates that fall by a cosine, decay of the base's matrices, and gradients no longer than 1."""
    model = model_of().double()
    set_dropout(model, 0.0)
    with torch.no_grad():
        model.classifier.weight.mul_(30)
    prepared = prepare_training(model, tiny_tokenizer(), options_of(sst2, steps=10, accumulate=accumulate))
    phase = replace(prepared.phases[0], learning_rate=1e-3, mechanism_learning_rate=1e-2, evaluate_every=10)
    other = copy.deepcopy(model).train()
    rates = {name: 1e-2 if ".mechanism." in name else 1e-3 for name, _ in other.named_parameters()}
    optimizer = torch.optim.AdamW(
        [
            {"params": [one], "weight_decay": 0.01 if one.dim() > 1 and ".mechanism." not in name else 0.0}
            for name, one in other.named_parameters()
        ]
    )
    order, norms, losses, used = Schedule(prepared.data, 8, 10, phase.seed), [], [], []
    for step in range(10):
        batch = prepared.data.batch([order[place][0] for place in range(8 * step, 8 * step + 8)], 0)
        labels = batch.pop("labels")
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(other(**batch).logits, labels)
        loss.backward()
        losses.append(float(loss.detach()))
        norms.append(float(torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)))
        now = (1 + math.cos(math.pi * step / 10)) / 2
        for name, group in zip(rates, optimizer.param_groups, strict=True):
            group["lr"] = rates[name] * now
        used.append(1e-3 * now)
        optimizer.step()
    assert max(norms) > 1
    outcome = one_mode(model, phase, prepared.data, Measure("loss", True, iter([2.0, 1.0]).__next__), tmp_path / "work")
    assert outcome.curve.pop(0) == {"step": 0, "validation": 2.0}
    assert (outcome.steps, outcome.best_step, outcome.tokens) == (10, 10, 10 * 8 * 6)
    assert outcome.seconds == round(outcome.seconds, 1)
    assert [point["step"] for point in outcome.curve] == list(range(1, 11))
    assert [point["loss"] for point in outcome.curve] == pytest.approx(losses, rel=1e-4)
    assert [point["learning_rate"] for point in outcome.curve] == pytest.approx(used)
    for name, x in model.state_dict().items():
        torch.testing.assert_close(x, other.state_dict()[name], rtol=1e-6, atol=1e-8, msg=name)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("lower", "values", "patience", "best", "steps", "ended"),
    [
        (True, [0.9, 0.5, 0.3, 0.4, 0.6], None, 2, 4, "steps"),
        (False, [0.4, 0.5, 0.3, 0.6, 0.4], None, 3, 4, "steps"),
        (False, [0.4, 0.5, 0.5, 0.5, 0.5], None, 1, 4, "steps"),
        (True, [0.9, 0.5, 0.3, 0.4, 0.35], 2, 2, 4, "steps"),
        (True, [0.9, 0.5, 0.6, 0.7, 0.1], 2, 1, 3, "patience"),
        (False, [0.4, 0.5, 0.4, 0.6, 0.9], 1, 1, 2, "patience"),
        # The start is as good as what follows, or better.
        (False, [0.5, 0.5, 0.4, 0.5, 0.3], None, 0, 4, "steps"),
        (True, [0.1, 0.5, 0.4, 0.3, 0.2], None, 0, 4, "steps"),
        (False, [0.9, 0.4, 0.6, 0.1, 0.1], 2, 0, 2, "patience"),
    ],
)
def test_the_best_step_is_that_of_the_best_value_on_its_side(
    sst2, tmp_path, lower, values, patience, best, steps, ended
):
    model = model_of(None)
    prepared = prepare_training(model, tiny_tokenizer(), options_of(sst2, steps=4, evaluate_every=1, patience=patience))
    names, weights = iter(values), []

    def value() -> float:
        weights.append(model.classifier.weight.detach().clone())
        return next(names)

    outcome = one_mode(model, prepared.phases[0], prepared.data, Measure("loss", lower, value), tmp_path / "work")
    assert (outcome.best_step, outcome.steps, outcome.ended) == (best, steps, ended)
    assert torch.equal(model.classifier.weight, weights[best])
    # Kept are the best and the last.
    left = {path.name for path in (tmp_path / "work").iterdir()}
    assert left == {f"checkpoint-{best}", f"checkpoint-{steps}"} or len(left) == 2 > len({best, steps} - {0})
    curve = {point["step"]: point["validation"] for point in outcome.curve if "validation" in point}
    assert curve == dict(enumerate(values[: steps + 1]))


def test_a_first_signal_waits_for_the_step_and_a_second_does_not(trainer):
    watch, before = trainer().watch, [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with signals(watch):
        signal.raise_signal(signal.SIGTERM)
        assert watch.stopped
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_non_finite_loss_at_the_first_step_says_that_nothing_was_saved(value, trainer):
    made = trainer()
    weight = made.trained.classifier.weight
    made.phase = replace(made.phase, objective=SimpleNamespace(loss=lambda *words: weight.sum() * 0 + value))
    with pytest.raises(ApproxError, match=rf"is {value} at step 1; nothing was saved yet") as caught:
        made.compute_loss(made.trained, {})
    assert caught.value.exit_code == Exit.VERIFICATION


@pytest.mark.parametrize(("batch", "accumulate", "each"), [(8, 1, 8), (8, 4, 2), (6, 2, 3)])
def test_a_step_is_shared_among_its_passes(trainer, batch, accumulate, each):
    arguments = trainer(batch_size=batch, accumulate=accumulate, steps=250, evaluate_every=7, seed=3).args
    assert arguments.per_device_train_batch_size == each
    assert arguments.gradient_accumulation_steps == accumulate
    assert (arguments.max_steps, arguments.logging_steps, arguments.seed) == (250, 2, 3)
    assert (arguments.eval_steps, arguments.save_steps, arguments.load_best_model_at_end) == (7, 7, True)
    assert (arguments.metric_for_best_model, arguments.greater_is_better) == ("eval_accuracy", True)
    assert arguments.use_cpu


@pytest.mark.parametrize(("mode", "found"), [("transfer", False), ("distill", True), ("task", True)])
def test_in_several_processes_parameters_without_gradients_are_looked_for_unless_all_would_be(trainer, mode, found):
    arguments = trainer(mode=mode).args
    assert arguments.ddp_find_unused_parameters is found
    assert arguments.log_level_replica == "passive"


def test_a_batch_of_one_input_is_a_batch(trainer):
    made = trainer()
    (one,) = made._collated([(3, 1)])["input_ids"].tolist()
    assert one == made.data.encodings[3]["input_ids"]


def test_a_batch_is_that_of_its_pass(trainer):
    made = trainer()
    made.data = SimpleNamespace(batch=lambda rows, passed: (rows, passed))
    assert made._collated([(3, 2), (5, 2)]) == ([3, 5], 2)


@pytest.mark.parametrize(
    ("used", "stopped", "ends", "validates", "ended"),
    [
        (0.99, False, False, False, "steps"),
        (1.0, False, True, True, "time"),
        (1.5, False, True, True, "time"),
        # The state is kept, and the time is up again after a resumption.
        (1.5, True, True, False, "steps"),
        (0.5, True, True, False, "steps"),
    ],
)
def test_a_step_is_the_last_when_time_is_up_or_a_signal_came(
    trainer, monkeypatch, used, stopped, ends, validates, ended
):
    made = trainer(seconds=100.0)
    made.create_optimizer()
    made.create_scheduler(100)
    made.watch.stopped = stopped
    monkeypatch.setattr(made.watch, "seconds", lambda: 100.0 * used)
    control = SimpleNamespace(should_training_stop=False, should_save=False, should_evaluate=False)
    assert made.watch.on_step_end(None, SimpleNamespace(global_step=1), control) is control
    assert (control.should_training_stop, control.should_save, control.should_evaluate) == (ends, ends, validates)
    assert made.watch.ended == ended


@pytest.mark.parametrize(
    ("this", "others", "stops"), [(False, 0.0, False), (True, 0.0, True), (False, 0.25, True), (True, 0.75, True)]
)
def test_all_processes_stop_when_one_stops(this, others, stops):
    made: Any = SimpleNamespace(
        args=SimpleNamespace(device=torch.device("cpu")), accelerator=SimpleNamespace(reduce=lambda x: x / 4 + others)
    )
    assert Watch(made, lambda *words: None)._agreed(this) is stops


def test_the_penalty_of_spans_is_added_by_its_weight(tmp_path):
    model = model_of("adaptive-span", max_span=16, ramp=4)
    stage = options_of(write_sst2(tmp_path), recover=["task"], steps=1)
    prepared = prepare_training(model, tiny_tokenizer(), stage)
    inputs = prepared.data.batch([0, 1, 2, 3], 0)
    losses = []
    for penalty in (0.0, 1.0, 3.0):
        phase = replace(prepared.phases[0], penalty=penalty)
        made = _Trainer(model.eval(), phase, prepared.data, prepared.measure, tmp_path / "work", lambda *words: None)
        losses.append(float(made.compute_loss(model, inputs).detach()))
    added = float(model.attention_penalty().detach())
    assert added > 0
    assert losses[1:] == pytest.approx([losses[0] + added, losses[0] + 3 * added])


def test_tokens_and_time_are_counted_and_survive_an_interruption(trainer, monkeypatch):
    made = trainer(seconds=100.0)
    watch, mask = made.watch, torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    watch.count({"input_ids": torch.zeros(2, 4), "attention_mask": mask})
    assert watch.tokens == 5
    watch.count({"input_ids": torch.zeros(2, 4)})
    assert watch.tokens == 13
    watch.count({})
    assert watch.tokens == 13
    watch.take(b'{"seconds": 40.0, "tokens": 7}', {})
    assert watch.tokens == 7
    assert 40.0 <= watch.seconds() < 45.0
    assert watch.share_of_time() == pytest.approx(0.4, abs=0.05)
    assert json.loads(watch.state_text({}))["tokens"] == 7
    assert 40.0 <= json.loads(watch.state_text({}))["seconds"] < 45.0
    assert trainer().watch.seconds() < 0.5
    assert trainer().watch.share_of_time() == 0.0


def test_progress_line_shows_rate_speed_and_time_left(trainer, monkeypatch):
    reported = []
    made = trainer(steps=100)
    made.watch._progress = lambda *words: reported.append(words)
    monkeypatch.setattr(made.watch, "seconds", lambda: 30.0)
    made.watch.tokens = 60_000
    made.create_optimizer()
    made.create_scheduler(100)
    made.watch.on_log(None, None, None, logs={"loss": 0.51239})
    made.watch.on_log(None, None, None, logs={"eval_accuracy": 0.5})
    made.watch._say(SimpleNamespace(global_step=25))
    ((words, done, total),) = reported
    first = made.phase.learning_rate / 6
    assert words in (
        f"task | loss 0.5124 | rate {first:.1e} | 2,000 tokens/s | 90 s left",
        f"task | loss 0.5124 | rate {first:.1e} | 2,000 tokens/s | 2 min left",
    )
    assert (done, total) == (25, 100)
    monkeypatch.setattr(made.watch, "seconds", lambda: 10.0)
    made.watch._say(SimpleNamespace(global_step=25))
    assert reported[1][0].endswith("| 30 s left")
    for share, seconds, left in ((0.5, 89.0, "89 s"), (0.25, 40.0, "2 min"), (0.1, 400.0, "60 min")):
        monkeypatch.setattr(made.watch, "share_of_time", lambda share=share: share)
        monkeypatch.setattr(made.watch, "seconds", lambda seconds=seconds: seconds)
        made.watch.on_evaluate(None, None, SimpleNamespace(), metrics={"eval_accuracy": 0.75})
        made.watch._say(SimpleNamespace(global_step=5))
        assert reported[-1][0].endswith(f"| {left} left")
    assert "task | loss 0.5124 | held-out accuracy 0.75 | rate" in reported[-1][0]


@pytest.mark.parametrize("complete", [(), (4,), (4, 20, 8)])
def test_the_latest_complete_checkpoint_goes_by_its_step(tmp_path, complete):
    for step in (4, 8, 20, 100):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if step in complete:
            (tmp_path / f"checkpoint-{step}" / "complete.json").write_text("{}")
    # Of the user, whatever is in it.
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-best" / "complete.json").write_text("{}")
    found = last_complete(tmp_path)
    assert found == (tmp_path / f"checkpoint-{max(complete)}" if complete else None)


def test_files_up_to_a_megabyte_are_hashed_and_tensors_are_not(tmp_path):
    for name, size in (("trainer_state.json", 2), ("scheduler.pt", 1_000_000), ("model.safetensors", 1_000_001)):
        (tmp_path / name).write_bytes(bytes(size))
    (tmp_path / "complete.json").write_text("{}")
    (tmp_path / "folder").mkdir()
    digests = {
        name: hashlib.sha256(bytes(size)).hexdigest()
        for name, size in (("trainer_state.json", 2), ("scheduler.pt", 10**6))
    }
    assert _hashes(tmp_path) == digests


def test_a_full_disk_names_the_state_that_is_kept(tmp_path):
    for state in ("", "; the state after step 8 is kept"):
        if state:
            (tmp_path / "checkpoint-8").mkdir()
            (tmp_path / "checkpoint-8" / "complete.json").write_text("{}")
        with pytest.raises(ApproxError) as caught, disk_errors(tmp_path):
            raise OSError(28, "No space left on device")
        assert f"{tmp_path}: No space left on device{state}. Free space" in str(caught.value)
        assert caught.value.exit_code == Exit.UNAVAILABLE
