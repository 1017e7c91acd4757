"""N-gram language models in the ARPA format, which KenLM, SRILM and LibriSpeech's own models are published in.

Source: Katz, 1987, "Estimation of Probabilities from Sparse Data"; the format is that of Doug Paul's at MIT, as SRILM's
manual page ngram-format describes it.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from approx.errors import ApproxError, Exit

BEGIN, END, _UNKNOWN = "<s>", "</s>", "<unk>"


@dataclass(frozen=True)
class NGram:
    """Probabilities of words after words.

    Args:
        sha256: Of the file; two models are equal if their files are.
        order: Words of the longest entries.
        entries: Words -> log10 of the probability of the last after the others, and of the weight of shorter entries for
            words that follow them.
        lower: Whether the model is written in lower case.
    """

    sha256: str
    order: int = field(compare=False, repr=False)
    entries: dict[tuple[str, ...], tuple[float, float]] = field(compare=False, repr=False)
    lower: bool = field(compare=False, repr=False)

    def score(self, before: tuple[str, ...], word: str) -> float:
        """Log10 of the probability of a word after others, of which the last ones count.

        Case does not matter. A word that the model does not know is its `<unk>`, or as likely as its rarest word where it
        has none.

        Args:
            before: `<s>` first, at the beginning of a text.
            word: `</s>` for the end.
        """
        words = tuple(map(self._known, (*before[max(0, len(before) - self.order + 1) :], word)))
        weight = 0.0
        for start in range(len(words)):
            if (found := self.entries.get(words[start:])) is not None:
                return weight + found[0]
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
        ApproxError: if it cannot be read or is not in the ARPA format, with the line.
    """
    try:
        stored = path.stat()
    except OSError as error:
        raise ApproxError(f"The n-gram model {path} cannot be read: {error.strerror}.", Exit.UNAVAILABLE) from None
    # A recipe opens its tasks several times, and millions of lines take a minute.
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
                score, *words = line.split()
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
        raise _damaged(path, "it holds no words")
    if not ended:
        raise _damaged(path, "it does not end as it should")
    lower = all(word == word.lower() for words in entries if len(words) == 1 for word in words)
    return NGram(hashlib.sha256(raw).hexdigest(), order, entries, lower)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    # Not splitlines(), which knows ends of lines that may stand within a word.
    return ((number, line.strip()) for number, line in enumerate(text.split("\n"), start=1))


def _damaged(path: Path, reason: str) -> ApproxError:
    return ApproxError(f"{path} is no n-gram model in the ARPA format ({reason}). Get it again.", Exit.UNAVAILABLE)
