"""Metrics that need no network, unlike `evaluate.load`, which downloads scripts.

Each is an `evaluate.Metric`, for Trainer and similar code; see `approx.tasks.metric`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import datasets
import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from approx.tasks.answer_words import answer_words
from approx.tasks.entities import EntityF1
from approx.tasks.error_rates import CharacterErrorRate, WordErrorRate
from approx.tasks.losses import BitsPerByte, MaskedLoss, Perplexity
from approx.tasks.metric import TaskMetric


class Accuracy(TaskMetric):
    """The share of examples with the correct class."""

    key = "accuracy"
    source = "https://scikit-learn.org/stable/modules/generated/sklearn.metrics.accuracy_score.html"

    @staticmethod
    def evidence(predictions: Sequence[Any], labels: Sequence[Any]) -> NDArray[np.float64]:
        """Whether each prediction is the label, [n, 1]."""
        pairs = zip(predictions, labels, strict=True)
        return np.asarray([prediction == label for prediction, label in pairs], float)[:, None]

    @staticmethod
    def chance(labels: Sequence[Any]) -> float | None:
        """The share of the most common class; None if no two examples share one, as where answers are written freely."""
        most = max(Counter(labels).values())
        return most / len(labels) if most > 1 else None

    @staticmethod
    def total(evidence: NDArray[np.float64]) -> float:
        """The mean over examples."""
        return float(evidence.mean())


class MeanScore(TaskMetric):
    """The mean of scores between 0 and 1 that the task itself gave each example."""

    key = "mean_score"
    feature = "float64"
    source = "https://github.com/EleutherAI/lm-evaluation-harness"

    @staticmethod
    def evidence(predictions: Sequence[Any], labels: Sequence[Any]) -> NDArray[np.float64]:
        """The scores, [n, 1]."""
        return np.asarray(predictions, float)[:, None]

    @staticmethod
    def total(evidence: NDArray[np.float64]) -> float:
        """The mean over examples."""
        return float(evidence.mean())


class TokenAccuracy(TaskMetric):
    """The share of correct tokens over all sequences.

    A prediction and its label are of equal length: texts with one character per token, or lists.
    """

    key = "token_accuracy"
    undefined = "the sequences have no tokens"
    feature = "string"
    source = "https://arxiv.org/abs/2006.16236"

    @staticmethod
    def evidence(predictions: Sequence[Any], labels: Sequence[Any]) -> NDArray[np.float64]:
        """Correct tokens and tokens of each sequence, [n, 2]."""
        pairs = zip(predictions, labels, strict=True)
        right = [sum(one == other for one, other in zip(prediction, label, strict=True)) for prediction, label in pairs]
        return np.stack([right, [len(label) for label in labels]], axis=1).astype(float)

    @staticmethod
    def chance(labels: Sequence[Any]) -> float | None:
        """The share of the most common token."""
        tokens = Counter("".join(labels))
        return max(tokens.values()) / tokens.total()

    @staticmethod
    def total(evidence: NDArray[np.float64]) -> float:
        """Correct tokens / tokens."""
        right, count = evidence.sum(0)
        return float(right / count)

    @classmethod
    def lost(cls, evidence: NDArray[np.float64]) -> NDArray[np.float64]:
        """No token is correct."""
        return evidence * [0, 1]

    @classmethod
    def won(cls, evidence: NDArray[np.float64]) -> NDArray[np.float64]:
        """Every token is correct."""
        return evidence[:, [1, 1]]


class F1(TaskMetric):
    """The harmonic mean of precision and recall of class 1; 0 if class 1 neither occurs nor is predicted."""

    key = "f1"
    of_one = False
    source = "https://scikit-learn.org/stable/modules/generated/sklearn.metrics.f1_score.html"

    @staticmethod
    def chance(labels: Sequence[Any]) -> float | None:
        """Class 1 for every example."""
        return F1.value([1] * len(labels), labels)

    @staticmethod
    def total(evidence: NDArray[np.float64]) -> float:
        """Score predicted classes, 0 or 1."""
        predicted, true = evidence.T == 1
        return float(2 * np.sum(predicted & true) / max(1, predicted.sum() + true.sum()))

    @classmethod
    def lost(cls, evidence: NDArray[np.float64]) -> NDArray[np.float64]:
        """The other class."""
        return np.stack([1 - evidence[:, 1], evidence[:, 1]], 1)

    @classmethod
    def won(cls, evidence: NDArray[np.float64]) -> NDArray[np.float64]:
        """The class of the label."""
        return evidence[:, [1, 1]]


class MicroF1(TaskMetric):
    """F1 over all labels of all examples: the harmonic mean of precision and recall of the labels that are set.

    A prediction and a label are lists of 0 and 1, one for each class.
    """

    key = "micro_f1"
    source = "https://scikit-learn.org/stable/modules/generated/sklearn.metrics.f1_score.html"

    @classmethod
    def _features(cls) -> dict[str, Any]:
        flags = datasets.List(datasets.Value("int64"))
        return {"predictions": flags, "references": flags}

    @staticmethod
    def evidence(predictions: Sequence[Any], labels: Sequence[Any]) -> NDArray[np.float64]:
        """Correct, predicted and true labels of each class, [n, 3 classes]."""
        predicted, true = np.asarray(predictions, float), np.asarray(labels, float)
        return np.concatenate([predicted * true, predicted, true], axis=1)

    @classmethod
    def chance(cls, labels: Sequence[Any]) -> float | None:
        """The same labels for every example: the most common ones, as many as score best."""
        commonest = np.argsort(-np.asarray(labels, float).sum(0))
        guesses = [np.isin(np.arange(len(commonest)), commonest[: count + 1]) for count in range(len(commonest))]
        return max(cls.value([guess.astype(float)] * len(labels), labels) for guess in guesses)

    @staticmethod
    def total(evidence: NDArray[np.float64]) -> float:
        """F1 of the counts of all classes."""
        right, predicted, true = evidence.sum(0).reshape(3, -1).sum(1)
        return float(2 * right / max(1, predicted + true))

    @classmethod
    def lost(cls, evidence: NDArray[np.float64]) -> NDArray[np.float64]:
        """The other labels, and none of the true ones."""
        true = np.split(evidence, 3, axis=1)[2]
        return np.concatenate([0 * true, 1 - true, true], axis=1)

    @classmethod
    def won(cls, evidence: NDArray[np.float64]) -> NDArray[np.float64]:
        """The true labels."""
        true = np.split(evidence, 3, axis=1)[2]
        return np.concatenate([true, true, true], axis=1)


class MacroF1(MicroF1):
    """The mean over classes of their F1; 0 for a class that neither occurs nor is predicted."""

    key = "macro_f1"
    of_one = False

    @staticmethod
    def total(evidence: NDArray[np.float64]) -> float:
        """The mean of the classes' F1."""
        right, predicted, true = evidence.sum(0).reshape(3, -1)
        return float(np.mean(2 * right / np.maximum(1, predicted + true)))


class SubsetAccuracy(MicroF1):
    """Exact match: the share of examples with all labels right."""

    key = "subset_accuracy"
    source = "https://scikit-learn.org/stable/modules/generated/sklearn.metrics.accuracy_score.html"

    @staticmethod
    def evidence(predictions: Sequence[Any], labels: Sequence[Any]) -> NDArray[np.float64]:
        """Whether all labels of each example are right, [n, 1]."""
        return (np.asarray(predictions, float) == np.asarray(labels, float)).all(1).astype(float)[:, None]

    @classmethod
    def chance(cls, labels: Sequence[Any]) -> float | None:
        """The most common set of labels."""
        return max(Counter(map(tuple, labels)).values()) / len(labels)

    @staticmethod
    def total(evidence: NDArray[np.float64]) -> float:
        """The mean over examples."""
        return float(evidence.mean())

    @classmethod
    def lost(cls, evidence: NDArray[np.float64]) -> NDArray[np.float64]:
        """Not all labels are right."""
        return 0 * evidence

    @classmethod
    def won(cls, evidence: NDArray[np.float64]) -> NDArray[np.float64]:
        """All labels are right."""
        return 0 * evidence + 1


class Matthews(TaskMetric):
    """Matthews correlation, which for two classes is the Pearson correlation of zeros and ones."""

    key = "matthews"
    of_one = False
    bounds = (-1.0, 1.0)
    source = "https://scikit-learn.org/stable/modules/generated/sklearn.metrics.matthews_corrcoef.html"

    @staticmethod
    def chance(labels: Sequence[Any]) -> float | None:
        """No correlation."""
        return 0.0

    @staticmethod
    def total(evidence: NDArray[np.float64]) -> float:
        """Score predicted classes, 0 or 1."""
        return _correlation(evidence)

    @classmethod
    def lost(cls, evidence: NDArray[np.float64]) -> NDArray[np.float64]:
        """The other class."""
        return np.stack([1 - evidence[:, 1], evidence[:, 1]], 1)

    @classmethod
    def won(cls, evidence: NDArray[np.float64]) -> NDArray[np.float64]:
        """The class of the label."""
        return evidence[:, [1, 1]]


class Pearson(TaskMetric):
    """Pearson correlation of predicted and true numbers."""

    key = "pearson"
    of_one = False
    bounds = (-1.0, 1.0)
    feature = "float64"
    source = "https://docs.scipy.org/doc/scipy/reference/generated/scipy.stats.pearsonr.html"

    @staticmethod
    def chance(labels: Sequence[Any]) -> float | None:
        """No correlation."""
        return 0.0

    @staticmethod
    def total(evidence: NDArray[np.float64]) -> float:
        """Score predicted numbers."""
        return _correlation(evidence)

    @classmethod
    def lost(cls, evidence: NDArray[np.float64]) -> NDArray[np.float64]:
        """The number that is farthest from the label, of all predictions and labels."""
        label = evidence[:, 1]
        low, high = evidence.min(), evidence.max()
        return np.stack([np.where(label - low > high - label, low, high), label], 1)

    @classmethod
    def won(cls, evidence: NDArray[np.float64]) -> NDArray[np.float64]:
        """The number of the label."""
        return evidence[:, [1, 1]]


class Spearman(Pearson):
    """Spearman correlation: the Pearson correlation of ranks; ties share their mean rank."""

    key = "spearman"
    source = "https://docs.scipy.org/doc/scipy/reference/generated/scipy.stats.spearmanr.html"

    @staticmethod
    def total(evidence: NDArray[np.float64]) -> float:
        """Score predicted numbers."""
        return _correlation(rankdata(evidence, axis=0))


class ExactMatch(TaskMetric):
    """The share of questions whose answer is among the reference answers, after SQuAD's normalisation.

    The label of a question is its list of answers; if it is empty, the correct answer is the empty text.
    """

    key = "exact_match"
    source = "https://rajpurkar.github.io/SQuAD-explorer/"

    @classmethod
    def _features(cls) -> dict[str, Any]:
        text = datasets.Value("string")
        return {"predictions": text, "references": datasets.List(text)}

    @classmethod
    def chance(cls, labels: Sequence[Any]) -> float | None:
        """No answer to every question."""
        return cls.value([""] * len(labels), labels)

    @staticmethod
    def evidence(predictions: Sequence[Any], labels: Sequence[Any]) -> NDArray[np.float64]:
        """Whether each answer matches, [n, 1]."""
        pairs = zip(predictions, labels, strict=True)
        matches = [
            any(answer_words(prediction) == answer_words(one) for one in answers or [""])
            for prediction, answers in pairs
        ]
        return np.asarray(matches, float)[:, None]

    @staticmethod
    def total(evidence: NDArray[np.float64]) -> float:
        """The mean over questions."""
        return float(evidence.mean())


class AnswerF1(ExactMatch):
    """The word overlap of an answer with the closest reference answer, as F1; the mean over questions.

    If there are reference answers, an answer without words scores 0, even if a reference is only punctuation.
    """

    key = "answer_f1"

    @staticmethod
    def evidence(predictions: Sequence[Any], labels: Sequence[Any]) -> NDArray[np.float64]:
        """F1 of each answer, [n, 1]."""
        pairs = zip(predictions, labels, strict=True)
        scores = [
            max(_overlap(prediction, one) for one in answers) if answers else float(not answer_words(prediction))
            for prediction, answers in pairs
        ]
        return np.asarray(scores)[:, None]


def _overlap(prediction: str, reference: str) -> float:
    first, second = answer_words(prediction), answer_words(reference)
    shared = sum((Counter(first) & Counter(second)).values())
    return 2 * shared / (len(first) + len(second)) if shared else 0.0


METRICS: dict[str, type[TaskMetric]] = {
    metric.key: metric
    for metric in (
        Accuracy,
        MeanScore,
        TokenAccuracy,
        F1,
        MicroF1,
        MacroF1,
        SubsetAccuracy,
        Matthews,
        Pearson,
        Spearman,
        AnswerF1,
        ExactMatch,
        BitsPerByte,
        Perplexity,
        MaskedLoss,
        EntityF1,
        WordErrorRate,
        CharacterErrorRate,
    )
}
"""Names as in a task's `metrics` and in a record."""


def _correlation(evidence: NDArray[np.float64]) -> float:
    # The correlation with the constant predictions of a collapsed model is NaN, which cannot be compared or stored.
    if not np.ptp(evidence, axis=0).all():
        return 0.0
    return float(np.corrcoef(*evidence.T)[0, 1])
