"""Trainings in a record."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from approx.validation import Written

Count = Annotated[int, Field(ge=0)]


class Point(Written):
    """A point of a training curve.

    Attributes:
        step: Number of steps done.
        loss: Mean loss since the previous point; null at points that have only a validation.
        learning_rate: Highest learning rate of all parameters.
        validation: Value of the measure on the held-out examples.
    """

    step: Count
    loss: float | None = None
    learning_rate: float | None = None
    validation: float | None = None


class TrainingPhase(Written):
    """One mode of a training.

    Attributes:
        mode: Name of the mode.
        steps: Number of steps.
        best_step: Step whose weights were kept.
        parameters: Number of trained parameters.
        tokens: Number of training tokens.
        seconds: Duration.
        measure: Measure that chose the best step: a metric, or `loss`.
        curve: Points in the order of the steps.
        ended: Reason for the end: `steps`, `time`, `patience` or `budget`.
    """

    mode: str
    steps: Count
    best_step: Count
    parameters: Count
    tokens: Count
    seconds: float
    measure: str
    curve: list[Point]
    ended: str


class Trained(Written):
    """The training of a variant, or of the base.

    Attributes:
        name: Name of the variant.
        recover: Names of the modes, in order.
        phases: Outcome of each mode; empty if the budget was met before training.
        measure: Measure of the held-out examples.
        exact: Its value with exact attention before training.
        before: Its value before training.
        after: Its value after training.
        held_out: Number of held-out examples, which chose the best step.
        examples: Number of training examples.
        data_sha256: Hash of all these examples.
        approximated: Share of the training inputs on which the variant approximates; null for the base.
    """

    name: str
    recover: list[str]
    phases: list[TrainingPhase]
    measure: str
    exact: float | None
    before: float | None
    after: float | None
    held_out: Count
    examples: Count
    data_sha256: str
    approximated: float | None = None
