"""What a record says of trainings."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from approx.validation import Written

Count = Annotated[int, Field(ge=0)]


class Point(Written):
    """A point of a training curve.

    Attributes:
        step: Steps done.
        loss: The mean since the point before; null where it was not noted.
        learning_rate: The highest of all parameters'.
        validation: Value of the measure on held-out examples.
    """

    step: Count
    loss: float | None = None
    learning_rate: float | None = None
    validation: float | None = None


class TrainingPhase(Written):
    """One mode of a training.

    Attributes:
        mode: Its name.
        steps: How many were made.
        best_step: The one whose weights were kept.
        parameters: How many numbers were trained.
        tokens: How many were read.
        seconds: That it took.
        measure: What chose the best step: a metric, or `loss`.
        curve: In the order of the steps.
        ended: By what: `steps`, `time`, `patience` or `budget`.
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
        name: As a variant.
        recover: Its modes.
        phases: What each did.
        measure: Of the held-out examples.
        exact: Its value with exact attention, before training.
        before: Its value before training.
        after: Its value after training.
        examples: How many were trained on.
        held_out: How many chose the best step.
        data_sha256: Of all of them.
    """

    name: str
    recover: list[str]
    phases: list[TrainingPhase]
    measure: str
    exact: float | None
    before: float | None
    after: float | None
    examples: Count
    held_out: Count
    data_sha256: str
