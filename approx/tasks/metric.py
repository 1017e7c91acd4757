"""Metrics, computed in two steps: the evidence of each example, and the total over examples.

The bootstrap computes thousands of totals of the same evidence, so a total is a few array operations. The tests compare
them with scikit-learn's functions, which take a hundred times as long to check their input.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import datasets
import evaluate
import numpy as np
from numpy.typing import NDArray


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
    widest: ClassVar[float | None] = 1.0
    """The largest difference of two scores: 1 between 0 and 1, 2 for a correlation; None if there is none."""

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
        """Score predictions, paired with labels by position."""
        return cls.total(cls.evidence(predictions, labels))

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
