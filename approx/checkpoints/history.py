"""The history of a converted checkpoint, stored in its config: the steps applied to it, in order."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from approx.errors import ApproxError, Exit


class Base(BaseModel):
    """The checkpoint that a step started from.

    Attributes:
        name: A model id of the hub, or the name of a folder without its path.
        revision: Commit on the hub; None for a folder.
        weights_sha256: Hash of its weights.
    """

    name: str
    revision: str | None
    weights_sha256: str


class CalibrationText(BaseModel):
    """A text file of the user's that mechanisms were calibrated on.

    Attributes:
        name: Name of the file.
        sha256: Hash of its bytes.
    """

    name: str
    sha256: str


class _Step(BaseModel):
    """One thing that was done to a checkpoint.

    Attributes:
        approx: Version that did it.
        base: What it was done to.
    """

    model_config = ConfigDict(frozen=True, extra="allow")  # a later version may say more

    approx: str
    base: Base


class Conversion(_Step):
    """The exchange of its attention.

    Attributes:
        action: What was done.
        plan: Rules, as plain data.
        max_length: Number of positions, in tokens, if the table was extended.
        calibration: The calibration text, if it was a file of the user's.
        calibration_length: Tokens per row of the calibration batch.
    """

    action: Literal["convert"] = "convert"
    plan: list[dict[str, Any]]
    max_length: int | None = None
    calibration: CalibrationText | None = None
    calibration_length: int


class Training(_Step):
    """Fine-tuning.

    Attributes:
        action: What was done.
        recover: Its modes, in order.
        task: Name of the task, or None for plain text.
        data_sha256: Of the examples.
        examples: How many were trained on.
        held_out: How many chose the best step.
        steps: Of all modes.
        seconds: Of all modes.
        seed: Of order and dropout.
        teacher: What was distilled, if that was not the same weights with exact attention.
        measure: Of the held-out examples: a metric, or `loss`.
        exact: Its value for exact attention before training.
        before: Its value before training; None where the model has no score.
        after: Its value after training.
        options: All that was asked for.
    """

    action: Literal["finetune"] = "finetune"
    recover: list[str]
    task: str | None
    data_sha256: str
    examples: int
    held_out: int
    steps: int
    seconds: float
    seed: int
    teacher: Base | None = None
    measure: str
    exact: float | None
    before: float | None
    after: float | None
    options: dict[str, Any]


Step = Annotated[Conversion | Training, Field(discriminator="action")]


def history(record: Mapping[str, Any]) -> list[Conversion | Training]:
    """What was done to a checkpoint, in order.

    Args:
        record: The field `approx` of its config; empty for a stock checkpoint.

    Raises:
        ApproxError: if the history is damaged, or was written by an earlier version.
    """
    if "recipe" in record and "history" not in record:
        raise ApproxError(
            "This checkpoint was converted by an earlier version of approx. Convert its base again.", Exit.UNAVAILABLE
        )
    try:
        return TypeAdapter(list[Step]).validate_python(record.get("history", []))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ApproxError(
            f"The history in config.json is damaged: {place}: {first['msg']}. Convert the base again.", Exit.UNAVAILABLE
        ) from None


def conversion(record: Mapping[str, Any]) -> Conversion | None:
    """The conversion in a history; None for a stock checkpoint, and for one that was converted in memory.

    Args and errors: as for `history`.
    """
    return next((step for step in reversed(history(record)) if isinstance(step, Conversion)), None)


def trainings(record: Mapping[str, Any]) -> list[Training]:
    """The trainings since the conversion.

    Args and errors: as for `history`.
    """
    return [step for step in history(record) if isinstance(step, Training)]
