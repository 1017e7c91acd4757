"""What a record becomes in a tracker, as TensorBoard reads its own files."""

from pathlib import Path

import pytest

from approx.errors import ApproxError, Exit
from approx.evaluation import tracking
from approx.evaluation.record import Point, Trained, TrainingPhase
from typed import record_of

from ..publishing.conftest import RECORD


def read(folder: Path) -> dict[str, dict[str, dict[int, float]]]:
    """Run -> metric -> step -> value."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator").EventAccumulator
    runs = {}
    for run in sorted(folder.iterdir()):
        events = accumulator(str(run)).Reload()
        scalars = events.Tags()["scalars"]
        runs[run.name] = {name: {one.step: one.value for one in events.Scalars(name)} for name in scalars}
    return runs


@pytest.fixture
def reported(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    made = record_of(RECORD)
    phase = TrainingPhase(
        mode="transfer", steps=20, best_step=20, parameters=8, tokens=80, seconds=1.0, measure="loss", ended="steps",
        curve=[Point(step=10, loss=0.5), Point(step=20, loss=0.25, validation=0.3)],
    )  # fmt: skip
    linear = Trained(
        name="linear", recover=["transfer"], phases=[phase], measure="loss", exact=None, before=None, after=None,
        held_out=4, examples=8, data_sha256="ef" * 32,
    )  # fmt: skip
    said = tracking.report("a/study: <1>", [made.model_copy(update={"trainings": [linear]})], "tensorboard")
    (folder,) = (tmp_path / "runs" / "tensorboard").iterdir()
    assert str(folder.relative_to(tmp_path)) in said
    assert folder.name.startswith("a-study-1-")
    return made, read(folder)


def test_each_model_is_a_run_with_its_scores(reported):
    _, runs = reported
    assert {"exact", "clustered-25", "linear", "local-128-x"} <= set(runs)
    assert runs["exact"]["glue/sst2/accuracy"] == {0: pytest.approx(0.8956)}
    clustered = runs["clustered-25"]
    assert clustered["glue/sst2/difference"] == {0: pytest.approx(-0.0034)}
    assert clustered["glue/sst2/difference low"] == {0: pytest.approx(-0.0049)}
    assert clustered["glue/mrpc/f1"] == {0: pytest.approx(0.912)}
    assert "glue/sst2/difference" not in runs["exact"]


def test_times_are_drawn_over_the_length(reported):
    made, runs = reported
    timed = {row.length: row.base.median_ms for row in made.speed if row.base.median_ms is not None}
    assert len(timed) > 1
    assert runs["exact"]["time, batch 1/ms"] == pytest.approx(timed)
    ratios = {row.length: row.believed(one).ratio for row in made.speed for one in row.variants if one.name == "linear"}
    assert runs["linear"]["time, batch 1/speed-up"] == pytest.approx({n: one for n, one in ratios.items() if one})


def test_curves_keep_their_steps(reported):
    _, runs = reported
    assert runs["linear"]["transfer/loss"] == {10: 0.5, 20: 0.25}
    assert runs["linear"]["transfer/held-out loss"] == {20: pytest.approx(0.3)}


def test_one_model_in_several_records_is_one_run(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "logs"))
    made = record_of(RECORD)
    parts = [made.model_copy(update={"speed": []}), made.model_copy(update={"quality": []})]
    tracking.report("sweep", [*parts, *(_elsewhere(part) for part in parts)], "tensorboard")
    (folder,) = (tmp_path / "logs").iterdir()
    runs = read(folder)
    assert {"minilm-sst2-linear", "other-linear"} <= set(runs)
    assert {"glue/sst2/accuracy", "time, batch 1/ms"} <= set(runs["minilm-sst2-linear"])


def _elsewhere(made):
    return made.model_copy(update={"checkpoint": made.checkpoint.model_copy(update={"name": "other"})})


def test_a_task_that_a_record_has_twice_keeps_both_scores():
    made = record_of(RECORD)
    first = made.quality[0]
    again = first.model_copy(
        update={"settings": {"length": 64}, "base": first.base.model_copy(update={"scores": {"accuracy": 0.5}})}
    )
    runs = tracking._runs(made.model_copy(update={"quality": [first, again]}))
    assert runs["exact"].points[0]["glue/sst2 dev/accuracy"] == 0.8956
    assert runs["exact"].points[0]["glue/sst2 dev length=64/accuracy"] == 0.5


def test_a_missing_tracker_is_named(monkeypatch):
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    with pytest.raises(ApproxError, match=r"needs the package wandb\. Install it: pip install wandb\.") as missing:
        tracking.refuse_missing("wandb")
    assert missing.value.exit_code == Exit.MISSING
    tracking.refuse_missing(None)
