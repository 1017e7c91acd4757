"""The receipt of a conversion in a record: what reports read of it is checked, and the rest is kept as it is."""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ValidationError


class _Measured(BaseModel):
    errors: dict[int, float] | None = None
    captured_mass: dict[int, float] | None = None
    measured_on: str | None = None


def _readable(receipt: dict[str, Any]) -> dict[str, Any]:
    try:
        _Measured.model_validate(receipt)
    except ValidationError:
        raise ValueError("a receipt whose errors and captured_mass are one number for each layer") from None
    return receipt


Receipt = Annotated[dict[str, Any], AfterValidator(_readable)]
