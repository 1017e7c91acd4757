"""Examples and splits: what a task loads."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

# Characters from which a text counts by its hash.
_LONG = 10_000


@dataclass(frozen=True)
class Groups:
    """Which examples of a task are correlated, so that they are resampled, searched and held out together.

    Args:
        by: What the examples of a group share: `article`, `speaker`; None if all examples are independent.
        independent: Why examples without a group count as independent.
    """

    by: str | None
    independent: str | None = None


@dataclass(frozen=True)
class Example:
    """One labelled example.

    Args:
        id: Stable name: a row of a source always has the same id, under any limit.
        inputs: The input data by name. Text tasks: `text`, and `text_pair` for the second text of a pair.
        label: The correct prediction: an index into `Task.labels`, or a float for regression.
        group: Examples of one group (a speaker, a document) are correlated and resampled together; None if examples are
            independent.
    """

    id: str
    inputs: dict[str, Any]
    label: Any
    group: str | None = None

    @property
    def unit(self) -> tuple[str, str]:
        """The group, or the example itself: resampling, searching and splitting never divide it."""
        return ("example", self.id) if self.group is None else ("group", self.group)

    @property
    def brief(self) -> dict[str, Any]:
        """The inputs with long texts replaced by their hashes; every stretch of a text carries the whole text."""
        return {
            name: _sha256(value) if isinstance(value, str) and len(value) > _LONG else value
            for name, value in self.inputs.items()
        }


@dataclass
class Tally:
    """Counts of the rows read from a source.

    Args:
        read: Rows that hold an example: rows of a table, lines, files. With a limit, reading ends before the source
            does.
        skipped: Why rows hold none -> their number, such as `empty lines`.
    """

    read: int = 0
    skipped: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Split:
    """The examples of one split, in the order of their source.

    Args:
        name: Name of the split in records: `dev`, `train`, or the stem of the user's file.
        examples: At least one example.
        subset: Whether rows of the full split are missing, which is shown next to the score.
        notes: What was left out or changed, shown next to the score.
        tally: Rows that were read and skipped; None if examples are not read from rows.
    """

    name: str
    examples: list[Example]
    subset: bool
    notes: tuple[str, ...] = ()
    tally: Tally | None = None


@functools.lru_cache(maxsize=16)
def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
