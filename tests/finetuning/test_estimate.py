"""What a training would take, by trial steps that change nothing."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from approx.finetuning import finetune as estimating
from approx.finetuning.finetune import estimate, prepare_training
from approx.finetuning.options import ModeOptions
from tiny_classifier import tiny_tokenizer
from tiny_training import model_of, options_of, write_sst2


@pytest.mark.parametrize("recover", [["transfer"], ["task"], ["lora", "task"]])
def test_estimate_measures_time_and_memory_and_does_not_change_the_model(recover, tmp_path, monkeypatch):
    if "lora" in recover:
        pytest.importorskip("peft")
    model = model_of()
    stage = options_of(write_sst2(tmp_path), recover=recover, steps=50, batch_size=8, accumulate=2, learning_rate=0.25)
    stage = stage.model_copy(update={"transfer": ModeOptions(learning_rate=0.25)})
    prepared = prepare_training(model, tiny_tokenizer(), stage)
    state, free = copy.deepcopy(model.state_dict()), {name: one.requires_grad for name, one in model.named_parameters()}
    times = iter([10.0, 10.5] * 9)
    monkeypatch.setattr(estimating.time, "perf_counter", lambda: next(times))
    peaks = []
    monkeypatch.setattr(estimating, "peak_mb", lambda step, device: peaks.append(step()) or 3.0)
    found = estimate(model, prepared.phases[0], prepared, stage)
    assert (found.mode, found.steps, found.batch_size, found.learning_rate) == (recover[-1], 50, 8, 0.25)
    # Half a second for each of two passes, fifty times.
    assert found.seconds == 50.0
    limited = replace(prepared.phases[0], seconds=20.0)
    assert estimate(model, limited, prepared, stage).seconds == 20.0
    assert found.parameters == sum(one.numel() for one in model.parameters())
    of_mechanisms = sum(one.numel() for name, one in model.named_parameters() if ".mechanism." in name)
    if recover == ["task"]:
        assert found.trained == found.parameters
    elif recover == ["transfer"]:
        assert found.trained == of_mechanisms
    else:
        assert of_mechanisms < found.trained < found.parameters
    # The peak of a step, the weights, and the two averages that an optimiser keeps of each trained number.
    weights = sum(one.numel() * 4 for one in model.parameters())
    if "lora" not in recover:
        assert found.memory_mb == pytest.approx(3.0 + (weights + 8 * found.trained) / 1e6, abs=0.06)
    assert len(peaks) == 6
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    assert free == {name: one.requires_grad for name, one in model.named_parameters()}
    assert all(one.grad is None for one in model.parameters())
    assert not model.training


@pytest.mark.parametrize(
    ("room_mb", "input_mb", "largest"), [(1000.0, 1, 8), (9.0, 1, 4), (1.0, 1, 1), (64_000.0, 400, 4)]
)
def test_trial_steps_begin_with_one_input_and_fill_half_the_memory_at_most(
    room_mb, input_mb, largest, tmp_path, monkeypatch
):
    model = model_of()
    stage = options_of(write_sst2(tmp_path), recover=["task"], steps=50, batch_size=8)
    prepared = prepare_training(model, tiny_tokenizer(), stage)
    sizes = []
    batch = type(prepared.data).batch

    def counted(self, rows, seed):
        sizes.append(len(rows))
        return batch(self, rows, seed)

    monkeypatch.setattr(type(prepared.data), "batch", counted)
    # Half a megabyte for the gradients, one for each input.
    monkeypatch.setattr(estimating, "peak_mb", lambda step, device: step() or 0.5 + input_mb * sizes[-1])
    monkeypatch.setattr(estimating, "available_bytes", lambda device: int(room_mb * 1e6))
    found = estimate(model, prepared.phases[0], prepared, stage)
    assert sizes[:2] == [1, min(largest, 2)]
    assert max(sizes) == largest
    # Of a whole batch in any case; after one input alone the most that it can be.
    weights = sum(one.numel() * 4 for one in model.parameters())
    needed = 8 * 1.5 if largest == 1 else 0.5 + 8 * input_mb
    assert found.memory_mb == pytest.approx(needed + (weights + 8 * found.trained) / 1e6, abs=0.06)


@pytest.mark.parametrize(("batch", "tried"), [(4, 4), (500, 36)])
def test_memory_is_that_of_the_longest_inputs_and_time_that_of_inputs_in_the_middle(
    batch, tried, tmp_path, monkeypatch
):
    data = write_sst2(tmp_path)
    lines = ["sentence\tlabel", *(f"{'film ' * (1 + row % 20)}\t{row % 2}" for row in range(40))]
    (Path(data) / "train.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    model = model_of(None)
    stage = options_of(data, steps=10, batch_size=batch, accumulate=1)
    prepared = prepare_training(model, tiny_tokenizer(), stage)
    phase = replace(prepared.phases[0], trained=["classifier.weight"])
    seen: list[list[int]] = []
    made, supervised = type(prepared.data).batch, type(phase.objective).loss

    def noted(self: Any, rows: list[int], passed: int) -> Any:
        seen.append([self.tokens(row) for row in rows])
        return made(self, rows, passed)

    def loss(self: Any, called: Any, inner: Any, inputs: Any) -> Any:
        assert called.training
        assert [name for name, one in called.named_parameters() if one.requires_grad] == ["classifier.weight"]
        return supervised(self, called, inner, inputs)

    monkeypatch.setattr(type(prepared.data), "batch", noted)
    monkeypatch.setattr(type(phase.objective), "loss", loss)
    times = iter([10.0, 10.5])
    monkeypatch.setattr(estimating.time, "perf_counter", lambda: next(times))
    found = estimate(model, phase, prepared, stage)
    # Two more tokens around each text.
    lengths = sorted(prepared.data.tokens(row) for row in range(36))
    begin = (36 - tried) // 2
    assert seen == [lengths[-1:], lengths[-2:], lengths[-tried:], *[lengths[begin : begin + tried]] * 2]
    assert found.seconds == 5.0
    assert not model.training


def test_a_batch_that_was_tried_in_part_takes_its_whole_time(tmp_path, monkeypatch):
    model = model_of()
    stage = options_of(write_sst2(tmp_path), steps=50, batch_size=8)
    prepared = prepare_training(model, tiny_tokenizer(), stage)
    sizes = iter([1, 2])
    monkeypatch.setattr(estimating, "peak_mb", lambda step, device: 0.5 + next(sizes))
    monkeypatch.setattr(estimating, "available_bytes", lambda device: 9_000_000)
    times = iter([10.0, 10.5])
    monkeypatch.setattr(estimating.time, "perf_counter", lambda: next(times))
    # Half a second for four of eight inputs, fifty times.
    assert estimate(model, prepared.phases[0], prepared, stage).seconds == 50.0
