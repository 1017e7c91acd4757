"""Tasks with generated examples: the splits, and rows that do not depend on their neighbours."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import ClassVar

import numpy as np

from approx.errors import ApproxError
from approx.tasks.settings import whole_setting
from approx.tasks.task import Example, Groups, Split, Task

# Longer examples would take minutes to make before anybody learns that no model can read them.
LONGEST = 131_072
_SPLITS = ("train", "dev")


class Generated(Task):
    """A task that generates its rows from a seed; `train` and `dev` have different rows."""

    groups: ClassVar[Groups] = Groups(None, "each row is drawn by itself")
    fields = ()
    size: int
    """Rows of a split."""
    seed: int

    @abstractmethod
    def example(self, split: str, row: int, random: np.random.Generator) -> Example:
        """Make a row of a split with its own random generator."""

    def read(
        self, data: Path | None = None, split: str | None = None, limit: int | None = None, *, streaming: bool = False
    ) -> Split:
        """Generate a split, `dev` (the default) or `train`.

        Raises:
            ApproxError: if data are given, the split is unknown or the limit is below 1.
        """
        if data is not None:
            raise ApproxError(
                f"The task '{self.name}' generates its examples and cannot read {data}. Leave out --data."
            )
        split = split or "dev"
        if split not in _SPLITS:
            raise ApproxError(f"Unknown split '{split}' of the task '{self.name}'. Known: {', '.join(_SPLITS)}.")
        if limit is not None:
            whole_setting(self.name, "limit", limit, 1)
        rows = range(min(self.size, limit or self.size))
        # With a generator per row, a row does not depend on the number of rows.
        drawn = (np.random.default_rng([self.seed, _SPLITS.index(split), row]) for row in rows)
        examples = [self.example(split, row, random) for row, random in zip(rows, drawn, strict=True)]
        return Split(split, examples, subset=len(rows) < self.size)
