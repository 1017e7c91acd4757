"""What can be asked of fine-tuning, each option said once."""

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from approx.validation import Count, Model, listed

Mode = Literal["transfer", "distill", "task", "clm", "mlm", "lora"]
_UNITS = {"s": 1, "m": 60, "h": 3600}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smh])")
_BUDGET = re.compile(r"loss<=(\d+(?:\.\d+)?)")


def seconds(duration: str) -> float:
    """Seconds of a duration such as `90s`, `30m` or `2h`.

    Raises:
        ValueError: if it is not of that form, or zero.
    """
    parts = _DURATION.fullmatch(duration.strip())
    if parts is None or not float(parts[1]):
        raise ValueError("a time above 0 in s, m or h, e.g. 90s, 30m or 2h,")
    return float(parts[1]) * _UNITS[parts[2]]


def allowed_loss(budget: str) -> float:
    """Points that a model may lose, of a budget such as `loss<=0.5`.

    Raises:
        ValueError: if it is not of that form.
    """
    parts = _BUDGET.fullmatch(budget.replace(" ", ""))
    if parts is None:
        raise ValueError("a budget of the form loss<=POINTS, e.g. loss<=0.5,")
    return float(parts[1])


def _checked(read: Callable[[str], float]) -> Callable[[str | None], str | None]:
    def check(text: str | None) -> str | None:
        if text is not None:
            read(text)
        return text

    return check


class Distillation(Model):
    """Weights of the parts of the distillation loss; a part of weight 0 is not computed.

    Attributes:
        logits: Of the divergence between the outputs of teacher and student.
        hidden: Of the relative squared error of the hidden states of each layer.
        attention: Of the relative squared error of the attention outputs of each layer.
        labels: Of the task's own loss.
        temperature: Divides the logits of both.
    """

    logits: Annotated[float, Field(ge=0)] = 1.0
    hidden: Annotated[float, Field(ge=0)] = 1.0
    attention: Annotated[float, Field(ge=0)] = 0.0
    labels: Annotated[float, Field(ge=0)] = 0.0
    temperature: Annotated[float, Field(gt=0)] = 2.0


class Lora(Model):
    """Low-rank adapters.

    Attributes:
        rank: Of an adapter.
        alpha: Its output is multiplied by alpha / rank.
        dropout: Of its input.
        targets: Names of the layers that get one, such as `query`; without them the projections of every attention layer.
    """

    rank: Count = 8
    alpha: Annotated[float, Field(gt=0)] = 16.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    targets: list[str] | None = None


class FinetuneStage(Model):
    """How a model is trained.

    Attributes:
        recover: Modes in their order. `transfer` fits the mechanisms to exact attention, layer by layer; `distill` fits the
            model to its base; `task` trains on the labels of the task; `clm` and `mlm` continue pre-training on text; from
            `lora` on, the following modes train low-rank adapters instead of the weights.
        task: Name of the task whose training examples are used, e.g. `glue/sst2`.
        data: The task's files in their official layout; the hub or the task's generator without it.
        text: Files of plain text, in place of a task.
        split: Of the task.
        settings: Of the task itself.
        limit: Use only the first so many examples.
        length: Tokens of an input at most; the positions of the model without it.
        batch_size: Inputs of a step, over all processes.
        accumulate: Forward passes that make up a step.
        steps: Steps of each mode; one mode's default without it.
        epochs: Passes over the examples, in place of `steps`.
        time_budget: Time for all modes together, e.g. `30m`; what ends first counts.
        learning_rate: The highest, of all modes alike; each mode has its own default.
        train: Which weights `distill`, `task`, `clm` and `mlm` train: all, those of attention layers, or the task head.
        projections: Whether `transfer` trains the projections to queries, keys and values too.
        joint: Whether `transfer` feeds each layer what the converted layers before it give, instead of exact outputs.
        match: What `transfer` compares: the outputs of attention, or its weights.
        distill: Weights of its loss.
        lora: Size of the adapters.
        penalty: Weight of what mechanisms want to be small, the spans of adaptive-span.
        validation: Training examples that are held out to choose the best step, at most a tenth of them.
        evaluate_every: Steps between two validations; about ten in all without it.
        patience: Validations without progress after which a mode ends.
        budget: Points of the task's metric that may be lost against exact attention, e.g. `loss<=0.5`; training stops as
            soon as the validation examples show no more.
        recompute: Whether layers are computed again in the backward pass, which saves memory.
        bfloat16: Whether the forward pass runs under bfloat16 autocast.
        report_to: Where transformers' Trainer reports to besides: tensorboard, trackio or wandb.
        seed: Of the order of the examples and of dropout.
    """

    recover: Annotated[list[Mode], Field(min_length=1), BeforeValidator(listed)] | None = None
    task: Annotated[str | None, Field(examples=["glue/sst2"])] = None
    data: str | None = None
    text: Annotated[list[str] | None, BeforeValidator(lambda value: None if value is None else listed(value))] = None
    split: str = "train"
    settings: dict[str, Any] = Field(default_factory=dict)
    limit: Count | None = None
    length: Annotated[int | None, Field(ge=8)] = None
    batch_size: Count | None = None
    accumulate: Count = 1
    steps: Count | None = None
    epochs: Annotated[float | None, Field(gt=0)] = None
    time_budget: Annotated[str | None, AfterValidator(_checked(seconds))] = None
    learning_rate: Annotated[float | None, Field(gt=0)] = None
    train: Literal["all", "attention", "head"] = "all"
    projections: bool = False
    joint: bool = False
    match: Literal["outputs", "weights"] = "outputs"
    distill: Distillation = Field(default_factory=Distillation)
    lora: Lora = Field(default_factory=Lora)
    penalty: Annotated[float | None, Field(ge=0)] = None
    validation: Annotated[int, Field(ge=1)] = 500
    evaluate_every: Count | None = None
    patience: Count | None = None
    budget: Annotated[str | None, AfterValidator(_checked(allowed_loss))] = None
    recompute: bool = False
    bfloat16: bool = False
    report_to: Literal["tensorboard", "trackio", "wandb"] | None = None
    seed: Annotated[int, Field(ge=0)] = 0

    @property
    def seconds(self) -> float | None:
        """The time budget."""
        return None if self.time_budget is None else seconds(self.time_budget)


class HealStage(FinetuneStage):
    """Training as a stage of a recipe: each variant is measured as it was converted and as it was healed.

    Attributes:
        variants: Names of those that are trained; all of them without it.
        exact: Whether the base gets the same training (without `transfer` and `distill`) and is measured beside them.
    """

    variants: list[str] | None = None
    exact: bool = False

    @property
    def training(self) -> FinetuneStage:
        """What is done to one variant."""
        return FinetuneStage(**{name: getattr(self, name) for name in FinetuneStage.model_fields})

    @property
    def of_the_base(self) -> FinetuneStage:
        """What is done to the base: the modes that need no conversion; without one the default of an exact model."""
        modes = [mode for mode in self.recover or [] if mode not in ("transfer", "distill")]
        return self.training.model_copy(
            update={"recover": modes if modes and modes[-1] != "lora" else None, "budget": None}
        )
