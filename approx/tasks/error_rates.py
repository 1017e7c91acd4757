"""Error rates of transcripts, over the alignments of jiwer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from approx.tasks.metric import TaskMetric


class WordErrorRate(TaskMetric):
    """Words replaced, left out or put in, by words of the transcripts."""

    key = "wer"
    feature = "string"
    source = "https://jitsi.github.io/jiwer/"
    lower_is_better = True
    # More words can be put in than there are.
    bounded = False

    @staticmethod
    def evidence(predictions: Sequence[Any], labels: Sequence[Any]) -> NDArray[np.float64]:
        """Errors and words of each utterance, [n, 2]; words are compared as they are written."""
        import jiwer

        return _errors(jiwer.process_words, predictions, labels)

    @staticmethod
    def total(evidence: NDArray[np.float64]) -> float:
        """Errors of all utterances by their words."""
        errors, words = evidence.sum(0)
        return float(errors / words)


class CharacterErrorRate(WordErrorRate):
    """Characters replaced, left out or put in, by characters of the transcripts; spaces count."""

    key = "cer"

    @staticmethod
    def evidence(predictions: Sequence[Any], labels: Sequence[Any]) -> NDArray[np.float64]:
        """Errors and characters of each utterance, [n, 2]."""
        import jiwer

        return _errors(jiwer.process_characters, predictions, labels)


def _errors(align: Callable[..., Any], said: Sequence[str], given: Sequence[str]) -> NDArray[np.float64]:
    found = [align(label, prediction) for prediction, label in zip(said, given, strict=True)]
    wrong = [one.substitutions + one.deletions for one in found]
    return np.asarray([(bad + one.insertions, bad + one.hits) for bad, one in zip(wrong, found, strict=True)], float)
