"""What a search found: the plan with its reasons and its proof, and the plans it was compared with."""

from dataclasses import dataclass, field
from typing import Any

import yaml

from approx.evaluation.record import BUSY, Quality, Speed, SpeedVariant
from approx.planning.anatomy import ranges
from approx.planning.plan import Plan


@dataclass(frozen=True)
class Proof:
    """A plan, measured on examples that the search did not see.

    Attributes:
        loss: Loss against exact attention: points or percent of the task's metric, or the divergence.
        interval: Its 95 % interval; None if the metric has none.
        verdict: The verdict of the evaluation; of a divergence whether it is within the budget.
        examples: Number of examples, or of rows of text.
        speed: Speed-up over the fastest exact attention.
        speed_interval: Its 95 % interval.
        milliseconds: Median time of one forward pass.
        share_of_ceiling: Share of the speed-up that the model without attention has.
        settled: Whether the machine was quiet enough for these times.
    """

    loss: float
    interval: tuple[float, float] | None
    verdict: str
    examples: int
    speed: float | None
    speed_interval: tuple[float, float] | None
    milliseconds: float | None
    share_of_ceiling: float | None
    settled: bool = True

    @classmethod
    def of(
        cls, loss: float, interval: tuple[float, float] | None, verdict: str, examples: int, row: SpeedVariant | None
    ) -> "Proof":
        """Join a loss and a row of times; a plan that changes nothing has no row."""
        if row is None:
            return cls(loss, interval, verdict, examples, 1.0, None, None, 0.0)
        between = None if row.interval is None else (row.interval[0], row.interval[1])
        return cls(
            loss,
            interval,
            verdict,
            examples,
            row.ratio,
            between,
            row.median_ms,
            row.share_of_ceiling,
            row.verdict != BUSY,
        )

    def phrase(self, unit: str) -> str:
        """As one phrase: `1.30× at −0.4 points (−0.9 to +0.1)`; a loss is negative."""
        speed = "out of memory" if self.speed is None else f"{self.speed:.2f}×"
        if not self.settled:
            speed += " (not settled: the machine was busy)"
        between = ""
        if self.interval is not None:
            between = f" ({-self.interval[1]:+.2g} to {-self.interval[0]:+.2g})"
        return f"{speed} at {-self.loss:+.2g} {unit}{between}".replace("-", "−")


@dataclass(frozen=True)
class LayerReason:
    """Why a layer got its mechanism.

    Attributes:
        layer: Number of the layer.
        choice: Name of its candidate, or `exact`.
        heads: The converted heads; `all` if they all are.
        saves: Milliseconds that it saves.
        damage: Its share of the predicted damage of the plan, from 0 to 1.
        reason: In words.
        divergence: What it moves the outputs by if it alone is converted, as `finetune --keep-exact` measures it; None where it
            stays exact or that was not measured.
    """

    layer: int
    choice: str
    heads: str
    saves: float
    damage: float
    reason: str
    divergence: float | None = None


@dataclass
class Searched:
    """The outcome of a search.

    Attributes:
        plan: The plan; None if exact attention everywhere is the answer.
        feasible: Whether the proof meets the budget and the speed.
        interrupted: Whether the search was stopped before the proof.
        goal: The budget and the speed to reach, in words.
        unit: Unit of losses.
        layers: A reason for each layer.
        proof: Of the plan; None if the search was interrupted.
        ceiling: Speed-up of the model without attention.
        correlation: Rank correlation of predicted and measured divergence over the plans that were measured; None if
            there were fewer than five.
        measured: Number of plans that were measured to find it.
        seconds: Time of the search.
        quality: Scores of the plan, of the front and of uniform plans on the same examples; None for text.
        speed: Their times, in one race.
        divergences: Name of each of them -> divergence of its outputs on the proof.
        models: The models that were measured on the proof, by name.
        verified: Whether the conversion of each of them passes the checks that need no folder.
        notes: What a user should know.
    """

    plan: Plan | None
    feasible: bool
    interrupted: bool
    goal: str
    unit: str
    layers: list[LayerReason]
    proof: Proof | None
    ceiling: float
    correlation: float | None
    measured: int
    seconds: float
    quality: Quality | None = None
    speed: Speed | None = None
    divergences: dict[str, float] = field(default_factory=dict)
    models: dict[str, Any] = field(default_factory=dict)
    verified: dict[str, bool] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def summary(self) -> str:
        """The outcome in one sentence."""
        if self.interrupted:
            return f"Interrupted before the proof. The best plan so far is not proven to meet: {self.goal}."
        if self.proof is None:
            return f"Infeasible: nothing found for {self.goal}; exact attention everywhere is best."
        best = self.proof.phrase(self.unit)
        if self.feasible:
            share = "" if self.proof.share_of_ceiling is None else f", {self.proof.share_of_ceiling:.0%} of the ceiling"
            return f"Found for {self.goal}: {best}, {self.proof.verdict}{share}."
        return f"Infeasible: nothing found for {self.goal}; the best is {best}."

    def to_data(self) -> dict[str, Any]:
        """As plain data, without the record's parts."""
        return {
            "outcome": self.summary,
            "feasible": self.feasible,
            "interrupted": self.interrupted,
            "plan": None if self.plan is None else self.plan.to_data(),
            "layers": [vars(one) for one in self.layers],
            "proof": None if self.proof is None else vars(self.proof),
            "ceiling": self.ceiling,
            "correlation": self.correlation,
            "measured": self.measured,
            "seconds": round(self.seconds, 1),
            "divergences": self.divergences,
            "notes": self.notes,
        }

    def to_yaml(self) -> str:
        """The plan as YAML for `Plan.read`, with the outcome and the reasons as comments.

        Raises:
            ValueError: if exact attention everywhere is the answer.
        """
        if self.plan is None:
            raise ValueError("exact attention everywhere is not a plan")
        head = [self.summary, *self.notes, *(f"layer {one.layer}: {one.reason}" for one in self.layers)]
        comments = "".join(f"# {' '.join(line.split())}\n" for line in head)
        return comments + yaml.safe_dump({"rules": self.plan.to_data()}, sort_keys=False)


def reasons(
    names: list[str], heads: list[tuple[int, ...]], saved: list[float], damages: list[float], refused: list[str]
) -> list[LayerReason]:
    """Say for each layer why it has its choice.

    Args:
        names: Name of each layer's candidate, `exact` for none.
        heads: Its converted heads; empty for all.
        saved: Milliseconds that it saves.
        damages: Its predicted damage.
        refused: For layers that stay exact, what the least damaging candidate that saves time would do.
    """
    total = sum(damages)
    made = []
    for layer, (name, some, gain, damage, why) in enumerate(zip(names, heads, saved, damages, refused, strict=True)):
        share = damage / total if total > 0 else 0.0
        heads_text = ranges(some) if some else "all"
        if name == "exact":
            reason = f"exact: {why}"
        else:
            of_heads = "" if not some else f" on heads {heads_text}"
            reason = f"{name}{of_heads}: saves {gain:.2f} ms for {share:.0%} of the plan's predicted damage"
        made.append(LayerReason(layer, name, heads_text, gain, share, reason))
    return made
