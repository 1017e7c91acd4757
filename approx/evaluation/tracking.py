"""Experiment trackers: runs in TensorBoard, Trackio or Weights & Biases, made from records."""

import importlib
import json
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from approx.errors import ApproxError, Exit

if TYPE_CHECKING:
    from approx.evaluation.record import Quality, Record, Speed, Timing

Tracker = Literal["tensorboard", "trackio", "wandb"]
PROJECT = "approx"


def refuse_missing(tracker: Tracker | None) -> None:
    """Check that the package of a tracker is installed, before any work.

    Raises:
        ApproxError: naming how to install it (exit code 4).
    """
    if tracker is not None and find_spec(tracker) is None:
        raise ApproxError(
            f"Reporting to {tracker} needs the package {tracker}. Install it: pip install {tracker}.", Exit.MISSING
        )


def event_folder(name: str) -> Path:
    """A new folder for TensorBoard's files, in $TENSORBOARD_LOGGING_DIR or `runs/tensorboard`."""
    root = Path(os.environ.get("TENSORBOARD_LOGGING_DIR", "runs/tensorboard")).expanduser()
    return root / f"{_slug(name)}-{time.strftime('%Y-%m-%d_%H-%M-%S')}"


def writer(folder: Path) -> Any:
    """TensorBoard's writer of a folder, made at once."""
    # Where TensorFlow is installed too, its messages would fill the terminal.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder))


def report(title: str, records: Sequence["Record"], tracker: Tracker) -> str:
    """Make a run of each model of some records: its scores, times and training curves.

    Scores have step 0, times the number of tokens as their step, so that a tracker draws them over the length, and
    curves the steps of the training.

    Args:
        title: What the runs belong to; of one title, they are a group.
        records: What was measured. Runs of one model in several records are joined.
        tracker: Where to report to; its own environment variables, such as `WANDB_MODE`, hold.

    Returns:
        Where the runs are, in a sentence.

    Raises:
        ApproxError: if the tracker's package is missing, or it cannot take the runs.
    """
    refuse_missing(tracker)
    runs: dict[tuple[str, str], _Run] = {}
    for record in records:
        for name, run in _runs(record).items():
            whole = runs.setdefault((record.checkpoint.name, name), _Run())
            whole.about.update(run.about)
            for step, values in run.points.items():
                whole.points[step].update(values)
    several = len({checkpoint for checkpoint, _ in runs}) > 1
    named = {f"{checkpoint} {name}" if several else name: run for (checkpoint, name), run in runs.items()}
    if tracker == "tensorboard":
        folder = event_folder(title)
        for name, run in named.items():
            with writer(folder / _slug(name)) as board:
                # TensorBoard shows Markdown.
                board.add_text("about", f"```json\n{json.dumps(run.about, indent=1)}\n```")
                for step, values in sorted(run.points.items()):
                    for metric, value in values.items():
                        board.add_scalar(metric, value, step)
        return f"Reported to {folder}; see it with tensorboard --logdir {folder.parent}"
    try:
        package = importlib.import_module(tracker)
        # What they print is not the output of a command, which with --json is one object.
        with redirect_stdout(sys.stderr):
            for name, run in named.items():
                package.init(project=os.environ.get("WANDB_PROJECT", PROJECT), group=title, name=name, config=run.about)
                for step, values in sorted(run.points.items()):
                    package.log(values, step=step)
                package.finish()
    except Exception as error:
        # Whatever a tracker lacks, such as a login, what was measured is written and shown already.
        raise ApproxError(f"{tracker} did not take the results: {error}", Exit.UNAVAILABLE) from error
    return f"Reported to {tracker}, {len(named)} {'run' if len(named) == 1 else 'runs'} in the group '{title}'"


@dataclass
class _Run:
    """One model: what is known of it, and step -> metric -> value."""

    about: dict[str, Any] = field(default_factory=dict)
    points: defaultdict[int, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))

    def add(self, step: int, what: str, **values: float | None) -> None:
        named = {f"{what}/{name}": value for name, value in values.items() if value is not None}
        self.points[step].update(named)


def _runs(record: "Record") -> dict[str, _Run]:
    """The models of a record by name, the base first."""
    from approx.evaluation.options import BASE

    made: defaultdict[str, _Run] = defaultdict(_Run)
    common = record.to_data()
    shared = {name: common[name] for name in ("command", "seed", "checkpoint", "environment")}
    made[BASE].about = dict(shared)
    for variant in record.variants:
        layers = [layer.to_data() for layer in variant.layers]
        made[variant.name].about = {**shared, "layers": layers, "verified": variant.verified}
    tasks = [quality.task for quality in record.quality]
    for quality in record.quality:
        _scores(made, quality, quality.task if tasks.count(quality.task) == 1 else _distinct(quality))
    for speed in record.speed:
        _times(made, speed)
    for trained in record.trainings:
        for phase in trained.phases:
            for point in phase.curve:
                made[trained.name].add(
                    *(point.step, phase.mode),
                    **{
                        "loss": point.loss,
                        "learning rate": point.learning_rate,
                        f"held-out {phase.measure}": point.validation,
                    },
                )
    return made


def _distinct(quality: "Quality") -> str:
    """The name of a task that a record has several times."""
    chosen = [f"{name}={value}" for name, value in quality.settings.items() if name != "columns"]
    return " ".join([quality.task, quality.split, *chosen])


def _scores(runs: dict[str, _Run], quality: "Quality", name: str) -> None:
    from approx.evaluation.options import BASE

    runs[BASE].add(0, name, **quality.base.scores)
    for one in quality.variants:
        low, high = one.interval or (None, None)
        runs[one.name].add(0, name, **one.scores)
        runs[one.name].add(0, name, **{"difference": one.difference, "difference low": low, "difference high": high})
        runs[one.name].about[f"verdict on {name}"] = one.verdict


def _times(runs: dict[str, _Run], speed: "Speed") -> None:
    from approx.evaluation.options import BASE, CEILING

    what = "time" if speed.mode == "forward" else "decoding"
    name = f"{what}, batch {speed.batch}{', fast products' if speed.fast_products else ''}"

    def add(run: str, timing: "Timing", **more: float | None) -> None:
        measured = {"ms": timing.median_ms, "MB": timing.peak_mb, "tokens per second": timing.tokens_per_second}
        runs[run].add(speed.length, name, **measured, **more)

    add(BASE, speed.base)
    others = [(CEILING, speed.ceiling)] if speed.ceiling else []
    for run, one in [*others, *((variant.name, variant) for variant in speed.variants)]:
        # Where the machine was busy, a ratio means nothing.
        believed = speed.believed(one)
        low, high = believed.interval or (None, None)
        add(run, one, **{"speed-up": believed.ratio, "speed-up low": low, "speed-up high": high})


def _slug(name: str) -> str:
    return re.sub(r"[^\w.=-]+", "-", name).strip("-.")
