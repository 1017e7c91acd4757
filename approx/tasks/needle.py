"""Find a generated needle in a long document: the value of the key in the question."""

from __future__ import annotations

from itertools import product

import numpy as np

from approx.tasks.classification import SequenceClassification
from approx.tasks.generated import LONGEST, Generated
from approx.tasks.settings import whole_setting
from approx.tasks.task import Example

QUESTION = "find"
VALUES = ("black", "blue", "brown", "green", "grey", "red", "white", "yellow")
# A table: a line of words is read as one.
# fmt: off
KEYS = (
    "acorn", "amber", "anchor", "apple", "arrow", "barrel", "basket", "beacon", "bell", "blanket",
    "bottle", "bridge", "bucket", "candle", "castle", "cherry", "compass", "copper", "cradle",
    "curtain", "feather", "fiddle", "hammer", "island", "kettle", "ladder", "lantern", "marble",
    "nutmeg", "orchard", "pebble", "violin",
)
# fmt: on
_SYLLABLES = [consonant + vowel for consonant, vowel in product("dklmprtv", "ao")]
FILLERS = tuple(first + second for first, second in product(_SYLLABLES, repeat=2))
NEEDLES = tuple(f"{key}:{value}" for key, value in product(KEYS, VALUES))
WORDS = (QUESTION, *KEYS, *NEEDLES, *FILLERS)
"""Every word of the examples; a tokenizer that knows them gives one token per word."""

_SPECIAL_TOKENS = 2
_QUESTION_WORDS = 2


class Needle(Generated, SequenceClassification):
    """Documents of made-up words that hide `needles` pairs `key:value` at random places.

    A text is the question (`find` and a key), followed by the document; the label is the value of that key. All other
    pairs are distractors, so a model must find one of thousands of words by its content, at any distance; counting
    values or reading near the question is no better than guessing. This demonstrates what a mechanism keeps; it is not
    a benchmark of language.

    Args:
        length: Tokens of every example, at most 131,072, including the two special tokens of a BERT tokenizer.
        examples: Rows of a split.
        needles: Pairs in every document, with different keys.
        seed: Seed of all rows, together with the split and the number of the row.

    Raises:
        ApproxError: if a setting is not a whole number, or there are more needles than keys or than the length allows.
    """

    name = "needle"
    metrics = ("accuracy",)
    labels = VALUES

    def __init__(self, length: int = 2048, examples: int = 200, needles: int = 8, seed: int = 0) -> None:
        whole_setting(self.name, "needles", needles, 1, len(KEYS))
        whole_setting(self.name, "length", length, _SPECIAL_TOKENS + _QUESTION_WORDS + needles, LONGEST)
        whole_setting(self.name, "examples", examples, 1)
        whole_setting(self.name, "seed", seed, 0)
        self.length, self.size, self.needles, self.seed = length, examples, needles, seed

    def example(self, split: str, row: int, random: np.random.Generator) -> Example:
        """A document; the classes take turns from row to row."""
        keys = random.permutation(len(KEYS))[: self.needles]
        values = random.integers(len(VALUES), size=self.needles)
        values[0] = row % len(VALUES)
        words = self.length - _SPECIAL_TOKENS - _QUESTION_WORDS
        document = [FILLERS[index] for index in random.integers(len(FILLERS), size=words)]
        for place, key, value in zip(random.permutation(words), keys, values, strict=False):
            document[place] = f"{KEYS[key]}:{VALUES[value]}"
        text = " ".join([QUESTION, KEYS[keys[0]], *document])
        name = f"needle/{split}/{self.length}-{self.needles}-{self.seed}/{row}"
        return Example(name, {"text": text}, int(values[0]))
