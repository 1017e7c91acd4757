"""Metrics, computed in two steps: the evidence of each example, and the total over examples.

The bootstrap computes thousands of totals of the same evidence, so a total is a few array operations. The tests compare
them with scikit-learn's functions, which take a hundred times as long to check their input.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import datasets
import evaluate
import numpy as np
from numpy.typing import NDArray

from approx.errors import ApproxError, Exit

# Examples whose weight in a score is tried.
_PROBED = 64


class TaskMetric(evaluate.Metric):
    """A metric of one number.

    Example: `F1().compute(predictions=[1, 0], references=[1, 1])` gives `{"f1": 0.667}`.
    """

    key: ClassVar[str]
    feature: ClassVar[str] = "int64"
    source: ClassVar[str]
    lower_is_better: ClassVar[bool] = False
    fraction: ClassVar[bool] = True
    """Whether it is a fraction, shown in percent and points; otherwise it has its own units."""
    margin: ClassVar[float] = 1.0
    """The loss that is acceptable by default: points of a fraction, otherwise percent of the base's score."""
    bounds: ClassVar[tuple[float, float]] = (0.0, 1.0)
    """The smallest and the largest score; infinity where there is none."""
    of_one: ClassVar[bool] = True
    """Whether the score of a single example means something."""
    undefined: ClassVar[str] = "it has no value on these predictions"
    """Why it may have no value, such as the error rate of transcripts without words."""

    @staticmethod
    def evidence(predictions: Sequence[Any], labels: Sequence[Any]) -> NDArray[np.float64]:
        """The input of `total`, one row per example, [n, k]; by default prediction and label."""
        return np.stack([np.asarray(predictions, float), np.asarray(labels, float)], axis=1)

    @staticmethod
    @abstractmethod
    def total(evidence: NDArray[np.float64]) -> float:
        """The score of one or more examples from their evidence."""

    @classmethod
    def value(cls, predictions: Sequence[Any], labels: Sequence[Any]) -> float:
        """Score predictions, paired with labels by position.

        Raises:
            ApproxError: if the score is not a finite number.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            total = cls.total(cls.evidence(predictions, labels))
        if not math.isfinite(total):
            raise ApproxError(
                f"The metric {cls.key} is {total} on {len(labels)} examples: {cls.undefined}. Give examples on which "
                "it has a value.",
                Exit.UNAVAILABLE,
            )
        return total

    @classmethod
    def lost(cls, evidence: NDArray[np.float64]) -> NDArray[np.float64]:
        """The evidence of the same examples if each were wholly lost, [n, k]; by default a score of 0."""
        return np.zeros_like(evidence)

    @classmethod
    def won(cls, evidence: NDArray[np.float64]) -> NDArray[np.float64]:
        """The evidence of the same examples if each were wholly right, [n, k]; by default a score of 1."""
        return np.ones_like(evidence)

    @classmethod
    def at_stake(cls, evidence: NDArray[np.float64]) -> tuple[float, float]:
        """What is at stake in one example: the loss and the gain of the score for each unit of the share of lost or won ones.

        The mean over the examples that have something to lose or to win; of many examples, over 64 of them.
        """
        count, score = len(evidence), cls.total(evidence)
        rows = np.arange(count) if count <= _PROBED else np.random.default_rng(0).choice(count, _PROBED, replace=False)

        def change(changed: NDArray[np.float64], sign: int) -> float:
            found = []
            for row in rows:
                other = evidence.copy()
                other[row] = changed[row]
                found.append(sign * (cls.total(other) - score) * count)
            real = [one for one in found if one > 1e-12]
            return float(np.mean(real)) if real else 0.0

        worse = 1 if cls.lower_is_better else -1
        with np.errstate(divide="ignore", invalid="ignore"):
            return change(cls.lost(evidence), worse), change(cls.won(evidence), -worse)

    @classmethod
    def acceptable(cls, margin: float | None, base: float) -> float:
        """The acceptable loss in the units of the score.

        Args:
            margin: In points, or in percent of the base's score; None is the metric's default.
            base: The base's score.
        """
        share = (cls.margin if margin is None else margin) / 100
        return share if cls.fraction else share * abs(base)

    @staticmethod
    def chance(labels: Sequence[Any]) -> float | None:
        """The score of the best answer that ignores its input, such as the most common class; None if it is not known."""
        return None

    @classmethod
    def _features(cls) -> dict[str, Any]:
        """Types of a prediction and a label, in terms of the library datasets."""
        return dict.fromkeys(("predictions", "references"), datasets.Value(cls.feature))

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=type(self).__doc__ or "",
            citation="",
            inputs_description="one prediction and one reference per example",
            features=datasets.Features(self._features()),
            reference_urls=[self.source],
        )

    def _compute(self, *, predictions: Any = None, references: Any = None, **_: Any) -> dict[str, float]:
        return {self.key: self.value(predictions, references)}
