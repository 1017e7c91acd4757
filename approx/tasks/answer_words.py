"""Normalisation of answers for SQuAD.

Source: the official scoring, https://rajpurkar.github.io/SQuAD-explorer/.
"""

import re
import string


def answer_words(text: str) -> list[str]:
    """The words of an answer: lower case, without punctuation and articles."""
    plain = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()
