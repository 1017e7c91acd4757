"""The record of a comparison from scratch, and its page: table, figure, and how it was measured."""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import Field

from approx.arena.options import EXACT, ArenaStage
from approx.evaluation.record import FROM_SCRATCH, Interval, Point
from approx.publishing import wording
from approx.publishing.plots import Bubble, Bubbles, bubbles_picture
from approx.validation import Written

NOTICE = (
    "Each encoder here was trained from scratch with its mechanism in place from the first step. These scores say nothing about "
    "converting a pretrained checkpoint, and never stand beside scores of conversions."
)


class Trial(Written):
    """One training.

    Attributes:
        seed: Its seed.
        score: Accuracy on the test examples, of the weights that were best on held-out ones; null if it failed.
        steps: Steps that it made.
        best_step: The step whose weights are scored; 0 if none was better than the first weights.
        ended: Why it ended: `steps` or `time`.
        seconds: How long it took.
        curve: Loss, and accuracy on held-out examples, at some steps.
        error: Why it failed.
        exit_code: The exit code of that.
    """

    seed: int
    score: float | None
    steps: int | None = None
    best_step: int | None = None
    ended: str | None = None
    seconds: float | None = None
    curve: list[Point] = Field(default_factory=list)
    error: str | None = None
    exit_code: int | None = None


class Contestant(Written):
    """One mechanism on one task.

    Attributes:
        mechanism: Its name; `exact` is the control.
        settings: Its settings, but for the seed.
        parameters: Parameters of the encoder.
        score: Mean accuracy over seeds; null if every training failed.
        interval: Student's 95 % interval of that mean; null for a single seed.
        trials: The trainings.
        steps_per_second: Training steps per second at the full length, from the median; null if it was not timed.
        ratio: That, relative to exact attention.
        ratio_interval: The interval of the ratio.
        peak_mb: Peak memory of a training step in megabytes, beyond weights and the optimizer's state.
        samples: Timed repetitions that were not disturbed.
        status: `ok`, `out of memory`, or why it was not timed.
        chosen: Op -> the implementation that the timed step used.
    """

    mechanism: str
    settings: dict[str, Any]
    parameters: int | None
    score: float | None
    interval: Interval | None
    trials: list[Trial]
    steps_per_second: float | None = None
    ratio: float | None = None
    ratio_interval: Interval | None = None
    peak_mb: float | None = None
    samples: int = 0
    status: str = "ok"
    chosen: dict[str, str] | None = None


class TaskResult(Written):
    """One task.

    Attributes:
        task: Its name.
        source: Where its examples are from, in words.
        size: Length, examples, steps, batch, layers, width, heads and learning rate.
        train: Examples trained on.
        held_out: Training examples that chose the best step.
        test: Examples that scores are of.
        tokens: Tokens of the timed inputs, the longest ones.
        chance: The share of the largest class among the test examples: the score of guessing.
        crowded: Whether other programs left fewer cores than the timing could use.
        contestants: The mechanisms, exact attention first.
    """

    task: str
    source: str
    size: dict[str, Any]
    train: int
    held_out: int
    test: int
    tokens: int | None
    chance: float
    crowded: bool
    contestants: list[Contestant]


class ArenaRecord(Written):
    """A comparison from scratch; `approx report` refuses it, since its scores never stand beside those of conversions.

    Attributes:
        kind: Always `long-range-arena`.
        notice: What the scores are not.
        command: The command as typed.
        options: The options.
        tasks: The results of each task.
        environment: Machine and versions.
    """

    kind: Literal["long-range-arena"] = FROM_SCRATCH
    notice: str
    command: str
    options: dict[str, Any]
    tasks: list[TaskResult]
    environment: dict[str, Any]

    @property
    def failed(self) -> list[tuple[str, int]]:
        """Each training that failed, with its error and exit code."""
        return [
            (f"{task.task}, {one.mechanism}, seed {trial.seed}: {trial.error}", trial.exit_code or 1)
            for task in self.tasks
            for one in task.contestants
            for trial in one.trials
            if trial.error
        ]


COLUMNS = ["mechanism", "score", "95 % over seeds", "steps/s", "against exact", "peak MB"]


def rows(task: TaskResult) -> list[list[str]]:
    """The rows of a task's table, with the columns `COLUMNS`."""
    return [
        [
            " ".join([one.mechanism, *(f"{name}={value}" for name, value in one.settings.items())]),
            wording.percent(one.score, 1),
            wording.between(one.interval, 1, 100),
            wording.decimal(one.steps_per_second, 2) if one.status == "ok" else one.status,
            wording.times(one.ratio)
            + (f" ({wording.between(one.ratio_interval)})" if one.ratio_interval and one.mechanism != EXACT else ""),
            wording.decimal(one.peak_mb, 1),
        ]
        for one in task.contestants
    ]


def heading(task: TaskResult) -> str:
    """One line about a task: what it is made of, and what guessing scores."""
    size = task.size
    return (
        f"{task.task}: {task.source}; trained on {wording.count(task.train)}, scored on {wording.count(task.test)}; guessing "
        f"scores {wording.percent(task.chance, 1)}; {size['steps']:,} steps of {size['batch']}, {size['layers']} layers of width "
        f"{size['hidden']} with {size['heads']} heads"
    )


def notes(record: ArenaRecord) -> list[str]:
    """How it was measured, in sentences, with all that weakens it."""
    seeds = record.options["seeds"]
    over = (
        f"the mean over {seeds} seeds, with Student's interval" if seeds > 1 else "of one seed, so without an interval"
    )
    said = [
        f"Score: accuracy on test examples, of the weights that were best on held-out training examples; {over}. Seeds differ in "
        "first weights, order of examples and the mechanism's own seed.",
        "Steps per second: forward, backward and AdamW at the full length, all mechanisms in turns, the median of undisturbed "
        "turns. Peak MB: what that step allocates beyond weights and the optimizer's state.",
    ]
    if record.options["size"] != "full" or record.options["length"] is not None:
        said.append(
            f"The size is '{record.options['size']}', much smaller than in the paper (arXiv 2011.04006), whose scores these "
            "cannot be compared with."
        )
    else:
        said.append(
            "Lengths are those of the paper (arXiv 2011.04006); the encoder is the same for all tasks, so its scores are not the "
            "paper's."
        )
    trials = [trial for task in record.tasks for one in task.contestants for trial in one.trials]
    longest = max((trial.seconds or 0.0 for trial in trials), default=0.0)
    total = sum(trial.seconds or 0.0 for trial in trials)
    said.append(
        f"{len(trials)} trainings took {wording.duration(total)} in all, the longest {wording.duration(longest)}, on "
        f"{record.environment.get('threads')} threads."
    )
    if any(trial.ended == "time" for trial in trials):
        said.append("Some trainings ended at the time budget, so faster mechanisms made more steps.")
    if crowded := [task.task for task in record.tasks if task.crowded]:
        said.append(f"Other programs were busy while {', '.join(crowded)} was timed: its speeds are not settled.")
    for task in record.tasks:
        near = [one.mechanism for one in task.contestants if _near_chance(one, task)]
        if near:
            said.append(f"{task.task}: no better than guessing, as far as these seeds show: {', '.join(near)}.")
    return said


def _near_chance(one: Contestant, task: TaskResult) -> bool:
    low = one.score if one.interval is None else one.interval[0]
    return low is not None and low <= task.chance


def markdown(record: ArenaRecord, figure: str | None) -> str:
    """The page: notice, figure, a table for each task, how it was measured, the command.

    Args:
        record: The record.
        figure: Name of the figure's file; None without one.
    """
    parts = ["# Long Range Arena, trained from scratch", f"**{wording.cell(NOTICE)}**"]
    if figure is not None:
        parts.append(f"![Score against speed; the area of a bubble is peak memory]({figure})")
    for task in record.tasks:
        lines = [COLUMNS, ["---"] + ["--:"] * (len(COLUMNS) - 1), *rows(task)]
        table = [f"| {' | '.join(map(wording.cell, line))} |" for line in lines]
        parts += [wording.cell(heading(task)), "\n".join(table)]
    parts.append("\n".join(f"- {wording.cell(sentence)}" for sentence in notes(record)))
    if record.failed:
        parts.append("\n".join(["Failed:", "", *(f"- {wording.cell(one)}" for one, _ in record.failed)]))
    parts.append(f"Command:\n\n```\n{record.command}\n```")
    return "\n\n".join(parts) + "\n"


def figure(record: ArenaRecord) -> str | None:
    """The paper's figure as SVG, a panel for each task and one for the mean of several; None if nothing was timed."""
    panels = [
        Bubbles(task.task, "training steps per second", list(_bubbles(task)), 100 * task.chance)
        for task in record.tasks
    ]
    if len(panels) > 1 and (mean := _mean_bubbles(record.tasks)):
        panels.append(Bubbles("mean over tasks", "speed relative to exact attention", mean, None))
    panels = [one for one in panels if one.bubbles]
    return bubbles_picture(panels) if panels else None


def _bubbles(task: TaskResult) -> Iterator[Bubble]:
    for one in task.contestants:
        if one.score is not None and one.steps_per_second is not None and one.peak_mb is not None:
            ends = None if one.interval is None else (100 * one.interval[0], 100 * one.interval[1])
            yield Bubble(one.mechanism, one.steps_per_second, 100 * one.score, ends, one.peak_mb)


def _mean_bubbles(tasks: Sequence[TaskResult]) -> list[Bubble]:
    """Mean score, geometric means of the ratios of speed and memory to exact attention; only of what ran on all tasks."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for task in tasks:
        shown = {bubble.name: bubble for bubble in _bubbles(task)}
        exact = shown.get(EXACT)
        for name, bubble in shown.items():
            if exact is not None and exact.memory:
                values = (bubble.score, bubble.speed / exact.speed, bubble.memory / exact.memory)
                found.setdefault(name, []).append(values)
    return [
        Bubble(
            name,
            statistics.geometric_mean(speed for _, speed, _ in values),
            statistics.fmean(score for score, _, _ in values),
            None,
            statistics.geometric_mean(memory for _, _, memory in values),
        )
        for name, values in found.items()
        if len(values) == len(tasks)
    ]


def options_of(stage: ArenaStage) -> dict[str, Any]:
    """The options as plain data for a record."""
    return stage.model_dump(mode="json")
