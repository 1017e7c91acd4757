"""Classification of texts from any table or hub dataset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from approx.errors import ApproxError
from approx.tasks.classification import SequenceClassification
from approx.tasks.settings import names_setting
from approx.tasks.table import Row
from approx.tasks.task import Example, Split


class Classification(SequenceClassification):
    """The class of a text, or of a pair of texts (column `text_pair`), in a table or a hub dataset of yours.

    Args:
        labels: Names of the classes in the data, in the order of the model's outputs, as a list or separated by commas; the
            data may also hold numbers in this order. None uses the names in the checkpoint.

    Raises:
        ApproxError: if there are fewer than two labels, or a label twice.
    """

    name = "text-classification"
    metrics = ("accuracy",)
    _other_labels: ClassVar[str] = (
        " Name the classes of the data, in the order of the model's outputs, with --set labels=."
    )

    def __init__(self, labels: Sequence[str] | None = None) -> None:
        self._declared = labels is not None
        if labels is None:
            return
        names = names_setting(self.name, "labels", labels)
        if len(names) < 2 or len(set(names)) < len(names):
            raise ApproxError(
                f"The setting 'labels' of the task '{self.name}' is {labels!r}; it must name at least two different "
                "classes, in the order of the model's outputs."
            )
        self.labels = names

    def adopt(self, config: Any) -> None:
        """Take the names of the classes from the first model."""
        if not self.labels:
            if config.num_labels < 2:
                raise ApproxError(
                    f"{self.name} needs at least two classes, but the model has {config.num_labels} output. Use the task "
                    "glue/stsb with --columns for a regression."
                )
            self.labels = tuple(str(config.id2label[index]) for index in range(config.num_labels))

    def read(
        self, data: Path | None = None, split: str | None = None, limit: int | None = None, *, streaming: bool = False
    ) -> Split:
        """Read a table; the default split is `test`.

        Args:
            data: A table (.csv, .tsv, .jsonl, .json, .parquet; all but the last also .gz) with the columns text and label,
                a folder with a table named after the split, or `hub:OWNER/NAME`. Other columns are named with
                --columns text=NAME,label=NAME.
            split: Name of the split.
            limit: Keep the first `limit` rows; the classes take turns, since many sources are sorted by class.
            streaming: Read a hub dataset while it downloads.

        Raises:
            ApproxError: if there are no data, a row is damaged or has an unknown label, or no row is left.
        """
        if data is None:
            raise ApproxError(
                f"The task '{self.name}' has no data of its own. Give a table or hub:OWNER/NAME with --data."
            )
        return self.read_table(data, split or "test", limit, streaming=streaming)

    def from_rows(self, rows: Iterator[Row], name: str, limit: int | None) -> Iterator[Example]:
        """The examples of the classes in turn."""
        return self.taking_turns(super().from_rows(rows, name, None), limit)

    def label_of(self, value: Any, place: str) -> Any:
        """The index of a class; its name before a model told the classes, when examples are only counted and compared."""
        return super().label_of(value, place) if self.labels else str(value)

    def taking_turns(self, examples: Iterator[Example], limit: int | None) -> Iterator[Example]:
        """Yield examples of the classes in turn; read until the limit is certain to be met."""
        classes: dict[Any, list[Example]] = {index: [] for index in range(len(self.labels))}
        for example in examples:
            classes.setdefault(example.label, []).append(example)
            if limit is not None and self.labels and min(map(len, classes.values())) * len(classes) >= limit:
                break
        for index in range(max(map(len, classes.values()), default=0)):
            yield from (members[index] for members in classes.values() if index < len(members))

    def _order(self, config: Any) -> list[int]:
        try:
            return super()._order(config)
        except ApproxError:
            # Names that the user gave in the order of the outputs need not be those in the config.
            if self._declared and config.num_labels == len(self.labels):
                return list(range(len(self.labels)))
            raise
