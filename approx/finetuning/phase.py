"""One mode of training: what was decided about it, what chooses its best step, and what came of it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from approx.finetuning.objectives import Objective

Progress = Callable[[str, int, int], None]
"""Called with what happens, steps done and steps in all."""


@dataclass(frozen=True)
class Phase:
    """One mode with all that was decided about it.

    Attributes:
        mode: Its name.
        objective: What it makes small.
        trained: Names of the parameters that it trains.
        steps: How many at most.
        batch_size: Inputs of a step, over all processes.
        accumulate: Forward passes of a step.
        learning_rate: The highest.
        own_learning_rate: The highest of the parameters of mechanisms.
        seconds: How long at most; None without a limit.
        evaluate_every: Steps between two validations.
        patience: Validations without progress after which it ends.
        penalty: Weight of what mechanisms want to be small.
        recompute: Whether layers are computed again in the backward pass.
        bfloat16: Whether the forward pass runs under autocast.
        report_to: Where the Trainer reports to besides.
        seed: Of the order and of dropout.
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
    """What chooses the best step.

    Attributes:
        name: Of a metric, or `loss`.
        lower_is_better: Whether smaller is better.
        value: Computes it, on the held-out examples; None where a model has no score.
        enough: With a value this good training ends; None without a budget.
    """

    name: str
    lower_is_better: bool
    value: Callable[[], float] | None
    enough: float | None = None

    def suffices(self, value: float) -> bool:
        """Whether a value is within the budget."""
        if self.enough is None:
            return False
        return value <= self.enough if self.lower_is_better else value >= self.enough


@dataclass
class Outcome:
    """What one mode did.

    Attributes:
        mode: Its name.
        steps: How many were made.
        best_step: The one whose weights were kept.
        parameters: How many numbers were trained.
        tokens: Tokens that were read.
        seconds: That it took, earlier attempts included.
        measure: What chose the best step.
        curve: Step, loss, learning rate and, where it was validated, the value of the measure.
        ended: Why: `steps`, `time`, `patience` or `budget`.
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
