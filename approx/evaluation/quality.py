"""From the predictions of several models on the same examples to one entry of a record's quality table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from approx.evaluation.statistics import (
    Comparison,
    Interval,
    accuracy_interval,
    compare_correct,
    compare_scores,
    score_interval,
    verdict,
)
from approx.tasks.metrics import METRICS, TaskMetric
from approx.tasks.task import Example, Task


def compare(
    task: Task,
    examples: Sequence[Example],
    lengths: Sequence[int],
    predictions: dict[str, list[Any]],
    *,
    margin: float,
    seed: int,
) -> dict[str, Any]:
    """Score every model and compare each with the first, which is the base.

    Accuracy is compared by exact McNemar, any other metric by a paired bootstrap that computes it again.

    Args:
        task: Whose first metric is compared; the others are only scored.
        examples: In the order of the predictions.
        lengths: Tokens of each example, for the slices.
        predictions: Name of a model -> its predictions; the base comes first.
        margin: The loss that is acceptable, in the units of the score.
        seed: Of the bootstrap.

    Returns:
        `metric`, `fraction`, `lower_is_better`, `sliced_by`, `slice_metric`, `base` and `variants` of a quality entry
        (see `approx.evaluation.record`).
    """
    labels, groups = [example.label for example in examples], _groups(examples)
    metric = METRICS[task.metrics[0]]
    evidence = {name: metric.evidence(found, labels) for name, found in predictions.items()}
    correct = {
        # Right and wrong make the score only where it is nothing but the share of the right ones.
        name: task.correct(found, labels) if metric.key == "accuracy" and groups is None else None
        for name, found in predictions.items()
    }
    base, *others = predictions
    variants = []
    for name in others:
        found = _compare(metric, (evidence[base], evidence[name]), (correct[base], correct[name]), groups, seed)
        low, high = found.interval
        gain = (-high, -low) if metric.lower_is_better else (low, high)
        judged, needed = verdict(gain, margin, len(labels))
        variants.append(
            {
                "name": name,
                "scores": task.score(predictions[name], labels),
                "difference": found.difference,
                "interval": [low, high],
                "confidence": found.confidence,
                "test": found.test,
                "p_value": found.p_value,
                "margin": margin,
                "verdict": judged,
                "needed_examples": needed,
                "slices": _slices(task, labels, lengths, predictions[base], predictions[name]),
            }
        )
    interval = _interval(metric, evidence[base], correct[base], groups, seed)
    return {
        "metric": metric.key,
        "fraction": metric.fraction,
        "lower_is_better": metric.lower_is_better,
        "sliced_by": task.sliced_by,
        "slice_metric": task.slice_metric or metric.key,
        "base": {"scores": task.score(predictions[base], labels), "interval": list(interval)},
        "variants": variants,
    }


Evidence = NDArray[np.float64]


def _compare(
    metric: type[TaskMetric],
    evidence: tuple[Evidence, Evidence],
    correct: tuple[list[bool] | None, list[bool] | None],
    groups: NDArray[np.intp] | None,
    seed: int,
) -> Comparison:
    if correct[0] is not None and correct[1] is not None:
        return compare_correct(correct[0], correct[1])
    base, converted = evidence
    return compare_scores(
        lambda rows: metric.total(converted[rows]) - metric.total(base[rows]),
        len(base),
        seed=seed,
        groups=groups,
        bounded=metric.bounded,
    )


def _interval(
    metric: type[TaskMetric],
    evidence: Evidence,
    correct: list[bool] | None,
    groups: NDArray[np.intp] | None,
    seed: int,
) -> Interval:
    if correct is not None:
        return accuracy_interval(correct)
    return score_interval(lambda rows: metric.total(evidence[rows]), len(evidence), seed=seed, groups=groups)


def _groups(examples: Sequence[Example]) -> NDArray[np.intp] | None:
    """Number of each example's group; None where examples are independent."""
    if all(example.group is None for example in examples):
        return None
    return np.unique([example.group or example.id for example in examples], return_inverse=True)[1]


def _slices(
    task: Task, labels: Sequence[Any], lengths: Sequence[int], base: Sequence[Any], converted: Sequence[Any]
) -> list[dict[str, Any]]:
    """Score both in each slice of the task."""
    metric = METRICS[task.slice_metric or task.metrics[0]]
    pairs = zip(task.slices(labels, lengths, base), task.slices(labels, lengths, converted), strict=True)
    return [
        {
            "from": start,
            "to": end,
            "examples": len(part_labels),
            "base": metric.value(part, part_labels),
            "converted": metric.value(other, part_labels),
        }
        for (start, end, part, part_labels), (_, _, other, _) in pairs
    ]
