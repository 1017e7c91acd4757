"""The base class of tasks: labelled examples, their encodings, predictions from a model's outputs, and scores.

To add a task, write one file, one line in `TASKS` and one test. A classification of texts subclasses
`SequenceClassification` and defines only `name`, `labels`, `metrics` and `load`.
"""

from __future__ import annotations

import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from approx.errors import ApproxError, Exit
from approx.tasks.head import Head

Encoding = dict[str, Any]
"""The model's inputs for one example or one window of it, by name, without padding.

A task may store its own data under other names; its `collate` leaves them out.
"""

# Characters from which a text counts by its hash.
_LONG = 10_000


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

    @property
    def brief(self) -> dict[str, Any]:
        """The inputs with long texts replaced by their hashes; every stretch of a text carries the whole text."""
        return {
            name: _sha256(value) if isinstance(value, str) and len(value) > _LONG else value
            for name, value in self.inputs.items()
        }


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


class Task(ABC):
    """One task: how to load its examples, encode them, and score predictions.

    A task holds no model and no data, so one object serves all checkpoints. `processor` is the tokenizer or feature
    extractor that transformers loads with a model.
    """

    name: str
    """Name on the command line, in recipes and in records: `glue/sst2`."""
    head: ClassVar[Head]
    """The head that a model needs."""
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
    draws: ClassVar[bool] = False
    """Whether parts of an encoding, such as hidden tokens, are drawn at random from the id of the example."""
    input_name: ClassVar[str] = "input_ids"
    """Transformers' name of the main input of suitable models."""
    input_per_token: ClassVar[int] = 1
    """Numbers in the input for each token, such as the samples of a frame of sound."""

    @abstractmethod
    def load(
        self, data: Path | None = None, split: str | None = None, limit: int | None = None, *, streaming: bool = False
    ) -> Split:
        """Load a split.

        Args:
            data: A file or folder in the official layout; None uses the task's own source (a hub dataset or a seeded
                generator).
            split: None uses the task's default, the usual split for scores.
            limit: Keep the first `limit` rows.
            streaming: Read a hub dataset while it downloads, up to the limit and without storing it, instead of
                downloading all splits into the cache. The examples are the same; other sources ignore it.

        Raises:
            ApproxError: if the data do not exist, a row is damaged or unlabelled, or no row is left.
        """

    def examples(
        self, data: Path | None = None, split: str | None = None, limit: int | None = None, *, streaming: bool = False
    ) -> list[Example]:
        """Return only the examples of `load`."""
        return self.load(data, split, limit, streaming=streaming).examples

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
            Tensors by the names of the model's inputs: `labels`, [B] or [B, L], or `start_positions` and `end_positions`,
            [B]. In [B, L], ignored tokens are -100.
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
        """Whether each prediction is correct; None if predictions are not simply correct or wrong."""
        if not self.labels:
            return None
        return [prediction == label for prediction, label in zip(predictions, labels, strict=True)]


@functools.lru_cache(maxsize=16)
def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def doubling(most: int, first: int = 16) -> Iterator[tuple[int, int]]:
    """Bounds of slices up to `most`: 0 to `first`, and then doubling."""
    start, end = 0, first
    while start <= most:
        yield start, end
        start, end = end, 2 * end
