"""The history of a converted checkpoint, kept in its config: what was done to it, in order."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from approx.errors import ApproxError, Exit


class Base(BaseModel):
    """The checkpoint that a step started from.

    Attributes:
        name: A model id of the hub, or the name of a folder without the path to it.
        revision: Commit of the hub; None for a folder.
        weights_sha256: Of its weights.
    """

    name: str
    revision: str | None
    weights_sha256: str


class CalibrationText(BaseModel):
    """A file of the user's own that mechanisms were fitted to.

    Attributes:
        name: Of the file.
        sha256: Of its bytes.
    """

    name: str
    sha256: str


class Step(BaseModel):
    """One thing that was done to a checkpoint.

    Attributes:
        action: What was done.
        approx: Version that did it.
        base: What it was done to.
        plan: Rules, as plain data.
        max_length: Positions, in tokens, if the table was extended.
        calibration: What mechanisms were fitted to, if it was a file of the user's own.
        calibration_length: Tokens a row of that batch.
    """

    model_config = ConfigDict(frozen=True, extra="allow")  # a later version may say more

    action: Literal["convert"]
    approx: str
    base: Base
    plan: list[dict[str, Any]]
    max_length: int | None = None
    calibration: CalibrationText | None = None
    calibration_length: int


def history(record: Mapping[str, Any]) -> list[Step]:
    """What was done to a checkpoint, in order.

    Args:
        record: The field `approx` of its config; empty for a stock checkpoint.

    Raises:
        ApproxError: if the history is damaged, or of an earlier version.
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
