"""CTC prefix beam search for the likeliest text, optionally with a language model.

Source: Hannun et al., 2014, "First-Pass Large Vocabulary Continuous Speech Recognition using Bi-Directional Recurrent
DNNs", arXiv 1408.2873, algorithm 1.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from approx.tasks.ngram import BEGIN, END, NGram

Prefix = tuple[int, ...]
Bonus = Callable[[Prefix, bool], float]
"""(characters of a text, whether it is complete) -> bonus for its log probability."""

# Characters whose log probability is lower than the frame's best by more than this are skipped.
_HOPELESS = math.log(1e-6)
_NEVER = -math.inf


def beam_search(frames: NDArray[np.float64], blank: int, beams: int, bonus: Bonus | None = None) -> Prefix:
    """The characters of the likeliest text, by the sum over all its alignments.

    Args:
        frames: Log probabilities of the outputs, [frames, outputs].
        blank: Index of the blank.
        beams: Number of prefixes kept after each frame.
        bonus: Bonus of a language model, if any.
    """

    def rank(entry: tuple[Prefix, Sequence[float]]) -> float:
        return _sum(*entry[1]) + (bonus(entry[0], False) if bonus else 0.0)

    # Log probabilities of a prefix that ends with a blank, and without one.
    best: dict[Prefix, Sequence[float]] = {(): (0.0, _NEVER)}
    for frame in frames:
        extended: defaultdict[Prefix, list[float]] = defaultdict(lambda: [_NEVER, _NEVER])
        likely = [(int(place), float(frame[place])) for place in np.flatnonzero(frame >= frame.max() + _HOPELESS)]
        for prefix, (closed, opened) in best.items():
            either = _sum(closed, opened)
            for character, chance in likely:
                if character == blank:
                    extended[prefix][0] = _sum(extended[prefix][0], either + chance)
                    continue
                longer, before = extended[(*prefix, character)], either
                if prefix and character == prefix[-1]:
                    # Two equal frames without a blank between them are one character.
                    extended[prefix][1] = _sum(extended[prefix][1], opened + chance)
                    before = closed
                longer[1] = _sum(longer[1], before + chance)
        best = dict(heapq.nlargest(beams, extended.items(), key=rank))
    return max(best, key=lambda prefix: _sum(*best[prefix]) + (bonus(prefix, True) if bonus else 0.0))


class WordBonus:
    """Bonus of an n-gram model of words for the characters of a text; a word counts once it is complete.

    Args:
        ngram: The model.
        weight: Weight of its log probabilities.
        reward: Bonus for each word, which makes up for the model's preference for few words.
        spelling: Text of each output.
        space: Index of the output between words.
    """

    def __init__(self, ngram: NGram, weight: float, reward: float, spelling: Sequence[str], space: int) -> None:
        self._ngram, self._weight, self._reward = ngram, weight * math.log(10), reward
        self._spelling, self._space = spelling, space
        # The score so far, the words before, and the letters of the incomplete word.
        self._known: dict[Prefix, tuple[float, tuple[str, ...], str]] = {(): (0.0, (BEGIN,), "")}

    def __call__(self, prefix: Prefix, whole: bool) -> float:
        """The bonus in nats."""
        score, before, word = self._at(prefix)
        if not whole:
            return score
        score, before = self._ended(score, before, word)
        return score + self._weight * self._ngram.score(before, END)

    def _at(self, prefix: Prefix) -> tuple[float, tuple[str, ...], str]:
        if prefix not in self._known:
            score, before, word = self._at(prefix[:-1])
            if prefix[-1] == self._space:
                self._known[prefix] = (*self._ended(score, before, word), "")
            else:
                self._known[prefix] = (score, before, word + self._spelling[prefix[-1]])
        return self._known[prefix]

    def _ended(self, score: float, before: tuple[str, ...], word: str) -> tuple[float, Any]:
        if not word:
            return score, before
        more = self._weight * self._ngram.score(before, word) + self._reward
        return score + more, (*before[-self._ngram.order :], word)


def _sum(first: float, second: float) -> float:
    """Log of the sum of two probabilities given by their logs."""
    high, low = (first, second) if first > second else (second, first)
    return high if low == _NEVER else high + math.log1p(math.exp(low - high))
