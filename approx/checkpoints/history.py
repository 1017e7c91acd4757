"""The history of a converted checkpoint, stored in its config: the steps applied to it, in order; and its receipt."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator
from pydantic.dataclasses import dataclass

from approx.errors import ApproxError, Exit, shown
from approx.validation import first_mistake

_Number = Annotated[int, Field(ge=0, lt=2**31)]


class _Strict(BaseModel):
    # Later versions may add fields.
    model_config = ConfigDict(strict=True, extra="allow")


class _Part(_Strict):
    mechanism: str
    # The package whose code the mechanism is, if it is not ours, as pip takes it.
    package: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+==[A-Za-z0-9._+!-]+$")] | None = None
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


RECEIPT = "approx_receipt.json"


class Loss(Protocol):
    """The error of one layer, as `approx.conversion.verify` measures it."""

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

    def lost(self, losses: Mapping[int, Loss], text: str) -> None:
        """Record the measured errors of the layers, the number of tokens and the text used."""
        self.measured_at = {layer: one.tokens for layer, one in losses.items()}
        lengths = " and ".join(f"{tokens:,}" for tokens in sorted(set(self.measured_at.values())))
        self.measured_on = f"{lengths} tokens a row, {text}"
        self.errors = {layer: one.error for layer, one in losses.items()}
        self.captured_mass = {
            layer: one.captured_mass for layer, one in losses.items() if one.captured_mass is not None
        }

    def keep(self, layers: Collection[int]) -> None:
        """Record that some converted layers are exact again."""
        paths = [f"{part.path}.mechanism." for part in self.swapped if part.layer in layers]
        self.swapped = [part for part in self.swapped if part.layer not in layers]
        self.left = sorted({*self.left, *layers})
        self.added = [name for name in self.added if not any(path in name for path in paths)]

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
        carried: Name -> sha256 of the files of custom code of the base that were copied at the user's request.
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


@dataclass(frozen=True)
class LayerDivergence:
    """How far one converted layer alone moves the outputs of a model.

    Attributes:
        layer: Its number.
        mechanism: Name of its mechanism; several if its heads differ.
        divergence: Mean divergence from the exact model, with every other layer exact.
        kept: Whether the layer was made exact again.
    """

    layer: int
    mechanism: str
    divergence: float
    kept: bool = False


@dataclass(frozen=True)
class KeptExact:
    """The layers that were made exact again before a training, since they move the outputs most.

    Attributes:
        unit: Unit of the divergences, in words.
        inputs: Number of training inputs that they were measured on.
        layers: All layers that were converted until then, in their order.
        steps: Steps of transfer that mechanisms were fitted by before that, and only for that.
    """

    unit: str
    inputs: int
    layers: list[LayerDivergence]
    steps: int = 0

    @property
    def numbers(self) -> list[int]:
        """Numbers of the layers that stay exact."""
        return [one.layer for one in self.layers if one.kept]

    @property
    def sentence(self) -> str:
        """Which layers stay exact, and why."""
        kept, others = ([one.divergence for one in self.layers if one.kept is which] for which in (True, False))
        apart = " and ".join(f"{value:.2g}" for value in kept)
        one = len(kept) == 1
        fitted = f", after {self.steps} steps of transfer" if self.steps else ""
        return (
            f"{'Layer' if one else 'Layers'} {', '.join(map(str, self.numbers))} {'stays' if one else 'stay'} exact: "
            f"converted alone, {'it moves' if one else 'they move'} the outputs by {apart} {self.unit}, the others by at "
            f"most {max(others):.2g} ({self.inputs} training inputs{fitted})."
        )


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
        fitted: What mechanisms were fitted to again before the first step, in words; None if they were not.
        helped: Whether the result is better than what training began with; None if that was not noted.
        kept_exact: The layers that were made exact again before it; None if there are none.
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
    fitted: str | None = None
    helped: bool | None = None
    kept_exact: KeptExact | None = None
    options: dict[str, Any]

    @property
    def moved_weights(self) -> bool:
        """Whether it changed the checkpoint's own weights, not only its mechanisms."""
        moved = set(self.recover) != {"transfer"} or bool(self.options.get("projections"))
        return bool(self.steps) and self.helped is not False and moved


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
