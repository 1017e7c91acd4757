"""The inputs on which a converted model approximates attention; only these can show a loss."""

from __future__ import annotations

from dataclasses import dataclass

from approx.evaluation.inputs import Prepared, Subject
from approx.evaluation.record_model import Approximated
from approx.tasks.task import Task


@dataclass(frozen=True)
class Coverage:
    """The inputs on which one model approximates.

    Args:
        examples: Whether it approximates in any window of the example; one per example, in the order of the split.
        tokens: Share of all real tokens that are in such windows.
    """

    examples: list[bool]
    tokens: float

    @property
    def counted(self) -> Approximated:
        """The entry of a record."""
        return Approximated(examples=sum(self.examples), tokens=self.tokens)


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
    for batch in prepared.batches:
        widest = max(positions[row] for row in batch)
        rows += [row for row in batch if subject.approximates(positions[row], widest)]
    owners = {prepared.owners[row] for row in rows}
    return Coverage(
        [example in owners for example in range(len(prepared.lengths))],
        sum(positions[row] for row in rows) / sum(positions),
    )
