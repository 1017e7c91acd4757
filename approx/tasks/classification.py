"""Classification and regression of texts: everything but the examples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from approx.errors import ApproxError, Exit
from approx.tasks.head import SEQUENCE_CLASSIFICATION, Head
from approx.tasks.padding import padded
from approx.tasks.settings import names_setting, wrong_setting
from approx.tasks.table import Row, text_of
from approx.tasks.task import Encoding, Example, Groups, Task


class SequenceClassification(Task):
    """A class, or a number, for one text or a pair (`Example.inputs`: `text` and optionally `text_pair`).

    Predictions are indices into `labels`; a task without labels is a regression, with floats. `kind` says so, and a
    checkpoint of another kind (`problem_type` in its config) is refused.
    """

    head: ClassVar[Head] = SEQUENCE_CLASSIFICATION
    groups: ClassVar[Groups] = Groups("group", "a table without a column `group` names nothing that its rows share")
    fields = ("text", "label")
    optional_fields = ("text_pair",)

    @property
    def kind(self) -> str:
        """`ONE` of the labels, `SEVERAL` of them, or a `NUMBER`."""
        return ONE if self.labels else NUMBER

    _arranged: tuple[int, ...] | None = None

    def arrange(self, labels: Any) -> None:
        """Set which class each of the model's outputs stands for, by name or number.

        Raises:
            ApproxError: if every class is not named once.
        """
        names = names_setting(self.name, "labels", labels)
        known = {
            **{str(index): index for index in range(len(self.labels))},
            **{n: i for i, n in enumerate(self.labels)},
        }
        order = tuple(known.get(name, -1) for name in names)
        if not self.labels or sorted(order) != list(range(len(self.labels))):
            classes = ", ".join(f"{name} or {index}" for index, name in enumerate(self.labels)) or "no classes"
            allowed = f"a list of names: each class once, in the order of the model's outputs ({classes})"
            raise wrong_setting("labels", labels, allowed, self.name)
        self._arranged = order

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
        """Raise if the model has no classification head, another kind of outputs, or other labels than the task."""
        super().check(model)
        self._refuse_kind(model.config)
        self._order(model.config)

    def _refuse_kind(self, config: Any) -> None:
        # A wrong number of outputs has its message elsewhere.
        if (found := kind_of_outputs(config)) != self.kind and config.num_labels == (len(self.labels) or 1):
            raise ApproxError(
                f"{self.name} has {_KINDS[self.kind]}, but the checkpoint predicts {_KINDS[found]} (problem_type "
                f"{config.problem_type!r} and {config.num_labels} output{'s'[: config.num_labels > 1]} in "
                "config.json). Use a checkpoint fine-tuned on such a task, or correct problem_type if it is wrong.",
                Exit.UNSUPPORTED,
            )

    def order_of(self, config: Any) -> list[int]:
        """The class of each of the model's outputs, as an index into `labels`."""
        return self._order(config)

    def set_labels(self, order: Sequence[int]) -> str:
        """The value of the setting `labels` that gives the outputs these classes."""
        return ",".join(map(str, order))

    def about_labels(self, config: Any) -> str | None:
        """How the model's outputs are taken, if neither their names nor the user say so; None if one of them does."""
        names = [str(config.id2label[index]) for index in range(config.num_labels)]
        if self._arranged is not None or self.kind != ONE or not unnamed(names):
            return None
        return f"the model's labels {_listed(names)} are taken as {_listed(self.labels)}; --labels sets another order"

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
        if self.kind == SEVERAL:
            return {"labels": torch.tensor([[float(label[index]) for index in order] for label in labels])}
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
        if self.kind == SEVERAL:
            # The probability of a label exceeds one half.
            return [[int(row[order.index(index)] > 0) for index in range(len(order))] for row in logits.tolist()]
        return [order[index] for index in logits.argmax(-1).tolist()]

    def in_words(self, value: Any) -> str:
        """The names of the classes, or the number."""
        if not self.labels:
            return f"{value:.4g}"
        if self.kind == SEVERAL:
            return ", ".join(name for name, is_set in zip(self.labels, value, strict=True) if is_set) or "none"
        return self.labels[value]

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
        if self._arranged is not None:
            return list(self._arranged)
        if unnamed(names) or not self.labels:
            return list(range(len(wanted)))
        plain = [_plain(name) for name in wanted]
        if sorted(map(_plain, names)) != sorted(plain):
            raise ApproxError(
                f"{self.name} has the labels {', '.join(wanted)}, but the model's are {', '.join(names)}. "
                "Use a checkpoint for this task, or set these names in id2label of config.json.",
                Exit.UNSUPPORTED,
            )
        return [plain.index(_plain(name)) for name in names]


ONE, SEVERAL, NUMBER = "one", "several", "number"
"""What a head predicts: one of the labels, any number of them, or a number."""

_KINDS = {ONE: "one of several labels", SEVERAL: "several labels at once", NUMBER: "a number"}


def kind_of_outputs(config: Any) -> str:
    """`ONE`, `SEVERAL` or `NUMBER`: what a head predicts, by `problem_type` and the number of its outputs, as in transformers."""
    problem = getattr(config, "problem_type", None)
    if problem == "multi_label_classification":
        return SEVERAL
    return NUMBER if problem == "regression" or (problem is None and config.num_labels == 1) else ONE


def unnamed(names: Sequence[str]) -> bool:
    """Whether the names of outputs say nothing: LABEL_0, LABEL_1, … or 0, 1, …"""
    return all(name in (f"LABEL_{index}", str(index)) for index, name in enumerate(names))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (", …" if len(names) > 6 else "")


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
