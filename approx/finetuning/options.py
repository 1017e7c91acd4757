"""Options of fine-tuning."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from approx.errors import ApproxError
from approx.evaluation.tracking import Tracker
from approx.validation import Count, Duration, File, Model, checked, listed, seconds

# Inputs per step, learning rate, and relative share of a time budget, by mode.
DEFAULTS = {
    # What it does not need of its share goes to the next mode, and it needs little; without it the next gains little.
    "transfer": (8, 2e-2, 3.0),
    "distill": (16, 1e-4, 1.0),
    "task": (32, 5e-5, 3.0),
    "clm": (16, 2e-4, 3.0),
    "mlm": (16, 1e-4, 3.0),
}
# Most steps of a mode, unless more are asked for.
MOST_STEPS = 2000

Mode = Literal["transfer", "distill", "task", "clm", "mlm", "lora"]
_BUDGET = re.compile(r"loss<=(\d+(?:\.\d+)?)")


def allowed_loss(budget: str) -> float:
    """Read the allowed loss in points from a budget such as `loss<=0.5`.

    Raises:
        ValueError: if it is not of that form.
    """
    parts = _BUDGET.fullmatch(budget.replace(" ", ""))
    if parts is None:
        raise ValueError("a budget of the form loss<=POINTS, e.g. loss<=0.5,")
    return float(parts[1])


Rate = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Shape = Literal["cosine", "linear", "constant", "warmup_stable_decay"]


class ModeOptions(Model):
    """Settings of one mode; what is left out is that of all modes.

    Attributes:
        learning_rate: The highest rate. That of all modes leaves `transfer` alone, whose mechanisms take a higher one.
        steps: Most steps.
        batch_size: Inputs of a step, over all processes.
        warm_up: Share of what runs, steps or time, during which the rate rises.
        schedule: How the rate falls after that.
        weight_decay: Decay of the base's matrices.
    """

    learning_rate: Annotated[float | None, Field(gt=0, examples=[0.02])] = None
    steps: Count | None = None
    batch_size: Count | None = None
    warm_up: Share | None = None
    schedule: Shape | None = None
    weight_decay: Annotated[float | None, Field(ge=0)] = None


class Distillation(ModeOptions):
    """Settings of `distill`, and the weights of its loss; parts with weight 0 are not computed.

    Attributes:
        mechanism_learning_rate: The highest rate of the mechanisms' parameters.
        logits: Weight of the divergence between the outputs of teacher and student.
        hidden: Weight of the relative squared error of each layer's hidden states.
        attention: Weight of the relative squared error of each layer's attention outputs.
        labels: Weight of the loss on labels.
        temperature: Divisor of the logits of both.
        cache: The teacher's largest logits of each place, so many, are kept in memory for further passes, which then do
            without it. Needs hidden=0 and attention=0.
    """

    mechanism_learning_rate: Rate | None = None
    logits: Annotated[float, Field(ge=0)] = 1.0
    hidden: Annotated[float, Field(ge=0)] = 1.0
    attention: Annotated[float, Field(ge=0)] = 0.0
    labels: Annotated[float, Field(ge=0)] = 0.0
    temperature: Annotated[float, Field(gt=0)] = 2.0
    cache: Count | None = None


class Lora(Model):
    """Low-rank adapters.

    Attributes:
        rank: Rank of an adapter.
        alpha: The output of an adapter is multiplied by alpha / rank.
        dropout: Dropout of the input of an adapter.
        targets: Names of the layers with adapters, such as `query`; by default the projections of every attention
            layer.
    """

    rank: Count = 8
    alpha: Annotated[float, Field(gt=0)] = 16.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    targets: list[str] | None = None


class FinetuneStage(Model):
    """How a model is trained.

    Attributes:
        recover: Modes in their order: transfer (fit the mechanisms to exact attention, layer by layer), distill (fit
            the model to its base), task (train on labels), clm or mlm (continue pre-training on text), lora (from there
            on, adapters instead of weights). Default for a converted model: transfer where mechanisms have parameters, then
            distill; for an exact one task, clm or mlm.
        task: A task, e.g. glue/sst2. `approx tasks` lists them.
        data: The task's files in their official layout, a table (.csv, .tsv, .jsonl, .json, .parquet), or
            hub:OWNER/NAME. Default: the hub, or the task's generator.
        text: A file of plain text, or a table with a text or the messages of a conversation in each row, in place of a
            task.
        split: Split to train on.
        settings: Settings of the task; `approx tasks NAME` lists them.
        streaming: Read no more examples than the steps take, and those of a hub dataset while it downloads, without storing
            it.
        limit: Use only this many examples, the first ones.
        length: Tokens of an input at most. Default: the positions of the model.
        min_length: Tokens of an input at least; short inputs may be exact and teach nothing.
        pack: Join short texts, with the tokenizer's end token after each, into inputs of the length.
        batch_size: Inputs of a step, over all processes.
        accumulate: Forward passes of a step.
        steps: Steps of each mode.
        epochs: Passes over the examples, instead of steps.
        time_budget: Time of all modes together, e.g. 90s, 30m or 2h; training ends when steps or time run out.
        learning_rate: The highest rate of the base's weights. Default: one for each mode.
        mechanism_learning_rate: The highest rate of the mechanisms' parameters, in all modes but transfer. Default: ten
            times that of the mode.
        warm_up: Share of what runs, steps or time, during which the rate rises. Default: 0.06.
        schedule: How the rate falls after that, as transformers does it: cosine or linear to 0 at the end, constant, or
            warmup_stable_decay, linear in the last fifth.
        weight_decay: Decay of the base's matrices. Default: 0.01.
        dropout: Dropout of the model in distill, task, clm and mlm. Default: none in distill, and otherwise what its config
            says. Adapters have their own.
        transfer: A setting of transfer alone: learning_rate, steps, batch_size, warm_up, schedule or weight_decay.
        keep_exact: Keep so many of the converted layers exact: those whose conversion alone moves the model's outputs most,
            measured on training inputs before the first step.
        train: Weights that distill, task, clm and mlm train: all, those of attention layers, or the task's head.
        projections: Let transfer train the q, k and v projections too.
        joint: In transfer, feed each layer what the converted layers before it compute, not exact attention.
        match: What transfer compares: the outputs of attention, or its weights.
        distill: Weight of a part of the loss of distill: logits, hidden, attention or labels; the temperature; cache, how
            many of the teacher's logits are kept for further passes; or a setting of distill alone, as for transfer.
        lora: The rank, alpha, dropout or targets of the adapters.
        penalty: Weight of the penalty of mechanisms, such as the spans of adaptive-span.
        validation: Training examples held out to choose the best step, at most a tenth. Fewer are used where they would
            take more than a tenth of the time.
        evaluate_every: Steps between validations. Default: about ten validations, in at most a tenth of the time.
        patience: End a mode after this many validations without progress.
        budget: Stop once the loss of score on held-out examples against exact attention, in points, is met: loss<=0.5.
        recompute: Compute layers again in the backward pass: less memory, more time.
        bfloat16: Run the forward pass under bfloat16 autocast. Default: in transfer and distill, where the processor or
            GPU is made for it.
        report_to: Also report to tensorboard, trackio or wandb.
        seed: Seed of the order of examples and of dropout.
    """

    recover: Annotated[list[Mode], Field(min_length=1), BeforeValidator(listed)] | None = None
    task: Annotated[str | None, Field(examples=["glue/sst2"])] = None
    data: str | None = None
    text: Annotated[list[File] | None, BeforeValidator(lambda value: None if value is None else listed(value))] = None
    split: str = "train"
    settings: dict[str, Any] = Field(default_factory=dict)
    streaming: bool = False
    limit: Count | None = None
    length: Annotated[int | None, Field(ge=8)] = None
    min_length: Count | None = None
    pack: bool = False
    batch_size: Count | None = None
    accumulate: Count = 1
    steps: Count | None = None
    epochs: Annotated[float | None, Field(gt=0)] = None
    time_budget: Duration | None = None
    learning_rate: Rate | None = None
    mechanism_learning_rate: Rate | None = None
    warm_up: Share | None = None
    schedule: Shape = "cosine"
    weight_decay: Annotated[float | None, Field(ge=0)] = None
    dropout: Share | None = None
    transfer: ModeOptions = Field(default_factory=ModeOptions)
    keep_exact: Count | None = None
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
    budget: Annotated[str | None, AfterValidator(checked(allowed_loss))] = None
    recompute: bool = False
    bfloat16: bool | None = None
    report_to: Tracker | None = None
    seed: Annotated[int, Field(ge=0)] = 0

    @property
    def seconds(self) -> float | None:
        """The time budget in seconds."""
        return None if self.time_budget is None else seconds(self.time_budget)

    @property
    def most_examples(self) -> int | None:
        """How many examples to read at most: the limit, and of a stream no more than the steps of a mode take.

        Raises:
            ApproxError: if passes over a stream were asked for.
        """
        if not self.streaming:
            return self.limit
        if self.epochs is not None:
            raise ApproxError(
                "--epochs counts passes over all examples, and --streaming reads only those that the steps take. Give "
                "--steps instead."
            )
        modes = [mode for mode in self.recover or DEFAULTS if mode != "lora"]
        taken = max(
            (self.of(mode, "steps") or MOST_STEPS) * (self.of(mode, "batch_size") or DEFAULTS[mode][0])
            for mode in modes
        )
        # A tenth of all is held out at most.
        taken += min(self.validation, taken // 9 + 1)
        return min(taken, self.limit or taken)

    def of(self, mode: str, setting: str) -> Any:
        """A setting of a mode: its own, or that of all modes; None for the default.

        What is set for all modes is the rate of the base's weights, of which `transfer` trains none by itself.
        """
        own = {"transfer": self.transfer, "distill": self.distill}.get(mode)
        value = getattr(own, setting, None)
        shared = mode != "transfer" or setting not in ("learning_rate", "mechanism_learning_rate")
        return getattr(self, setting) if value is None and shared else value


class HealStage(FinetuneStage):
    """Training as a stage of a recipe; each variant is measured before and after it.

    Attributes:
        variants: Names of the variants to train; by default all.
        exact: Whether the base gets the same training (without `transfer` and `distill`) for comparison.
    """

    variants: list[str] | None = None
    exact: bool = False

    @property
    def training(self) -> FinetuneStage:
        """The training of one variant."""
        return FinetuneStage(**{name: getattr(self, name) for name in FinetuneStage.model_fields})

    @property
    def of_the_base(self) -> FinetuneStage:
        """The training of the base: only the modes that need no conversion, or the default of an exact model."""
        modes = [mode for mode in self.recover or [] if mode not in ("transfer", "distill")]
        return self.training.model_copy(
            update={"recover": modes if modes and modes[-1] != "lora" else None, "budget": None, "keep_exact": None}
        )
