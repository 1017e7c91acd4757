"""The base class of tasks: labelled examples, their encodings, predictions from a model's outputs, and scores.

To add a task, write one file, one line in `TASKS` and one test. A classification of texts subclasses
`SequenceClassification` and defines only `name`, `labels`, `metrics` and `load`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from approx.errors import ApproxError, Exit
from approx.tasks.example import Example, Groups, Split, Tally
from approx.tasks.head import Head
from approx.tasks.table import Row, is_hub, open_table, readable

__all__ = ["Encoding", "Example", "Groups", "Split", "Tally", "Task", "doubling"]

Encoding = dict[str, Any]
"""The model's inputs for one example or one window of it, by name, without padding.

A task may store its own data under other names; its `collate` leaves them out.
"""


class Task(ABC):
    """One task: how to load its examples, encode them, and score predictions.

    A task holds no model and no data, so one object serves all checkpoints. `processor` is the tokenizer or feature
    extractor that transformers loads with a model.
    """

    name: str
    """Name on the command line, in recipes and in records: `glue/sst2`."""
    head: ClassVar[Head]
    """The head that a model needs."""
    groups: ClassVar[Groups]
    """Which examples are correlated; every task says so, or why none are."""
    fields: ClassVar[tuple[str, ...]] = ()
    """What a row of a table must hold: `text`, `label`; empty if the task reads no tables."""
    optional_fields: ClassVar[tuple[str, ...]] = ()
    """What it may hold besides, and besides `id`; read only from columns that are named. A column `group` is always read."""
    columns: Mapping[str, str] = MappingProxyType({})
    """Field -> name of its column, where they differ."""
    encoding: str | None = None
    """Encoding of text files; None is UTF-8, or what a byte order mark says."""
    metrics: tuple[str, ...]
    """Names in `approx.tasks.metrics.METRICS`; models are compared by the first."""
    dataset: str | None = None
    """Its dataset on the hub; None if examples are generated or only in files."""
    labels: tuple[str, ...] = ()
    """Names of the classes in the order of their indices; empty for regression."""
    slice_metric: str | None = None
    """The metric of slices, if it is not the first."""
    sliced_by: ClassVar[str] = "tokens"
    """The unit of a slice's bounds: tokens of an example."""
    windowed: ClassVar[bool] = False
    """Whether an example longer than a model's positions is read in several windows."""
    part_setting: ClassVar[str | None] = None
    """The setting that selects a part of a split, if any, such as `articles`."""
    measures: Literal["likelihood", "generation"] | None = None
    """For decoders: `likelihood` if given text is rated, `generation` if the model writes its answer token by token."""
    usual: ClassVar[bool] = False
    """Whether it is the task of data without a named task, for models with its head."""
    draws: ClassVar[bool] = False
    """Whether parts of an encoding, such as hidden tokens, are drawn at random from the id of the example."""
    input_name: ClassVar[str] = "input_ids"
    """Transformers' name of the main input of suitable models."""
    input_per_token: ClassVar[int] = 1
    """Numbers in the input for each token, such as the samples of a frame of sound."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not hasattr(cls, "groups"):
            raise TypeError(f"The task {cls.__name__} does not say which of its examples are correlated: set 'groups'.")

    def load(
        self, data: Path | None = None, split: str | None = None, limit: int | None = None, *, streaming: bool = False
    ) -> Split:
        """Load a split: a table if columns were named or it is a hub dataset, otherwise what `read` reads.

        Args:
            data: A table (.csv, .tsv, .jsonl, .json, .parquet), `hub:OWNER/NAME`, or as in `read`.
            split: None uses the task's default, the usual split for scores.
            limit: Keep the first `limit` rows.
            streaming: Read a hub dataset while it downloads, up to the limit and without storing it, instead of
                downloading all splits into the cache. The examples are the same; other sources ignore it.

        Raises:
            ApproxError: if the data do not exist, a row is damaged or unlabelled, or no row is left.
        """
        if not self.columns and not is_hub(data):
            with readable(self.name, data):
                return self.read(data, split, limit, streaming=streaming)
        if data is None:
            raise ApproxError(
                f"Columns were named for the task '{self.name}', but no table. Give a file or hub:OWNER/NAME with "
                "--data."
            )
        return self.read_table(data, split or "test", limit, streaming=streaming)

    @abstractmethod
    def read(
        self, data: Path | None = None, split: str | None = None, limit: int | None = None, *, streaming: bool = False
    ) -> Split:
        """Read a split in the task's own layout.

        Args:
            data: A file or folder in the official layout; None uses the task's own source (a hub dataset or a seeded
                generator).
            split: As for `load`.
            limit: As for `load`.
            streaming: As for `load`.

        Raises:
            ApproxError: as for `load`.
        """

    def read_table(self, data: Path, split: str, limit: int | None = None, *, streaming: bool = False) -> Split:
        """Read a split from a table, whose columns are `columns`.

        Raises:
            ApproxError: if there is no such table, the task reads none, or a column is missing.
        """
        if not self.fields:
            raise ApproxError(f"The task '{self.name}' reads no tables. Give its own files with --data.")
        if limit is not None and limit < 1:
            raise ApproxError(f"--limit {limit} leaves no rows; it must be at least 1.")
        tally = Tally()
        name, rows = open_table(self.name, data, split, tally, encoding=self.encoding, streaming=streaming)
        examples = list(islice(self.from_rows(rows, name, limit), limit))
        if not examples:
            raise ApproxError(f"{self.name}: 0 rows in {data}. Give a file with at least one.", Exit.UNAVAILABLE)
        return Split(name, examples, subset=limit == len(examples), tally=tally)

    def from_rows(self, rows: Iterator[Row], name: str, limit: int | None) -> Iterator[Example]:
        """Examples of the rows of a table, at least `limit` of them if there are as many; by default one for each row."""
        for number, row in enumerate(rows):
            cells = self._cells(row)
            inputs, label = self.from_cells(cells, row)
            # Correlated rows that are taken for independent ones give intervals that are too narrow.
            group = cells.get("group", row.cells.get("group"))
            yield Example(
                str(cells.get("id", f"{name}-{number}")), inputs, label, None if group in (None, "") else str(group)
            )

    def from_cells(self, cells: dict[str, Any], row: Row) -> tuple[dict[str, Any], Any]:
        """Inputs and label of an example.

        Args:
            cells: Values by the names of `fields`.
            row: The row that holds them, for messages and paths.
        """
        raise NotImplementedError

    def _cells(self, row: Row) -> dict[str, Any]:
        """The values of a row by the names of the task's fields; those that may be missing only if a column is named."""
        names = {**{field: field for field in self.fields}, **self.columns}
        grouped = self.columns.get("group")
        missing = [
            column
            for column in names.values()
            if row.cells.get(column) is None or (column == grouped and row.cells[column] == "")
        ]
        if missing:
            raise ApproxError(
                f"{row.place}: no column {' and no '.join(missing)}, or it is empty; the columns are "
                f"{', '.join(map(str, row.cells))[:200]}. Name the columns with --columns, e.g. "
                f"--columns {','.join(f'{field}=NAME' for field in self.fields)}.",
                Exit.UNAVAILABLE,
            )
        return {field: row.cells[column] for field, column in names.items()}

    def examples(
        self, data: Path | None = None, split: str | None = None, limit: int | None = None, *, streaming: bool = False
    ) -> list[Example]:
        """Return only the examples of `load`."""
        return self.load(data, split, limit, streaming=streaming).examples

    def adopt(self, config: Any) -> None:  # noqa: B027  # most tasks leave nothing open
        """Take over from the first model what the settings leave open, such as the names of its classes."""

    def check(self, model: Any) -> None:
        """Check that a model fits this task.

        Raises:
            ApproxError: if its head or its labels differ from the task's.
        """
        if not self.head.is_of(type(model)):
            raise ApproxError(
                f"{self.name} needs a {self.head.name} head, but the model is a {type(model).__name__}. "
                f"Fine-tune the checkpoint on the task (with {self.head.auto_class}), or choose a task for its head.",
                Exit.UNSUPPORTED,
            )
        self.adopt(model.config)

    @abstractmethod
    def encode(self, example: Example, processor: Any, max_length: int | None = None) -> list[Encoding]:
        """Turn one example into the model's inputs, without padding: one encoding, or several windows.

        Args:
            example: An example from `load`.
            processor: The tokenizer or feature extractor of the checkpoint.
            max_length: Maximum tokens of an encoding: windowed tasks read longer examples in windows, others truncate
                them. None means no limit.
        """

    def tokens(self, encoding: Encoding) -> int:
        """Tokens of an encoding."""
        return len(next(iter(encoding.values()), ()))

    def at_least(self, split: Split, processor: Any, tokens: int | None, limit: int | None = None) -> Split:
        """The examples with an input of so many tokens or more; all where `tokens` is None.

        Args:
            split: Examples of this task.
            processor: Tokenizer or feature extractor.
            tokens: Tokens of an input at least.
            limit: Tokens of an input at most, as in `encode`.

        Raises:
            ApproxError: if no example is left.
        """
        if tokens is None:
            return split
        longest = [
            max(map(self.tokens, self.encode(example, processor, limit)), default=0) for example in split.examples
        ]
        if max(longest, default=0) < tokens:
            raise ApproxError(
                f"{self.name}: none of {len(longest)} examples has the {tokens} tokens of --min-length; the longest has "
                f"{max(longest, default=0)}.",
                Exit.UNAVAILABLE,
            )
        chosen = [example for example, length in zip(split.examples, longest, strict=True) if length >= tokens]
        return replace(split, examples=chosen, subset=split.subset or len(chosen) < len(longest))

    def positions(self, encoding: Encoding, config: Any) -> int:
        """Positions of an encoding in the model's attention, without padding; by default one per token.

        Args:
            encoding: An encoding from `encode`.
            config: The model's configuration.
        """
        return self.tokens(encoding)

    def company(self, encoding: Encoding, processor: Any, config: Any) -> int | None:
        """Only encodings with the same number share a batch; None for one that must be alone.

        By default all may share a batch, since padding does not change outputs.
        """
        return 0

    @abstractmethod
    def collate(self, encodings: Sequence[Encoding], processor: Any) -> dict[str, Any]:
        """Pad encodings into one batch of tensors, [B, L]."""

    @property
    def in_order(self) -> bool:
        """Whether a model reads encodings that follow one another in their order, and keeps something in between."""
        return False

    def follows(self, encoding: Encoding, before: Encoding) -> bool:
        """Whether an encoding of a task that is read in order goes on where another ended."""
        return False

    def predict_in_order(self, model: Any, encodings: Sequence[Encoding]) -> Iterator[Any]:
        """Make the prediction of each encoding in turn; for tasks that are read in order.

        Args:
            model: The model, on its device.
            encodings: Encodings that follow one another.

        Raises:
            ApproxError: if the model cannot read in this way, or its outputs are not finite.
        """
        raise NotImplementedError(f"{type(self).__name__} is not read in order.")

    def writes(self, model: Any) -> bool:
        """Whether a model writes its prediction with a decoder, which reads what is written so far."""
        return False

    def imitated(self, model: Any, batch: dict[str, Any], processor: Any) -> dict[str, Any]:
        """Targets of what a model itself writes for a batch, as `targets`; for tasks some of whose models write."""
        raise NotImplementedError(
            f"{type(self).__name__} does not say what its models write. Define imitated() beside writes(), as "
            "approx/tasks/speech.py does."
        )

    def labelled(self, split: Split) -> Split:
        """The split, every example of which has a label.

        Raises:
            ApproxError: if one has none.
        """
        if missing := sum(example.label is None for example in split.examples):
            raise ApproxError(
                f"{self.name}: {missing} of {len(split.examples)} examples have no label. Scores and the mode 'task' need "
                "them; 'transfer' and 'distill' do not.",
                Exit.UNAVAILABLE,
            )
        return split

    def outputs(self, model: Any, batch: dict[str, Any]) -> Any:
        """The model's outputs for a batch, which `predict` reads; by default of one forward pass."""
        return model(**batch)

    @abstractmethod
    def targets(
        self, examples: Sequence[Example], encodings: Sequence[Encoding], processor: Any, config: Any
    ) -> dict[str, Any]:
        """The training targets of a batch: the inputs from which transformers' models compute their loss.

        Args:
            examples: The example of each encoding.
            encodings: The rows of the batch, from `encode`.
            processor: The tokenizer or feature extractor of the checkpoint.
            config: The model's configuration, which maps outputs to labels.

        Returns:
            Tensors by the names of the model's inputs: `labels`, [B] or [B, L], or `start_positions` and
            `end_positions`, [B]. In [B, L], ignored tokens are -100.
        """

    @abstractmethod
    def predict(self, outputs: Any, encodings: Sequence[Encoding], config: Any) -> list[Any]:
        """Make the prediction of each row from the model's outputs.

        Args:
            outputs: The model's outputs for the batch.
            encodings: The rows of the batch, from `encode`.
            config: The model's configuration, which maps outputs to labels.

        Returns:
            B JSON values: predictions, or parts of predictions for `combine`.

        Raises:
            ApproxError: if the outputs are not finite.
        """

    def combine(self, example: Example, parts: list[Any]) -> Any:
        """Combine the predictions of an example's windows to one that is comparable with its label."""
        return parts[0]

    def excerpt(self, example: Example) -> str:
        """The texts of an example, for readers; empty if its input is no text. What is long is cut later."""
        texts = (" ".join(value) if isinstance(value, list) else value for value in example.inputs.values())
        return " | ".join(text for text in texts if isinstance(text, str))

    def in_words(self, value: Any) -> str:
        """A prediction or a label, for readers; empty if it is not a text, and its score says it all."""
        return value if isinstance(value, str) else ""

    def score(self, predictions: Sequence[Any], labels: Sequence[Any], metrics: Sequence[str] = ()) -> dict[str, float]:
        """Score predictions, paired with labels by position.

        Args:
            predictions: Predictions from `predict` or `combine`.
            labels: The label of each example, in the same order.
            metrics: Names from `self.metrics`; empty uses all.
        """
        # The metric library is slow to import, and listing tasks does not need it.
        from approx.tasks.metrics import METRICS

        return {name: METRICS[name].value(predictions, labels) for name in metrics or self.metrics}

    def slices(
        self, labels: Sequence[Any], lengths: Sequence[int], predictions: Sequence[Any]
    ) -> Iterator[tuple[int, int, list[Any], list[Any]]]:
        """Divide predictions into slices to score separately; by default by the length of the input.

        Args:
            labels: One per example.
            lengths: Tokens of each example.
            predictions: One per example.

        Yields:
            For each non-empty slice: lower bound, upper bound (exclusive), predictions, labels.
        """
        for start, end in doubling(max(lengths)):
            rows = [row for row, length in enumerate(lengths) if start <= length < end]
            if rows:
                yield start, end, [predictions[row] for row in rows], [labels[row] for row in rows]

    def correct(self, predictions: Sequence[Any], labels: Sequence[Any]) -> list[bool] | None:
        """Whether each prediction is correct; None if the score is not the share of correct ones."""
        if self.metrics[0] != "accuracy":
            return None
        return [prediction == label for prediction, label in zip(predictions, labels, strict=True)]


def doubling(most: int, first: int = 16) -> Iterator[tuple[int, int]]:
    """Bounds of slices up to `most`: 0 to `first`, and then doubling."""
    start, end = 0, first
    while start <= most:
        yield start, end
        start, end = end, 2 * end
