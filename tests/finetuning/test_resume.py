"""Interrupted training goes on to the same weights, and only where it is the same training."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from approx.errors import ApproxError, Exit
from approx.finetuning.trainer import Interrupted, last_complete
from conftest import ROOT
from tiny_training import interrupt, model_of, options_of, trained


def same(one: Any, other: Any) -> bool:
    states = one.state_dict(), other.state_dict()
    return states[0].keys() == states[1].keys() and all(
        torch.equal(states[0][name], states[1][name]) for name in states[0]
    )


@pytest.mark.parametrize("recover", [["task"], ["transfer", "task"], ["lora", "task"], ["distill"]])
@pytest.mark.sample(1)
def test_interrupted_after_any_step_and_resumed_the_weights_are_the_same_to_the_bit(recover, sst2, tmp_path):
    if "lora" in recover:
        pytest.importorskip("peft")
    options = options_of(sst2, recover=recover, steps=9, evaluate_every=4, learning_rate=None)
    whole = model_of()
    # Dropout is part of it.
    assert whole.config.hidden_dropout_prob > 0
    uninterrupted = trained(whole, tmp_path / "whole", options)
    model = model_of()

    def stop(at: int) -> Any:
        def progress(what: str, n: int, total: int) -> None:
            if " | " in what and n == at:
                signal.raise_signal(signal.SIGINT)

        return progress

    for number, at in enumerate((3, 4, 7)):
        with pytest.raises(Interrupted):
            trained(model, tmp_path / "work", options, resume=number > 0, progress=stop(at))
        model = model_of()
    done = trained(model, tmp_path / "work", options, resume=True)
    assert same(model, whole)
    assert done.after == uninterrupted.after
    assert [phase.best_step for phase in done.phases] == [phase.best_step for phase in uninterrupted.phases]


@pytest.mark.slow
def test_a_training_whose_folder_was_moved_ends_with_its_best_weights(sst2, tmp_path):
    options = options_of(sst2, steps=30, patience=100)
    whole = trained(model := model_of(), tmp_path / "whole", options)
    (best,) = (phase.best_step for phase in whole.phases)
    assert 0 < best < 20

    interrupt(model_of(), tmp_path / "work", options, 22)
    (tmp_path / "elsewhere").mkdir()
    moved = (tmp_path / "work").rename(tmp_path / "elsewhere" / "work")
    again = trained(resumed := model_of(), moved, options, resume=True)
    assert [phase.best_step for phase in again.phases] == [best]
    assert same(resumed, model)


def test_a_training_whose_best_weights_are_gone_does_not_end_with_others(sst2, tmp_path):
    options = options_of(sst2, steps=30)

    interrupt(model_of(), tmp_path / "work", options, 22)
    earlier, _ = sorted((tmp_path / "work").glob("*/checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    shutil.rmtree(earlier)
    with pytest.raises(ApproxError, match=f"{earlier.name}, which has the best weights so far, is missing") as caught:
        trained(model_of(), tmp_path / "work", options, resume=True)
    assert caught.value.exit_code == Exit.UNAVAILABLE


def test_a_training_of_an_earlier_version_is_refused_by_name(sst2, tmp_path):
    options = options_of(sst2, steps=6)

    interrupt(model_of(), tmp_path / "work", options)
    file = tmp_path / "work" / "training.json"
    state = json.loads(file.read_text())
    for name in ("transfer", "mechanism_learning_rate", "warm_up", "weight_decay"):
        del state["about"]["options"][name]
    file.write_text(json.dumps(state | {"validated": None}))
    with pytest.raises(ApproxError, match="training of an earlier version of approx, with other defaults") as caught:
        trained(model_of(), tmp_path / "work", options, resume=True)
    assert caught.value.exit_code == Exit.REFUSED


def test_a_training_that_was_stopped_while_it_scored_goes_on(sst2, tmp_path):
    def stop(what: str, n: int, total: int) -> None:
        if what == "score before training":
            raise KeyboardInterrupt

    options = options_of(sst2, steps=2)
    with pytest.raises(KeyboardInterrupt):
        trained(model_of(), tmp_path / "work", options, progress=stop)
    assert trained(model_of(), tmp_path / "work", options, resume=True).steps == 2


def test_an_error_after_a_resumption_is_not_one_of_the_checkpoint(sst2, tmp_path):
    options = options_of(sst2, steps=6)

    def stop(at: int, error: type[BaseException] | None = None) -> Any:
        def progress(what: str, n: int, total: int) -> None:
            if " | " in what and n == at:
                if error is not None:
                    raise error("of the user")
                signal.raise_signal(signal.SIGINT)

        return progress

    with pytest.raises(Interrupted):
        trained(model_of(), tmp_path / "work", options, progress=stop(2))
    with pytest.raises(ZeroDivisionError, match="of the user"):
        trained(model_of(), tmp_path / "work", options, resume=True, progress=stop(4, ZeroDivisionError))


def test_a_finished_mode_and_the_scores_are_not_repeated(sst2, tmp_path, monkeypatch):
    options = options_of(sst2, recover=["transfer", "task"], steps=3, evaluate_every=3)

    def stop(what: str, n: int, total: int) -> None:
        if what.startswith("task |"):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        trained(model_of(), tmp_path / "work", options, progress=stop)
    monkeypatch.setattr("approx.finetuning.finetune._before", None)
    reported: list[str] = []
    done = trained(model_of(), tmp_path / "work", options, resume=True, progress=lambda what, *_: reported.append(what))
    assert [what.partition(" | ")[0] for what in reported if " | " in what] == ["task", "task"]
    assert [phase.steps for phase in done.phases] == [3, 3]
    assert done.exact is not None
    assert done.before is not None


def test_an_incomplete_checkpoint_is_not_resumed_from(sst2, tmp_path):
    options = options_of(sst2, steps=8, evaluate_every=4)
    whole = model_of()
    trained(whole, tmp_path / "whole", options)

    interrupt(model_of(), tmp_path / "work", options, 6, by=signal.SIGTERM)
    last = last_complete(tmp_path / "work" / "0-task")
    assert last is not None
    assert last.name == "checkpoint-6"
    # As a process leaves it that was killed while it wrote.
    (last / "complete.json").unlink()
    (last / "model.safetensors").write_bytes(b"half")
    model = model_of()
    trained(model, tmp_path / "work", options, resume=True)
    assert same(model, whole)


def test_a_training_goes_on_only_with_the_same_options_and_examples(sst2, tmp_path):
    options, work = options_of(sst2, steps=6), tmp_path / "work"

    interrupt(model_of(), work, options, 2)
    for other, model, word in [
        (options_of(sst2, steps=6, batch_size=4), model_of(), "options"),
        (options_of(sst2, steps=6), model_of("local"), "mechanisms"),
    ]:
        with pytest.raises(ApproxError, match=f"with other .*{word}") as caught:
            trained(model, work, other, resume=True)
        assert caught.value.exit_code == Exit.REFUSED
    changed = model_of()
    with torch.no_grad():
        changed.classifier.bias.add_(1)
    with pytest.raises(ApproxError, match="with other weights"):
        trained(changed, work, options, resume=True)
    about = json.loads((work / "training.json").read_text())["about"]
    # Whatever is a default of this version of transformers counts too; where and how long it trains does not.
    assert about["config"]["hidden_act"] == "gelu"
    assert not {"_name_or_path", "transformers_version"} & set(about["config"])
    assert not {"time_budget", "report_to"} & set(about["options"])
    other_class = model_of()
    other_class.__class__ = type(f"Other{type(other_class).__name__}", (type(other_class),), {})
    with pytest.raises(ApproxError, match=r"with other architecture\."):
        trained(other_class, work, options, resume=True)
    drier = model_of()
    drier.config.hidden_dropout_prob = 0.5
    with pytest.raises(ApproxError, match=r"with other settings in config\.json\."):
        trained(drier, work, options, resume=True)
    file = Path(sst2) / "train.tsv"
    before = file.read_text()
    file.write_text(before.replace("\t1", "\t0"))
    with pytest.raises(ApproxError, match=r"with other .*examples"):
        trained(model_of(), work, options, resume=True)
    file.write_text(before)
    with pytest.raises(ApproxError, match="--resume"):
        trained(model_of(), work, options)
    # More time is no other training.
    trained(model_of(), work, options_of(sst2, steps=6, time_budget="2h"), resume=True)
    with pytest.raises(ApproxError, match="nothing to resume"):
        trained(model_of(), tmp_path / "other", options, resume=True)


# Once the second process is late, so that the folder is claimed before it looks, and once the first, which removes the
# old state. The second is also late to load the best step, whose checkpoint the first removes.
LATE = """
import os, sys, time
from pathlib import Path
from approx.evaluation import evaluate
from approx.finetuning.trainer import Trainer
from tiny_training import model_of, options_of, trained

load = Trainer._load_best_model

def load_late(trainer):
    time.sleep(3 * int(os.environ["RANK"]))
    assert Path(trainer.state.best_model_checkpoint).is_dir()
    load(trainer)

Trainer._load_best_model = load_late
data, folder = sys.argv[1:]
for late in (1, 0):
    evaluate.gather(None)

    def progress(what, done, total):
        if what == "read the data" and int(os.environ["RANK"]) == late:
            time.sleep(3)

    trained(model_of(), Path(folder), options_of(data, steps=2, evaluate_every=1), restart=late == 0, progress=progress)
"""


@pytest.mark.slow
def test_a_process_that_is_late_takes_part_in_the_same_training(sst2, tmp_path):
    (tmp_path / "late.py").write_text(LATE, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "tests")))}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            tmp_path / "late.py",
            sst2,
            tmp_path / "work",
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
