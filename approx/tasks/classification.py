"""Classification and regression of texts: everything but the examples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from approx.errors import ApproxError, Exit
from approx.tasks.head import SEQUENCE_CLASSIFICATION, Head
from approx.tasks.padding import padded
from approx.tasks.table import Row, text_of
from approx.tasks.task import Encoding, Example, Task


class SequenceClassification(Task):
    """A class, or a number, for one text or a pair (`Example.inputs`: `text` and optionally `text_pair`).

    Predictions are indices into `labels`; a task without labels is a regression, with floats.
    """

    head: ClassVar[Head] = SEQUENCE_CLASSIFICATION
    fields = ("text", "label")
    optional_fields = ("text_pair",)

    def from_cells(self, cells: dict[str, Any], row: Row) -> tuple[dict[str, Any], Any]:
        """The text or pair, and its class by name or number, or the number of a regression."""
        inputs = {name: text_of(cells[name], row.place) for name in ("text", "text_pair") if name in cells}
        return inputs, self.label_of(cells["label"], row.place)

    def label_of(self, value: Any, place: str) -> Any:
        """The label for a class by its name or number, or for the number of a regression.

        Args:
            value: As found in the data.
            place: File and line, for messages.

        Raises:
            ApproxError: if it is no known class, or no finite number.
        """
        text = str(value) if str(value) in self.labels else str(value).strip()
        if not self.labels:
            return _number(text, place)
        if text in self.labels:
            return self.labels.index(text)
        if text.isdecimal() and int(text) < len(self.labels):
            return int(text)
        known = ", ".join(f"{name} or {index}" for index, name in enumerate(self.labels))
        raise ApproxError(
            f"{place}: unknown label '{text[:60]}'. {self.name} has {known}.{self._other_labels}", Exit.UNAVAILABLE
        )

    _other_labels: ClassVar[str] = ""

    def check(self, model: Any) -> None:
        """Raise if the model has no classification head, or other labels than the task."""
        super().check(model)
        self._order(model.config)

    def encode(self, example: Example, processor: Any, max_length: int | None = None) -> list[Encoding]:
        """Tokenise the text or the pair, with the tokenizer's own special tokens."""
        encoding = processor(
            example.inputs["text"],
            example.inputs.get("text_pair"),
            truncation=max_length is not None,
            max_length=max_length,
            # No warning about length: it is checked against the model's positions.
            verbose=False,
        )
        return [dict(encoding)]

    def company(self, encoding: Encoding, processor: Any, config: Any) -> int | None:
        """The exact length if config and tokenizer have different padding tokens; None if the config has none.

        A decoder's head reads the last token of a row that is not the config's padding token. Without a padding token,
        it takes no batches.
        """
        if config.pad_token_id is None:
            return None
        return 0 if config.pad_token_id == processor.pad_token_id else self.tokens(encoding)

    def collate(self, encodings: Sequence[Encoding], processor: Any) -> dict[str, Any]:
        """Pad to the longest of the batch, on the right."""
        return padded(encodings, processor)

    def targets(
        self, examples: Sequence[Example], encodings: Sequence[Encoding], processor: Any, config: Any
    ) -> dict[str, Any]:
        """`labels` [B]: index of the model's output for the class of each example, or the number."""
        import torch

        labels = [example.label for example in examples]
        if not self.labels:
            return {"labels": torch.tensor(labels, dtype=torch.float32)}
        order = self._order(config)
        return {"labels": torch.tensor([order.index(label) for label in labels])}

    def predict(self, outputs: Any, encodings: Sequence[Encoding], config: Any) -> list[Any]:
        """The likeliest class of each row, or the predicted number."""
        logits = outputs.logits.float()
        # The argmax of NaN is 0, which looks like a prediction.
        if not logits.isfinite().all():
            raise ApproxError("its logits are not finite on some inputs, so it has no score.", Exit.VERIFICATION)
        if not self.labels:
            return logits.squeeze(-1).tolist()
        order = self._order(config)
        return [order[index] for index in logits.argmax(-1).tolist()]

    def _order(self, config: Any) -> list[int]:
        """Index in `labels` of each of the model's outputs, by name unless the names are generic."""
        wanted = list(self.labels) or ["score"]
        names = [str(config.id2label[index]) for index in range(config.num_labels)]
        if len(names) != len(wanted):
            raise ApproxError(
                f"{self.name} has {len(wanted)} outputs ({', '.join(wanted)}), "
                f"but the model has {len(names)} ({', '.join(names)}). Use a checkpoint fine-tuned on {self.name}.",
                Exit.UNSUPPORTED,
            )
        unnamed = all(name in (f"LABEL_{index}", str(index)) for index, name in enumerate(names))
        if unnamed or not self.labels:
            return list(range(len(wanted)))
        plain = [_plain(name) for name in wanted]
        if sorted(map(_plain, names)) != sorted(plain):
            raise ApproxError(
                f"{self.name} has the labels {', '.join(wanted)}, but the model's are {', '.join(names)}. "
                "Use a checkpoint for this task, or set these names in id2label of config.json.",
                Exit.UNSUPPORTED,
            )
        return [plain.index(_plain(name)) for name in names]


def _number(text: str, place: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ApproxError(f"{place}: the score '{text[:60]}' is not a finite number.", Exit.UNAVAILABLE)
    return number


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "_").replace(" ", "_")
