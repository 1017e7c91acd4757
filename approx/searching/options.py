"""The options of a search."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from approx.errors import ApproxError
from approx.planning.rule import Rules
from approx.validation import Count, Counts, Duration, File, Model, checked, listed, seconds

_BUDGET = re.compile(r"(loss|kl|error)<=(\d+(?:\.\d+)?)")
_SPEED = re.compile(r"(\d+(?:\.\d+)?)[x×]")
_LATENCY = re.compile(r"(\d+(?:\.\d+)?)(ms|s)")


def read_budget(text: str) -> tuple[str, float]:
    """Read a budget, such as `loss<=0.5`: what is bounded, and the bound.

    Raises:
        ValueError: if it is not of that form.
    """
    parts = _BUDGET.fullmatch(text.replace(" ", ""))
    if parts is None:
        raise ValueError("a budget such as loss<=0.5 (points of the task), kl<=0.05 (nats) or error<=0.1,")
    return parts[1], float(parts[2])


def read_speed(text: str) -> float:
    """Read a speed-up, such as `1.5x`.

    Raises:
        ValueError: if it is not of that form, or not above 1.
    """
    parts = _SPEED.fullmatch(text.strip())
    if parts is None or float(parts[1]) <= 1:
        raise ValueError("a speed-up above 1, such as 1.5x,")
    return float(parts[1])


def read_latency(text: str) -> float:
    """Read a time as milliseconds, such as `20ms`.

    Raises:
        ValueError: if it is not of that form, or zero.
    """
    parts = _LATENCY.fullmatch(text.replace(" ", ""))
    if parts is None or not float(parts[1]):
        raise ValueError("a time above 0, such as 20ms,")
    return float(parts[1]) * (1000 if parts[2] == "s" else 1)


class SearchStage(Model):
    """What a search may lose, how fast its plan must be, and where it looks.

    Attributes:
        length: Tokens of the input that is timed.
        budget: What may be lost: 'loss<=0.5', in points of the task (losses in percent of the base's); without a task
            'kl<=0.05', nats between the outputs, or 'error<=0.1', of the hidden states of a model without a head.
        speed: Speed-up over the fastest exact attention to reach, e.g. 1.5x.
        latency: Time of one forward pass to reach instead, e.g. 20ms.
        task: A task that measures the loss, e.g. glue/sst2. `approx tasks` lists them.
        data: The task's files in their official layout, a table (.csv, .tsv, .jsonl, .json, .parquet), or
            hub:OWNER/NAME. Default: the hub, or the task's generator.
        settings: Settings of the task; `approx tasks NAME` lists them.
        split: Split to use. Default: the task's default.
        limit: Use only the first examples, this many.
        min_length: Use only examples of at least this many tokens, so that quality and speed are compared at like
            lengths.
        truncate: Truncate inputs that are too long.
        text: A file of plain text, in place of a task. Default: built-in English.
        batch: Inputs of the timed forward pass.
        mechanisms: Mechanisms to choose from, e.g. local,improved-clustered. Default: those that need no training.
        candidates: A YAML list of mechanisms with settings to choose from instead, without layers or heads.
        granularity: One mechanism for each layer, or also layers that keep exact attention in the heads that need it
            most.
        stock: Only plans that a stock architecture of transformers expresses, for approx export --format stock.
        heal: First fit mechanisms with parameters, such as linear, to exact attention, as finetune --recover transfer
            does.
        calibration: Examples that weigh the errors of layers. Default: 64, or all that compare plans.
        examples: Examples that compare plans, at most half.
        proof: Other examples that prove the plan, at most.
        front: Plans for other budgets to measure as well.
        time_budget: Time of the whole search, e.g. 10m: 60 % to try plans, the rest to prove the best; plans that are
            only compared are left out where it has no room for them.
    """

    length: Count
    budget: Annotated[str | None, AfterValidator(checked(read_budget))] = None
    speed: Annotated[str | None, AfterValidator(checked(read_speed))] = None
    latency: Annotated[str | None, AfterValidator(checked(read_latency))] = None
    task: Annotated[str | None, Field(examples=["squad"])] = None
    data: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    split: str | None = None
    limit: Count | None = None
    min_length: Count | None = None
    truncate: bool = False
    text: File | None = None
    batch: Count = 1
    mechanisms: Annotated[list[str] | None, BeforeValidator(lambda value: None if value is None else listed(value))] = (
        None
    )
    candidates: Rules | None = None
    granularity: Literal["layer", "heads"] = "layer"
    stock: bool = False
    heal: Literal["transfer"] | None = None
    calibration: Count | None = None
    examples: Count = 300
    proof: Count = 500
    front: Annotated[int, Field(ge=0)] = 5
    time_budget: Duration | None = None

    @property
    def seconds(self) -> float | None:
        """The time budget in seconds; None without one."""
        return None if self.time_budget is None else seconds(self.time_budget)

    @property
    def allowed(self) -> tuple[str, float] | None:
        """What the budget bounds, and the bound; None without a budget."""
        return None if self.budget is None else read_budget(self.budget)


class RecommendStage(Model):
    """What to recommend for, and how long to measure.

    Attributes:
        task: A task, e.g. squad. `approx tasks` lists them. Default: with data, the usual one of the model's head.
        data: The task's files in their official layout, a table (.csv, .tsv, .jsonl, .json, .parquet), or
            hub:OWNER/NAME. Default: the hub, or the task's generator.
        settings: Settings of the task; `approx tasks NAME` lists them.
        split: Split to use. Default: the task's default.
        limit: Use only the first examples, this many.
        truncate: Truncate inputs that are too long.
        lengths: Tokens of the inputs that are timed. Default: the median and the 90th percentile of the examples; without
            a task usual ones.
        batch: Inputs of the timed forward pass.
        mechanisms: Mechanisms to try, e.g. local,improved-clustered. Default: those that a search tries, and those that
            need training if there is a task.
        margin: Acceptable loss: in points; of losses and bits per byte in percent of the base's. Default: 1, of error
            rates 0.5.
        examples: Examples that score what is faster, at most.
        heal: Say what a short attention transfer gives back to mechanisms with parameters. Default: if there is time.
        time_budget: Time of everything, e.g. 10m; what does not fit is left out and named.
    """

    task: Annotated[str | None, Field(examples=["squad"])] = None
    data: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    split: str | None = None
    limit: Count | None = None
    truncate: bool = False
    lengths: Counts | None = None
    batch: Count = 1
    mechanisms: Annotated[list[str] | None, BeforeValidator(lambda value: None if value is None else listed(value))] = (
        None
    )
    margin: Annotated[float, Field(ge=0)] | None = None
    examples: Annotated[int, Field(ge=10)] = 500
    heal: bool | None = None
    time_budget: Duration = "10m"

    @property
    def seconds(self) -> float:
        """The time budget in seconds."""
        return seconds(self.time_budget)


def contradictions(stage: SearchStage) -> Iterator[str]:
    """What is wrong with options that are right one by one, a sentence each."""
    if stage.budget is None and stage.speed is None and stage.latency is None:
        yield (
            "Neither a loss nor a speed was given. Say what may be lost (loss<=0.5), how fast the plan must be (1.5x), "
            "or both."
        )
    if stage.speed is not None and stage.latency is not None:
        yield f"Both a speed ({stage.speed}) and a latency ({stage.latency}) were given. Give one of them."
    if stage.task is not None and stage.text is not None:
        yield "Both a task and a text were given. Give the task to bound its score, or the text to bound a divergence."
    if stage.mechanisms is not None and stage.candidates is not None:
        yield "Both mechanisms and candidates were given. Give one of them."
    if stage.stock and stage.granularity == "heads":
        yield "Stock architectures have no groups of heads, but the granularity is heads. Leave out one of the two."
    bounded = stage.allowed and stage.allowed[0]
    if bounded == "loss" and stage.task is None:
        yield f"The budget {stage.budget} is in points of a task, but no task was given. Name one, or bound kl or error."
    if bounded in ("kl", "error") and stage.task is not None:
        yield (
            f"The budget {stage.budget} is a divergence, but the task {stage.task} was given. Bound its loss, or leave "
            "the task out."
        )
    for rule in stage.candidates or ():
        if (rule.layers, rule.heads, rule.exact_below) != ("all", "all", 0):
            yield (
                f"The candidate {rule.mechanism} names layers, heads or a length, which the search chooses itself. "
                "Leave them out."
            )


def check(stage: SearchStage) -> None:
    """Raise for contradictory options.

    Raises:
        ApproxError: naming every contradiction.
    """
    if found := list(contradictions(stage)):
        raise ApproxError("\n".join(found))
