"""One mode of training: its settings, the measure that chooses its best step, and its outcome."""

from collections.abc import Callable
from dataclasses import dataclass, field

from approx.finetuning.objectives import Objective

Progress = Callable[[str, int, int], None]
"""Called with the current activity, steps done and total steps."""


@dataclass(frozen=True)
class Phase:
    """One mode with its settings.

    Attributes:
        mode: Name of the mode.
        objective: The loss.
        trained: Names of the trained parameters.
        steps: Maximum number of steps.
        batch_size: Inputs per step, over all processes.
        accumulate: Forward passes per step.
        learning_rate: Highest learning rate.
        own_learning_rate: Highest learning rate of the mechanisms' parameters.
        seconds: Time limit; None for no limit.
        evaluate_every: Steps between validations.
        patience: Validations without improvement after which the mode ends; None for no limit.
        penalty: Weight of the mechanisms' penalty.
        recompute: Whether to recompute layers in the backward pass.
        bfloat16: Whether the forward pass runs under autocast.
        report_to: Additional reporting of the Trainer.
        seed: Seed of the order of examples and of dropout.
    """

    mode: str
    objective: Objective
    trained: list[str]
    steps: int
    batch_size: int
    accumulate: int
    learning_rate: float
    own_learning_rate: float
    seconds: float | None
    evaluate_every: int
    patience: int | None
    penalty: float
    recompute: bool
    bfloat16: bool
    report_to: str | None
    seed: int


@dataclass
class Measure:
    """The measure that chooses the best step.

    Attributes:
        name: Name of a metric, or `loss`.
        lower_is_better: Whether smaller values are better.
        value: Measures the held-out examples; None if the model has no score.
        enough: Value at which training ends; None for no budget.
        about_labels: What the last measurement shows about the order of the model's labels, in sentences.
    """

    name: str
    lower_is_better: bool
    value: Callable[[], float] | None
    enough: float | None = None
    about_labels: list[str] = field(default_factory=list)

    def suffices(self, value: float) -> bool:
        """Return whether a value is within the budget."""
        if self.enough is None:
            return False
        return value <= self.enough if self.lower_is_better else value >= self.enough


@dataclass
class Outcome:
    """The outcome of one mode.

    Attributes:
        mode: Name of the mode.
        steps: Number of steps.
        best_step: Step whose weights were kept.
        parameters: Number of trained parameters.
        tokens: Number of training tokens.
        seconds: Time, including interrupted attempts.
        measure: Name of the measure that chose the best step.
        curve: Step, loss, learning rate and, at validations, the value of the measure.
        ended: Reason for the end: `steps`, `time`, `patience` or `budget`.
    """

    mode: str
    steps: int
    best_step: int
    parameters: int
    tokens: int
    seconds: float
    measure: str
    curve: list[dict[str, float]] = field(default_factory=list)
    ended: str = "steps"
