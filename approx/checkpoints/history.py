"""The history of a converted checkpoint, stored in its config: the steps applied to it, in order."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from approx.errors import ApproxError, Exit, shown


class Base(BaseModel):
    """The checkpoint that a step started from.

    Attributes:
        name: A model id of the hub, or the name of a folder without its path.
        revision: Commit on the hub; None for a folder.
        weights_sha256: Hash of its weights, and of the files of a merged adapter.
        adapter: Kind of the adapter that was merged into it, such as LORA; None without one.
    """

    name: str
    revision: str | None
    weights_sha256: str
    adapter: str | None = None


class CalibrationText(BaseModel):
    """A text file of the user's that mechanisms were calibrated on.

    Attributes:
        name: Name of the file.
        sha256: Hash of its bytes.
    """

    name: str
    sha256: str


class _Step(BaseModel):
    """One step applied to a checkpoint.

    Attributes:
        approx: Version of approx that applied it.
        base: The checkpoint it was applied to.
    """

    model_config = ConfigDict(frozen=True, extra="allow")  # a later versions may add fields

    approx: str
    base: Base


class Conversion(_Step):
    """A conversion.

    Attributes:
        action: Kind of the step.
        plan: Rules, as plain data.
        max_length: Number of positions, in tokens, if the table was extended.
        calibration: The calibration text, if it was a file of the user's.
        calibration_length: Tokens per row of the calibration batch.
        carried: Name -> sha256 of the files of the base's own code that went along, because the user said so.
    """

    action: Literal["convert"] = "convert"
    plan: list[dict[str, Any]]
    max_length: int | None = None
    calibration: CalibrationText | None = None
    calibration_length: int
    carried: dict[str, str] = {}

    @field_validator("plan")
    @classmethod
    def _of_rules(cls, plan: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Check what the card shows of the rules; the plan that counts is that of the layers."""
        kinds = {"mechanism": str, "settings": dict, "exact_below": int}
        for rule in plan:
            if "mechanism" not in rule or any(
                not isinstance(rule.get(key, kind()), kind) for key, kind in kinds.items()
            ):
                raise ValueError(f"{shown(rule)} is no rule of a plan")
        return plan


class Training(_Step):
    """Fine-tuning.

    Attributes:
        action: Kind of the step.
        recover: Modes, in order.
        task: Name of the task, or None for plain text.
        data_sha256: Hash of the examples.
        examples: Number of training examples.
        held_out: Number of examples that chose the best step.
        steps: Steps of all modes.
        seconds: Time of all modes.
        seed: Seed of the order of examples and of dropout.
        teacher: The teacher, if it was not the same weights with exact attention.
        measure: What was measured on the held-out examples: a metric, or `loss`.
        exact: Its value with exact attention before training.
        before: Its value before training; None if the model has no score.
        after: Its value after training.
        options: Options of the training.
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
    """The steps applied to a checkpoint, in order.

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
        # The number of the step, its kind, and then the field.
        number, *kind_and_field = first["loc"] or ("",)
        place = ".".join(map(str, [number, *kind_and_field[1:]]))
        raise ApproxError(
            f"The history in config.json is damaged: {place}: {first['msg']}. Convert the base again.", Exit.UNAVAILABLE
        ) from None


def conversion(record: Mapping[str, Any]) -> Conversion | None:
    """The conversion in a history; None for a stock checkpoint and for one converted in memory.

    Args and errors: as for `history`.
    """
    return next((step for step in reversed(history(record)) if isinstance(step, Conversion)), None)


def trainings(record: Mapping[str, Any]) -> list[Training]:
    """The trainings since the conversion.

    Args and errors: as for `history`.
    """
    return [step for step in history(record) if isinstance(step, Training)]
