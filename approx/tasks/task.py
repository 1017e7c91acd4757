"""What a task is: labelled examples, their tokens, predictions read off a model's outputs, and their score.

Adding a task: one file, one line in `TASKS`, one test. A classification of texts subclasses
`SequenceClassification` and says only `name`, `labels`, `metrics` and how its examples are loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from approx.errors import ApproxError, Exit
from approx.tasks.head import Head

Encoding = dict[str, Any]
"""What a model reads of one example, or of one window of it, without padding, by the names of the model's inputs.

A task may keep things for itself under further names; its `collate` leaves them out.
"""


@dataclass(frozen=True)
class Example:
    """One labelled example.

    Args:
        id: Stable name: the same row of the same source has the same id everywhere and under every limit.
        inputs: What the model reads, by name. Text tasks: `text`, and `text_pair` for the second of a pair.
        label: What a prediction is compared with: an index into `Task.labels`, or a float for regression.
        group: Examples of one group (a speaker, a document) are alike, and are drawn together when scores are
            resampled; None where examples are independent.
    """

    id: str
    inputs: dict[str, Any]
    label: Any
    group: str | None = None


@dataclass(frozen=True)
class Split:
    """The examples of one split, in the order of their source.

    Args:
        name: The split as records name it: `dev`, `train`, or the stem of a file given by hand.
        examples: At least one example.
        subset: Whether rows of the full split are missing; then its score is told as a subset's.
        notes: What was left out or changed on the way; told beside the score.
    """

    name: str
    examples: list[Example]
    subset: bool
    notes: tuple[str, ...] = ()


class Task(ABC):
    """One task: where its examples come from, how a model reads them, how its answers are scored.

    A task holds no model and no data; the same object serves every checkpoint. `processor` is always what
    transformers loads beside a model: a tokenizer or a feature extractor.
    """

    name: str
    """As on the command line, in a recipe and in a record: `glue/sst2`."""
    head: ClassVar[Head]
    """The head a model needs."""
    metrics: tuple[str, ...]
    """Names in `approx.tasks.metrics.METRICS`; the first is the one that is compared."""
    dataset: str | None = None
    """Its dataset on the hub; None where examples are generated or come from files alone."""
    labels: tuple[str, ...] = ()
    """Names of the classes in the order of their indices; empty for regression."""
    slice_metric: str | None = None
    """The metric that slices are scored by, where it is not the first."""
    sliced_by: ClassVar[str] = "tokens"
    """What the bounds of a slice count: the tokens of an example."""
    windowed: ClassVar[bool] = False
    """Whether an example that is longer than a model's positions is read in several windows."""
    draws: ClassVar[bool] = False
    """Whether part of an encoding is drawn from the id of its example, as hidden tokens are."""
    input_name: ClassVar[str] = "input_ids"
    """The main input of the models that it is for, by transformers' name."""

    @abstractmethod
    def load(
        self, data: Path | None = None, split: str | None = None, limit: int | None = None, *, streaming: bool = False
    ) -> Split:
        """Load a split.

        Args:
            data: A file or folder in the official layout; None means the task's own source (a hub dataset,
                or a seeded generator).
            split: None means the task's default, the one its score is usually told on.
            limit: Keep the first `limit` rows.
            streaming: Read a hub dataset as it is downloaded, keep nothing of it and stop at the limit, instead of
                downloading all of its splits into the cache; the examples are the same. Nothing to all other sources.

        Raises:
            ApproxError: if nothing is found, a row is damaged or unlabelled, or no row is left.
        """

    def examples(
        self, data: Path | None = None, split: str | None = None, limit: int | None = None, *, streaming: bool = False
    ) -> list[Example]:
        """Return the examples of `load`, for those who need no more than these."""
        return self.load(data, split, limit, streaming=streaming).examples

    def check(self, model: Any) -> None:
        """Refuse a model that cannot do this task.

        Raises:
            ApproxError: if its head or its labels differ from the task's.
        """
        if not self.head.is_of(type(model)):
            raise ApproxError(
                f"{self.name} needs a {self.head.name} head, but the model is a {type(model).__name__}. "
                f"Fine-tune the checkpoint on the task, or choose a task for its head ({self.head.auto_class} makes the one "
                "that is needed).",
                Exit.UNSUPPORTED,
            )

    @abstractmethod
    def encode(self, example: Example, processor: Any, max_length: int | None = None) -> list[Encoding]:
        """Turn one example into the model's inputs, without padding: one encoding, or several windows.

        Args:
            example: One of `load`.
            processor: The tokenizer or feature extractor of the checkpoint.
            max_length: The most tokens of an encoding: longer examples are read in windows by a windowed task and cut
                by others. None means no limit.
        """

    def tokens(self, encoding: Encoding) -> int:
        """Tokens of an encoding."""
        return len(next(iter(encoding.values()), ()))

    def positions(self, encoding: Encoding, config: Any) -> int:
        """Positions that the model's attention has for an encoding, padding aside: here one a token.

        Args:
            encoding: One of `encode`.
            config: The model's configuration.
        """
        return self.tokens(encoding)

    def company(self, encoding: Encoding, processor: Any, config: Any) -> int | None:
        """A number that encodings must have in common to share a batch, or None for one that has to be alone.

        Where padding leaves no trace, as here, any may share one.
        """
        return 0

    @abstractmethod
    def collate(self, encodings: Sequence[Encoding], processor: Any) -> dict[str, Any]:
        """Pad encodings into one batch of tensors, [B, L]."""

    @abstractmethod
    def targets(
        self, examples: Sequence[Example], encodings: Sequence[Encoding], processor: Any, config: Any
    ) -> dict[str, Any]:
        """What a model is trained to say of a batch: the inputs from which transformers' models compute their loss.

        Args:
            examples: The example that each encoding is of.
            encodings: The rows of the batch, as `encode` made them and `collate` pads them.
            processor: The tokenizer or feature extractor of the checkpoint.
            config: The model's configuration; it says which output stands for which label.

        Returns:
            Tensors by the names of the model's inputs: `labels`, [B] or [B, L], or `start_positions` and `end_positions`,
            [B]. In [B, L] what does not count is -100.
        """

    @abstractmethod
    def predict(self, outputs: Any, encodings: Sequence[Encoding], config: Any) -> list[Any]:
        """Read what each row says off a model's outputs.

        Args:
            outputs: What the model returned for the batch.
            encodings: The rows of the batch, as `encode` made them.
            config: The model's configuration; it says which output stands for which label.

        Returns:
            B values that JSON can hold: predictions, or parts of one that `combine` puts together.

        Raises:
            ApproxError: if the outputs are not finite.
        """

    def combine(self, example: Example, parts: list[Any]) -> Any:
        """Make the prediction of an example, comparable with its label, of what its windows say."""
        return parts[0]

    def score(self, predictions: Sequence[Any], labels: Sequence[Any], metrics: Sequence[str] = ()) -> dict[str, float]:
        """Score predictions, paired with labels by position.

        Args:
            predictions: As `predict` returns them.
            labels: Each example's label, in the same order.
            metrics: Which of `self.metrics`; empty means all.
        """
        # The metric library is slow to import, and a list of tasks needs none of it.
        from approx.tasks.metrics import METRICS

        return {name: METRICS[name].value(predictions, labels) for name in metrics or self.metrics}

    def slices(
        self, labels: Sequence[Any], lengths: Sequence[int], predictions: Sequence[Any]
    ) -> Iterator[tuple[int, int, list[Any], list[Any]]]:
        """Cut what was predicted into slices, whose scores may differ: here by the length of the input.

        Args:
            labels: One an example.
            lengths: Tokens of each example.
            predictions: One an example.

        Yields:
            Of each slice that is not empty its first and its last bound, the latter excluded, its predictions and labels.
        """
        for start, end in doubling(max(lengths)):
            rows = [row for row, length in enumerate(lengths) if start <= length < end]
            if rows:
                yield start, end, [predictions[row] for row in rows], [labels[row] for row in rows]

    def correct(self, predictions: Sequence[Any], labels: Sequence[Any]) -> list[bool] | None:
        """Say of each prediction whether it is right, or None where right and wrong do not exist."""
        if not self.labels:
            return None
        return [prediction == label for prediction, label in zip(predictions, labels, strict=True)]


def doubling(most: int, first: int = 16) -> Iterator[tuple[int, int]]:
    """Bounds of slices up to `most`: 0 to `first`, and then each reaches to twice the one before."""
    start, end = 0, first
    while start <= most:
        yield start, end
        start, end = end, 2 * end
