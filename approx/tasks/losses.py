"""Losses of language models as metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    widest = None

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


class Perplexity(MaskedLoss):
    """The exponential of the mean loss of a token."""

    key = "perplexity"
    source = "https://huggingface.co/docs/transformers/perplexity"

    @staticmethod
    def total(evidence: NDArray[np.float64]) -> float:
        """Perplexity over all tokens; huge losses give infinity."""
        with np.errstate(over="ignore"):
            return float(np.exp(MaskedLoss.total(evidence)))


class BitsPerByte(MaskedLoss):
    """The loss in bits per byte of the text, which does not depend on the tokenizer."""

    key = "bits_per_byte"
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
