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
from approx.tasks.task import Task

_SHORTEST_SLICE = 16


def compare(
    task: Task,
    labels: Sequence[Any],
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
        labels: One an example.
        lengths: Tokens of each example, for the slices.
        predictions: Name of a model -> its predictions, in the order of `labels`; the base comes first.
        margin: The loss that is acceptable, in the units of the score.
        seed: Of the bootstrap.

    Returns:
        `metric`, `base` and `variants` of a quality entry (see `approx.evaluation.record`).
    """
    (_, base), *others = predictions.items()
    variants = []
    for name, converted in others:
        found = _compare(task, labels, base, converted, seed)
        judged, needed = verdict(found.interval, margin, len(labels))
        variants.append(
            {
                "name": name,
                "scores": task.score(converted, labels),
                "difference": found.difference,
                "interval": list(found.interval),
                "confidence": found.confidence,
                "test": found.test,
                "p_value": found.p_value,
                "margin": margin,
                "verdict": judged,
                "needed_examples": needed,
                "slices": _slices(task, labels, lengths, base, converted),
            }
        )
    interval = list(_interval(task, labels, base, seed))
    return {
        "metric": task.metrics[0],
        "base": {"scores": task.score(base, labels), "interval": interval},
        "variants": variants,
    }


def _compare(task: Task, labels: Sequence[Any], base: list[Any], converted: list[Any], seed: int) -> Comparison:
    right, right_too = _correct(task, base, labels), _correct(task, converted, labels)
    if right is not None and right_too is not None:
        return compare_correct(right, right_too)
    score, score_too = _Resampled(task, base, labels), _Resampled(task, converted, labels)
    return compare_scores(lambda rows: score_too(rows) - score(rows), len(labels), seed=seed)


def _interval(task: Task, labels: Sequence[Any], predictions: list[Any], seed: int) -> Interval:
    right = _correct(task, predictions, labels)
    if right is not None:
        return accuracy_interval(right)
    return score_interval(_Resampled(task, predictions, labels), len(labels), seed=seed)


def _correct(task: Task, predictions: list[Any], labels: Sequence[Any]) -> list[bool] | None:
    """Say which predictions are right, where the score is nothing but the share of these."""
    return task.correct(predictions, labels) if task.metrics[0] == "accuracy" else None


class _Resampled:
    """The compared metric of one model as a function of the rows it is computed on."""

    def __init__(self, task: Task, predictions: Sequence[Any], labels: Sequence[Any]) -> None:
        self._task, self._metric = task, task.metrics[0]
        self._predictions, self._labels = np.asarray(predictions), np.asarray(labels)

    def __call__(self, rows: NDArray[np.intp]) -> float:
        picked = self._predictions[rows], self._labels[rows]
        return self._task.score(*picked, metrics=[self._metric])[self._metric]


def _slices(
    task: Task, labels: Sequence[Any], lengths: Sequence[int], base: list[Any], converted: list[Any]
) -> list[dict[str, Any]]:
    """Score both by input length: up to 16 tokens, and then each slice reaches to twice the length."""
    score, score_too = _Resampled(task, base, labels), _Resampled(task, converted, labels)
    counts = np.asarray(lengths)
    found, start, end = [], 0, _SHORTEST_SLICE
    while start <= counts.max():
        rows = np.flatnonzero((counts >= start) & (counts < end))
        if rows.size:
            scores = {"base": score(rows), "converted": score_too(rows)}
            found.append({"from": start, "to": end, "examples": int(rows.size), **scores})
        start, end = end, 2 * end
    return found
