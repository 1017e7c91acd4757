"""Entities in the tags of words, and their F1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
import numpy as np
from numpy.typing import NDArray

from approx.tasks.metric import TaskMetric


class EntityF1(TaskMetric):
    """F1 over whole entities: their type, first and last word must be right.

    Tags are B-TYPE, I-TYPE and O; I- also begins an entity if none of its type goes on. A tag without a type is an
    entity of one word.
    """

    key = "entity_f1"
    source = "https://www.clips.uantwerpen.be/conll2000/chunking/output.html"

    @classmethod
    def _features(cls) -> dict[str, Any]:
        tags = datasets.List(datasets.Value("string"))
        return {"predictions": tags, "references": tags}

    @staticmethod
    def evidence(predictions: Sequence[Any], labels: Sequence[Any]) -> NDArray[np.float64]:
        """Entities found correctly, predicted and present in each text, [n, 3]."""
        pairs = [(entities(predicted), entities(true)) for predicted, true in zip(predictions, labels, strict=True)]
        return np.asarray([(len(predicted & true), len(predicted), len(true)) for predicted, true in pairs], float)

    @staticmethod
    def total(evidence: NDArray[np.float64]) -> float:
        """The harmonic mean of precision and recall over all texts; 0 without any entity."""
        right, predicted, true = evidence.sum(0)
        return float(2 * right / max(1, predicted + true))

    @classmethod
    def lost(cls, evidence: NDArray[np.float64]) -> NDArray[np.float64]:
        """As many entities as there are, all of them wrong."""
        _, predicted, true = evidence.T
        return np.stack([np.zeros(len(evidence)), np.maximum(predicted, true), true], 1)

    @classmethod
    def won(cls, evidence: NDArray[np.float64]) -> NDArray[np.float64]:
        """Every entity, and no other."""
        return evidence[:, [2, 2, 2]]


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Type, first word and end of every entity."""
    found, start, kind = set(), 0, None
    for place, tag in enumerate([*tags, "O"]):
        prefix, _, name = tag.partition("-")
        if kind is not None and not (prefix in ("I", "E") and name == kind):
            found.add((kind, start, place))
            kind = None
        if kind is None and tag != "O":
            start, kind = place, name or tag
    return found
