"""Error rates of transcripts, from alignments by jiwer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from approx.tasks.metric import TaskMetric


class WordErrorRate(TaskMetric):
    """Substituted, deleted and inserted words, divided by the words of the transcripts."""

    key = "wer"
    feature = "string"
    source = "https://jitsi.github.io/jiwer/"
    lower_is_better = True
    margin = 0.5
    # More words can be inserted than the transcript has.
    bounds = (0.0, math.inf)

    @classmethod
    def chance(cls, labels: Sequence[Any]) -> float | None:
        """The empty transcript, which misses every word."""
        return cls.value([""] * len(labels), labels)

    @staticmethod
    def evidence(predictions: Sequence[Any], labels: Sequence[Any]) -> NDArray[np.float64]:
        """Errors and words of each utterance, [n, 2]; words are compared verbatim."""
        import jiwer

        return _errors(jiwer.process_words, predictions, labels)

    @staticmethod
    def total(evidence: NDArray[np.float64]) -> float:
        """Errors / words, over all utterances."""
        errors, words = evidence.sum(0)
        # A resample may hold only utterances without words; a task refuses to be scored on such alone.
        return float(errors / max(1, words))

    @classmethod
    def lost(cls, evidence: NDArray[np.float64]) -> NDArray[np.float64]:
        """Every word is wrong, or as many for each word as in the worst utterance."""
        errors, words = evidence.T
        worst = max(1.0, float(np.max(errors[words > 0] / words[words > 0], initial=0.0)))
        return np.stack([np.maximum(errors, worst * words), words], 1)

    @classmethod
    def won(cls, evidence: NDArray[np.float64]) -> NDArray[np.float64]:
        """No word is wrong."""
        return evidence * [0, 1]


class CharacterErrorRate(WordErrorRate):
    """Substituted, deleted and inserted characters, divided by the characters of the transcripts; spaces count."""

    key = "cer"

    @staticmethod
    def evidence(predictions: Sequence[Any], labels: Sequence[Any]) -> NDArray[np.float64]:
        """Errors and characters of each utterance, [n, 2]."""
        import jiwer

        return _errors(jiwer.process_characters, predictions, labels)


def _errors(align: Callable[..., Any], predictions: Sequence[str], labels: Sequence[str]) -> NDArray[np.float64]:
    alignments = [align(label, prediction) for prediction, label in zip(predictions, labels, strict=True)]
    wrong = [one.substitutions + one.deletions for one in alignments]
    return np.asarray(
        [(bad + one.insertions, bad + one.hits) for bad, one in zip(wrong, alignments, strict=True)], float
    )
