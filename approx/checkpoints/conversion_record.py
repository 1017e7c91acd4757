"""The form of the field `approx` in the config of a converted checkpoint, checked before anything is built from it."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from approx.errors import ApproxError, Exit

_Number = Annotated[int, Field(ge=0, lt=2**31)]


class _Strict(BaseModel):
    # Later versions may add fields.
    model_config = ConfigDict(strict=True, extra="allow")


class _Part(_Strict):
    mechanism: str
    settings: dict[str, Any]
    exact_below: _Number = 0
    recompute: bool = False


class _Group(_Part):
    heads: list[_Number]


class _Shape(_Strict):
    layer: _Number
    heads: _Number
    head_dim: _Number
    causal: bool
    scale: Annotated[float, Field(allow_inf_nan=False)]


class _Whole(_Shape, _Part):
    pass


class _Grouped(_Shape):
    groups: Annotated[list[_Group], Field(min_length=1)]


class _Base(_Strict):
    model_type: str
    architecture: str
    implementation: str | None
    positions: _Number | None


class _Record(_Strict):
    sites: Annotated[dict[str, _Grouped | _Whole], Field(min_length=1)]
    base: _Base
    bundle_kernels: bool = False


def check_record(config: dict[str, Any], path: Path) -> None:
    """Check the field `approx` of a converted config.

    Args:
        config: The raw config.
        path: Its file, for the message.

    Raises:
        ApproxError: naming the first field that is missing or wrong.
    """
    try:
        _Record.model_validate(config.get("approx"))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(["approx", *(str(step) for step in first["loc"] if step not in ("_Grouped", "_Whole"))])
        raise ApproxError(
            f"{path} is damaged: {place}: {first['msg']}. Copy the folder again, or convert the base checkpoint again.",
            Exit.UNAVAILABLE,
        ) from None
