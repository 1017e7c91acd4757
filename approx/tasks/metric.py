"""What a metric is: a number computed in two steps, the evidence of each example, and the total of some examples'.

The bootstrap takes thousands of totals of the same evidence, so a total is a few array operations: scikit-learn's functions,
which the tests hold them to, spend a hundred times as long on checking their input.
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
    """Whether it is a fraction, told in percent and points; otherwise it is told in its own units."""
    bounded: ClassVar[bool] = True
    """Whether it lies between 0 and 1, or for a correlation -1 and 1."""

    @staticmethod
    def evidence(predictions: Sequence[Any], labels: Sequence[Any]) -> NDArray[np.float64]:
        """What the score is computed from, a row an example, [n, k]; here the prediction beside the label."""
        return np.stack([np.asarray(predictions, float), np.asarray(labels, float)], axis=1)

    @staticmethod
    @abstractmethod
    def total(evidence: NDArray[np.float64]) -> float:
        """The score of the examples whose evidence this is, at least one."""

    @classmethod
    def value(cls, predictions: Sequence[Any], labels: Sequence[Any]) -> float:
        """Score predictions, paired with labels by position."""
        return cls.total(cls.evidence(predictions, labels))

    @classmethod
    def _features(cls) -> dict[str, Any]:
        """Types of a prediction and of a label, as datasets name them."""
        return dict.fromkeys(("predictions", "references"), datasets.Value(cls.feature))

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=type(self).__doc__ or "",
            citation="",
            inputs_description="predictions and references, one of each an example",
            features=datasets.Features(self._features()),
            reference_urls=[self.source],
        )

    def _compute(self, *, predictions: Any = None, references: Any = None, **_: Any) -> dict[str, float]:
        return {self.key: self.value(predictions, references)}
