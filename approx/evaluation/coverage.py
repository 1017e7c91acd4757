"""On which of the inputs a converted model computes anything but exact attention: the only ones that can show a loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from approx.evaluation.inputs import Prepared, Subject
from approx.tasks.task import Task


@dataclass(frozen=True)
class Coverage:
    """Where one model approximates.

    Args:
        examples: Whether it does, one an example, in the order of the split: in any of the windows that the example is read in.
        tokens: Share of all real tokens that lie in windows in which it does.
    """

    examples: list[bool]
    tokens: float

    def to_dict(self) -> dict[str, Any]:
        """What a record keeps of it."""
        return {"examples": sum(self.examples), "tokens": self.tokens}


def coverage(subject: Subject, task: Task, prepared: Prepared) -> Coverage | None:
    """Tell from the lengths of the inputs on which of them a model approximates.

    Nothing is run, so it is the same whether outputs are computed or were kept. A batch that is halved because memory ends is
    counted as it was planned.

    Returns:
        None for a model that is not converted.
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
