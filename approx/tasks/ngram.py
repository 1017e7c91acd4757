"""N-gram language models in the ARPA format, used by KenLM, SRILM and LibriSpeech's own models.

Source: Katz, 1987, "Estimation of Probabilities from Sparse Data"; the format is described by SRILM's manual page
ngram-format.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from approx.errors import ApproxError, Exit
from approx.text_file import words as split_words

BEGIN, END, _UNKNOWN = "<s>", "</s>", "<unk>"


@dataclass(frozen=True)
class NGram:
    """An n-gram model with back-off.

    Args:
        sha256: Hash of the file; models with equal files are equal.
        order: Words of the longest entries.
        entries: Words -> log10 probability of the last word given the others, and log10 back-off weight.
        lower: Whether the words are in lower case.
    """

    sha256: str
    order: int = field(compare=False, repr=False)
    entries: dict[tuple[str, ...], tuple[float, float]] = field(compare=False, repr=False)
    lower: bool = field(compare=False, repr=False)

    def score(self, before: tuple[str, ...], word: str) -> float:
        """Log10 probability of a word given the words before it.

        Case does not matter. An unknown word counts as `<unk>`; without `<unk>`, it is as likely as the rarest word.

        Args:
            before: The words before, starting with `<s>` at the beginning of a text; only the last ones count.
            word: The word, or `</s>` for the end.
        """
        words = tuple(map(self._known, (*before[max(0, len(before) - self.order + 1) :], word)))
        weight = 0.0
        for start in range(len(words)):
            if (entry := self.entries.get(words[start:])) is not None:
                return weight + entry[0]
            weight += self.entries.get(words[start:-1], (0.0, 0.0))[1]
        return weight + self._rarest

    @functools.cached_property
    def _rarest(self) -> float:
        return min(score for words, (score, _) in self.entries.items() if len(words) == 1 and words != (BEGIN,))

    def _known(self, word: str) -> str:
        if word in (BEGIN, END):
            return word
        word = word.lower() if self.lower else word.upper()
        return word if (word,) in self.entries else _UNKNOWN


def read_ngram(path: Path) -> NGram:
    """Read a model, .arpa or .arpa.gz.

    Raises:
        ApproxError: if the file cannot be read or is not in the ARPA format, with the line.
    """
    try:
        stored = path.stat()
    except OSError as error:
        raise ApproxError(f"The n-gram model {path} cannot be read: {error.strerror}.", Exit.UNAVAILABLE) from None
    # Cached, since a recipe opens its tasks several times and millions of lines take a minute.
    return _read(path.absolute(), stored.st_size, stored.st_mtime_ns)


@functools.lru_cache(maxsize=1)
def _read(path: Path, size: int, changed: int) -> NGram:
    entries: dict[tuple[str, ...], tuple[float, float]] = {}
    order, number, ended = 0, 0, False
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
        for number, line in _lines(text):  # noqa: B007 - the error below names it
            if line.startswith("\\") and line.endswith("-grams:"):
                order = int(line[1:-7])
            elif line == "\\end\\":
                ended = True
            elif order and line:
                score, *words = split_words(line)
                weight = float(words.pop()) if len(words) == order + 1 else 0.0
                if len(words) != order:
                    raise ValueError(f"{len(words)} words where {order} are expected")
                entries[tuple(words)] = (float(score), weight)
    except OSError as error:
        reason = error.strerror or error
        raise ApproxError(f"The n-gram model {path} cannot be read: {reason}.", Exit.UNAVAILABLE) from None
    except (ValueError, EOFError) as error:
        raise _damaged(path, f"line {number}: {error}") from None
    if not any(len(words) == 1 and words[0] not in (BEGIN, END, _UNKNOWN) for words in entries):
        raise _damaged(path, "it has no words")
    if not ended:
        raise _damaged(path, "it has no \\end\\")
    lower = all(word == word.lower() for words in entries if len(words) == 1 for word in words)
    return NGram(hashlib.sha256(raw).hexdigest(), order, entries, lower)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    # Not splitlines(), which also splits at characters that may be in a word.
    return ((number, line.strip(" \t\r")) for number, line in enumerate(text.split("\n"), start=1))


def _damaged(path: Path, reason: str) -> ApproxError:
    return ApproxError(
        f"{path} is not an n-gram model in the ARPA format ({reason}). Download it again.", Exit.UNAVAILABLE
    )
