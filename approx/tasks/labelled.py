"""Classification of texts from any table or hub dataset."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from approx.errors import ApproxError, Exit, shown
from approx.tasks.classification import NUMBER, ONE, SEVERAL, SequenceClassification, kind_of_outputs, unnamed
from approx.tasks.settings import names_setting
from approx.tasks.table import Row
from approx.tasks.task import Example, Split

_METRICS = {SEVERAL: ("micro_f1", "macro_f1", "subset_accuracy"), NUMBER: ("pearson", "spearman")}
# Between the names of several labels in one cell.
_BETWEEN = re.compile(r"\s*[,;|]\s*")


class Classification(SequenceClassification):
    """The class of a text, or of a pair of texts (column `text_pair`), in a table or a hub dataset of yours.

    The checkpoint's `problem_type` says whether a text has one label, several at once (`label` is a list, names between
    commas, or missing where each label has a column of 0 and 1) or a number. Metrics are accuracy; F1 over all labels,
    its mean over labels and the share of texts with all labels right; or correlations.

    Args:
        labels: Names of the classes in the data, in the order of the model's outputs, as a list or separated by commas;
            the data may also hold numbers in this order. None uses the names in the checkpoint.

    Raises:
        ApproxError: if there are fewer than two labels, or a label twice.
    """

    name = "text-classification"
    usual: ClassVar[bool] = True
    metrics = ("accuracy",)
    _other_labels: ClassVar[str] = (
        " Name the classes of the data, in the order of the model's outputs, with --set labels=."
    )

    def __init__(self, labels: Sequence[str] | None = None) -> None:
        self._declared = labels is not None
        if labels is None:
            return
        names = names_setting(self.name, "labels", labels)
        numbers = [int(name) if name.isdecimal() else -1 for name in names]
        if len(names) > 1 and sorted(numbers) == list(range(len(names))):
            # The names of the classes are those of the checkpoint, or their numbers.
            self.labels, self._arranged = tuple(map(str, range(len(names)))), tuple(numbers)
            return
        if len(names) < 2 or len(set(names)) < len(names):
            raise ApproxError(
                f"The setting 'labels' of the task '{self.name}' is {shown(labels)}; it must name at least two "
                "different classes, in the order of the model's outputs."
            )
        self.labels, self._arranged = names, tuple(range(len(names)))

    _kind: str | None = None

    @property
    def kind(self) -> str:
        """What the checkpoint predicts; one of the labels before a model is checked."""
        return self._kind or ONE

    def adopt(self, config: Any) -> None:
        """Take what is predicted, and the names of the classes, from the first model."""
        names = tuple(str(config.id2label[index]) for index in range(config.num_labels))
        if self._kind is None:
            self._kind = self._kind_of(config)
            self.metrics = _METRICS.get(self._kind, self.metrics)
            if self._kind == NUMBER:
                self._refuse_numbers(config)
        numbered = self._arranged is not None and self.labels == tuple(map(str, range(len(names))))
        if self._kind != NUMBER and (not self.labels or (numbered and not unnamed(names))):
            self.labels = names

    def _kind_of(self, config: Any) -> str:
        return kind_of_outputs(config)

    def _refuse_numbers(self, config: Any) -> None:
        if config.num_labels != 1 or self.labels:
            raise ApproxError(
                f"{self.name}: the checkpoint predicts {config.num_labels} number{'s'[: config.num_labels > 1]} "
                f"(problem_type {config.problem_type!r} in config.json), "
                f"{'which no task here scores' if config.num_labels > 1 else 'not labels'}. Use a checkpoint with "
                "labels, or correct problem_type if it is wrong.",
                Exit.UNSUPPORTED,
            )

    def set_labels(self, order: Sequence[int]) -> str:
        """The value of the setting `labels`: names, not numbers, if the user named the classes."""
        named = self._arranged is not None and self.labels != tuple(map(str, range(len(self.labels))))
        return ",".join(self.labels[index] for index in order) if named else super().set_labels(order)

    def about_labels(self, config: Any) -> str | None:
        """As for any classification; also that names set by the user contradict those of the checkpoint."""
        if self._arranged is None or self.kind != ONE:
            return super().about_labels(config)
        set_ = [self.labels[index] for index in self._arranged]
        from_config = [str(config.id2label[index]) for index in range(config.num_labels)]
        if set_ != from_config and sorted(set_) == sorted(from_config):
            return f"labels were set as {', '.join(set_)}, though the checkpoint names its outputs {', '.join(from_config)}"
        return None

    def read(
        self, data: Path | None = None, split: str | None = None, limit: int | None = None, *, streaming: bool = False
    ) -> Split:
        """Read a table; the default split is `test`.

        Args:
            data: A table (.csv, .tsv, .jsonl, .json, .parquet; all but the last also .gz) with the columns text and
                label, a folder with a table named after the split, or `hub:OWNER/NAME`. Other columns are named with
                --columns text=NAME,label=NAME.
            split: Name of the split.
            limit: Keep the first `limit` rows; the classes take turns, since many sources are sorted by class.
            streaming: Read a hub dataset while it downloads.

        Raises:
            ApproxError: if there are no data, a row is damaged or has an unknown label, or no row is left.
        """
        if data is None:
            raise ApproxError(f"The task '{self.name}' has no data set. Give a table or hub:OWNER/NAME with --data.")
        return self.read_table(data, split or "test", limit, streaming=streaming)

    def from_rows(self, rows: Iterator[Row], name: str, limit: int | None) -> Iterator[Example]:
        """The examples of the classes in turn."""
        return self.taking_turns(super().from_rows(rows, name, None), limit)

    def label_of(self, value: Any, place: str) -> Any:
        """The label; as text before the classes are known from a model, when examples are only counted and compared.

        Several labels are 0 or 1 for each class, in order.
        """
        if self.kind == SEVERAL:
            return self._several(value, place)
        return super().label_of(value, place) if self.labels or self.kind == NUMBER else str(value)

    def _several(self, value: Any, place: str) -> list[int]:
        if isinstance(value, str) and value not in self.labels:
            value = [name for name in _BETWEEN.split(value.strip()) if name]
        listed = value if isinstance(value, list) else [value]
        flags = [_flag(one) for one in listed]
        if len(listed) == len(self.labels) > 1 and None not in flags:
            return [int(flag or 0) for flag in flags]
        chosen = {super(Classification, self).label_of(one, place) for one in listed}
        return [int(index in chosen) for index in range(len(self.labels))]

    def _cells(self, row: Row) -> dict[str, Any]:
        """The values of a row; of several labels, the names of the columns that hold 1, if there is no column of them."""
        column = self.columns.get("label", "label")
        if self._kind is None and not self.labels and column not in row.cells:
            # Examples that are only counted and compared, before a model shows that each label has a column.
            return super()._cells(
                dataclasses.replace(row, cells={**row.cells, column: sorted(map(str, row.cells.items()))})
            )
        if self.kind != SEVERAL or row.cells.get(column) is not None or not set(self.labels) <= row.cells.keys():
            return super()._cells(row)
        flags = {name: _flag(row.cells[name]) for name in self.labels}
        if wrong := next((name for name, flag in flags.items() if flag is None), None):
            raise ApproxError(
                f"{row.place}: the column {wrong} holds {shown(row.cells[wrong])}; a label's column holds 0 or 1. Fix "
                "or remove it.",
                Exit.UNAVAILABLE,
            )
        with_labels = dataclasses.replace(
            row, cells={**row.cells, column: [name for name, flag in flags.items() if flag]}
        )
        return super()._cells(with_labels)

    def taking_turns(self, examples: Iterator[Example], limit: int | None) -> Iterator[Example]:
        """Yield examples of the classes in turn; read until the limit is certain to be met."""
        if self.kind != ONE:
            yield from examples
            return
        classes: dict[Any, list[Example]] = {index: [] for index in range(len(self.labels))}
        for example in examples:
            classes.setdefault(example.label, []).append(example)
            if limit is not None and self.labels and min(map(len, classes.values())) * len(classes) >= limit:
                break
        for index in range(max(map(len, classes.values()), default=0)):
            yield from (members[index] for members in classes.values() if index < len(members))


def _flag(value: Any) -> bool | None:
    """Whether a label is set, from 0 or 1; None if the value is neither."""
    return {"0": False, "1": True, "0.0": False, "1.0": True, "true": True, "false": False}.get(
        str(value).strip().lower()
    )
