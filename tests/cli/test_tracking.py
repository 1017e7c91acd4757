"""`--report-to`: what commands measured is in TensorBoard's files afterwards."""

from pathlib import Path

import pytest

from approx.errors import Exit
from tiny_study import tiny_recipe

from ..evaluation.test_tracking import read
from .conftest import call


def reported(folder: Path) -> dict[str, dict[str, dict[int, float]]]:
    """The runs of the only report in an empty folder."""
    (made,) = (folder / "runs" / "tensorboard").iterdir()
    return read(made)


def test_evaluate_reports_both_models(converted, data, tmp_path):
    pytest.importorskip("tensorboard")
    words = ("evaluate", converted, "--task", "glue/sst2", "--data", data, "--limit", "8")
    answer = call(*words, "--json", "--report-to", "tensorboard")
    assert answer.code == 0, answer.err
    assert "tensorboard --logdir runs/tensorboard" in answer.err
    runs = reported(tmp_path)
    score = answer.json["quality"][0]["base"]["scores"]["accuracy"]
    assert runs["exact"]["glue/sst2/accuracy"] == {0: pytest.approx(score)}
    assert set(runs) == {"exact", "con-verted"}


@pytest.mark.slow
def test_run_reports_scores_times_and_curves(base, data, tmp_path):
    pytest.importorskip("tensorboard")
    recipe = tiny_recipe(tmp_path / "tiny.yaml", base, data)
    lines = [f"the film is {word}\t{label}" for word, label in [("good", 1), ("bad", 0)] * 12]
    (data / "train.tsv").write_text("\n".join(["sentence\tlabel", *lines]) + "\n")
    heal = f"heal: {{task: glue/sst2, data: {data}, steps: 2, recover: task}}\n"
    recipe.write_text(recipe.read_text() + heal)
    answer = call("run", recipe, "-o", "out", "--report-to", "tensorboard")
    assert answer.code == 0, answer.err
    runs = reported(tmp_path)
    healed = next(run for name, run in runs.items() if "task/held-out accuracy" in run)
    assert {"glue/sst2/accuracy", "time, batch 1/ms"} <= set(runs["exact"])
    assert max(healed["task/held-out accuracy"]) == 2


@pytest.mark.slow
def test_the_files_of_a_training_outlive_its_checkpoints(converted, data, tmp_path):
    pytest.importorskip("tensorboard")
    (data / "train.tsv").write_text((data / "dev.tsv").read_text())
    words = ("finetune", converted, "--task", "glue/sst2", "--data", data, "--recover", "task", "--steps", "2")
    answer = call(*words, "-o", "healed", "--report-to", "tensorboard")
    assert answer.code == 0, answer.err
    assert not (tmp_path / "healed.training").exists()
    runs = read(tmp_path / "runs" / "tensorboard")
    ((name, run),) = runs.items()
    assert name.startswith("healed-0-task-")
    assert "train/loss" in run


@pytest.mark.parametrize(
    "words", [("evaluate", "nothing", "--task", "needle"), ("run", "quickstart"), ("sweep", "needle-grid")]
)
def test_a_missing_tracker_is_refused_before_any_work(words, tmp_path, monkeypatch):
    monkeypatch.setattr("approx.evaluation.tracking.find_spec", lambda name: None)
    answer = call(*words, "--report-to", "trackio")
    assert answer.code == Exit.MISSING
    assert "Reporting to trackio needs the package trackio. Install it: pip install trackio." in answer.err
    assert list(tmp_path.iterdir()) == []
