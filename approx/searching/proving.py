"""The proof: plans on the examples that the search did not see, paired with the base, and their times in one race."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median_low
from typing import Any

from approx.checkpoints.checkpoint import Checkpoint
from approx.conversion import checks
from approx.evaluation.coverage import coverage
from approx.evaluation.evaluate import predict
from approx.evaluation.prediction_cache import default_folder
from approx.evaluation.quality import compare, label_order
from approx.evaluation.record_model import Quality, Tokens
from approx.evaluation.record_speed import Speed
from approx.evaluation.statistics import Stake, score_interval
from approx.measuring.measure import Progress, subject_of
from approx.planning.plan import Plan
from approx.recipe import BASE
from approx.searching.cost import race
from approx.searching.judging import Judge
from approx.searching.outcome import Proof, Searched
from approx.tasks.metrics import METRICS

FOUND = "found"
_ROUNDS = 12


@dataclass(frozen=True)
class Proven:
    """Models on the proof.

    Attributes:
        proofs: Label -> loss and speed.
        quality: Their scores; None for text.
        speed: Their times.
        divergences: Label -> divergence, for text.
        verified: Label -> whether its conversion passes the checks that need no folder.
    """

    proofs: dict[str, Proof]
    quality: Quality | None
    speed: Speed
    divergences: dict[str, float]
    verified: dict[str, bool]

    def given_to(self, outcome: Searched, models: Mapping[str, Checkpoint], chosen: str | None) -> Searched:
        """Put everything into an outcome, whose own plan is called `found`."""
        names = {name: FOUND if name == chosen else name for name in self.proofs}
        order = sorted(names, key=lambda name: name != chosen)

        def renamed(rows: Any) -> list[Any]:
            known = {row.name: row for row in rows}
            return [known[name].model_copy(update={"name": names[name]}) for name in order]

        if self.quality is not None:
            outcome.quality = self.quality.model_copy(update={"variants": renamed(self.quality.variants)})
        outcome.speed = self.speed.model_copy(update={"variants": renamed(self.speed.variants)})
        outcome.divergences = {names[name]: value for name, value in self.divergences.items()}
        outcome.models = {names[name]: models[name] for name in order}
        outcome.verified = {names[name]: self.verified[name] for name in order}
        if self.speed.crowded:
            outcome.notes.append(
                "Other programs used the machine while the plans were timed. Search again on an idle one."
            )
        return outcome


def prove(
    judge: Judge, models: Mapping[str, Checkpoint], plans: Mapping[str, Plan], seed: int, progress: Progress
) -> Proven:
    """Measure models on the examples that the search did not see, and their times in one race.

    Args:
        judge: The examples, and the base.
        models: Label -> model.
        plans: Label -> its plan.
        seed: Seed of the bootstrap.
        progress: Called with what happens, done and total.
    """
    bound = None if judge.stage.allowed is None else judge.stage.allowed[1]
    scores = None
    if judge.task is not None:
        # Here the margin is the budget.
        scores = quality(judge, models, bound, seed, progress)
    row = race(
        {BASE: judge.base, **models}, judge.stage, seed=seed, rounds=_ROUNDS,
        progress=lambda _, done, total: progress("time the plans", done, total),
    )  # fmt: skip
    times = {one.name: one for one in row.variants}
    proofs, divergences, verified = {}, {}, {}
    for number, (name, one) in enumerate(models.items()):
        progress("check the plans", number, len(models))
        if scores is not None:
            loss, interval, verdict = loss_in_points(scores, name)
            count = scores.examples
        else:
            loss, interval = divergence_interval(judge, one.model, seed)
            verdict, count = _within(interval, bound), judge.proof.inputs
            divergences[name] = loss
        proofs[name] = Proof.of(loss, interval, verdict, count, times.get(name))
        verified[name] = _verified(judge.base.model, plans[name], one.model)
    return Proven(proofs, scores, row, divergences, verified)


def _verified(base: Any, plan: Plan, model: Any) -> bool:
    done = (checks.exact_limit(base, plan), checks.padding(model), checks.causality(model))
    return all(check.passed is not False for check in done)


def _within(interval: tuple[float, float] | None, bound: float | None) -> str:
    if bound is None:
        return "no budget"
    if interval is None or interval[0] <= bound < interval[1]:
        return "inconclusive"
    return "within the budget" if interval[1] <= bound else "beyond the budget"


def quality(
    judge: Judge, models: Mapping[str, Checkpoint], margin: float | None, seed: int, progress: Progress
) -> Quality:
    """Score the base and models on the proof; outputs are kept, so that a search goes on where it stopped.

    Args:
        judge: Of a task.
        models: Label -> model.
        margin: Acceptable loss, as in `EvaluateOptions`.
        seed: Seed of the bootstrap.
        progress: Called with what happens, done and total.
    """
    task, read = judge.of_task(judge.proof)
    subjects = [subject_of(label, one, judge.processor) for label, one in {BASE: judge.base, **models}.items()]
    kept = default_folder()
    predictions = {}
    for number, one in enumerate(subjects):
        progress("prove", number, len(subjects))
        predictions[one.name] = predict(one, task, read, device=one.model.device, kept=kept, halve=True)
    progress("prove", len(subjects), len(subjects))
    covered = {one.name: reach for one in subjects if (reach := coverage(one, task, read)) is not None}
    examples, lengths = read.split.examples, read.lengths
    metric = METRICS[task.metrics[0]]
    labels = [example.label for example in examples]
    compared = compare(
        task, examples, lengths, predictions, seed=seed, covered=covered,
        margin=metric.acceptable(margin, metric.value(predictions[BASE], labels)),
    )  # fmt: skip
    return Quality(
        task=task.name, split=read.split.name, examples=len(examples), subset=True, truncated=read.truncated,
        notes=["examples that the search did not see", *label_order(task, predictions[BASE], labels, judge.base.model.config)],
        settings=judge.stage.settings,
        tokens=Tokens(median=median_low(lengths), longest=max(lengths), windows=read.windows), outputs=None,
        **vars(compared),
    )  # fmt: skip


def loss_in_points(entry: Quality, name: str) -> tuple[float, tuple[float, float] | None, str]:
    """The loss of a variant in points, or percent of the base's score, with its interval and verdict."""
    variant = next(one for one in entry.variants if one.name == name)
    metric = METRICS[entry.metric]
    point = max(metric.acceptable(1.0, entry.base.scores[entry.metric]), 1e-12)
    sign = 1 if entry.lower_is_better else -1
    loss = sign * variant.difference / point
    interval = None
    if variant.interval is not None:
        low, high = sorted(sign * end / point for end in variant.interval)
        interval = (low, high)
    return loss, interval, variant.verdict


def divergence_interval(judge: Judge, model: Any, seed: int) -> tuple[float, tuple[float, float] | None]:
    """The mean divergence on the proof, and its interval over inputs, which are rows of a text.

    There is none for a single row, nor where no row changes at all: what nothing approximates says nothing of other rows.
    """
    apart = judge.divergences(model, judge.proof)
    mean = float(apart.mean())
    if not apart.any():
        return mean, None
    # Divergences have no upper bound: rows that are not seen may be as bad as the worst one that is, or not change at all.
    stake = Stake(mean, float(apart.max()))
    return mean, score_interval(
        lambda rows: float(apart[rows].mean()), len(apart), seed=seed, stake=stake, bounds=(0.0, math.inf)
    )
