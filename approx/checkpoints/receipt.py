"""The receipt of a converted folder: what the conversion changed, what each layer loses, which checks it passed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from approx.errors import ApproxError, Exit

RECEIPT = "approx_receipt.json"


class Loss(Protocol):
    """What one layer loses, as `approx.conversion.layer_error` measures it."""

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
        """How many it attended over."""
        ...


@dataclass(frozen=True)
class Check:
    """One check of a conversion.

    Attributes:
        name: What was checked.
        passed: Whether it held; None if it does not apply to this model.
        detail: The figure, or why it does not apply.
        lengths: Positions of the inputs that were run, padding left out; none where nothing was run.
    """

    name: str
    passed: bool | None
    detail: str
    lengths: list[int] = Field(default_factory=list)


class Swapped(BaseModel):
    """A converted layer, or a group of its heads where they differ.

    Attributes:
        path: Of the attention module.
        layer: Its number.
        heads: `all`, or numbers and ranges.
        mechanism: Name of the registry.
        settings: Of the mechanism, complete.
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
    """What surgery did to a model.

    Attributes:
        swapped: One entry a converted layer, or a group of its heads where they differ.
        left: Layers that stay exact.
        cross_attention: Cross-attention modules, which always stay exact.
        added: Names of the tensors that the mechanisms added to the state dict.
        positions: Usable positions before and after, or None if they were not changed.
        warnings: What the mechanisms have to say about their settings, such as that fine-tuning has to follow.
        errors: Relative error of each swapped layer's output on a calibration batch, once it was measured.
        captured_mass: Exact attention weight on the keys that a layer still sees, for each layer that leaves keys out.
        measured_at: Tokens that each swapped layer attended over when these figures were measured.
        measured_on: The same in words, with what these tokens were: "512 tokens a row, built-in English text".
        checks: What was checked before the folder got its name.
    """

    model_config = ConfigDict(extra="allow")  # a later version may say more

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
        """Write down what the layers lose, once it was measured, on how many tokens and on what."""
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
    """The receipt of a converted folder; None where there is none.

    Raises:
        ApproxError: if it is damaged.
    """
    path = folder / RECEIPT
    if not path.is_file():
        return None
    try:
        return Receipt.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ApproxError(
            f"{path} is damaged: {f'{place}: ' if place else ''}{first['msg']}. Convert the base again, or delete the file.",
            Exit.UNAVAILABLE,
        ) from None
