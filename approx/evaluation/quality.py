"""Compare the predictions of several models on the same examples, for one quality entry of a record."""

from __future__ import annotations

import heapq
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from approx.evaluation.inputs import Ablation, Coverage
from approx.evaluation.record import (
    AT_CHANCE,
    Ablated,
    BaseQuality,
    CarriedState,
    Quality,
    QualityVariant,
    Record,
    Seeds,
    Slice,
    WorstExample,
    judge_likelihoods,
)
from approx.evaluation.statistics import (
    Comparison,
    Interval,
    Stake,
    accuracy_interval,
    compare_correct,
    compare_scores,
    design_effect,
    holm,
    score_interval,
    use_of,
    verdict,
)
from approx.tasks.classification import ONE, SequenceClassification
from approx.tasks.metrics import METRICS, TaskMetric
from approx.tasks.task import Example, Task
from approx.tasks.token_classification import TokenClassification

# Examples that a variant loses most on, of which a record holds so many, and characters of their texts.
_WORST, _EXCERPT = 10, 240


@dataclass(frozen=True)
class Compared:
    """The part of a quality entry that follows from predictions; see `approx.evaluation.record.Quality`."""

    metric: str
    fraction: bool
    lower_is_better: bool
    sliced_by: str
    slice_metric: str
    chance: float | None
    groups: int | None
    grouped_by: str | None
    stake: float
    base: BaseQuality
    variants: list[QualityVariant]


def compare(
    task: Task,
    examples: Sequence[Example],
    lengths: Sequence[int],
    predictions: dict[str, list[Any]],
    *,
    margin: float,
    seed: int,
    covered: Mapping[str, Coverage] | None = None,
) -> Compared:
    """Score every model and compare each with the first, the base.

    Accuracy of independent examples is compared by the exact McNemar test, anything else by a paired bootstrap, over
    groups if there are any. Where the base is no better than guessing, nothing is judged.

    Args:
        task: The task; its first metric is compared, the others are only scored.
        examples: The examples, in the order of the predictions.
        lengths: Tokens of each example, for the slices.
        predictions: Name of a model -> its predictions; the base comes first.
        margin: The acceptable loss, in the units of the score.
        seed: Seed of the bootstrap.
        covered: Name of each converted model -> the inputs on which it approximates.
    """
    labels, groups = [example.label for example in examples], groups_of(examples)
    metric = METRICS[task.metrics[0]]
    base, *others = predictions
    scored = {
        name: _Scored.of(
            metric,
            metric.evidence(values, labels),
            # The McNemar test applies only if the score is the share of correct, independent examples.
            task.correct(values, labels) if groups is None else None,
        )
        for name, values in predictions.items()
    }
    chance = metric.chance(labels)
    clustering = 1.0
    if groups is not None:
        clustering = design_effect(scored[base].score, len(labels), groups, seed=seed)

    def against_chance(name: str) -> tuple[Interval | None, bool]:
        """The interval of the score of one model, and whether it reaches chance."""
        ends = scored[name].interval(groups, clustering, seed)
        low, high = ends or (scored[name].score(slice(None)),) * 2
        return ends, chance is not None and (high >= chance if metric.lower_is_better else low <= chance)

    interval, at_chance = against_chance(base)
    variants = []
    for name in others:
        comparison = scored[base].compared_with(scored[name], groups, clustering, seed)
        reach = (covered or {}).get(name)
        judged, needed = verdict(
            comparison.interval,
            margin,
            len(labels),
            None if reach is None else sum(reach.examples),
            None if reach is None else reach.pairs,
            at_chance=at_chance,
            rare=comparison.rare,
        )
        difference, ends = comparison.difference, comparison.interval
        if metric.lower_is_better:
            difference, ends = -difference, None if ends is None else (-ends[1], -ends[0])
        variants.append(
            QualityVariant(
                name=name,
                scores=task.score(predictions[name], labels),
                difference=difference,
                interval=None if ends is None else list(ends),
                confidence=comparison.confidence,
                test=comparison.test,
                p_value=comparison.p_value,
                margin=margin,
                verdict=judged,
                needed_examples=needed,
                approximated=None if reach is None else reach.counted,
                slices=_slices(task, labels, lengths, predictions[base], predictions[name]),
                at_chance=chance is not None and against_chance(name)[1],
                rare=comparison.rare if ends is not None else None,
                carried=_carried(task, predictions[name]),
                worst=_worst(task, examples, metric, scored[base], scored[name], predictions[base], predictions[name]),
            )
        )
    return Compared(
        metric=metric.key,
        fraction=metric.fraction,
        lower_is_better=metric.lower_is_better,
        sliced_by=task.sliced_by,
        slice_metric=task.slice_metric or metric.key,
        chance=chance,
        groups=None if groups is None else int(groups.max()) + 1,
        grouped_by=None if groups is None else task.groups.by,
        stake=scored[base].stake[0],
        base=BaseQuality(
            scores=task.score(predictions[base], labels),
            interval=None if interval is None else list(interval),
            at_chance=at_chance,
            carried=_carried(task, predictions[base]),
        ),
        variants=variants,
    )


def _carried(task: Task, predictions: Sequence[Any]) -> CarriedState | None:
    if not task.in_order:
        return None
    largest = max(one["state"] for one in predictions)
    return CarriedState(
        tokens=sum(one["count"] for one in predictions),
        state_bytes=largest,
        reached=min(one["end"] for one in predictions if one["state"] == largest),
        seconds=sum(one["seconds"] for one in predictions),
    )


def ablated(
    task: Task,
    examples: Sequence[Example],
    ablation: Ablation,
    variant: QualityVariant,
    whole: list[Any],
    without: list[Any] | None,
    *,
    seed: int,
) -> Ablated:
    """What the estimates of a variant add to its score, or why that cannot be said.

    The interval is of what these examples show; changes too rare to show, which `compare` counts, are not, since a part that
    no example needs is not used.

    Args:
        task: The task; its first metric is compared.
        examples: The examples, in the order of the predictions.
        ablation: What was switched off.
        variant: The entry of the variant.
        whole: Predictions of the variant.
        without: Predictions with the estimates switched off; None if there is nothing to switch off.
        seed: Seed of the bootstrap.
    """
    part, layers = ablation.part, ablation.layers
    if without is None:
        return Ablated(part=part, layers=layers, scores={}, verdict=f"nothing to switch off: {ablation.why}")
    labels, groups, metric = [example.label for example in examples], groups_of(examples), METRICS[task.metrics[0]]
    off, on = (_Scored(metric, metric.evidence(values, labels), None, (0.0, 0.0)) for values in (without, whole))
    comparison = off.compared_with(on, groups, 1.0, seed)
    judged = use_of(part, comparison.interval, variant.margin or 0.0)
    if variant.verdict == AT_CHANCE or variant.verdict.startswith("not tested"):
        judged = variant.verdict
    sign = -1 if metric.lower_is_better else 1
    return Ablated(
        part=part,
        layers=layers,
        scores=task.score(without, labels),
        difference=sign * comparison.difference,
        interval=None if comparison.interval is None else sorted(sign * end for end in comparison.interval),
        verdict=judged,
    )


def label_order(task: Task, predictions: Sequence[Any], labels: Sequence[Any], config: Any) -> list[str]:
    """How the outputs of a classification are taken, and whether another order of its labels scores far better.

    The order is chosen on every second example and tested on the others: of many orders one is always better by chance.

    Args:
        task: The task, which a model was checked for.
        predictions: Of the base.
        labels: The label of each example.
        config: The config of the base.
    """
    if not isinstance(task, SequenceClassification) or isinstance(task, TokenClassification) or task.kind != ONE:
        return []
    notes = [one] if (one := task.about_labels(config)) else []
    predicted, true = np.asarray(predictions), np.asarray(labels)
    seen, tested = slice(0, None, 2), slice(1, None, 2)
    if len(predicted) < 2:
        return notes
    counts = np.zeros((len(task.labels),) * 2)
    np.add.at(counts, (predicted[seen], true[seen]), 1)
    # Ties keep the order as it is.
    _, reordered = linear_sum_assignment(counts + 1e-6 * np.eye(len(counts)), maximize=True)
    now, other = predicted == true, reordered[predicted] == true
    commonest = np.bincount(true).max() / len(true)
    low, high = accuracy_interval(other[tested])[0], accuracy_interval(now[tested])[1]
    if low > max(high, commonest):
        names = task.set_labels([int(reordered[index]) for index in task.order_of(config)])
        notes.append(
            f"accuracy would be {other.mean():.1%} instead of {now.mean():.1%} with the labels in another order: set "
            f"--labels {names} if the checkpoint has this order"
        )
    return notes


def over_tasks(quality: Sequence[Quality]) -> list[Quality]:
    """Add `p_adjusted`, the p-value Holm-adjusted over a variant's tasks (null for a single task), and judge likelihoods."""
    names = [entry.name for task in quality for entry in task.variants]
    return judge_likelihoods(list(_adjusted(quality, names)))


def over_records(records: Sequence[Record]) -> list[Record]:
    """Holm-adjust the p-values of several records over all tasks that a plan was evaluated on.

    Plans are equal if their layers are, regardless of the names of variants and checkpoints, since each task often has
    its own checkpoint. A single record is returned unchanged.
    """
    if len(records) < 2:
        return list(records)
    plans = [
        {one.name: json.dumps([layer.to_data() for layer in one.layers], sort_keys=True) for one in record.variants}
        for record in records
    ]
    families = [
        plan[entry.name]
        for record, plan in zip(records, plans, strict=True)
        for task in record.quality
        for entry in task.variants
    ]
    adjusted = _adjusted([task for record in records for task in record.quality], families)
    return [record.model_copy(update={"quality": [next(adjusted) for _ in record.quality]}) for record in records]


def _adjusted(quality: Sequence[Quality], families: Sequence[str]) -> Iterator[Quality]:
    """Holm-adjust the p-values of each family; `families` has one entry per variant of each task."""
    p_values = [entry.p_value for task in quality for entry in task.variants]
    raised: dict[int, float] = {}
    for family in dict.fromkeys(families):
        known = {
            row: value
            for row, (other, value) in enumerate(zip(families, p_values, strict=True))
            if other == family and value is not None
        }
        if len(known) > 1:
            raised |= zip(known, holm(list(known.values())), strict=True)
    values = iter([raised.get(row) for row in range(len(p_values))])
    for task in quality:
        variants = [entry.model_copy(update={"p_adjusted": next(values)}) for entry in task.variants]
        yield task.model_copy(update={"variants": variants})


def over_seeds(scores: Sequence[float]) -> Seeds:
    """Summarise scores that differ only in the seed; empty if nothing is random."""
    return Seeds(
        seeds=list(range(len(scores))),
        scores=list(scores),
        mean=statistics.fmean(scores) if scores else None,
        sd=statistics.stdev(scores) if len(scores) > 1 else None,
        low=min(scores, default=None),
        high=max(scores, default=None),
    )


@dataclass(frozen=True)
class _Scored:
    """A model's outputs as the metric reads them.

    Args:
        metric: The metric.
        evidence: Evidence of each example, [n, k].
        correct: Whether each example is correct, where accuracies of independent examples are compared.
        stake: Loss and gain of the score at stake in one example, as magnitudes.
    """

    metric: type[TaskMetric]
    evidence: NDArray[np.float64]
    correct: list[bool] | None
    stake: tuple[float, float]

    @classmethod
    def of(cls, metric: type[TaskMetric], evidence: NDArray[np.float64], correct: list[bool] | None) -> _Scored:
        return cls(metric, evidence, correct, metric.at_stake(evidence) if correct is None else (1.0, 1.0))

    def score(self, rows: Any) -> float:
        """The score on rows of the examples."""
        return self.metric.total(self.evidence[rows])

    def compared_with(
        self, other: _Scored, groups: NDArray[np.intp] | None, clustering: float, seed: int
    ) -> Comparison:
        """The difference of another model from this one, oriented so that a loss is negative."""
        if self.correct is not None and other.correct is not None:
            return compare_correct(self.correct, other.correct)
        low, high = self.metric.bounds
        sign = -1 if self.metric.lower_is_better else 1
        return compare_scores(
            lambda rows: sign * (other.score(rows) - self.score(rows)),
            len(self.evidence),
            seed=seed,
            stake=Stake(*self.stake),
            groups=groups,
            clustering=clustering,
            widest=high - low if math.isfinite(high - low) else None,
        )

    def interval(self, groups: NDArray[np.intp] | None, clustering: float, seed: int) -> Interval | None:
        """The interval of the score; None if there are too few examples or groups for one."""
        if self.correct is not None:
            return accuracy_interval(self.correct)
        return score_interval(
            self.score,
            len(self.evidence),
            seed=seed,
            # A loss makes scores smaller, unless lower ones are better.
            stake=Stake(*(self.stake[::-1] if self.metric.lower_is_better else self.stake)),
            bounds=self.metric.bounds,
            groups=groups,
            clustering=clustering,
        )


def groups_of(examples: Sequence[Example]) -> NDArray[np.intp] | None:
    """Number of each example's group, [n]; None if no two examples share one."""
    numbers: dict[tuple[str, str], int] = {}
    groups = np.array([numbers.setdefault(example.unit, len(numbers)) for example in examples])
    return groups if len(numbers) < len(examples) and any(example.group is not None for example in examples) else None


def _worst(
    task: Task,
    examples: Sequence[Example],
    metric: type[TaskMetric],
    base: _Scored,
    converted: _Scored,
    by_base: Sequence[Any],
    by_converted: Sequence[Any],
) -> list[WorstExample]:
    """The examples on which a model loses most against the base; of equal losses those that come first.

    Where an example has no score of its own, its loss is what the whole score loses if only its prediction is the
    converted model's.
    """
    changed = np.flatnonzero((base.evidence != converted.evidence).any(1))
    scores = {
        row: tuple(_finite(one.score(slice(row, row + 1))) for one in (base, converted))
        if metric.of_one
        else (None,) * 2
        for row in changed.tolist()
    }
    sign = 1 if metric.lower_is_better else -1
    whole = base.score(slice(None))

    def loss(row: int) -> float:
        before, after = scores[row]
        if metric.of_one:
            return 0.0 if before is None or after is None else sign * (after - before)
        mixed = base.evidence.copy()
        mixed[row] = converted.evidence[row]
        return sign * (metric.total(mixed) - whole)

    losses = {row: one for row in scores if (one := loss(row)) > 0}
    return [
        WorstExample(
            id=_brief(examples[row].id),
            input=_brief(task.excerpt(examples[row])),
            target=_brief(task.in_words(examples[row].label)),
            base=_brief(task.in_words(by_base[row])),
            converted=_brief(task.in_words(by_converted[row])),
            base_score=scores[row][0],
            converted_score=scores[row][1],
        )
        for row in heapq.nlargest(_WORST, losses, key=losses.__getitem__)
    ]


def _finite(score: float) -> float | None:
    return score if math.isfinite(score) else None


def _brief(text: str) -> str:
    """A text in one line, without its end if it is long, and with nothing that cannot be stored."""
    line = " ".join(text[: 2 * _EXCERPT].split()).encode(errors="replace").decode()
    return line if len(line) <= _EXCERPT and len(text) <= 2 * _EXCERPT else f"{line[:_EXCERPT].rstrip()}…"


def _slices(
    task: Task, labels: Sequence[Any], lengths: Sequence[int], base: Sequence[Any], converted: Sequence[Any]
) -> list[Slice]:
    """Score base and converted in each slice of the task."""
    metric = METRICS[task.slice_metric or task.metrics[0]]
    pairs = zip(task.slices(labels, lengths, base), task.slices(labels, lengths, converted), strict=True)
    return [
        Slice.of(
            start,
            end,
            examples=len(part_labels),
            base=_known(metric, part, part_labels),
            converted=_known(metric, other, part_labels),
        )
        for (start, end, part, part_labels), (_, _, other, _) in pairs
    ]


def _known(metric: type[TaskMetric], predictions: Sequence[Any], labels: Sequence[Any]) -> float | None:
    """The score of a slice; None if it has none, such as the error rate of transcripts without words."""
    with np.errstate(divide="ignore", invalid="ignore"):
        total = metric.total(metric.evidence(predictions, labels))
    return total if math.isfinite(total) else None
