"""A generated needle in a long document: which value does the key have that the question names?"""

from __future__ import annotations

from itertools import product

import numpy as np

from approx.tasks.classification import SequenceClassification
from approx.tasks.generated import Generated
from approx.tasks.settings import whole_setting
from approx.tasks.task import Example

QUESTION = "find"
VALUES = ("black", "blue", "brown", "green", "grey", "red", "white", "yellow")
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
"""Every word that an example may hold; a tokenizer that knows them reads one token a word."""

_SPECIAL_TOKENS = 2
_QUESTION_WORDS = 2


class Needle(Generated, SequenceClassification):
    """Documents of made-up words that hide `needles` pairs `key:value`, anywhere and in any order.

    A text is the question (`find` and a key) and then the document; the label is the value of that key. All
    the other pairs are distractors, so neither counting values nor reading around the question gives more than
    a guess: one of thousands of words has to be found by its content, at any distance. A demonstration of
    what a mechanism keeps, and no benchmark of language.

    Args:
        length: Tokens of every example, with the two special tokens that a BERT tokenizer puts around the text.
        examples: Rows of a split.
        needles: Pairs in every document, all of different keys.
        seed: What every row is drawn from, together with its split and its own number.

    Raises:
        ApproxError: if a setting is not a whole number, or the needles fit neither the keys nor the length.
    """

    name = "needle"
    metrics = ("accuracy",)
    labels = VALUES

    def __init__(self, length: int = 2048, examples: int = 200, needles: int = 8, seed: int = 0) -> None:
        whole_setting(self.name, "needles", needles, 1, len(KEYS))
        whole_setting(self.name, "length", length, _SPECIAL_TOKENS + _QUESTION_WORDS + needles)
        whole_setting(self.name, "examples", examples, 1)
        whole_setting(self.name, "seed", seed, 0)
        self.length, self.size, self.needles, self.seed = length, examples, needles, seed

    def example(self, split: str, row: int, random: np.random.Generator) -> Example:
        """A document; the classes of the rows take turns."""
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
