"""Examples and splits: what a task loads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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


@dataclass(frozen=True)
class Split:
    """The examples of one split, in the order of their source.

    Args:
        name: Name of the split in records: `dev`, `train`, or the stem of the user's file.
        examples: At least one example.
        subset: Whether rows of the full split are missing, which is shown beside the score.
        notes: What was left out or changed, shown beside the score.
    """

    name: str
    examples: list[Example]
    subset: bool
    notes: tuple[str, ...] = ()
