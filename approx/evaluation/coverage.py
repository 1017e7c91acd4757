"""How much of attention a converted model approximates on the inputs of a task; only that can show a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from approx.evaluation.inputs import Prepared, Subject
from approx.evaluation.record_model import Approximated
from approx.tasks.task import Task

# Lengths at which pairs are counted; between them their share is interpolated.
_COUNTED = 32


@dataclass(frozen=True)
class Coverage:
    """The inputs on which one model approximates, and how much of them.

    Args:
        examples: Whether it approximates in any window of the example; one per example, in the order of the split.
        tokens: Share of all real tokens that are in such windows.
        pairs: Share of the pairs of tokens whose weight is not exact, averaged over the inputs; None if it is not known.
    """

    examples: list[bool]
    tokens: float
    pairs: float | None = None

    @property
    def counted(self) -> Approximated:
        """The entry of a record."""
        return Approximated(examples=sum(self.examples), tokens=self.tokens, pairs=self.pairs)


def coverage(subject: Subject, task: Task, prepared: Prepared) -> Coverage | None:
    """Compute from the lengths of the inputs on which of them a model approximates.

    The model does not run, so cached outputs give the same result. A batch halved for lack of memory counts as planned.

    Returns:
        The coverage; None for a model that is not converted.
    """
    if subject.approximates is None:
        return None
    positions = [task.positions(encoding, subject.model.config) for encoding in prepared.encodings]
    rows: list[int] = []
    sizes: list[tuple[int, int]] = []
    for batch in prepared.batches:
        widest = max(positions[row] for row in batch)
        rows += [row for row in batch if subject.approximates(positions[row], widest)]
        sizes += [(positions[row], widest) for row in batch]
    owners = {prepared.owners[row] for row in rows}
    return Coverage(
        [example in owners for example in range(len(prepared.lengths))],
        sum(positions[row] for row in rows) / sum(positions),
        None if subject.approximated_pairs is None else mean_pairs(subject, subject.approximated_pairs, sizes),
    )


def mean_pairs(subject: Subject, share: Callable[[int, int], float], sizes: list[tuple[int, int]]) -> float:
    """The share of approximated pairs, averaged over inputs.

    Args:
        subject: The model, which is exact where `approximates` says so.
        share: Its `approximated_pairs`.
        sizes: Positions of each input, and of the longest input of its batch.
    """
    assert subject.approximates is not None
    reached = [size for size in sizes if subject.approximates(*size)]
    if not reached:
        return 0.0
    lengths = np.unique([length for length, _ in reached])
    grid = lengths[np.unique(np.linspace(0, len(lengths) - 1, _COUNTED).round().astype(int))]
    # Where `exact_below` makes an input exact, that was decided above; a batch as wide as the input is not.
    widest = max(widest for _, widest in reached)
    counted = [share(int(length), widest) for length in grid]
    return float(np.interp([length for length, _ in reached], grid, counted).sum()) / len(sizes)
