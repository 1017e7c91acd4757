"""The receipt of a converted folder: the changes, the error of each layer, and the checks it passed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from approx.errors import ApproxError, Exit
from approx.validation import first_mistake

RECEIPT = "approx_receipt.json"


class Loss(Protocol):
    """The error of one layer, as `approx.conversion.layer_error` measures it."""

    @property
    def error(self) -> float:
        """Relative error of the output."""
        ...

    @property
    def captured_mass(self) -> float | None:
        """Exact attention weight on the keys that the layer still sees."""
        ...

    @property
    def tokens(self) -> int:
        """Number of tokens it attended over."""
        ...


@dataclass(frozen=True)
class Check:
    """One check of a conversion.

    Attributes:
        name: Name of the check.
        passed: Whether it passed; None if it does not apply to this model.
        detail: The measured value, or why the check does not apply.
        lengths: Positions of the inputs that were run, without padding; empty if nothing was run.
    """

    name: str
    passed: bool | None
    detail: str
    lengths: list[int] = Field(default_factory=list)


class Swapped(BaseModel):
    """A converted layer, or a group of its heads if they differ.

    Attributes:
        path: Path of the attention module.
        layer: Its number.
        heads: `all`, or numbers and ranges.
        mechanism: Name of the mechanism.
        settings: All settings of the mechanism.
        exact_below: Inputs shorter than this many tokens keep exact attention.
        recompute: Whether training recomputes the mechanism in the backward pass.
    """

    path: str
    layer: int
    heads: str = "all"
    mechanism: str
    settings: dict[str, Any]
    exact_below: int = 0
    recompute: bool = False


class Receipt(BaseModel):
    """The changes that a conversion made to a model.

    Attributes:
        swapped: One entry per converted layer, or per group of its heads if they differ.
        left: Layers that stay exact.
        cross_attention: Cross-attention modules, which always stay exact.
        added: Names of the tensors that the mechanisms added to the state dict.
        positions: Usable positions before and after, or None if unchanged.
        warnings: Warnings of the mechanisms about their settings, such as that the model needs fine-tuning.
        errors: Relative error of each converted layer's output on a calibration batch, once measured.
        captured_mass: Exact attention weight on the keys that a layer still sees, for each layer that skips keys.
        measured_at: Tokens that each converted layer attended over in these measurements.
        measured_on: The same in words, with the text used: "512 tokens a row, built-in English text".
        checks: Checks that ran before the folder was published.
    """

    model_config = ConfigDict(extra="allow")  # later versions may add fields

    swapped: list[Swapped]
    left: list[int]
    cross_attention: int
    added: list[str]
    positions: tuple[int, int] | None = None
    warnings: list[str] = []
    errors: dict[int, float] | None = None
    captured_mass: dict[int, float] | None = None
    measured_at: dict[int, int] | None = None
    measured_on: str | None = None
    checks: list[Check] = []

    def lost(self, losses: Mapping[int, Loss], told: str) -> None:
        """Record the measured errors of the layers, the number of tokens and the text used."""
        self.measured_at = {layer: one.tokens for layer, one in losses.items()}
        lengths = " and ".join(f"{tokens:,}" for tokens in sorted(set(self.measured_at.values())))
        self.measured_on = f"{lengths} tokens a row, {told}"
        self.errors = {layer: one.error for layer, one in losses.items()}
        self.captured_mass = {
            layer: one.captured_mass for layer, one in losses.items() if one.captured_mass is not None
        }

    @property
    def verified(self) -> bool:
        """Whether there are checks and none failed."""
        return bool(self.checks) and all(check.passed is not False for check in self.checks)


def read_receipt(folder: Path) -> Receipt | None:
    """The receipt of a converted folder; None if there is none.

    Raises:
        ApproxError: if it is damaged.
    """
    path = folder / RECEIPT
    if not path.is_file():
        return None
    try:
        return Receipt.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ApproxError(
            f"{path} is damaged: {first_mistake(error)}. Convert the base again, or delete the file.",
            Exit.UNAVAILABLE,
        ) from None
