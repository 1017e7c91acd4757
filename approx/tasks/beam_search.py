"""The likeliest text of a CTC model's outputs, over all the ways to say it, and with a language model if there is one.

Source: Hannun et al., 2014, "First-Pass Large Vocabulary Continuous Speech Recognition using Bi-Directional Recurrent DNNs",
arXiv 1408.2873, algorithm 1.
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
"""What is added to the log probability of a text, by its characters and whether it is whole."""

# Characters that are so much less likely than a frame's likeliest are not tried.
_HOPELESS = math.log(1e-6)
_NEVER = -math.inf


def beam_search(frames: NDArray[np.float64], blank: int, beams: int, bonus: Bonus | None = None) -> Prefix:
    """The characters of the likeliest text, summed over all paths that give it.

    Args:
        frames: Log probabilities of the outputs, [frames, outputs].
        blank: The output that stands between characters.
        beams: How many beginnings of a text are kept after each frame.
        bonus: What a language model adds; None adds nothing.
    """

    def rank(entry: tuple[Prefix, Sequence[float]]) -> float:
        return _sum(*entry[1]) + (bonus(entry[0], False) if bonus else 0.0)

    # Log probabilities that a beginning is said with a blank behind it, and without.
    kept: dict[Prefix, Sequence[float]] = {(): (0.0, _NEVER)}
    for frame in frames:
        found: defaultdict[Prefix, list[float]] = defaultdict(lambda: [_NEVER, _NEVER])
        likely = [(int(place), float(frame[place])) for place in np.flatnonzero(frame >= frame.max() + _HOPELESS)]
        for prefix, (closed, opened) in kept.items():
            either = _sum(closed, opened)
            for character, chance in likely:
                if character == blank:
                    found[prefix][0] = _sum(found[prefix][0], either + chance)
                    continue
                longer, before = found[(*prefix, character)], either
                if prefix and character == prefix[-1]:
                    # Without a blank between them, two frames say one character.
                    found[prefix][1] = _sum(found[prefix][1], opened + chance)
                    before = closed
                longer[1] = _sum(longer[1], before + chance)
        kept = dict(heapq.nlargest(beams, found.items(), key=rank))
    return max(kept, key=lambda prefix: _sum(*kept[prefix]) + (bonus(prefix, True) if bonus else 0.0))


class WordBonus:
    """What an n-gram model of words says of the characters of a text; each word counts when it is whole.

    Args:
        ngram: The model.
        weight: Of its log probabilities.
        reward: For each word, since every further one costs probability.
        spelling: Text of each output.
        space: The output between words.
    """

    def __init__(self, ngram: NGram, weight: float, reward: float, spelling: Sequence[str], space: int) -> None:
        self._ngram, self._weight, self._reward = ngram, weight * math.log(10), reward
        self._spelling, self._space = spelling, space
        # The sum so far, the words before, and the letters of the word that is not whole yet.
        self._known: dict[Prefix, tuple[float, tuple[str, ...], str]] = {(): (0.0, (BEGIN,), "")}

    def __call__(self, prefix: Prefix, whole: bool) -> float:
        """In nats, as `beam_search` adds it."""
        found, before, word = self._at(prefix)
        if not whole:
            return found
        found, before = self._ended(found, before, word)
        return found + self._weight * self._ngram.score(before, END)

    def _at(self, prefix: Prefix) -> tuple[float, tuple[str, ...], str]:
        if prefix not in self._known:
            found, before, word = self._at(prefix[:-1])
            if prefix[-1] == self._space:
                self._known[prefix] = (*self._ended(found, before, word), "")
            else:
                self._known[prefix] = (found, before, word + self._spelling[prefix[-1]])
        return self._known[prefix]

    def _ended(self, found: float, before: tuple[str, ...], word: str) -> tuple[float, Any]:
        if not word:
            return found, before
        more = self._weight * self._ngram.score(before, word) + self._reward
        return found + more, (*before[-self._ngram.order :], word)


def _sum(first: float, second: float) -> float:
    """Log of the sum of two probabilities given by their logs."""
    high, low = (first, second) if first > second else (second, first)
    return high if low == _NEVER else high + math.log1p(math.exp(low - high))
