"""Losses of language models as metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import datasets
import numpy as np
from numpy.typing import NDArray

from approx.tasks.metric import TaskMetric


class MaskedLoss(TaskMetric):
    """Mean loss on hidden tokens, in nats.

    A prediction is {"loss": summed nats, "count": tokens}; a label is not used.
    """

    key = "masked_loss"
    source = "https://arxiv.org/abs/1810.04805"
    lower_is_better = True
    fraction = False
    bounds = (0.0, math.inf)
    undefined = "no token is scored, or the losses are too large"
    unit: ClassVar[int] = 1
    """Column of the evidence that the loss of an example is divided by."""
    worst: ClassVar[float] = 0.0
    """Nats for each of these in a lost example; more if an example has more, or twice the mean."""

    @classmethod
    def _features(cls) -> dict[str, Any]:
        loss = {"loss": datasets.Value("float64"), "count": datasets.Value("int64")}
        return {"predictions": loss, "references": datasets.Value("int64")}

    @staticmethod
    def evidence(predictions: Sequence[Any], labels: Sequence[Any]) -> NDArray[np.float64]:
        """Nats, tokens and bytes of each stretch of text, [n, 3]; the label is its number of bytes."""
        pairs = zip(predictions, labels, strict=True)
        return np.asarray([(one["loss"], one["count"], size) for one, size in pairs], float)

    @staticmethod
    def total(evidence: NDArray[np.float64]) -> float:
        """Nats per token."""
        loss, count, _ = evidence.sum(0)
        return float(loss / count)

    @classmethod
    def lost(cls, evidence: NDArray[np.float64]) -> NDArray[np.float64]:
        """The loss of the worst example; at least twice the mean, and at least that of guessing where it is known."""
        loss, size = evidence[:, 0], evidence[:, cls.unit]
        rates = loss[size > 0] / size[size > 0]
        worst = max(cls.worst, 2 * loss.sum() / size.sum(), rates.max())
        return np.column_stack([worst * size, evidence[:, 1:]])

    @classmethod
    def won(cls, evidence: NDArray[np.float64]) -> NDArray[np.float64]:
        """The loss of the best example."""
        loss, size = evidence[:, 0], evidence[:, cls.unit]
        return np.column_stack([(loss[size > 0] / size[size > 0]).min() * size, evidence[:, 1:]])


class Perplexity(MaskedLoss):
    """The exponential of the mean loss of a token."""

    key = "perplexity"
    bounds = (1.0, math.inf)
    undefined = "no token is scored, or the losses are too large"
    source = "https://huggingface.co/docs/transformers/perplexity"

    @staticmethod
    def total(evidence: NDArray[np.float64]) -> float:
        """Perplexity over all tokens; huge losses give infinity."""
        with np.errstate(over="ignore"):
            return float(np.exp(MaskedLoss.total(evidence)))


class BitsPerByte(MaskedLoss):
    """The loss in bits per byte of the text, which does not depend on the tokenizer."""

    key = "bits_per_byte"
    unit = 2
    worst = 8 * math.log(2)
    source = "https://arxiv.org/abs/2101.00027"

    @staticmethod
    def chance(labels: Sequence[Any]) -> float | None:
        """Every byte as likely as any other."""
        return 8.0

    @staticmethod
    def total(evidence: NDArray[np.float64]) -> float:
        """Bits per byte."""
        loss, _, size = evidence.sum(0)
        return float(loss / np.log(2) / size)
