"""Classification and regression of texts: all that such tasks share but their examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from approx.errors import ApproxError, Exit
from approx.tasks.head import SEQUENCE_CLASSIFICATION, Head
from approx.tasks.padding import padded
from approx.tasks.task import Encoding, Example, Task


class SequenceClassification(Task):
    """A class, or a number, for one text or a pair (`Example.inputs`: `text` and perhaps `text_pair`).

    Predictions are indices into `labels`; without labels the task is regression and they are floats.
    """

    head: ClassVar[Head] = SEQUENCE_CLASSIFICATION

    def check(self, model: Any) -> None:
        """Refuse a model without a classification head, or with other labels than the task's."""
        super().check(model)
        self._order(model.config)

    def encode(self, example: Example, processor: Any, max_length: int | None = None) -> list[Encoding]:
        """Tokenise the text or the pair, with the tokenizer's own special tokens."""
        encoding = processor(
            example.inputs["text"],
            example.inputs.get("text_pair"),
            truncation=max_length is not None,
            max_length=max_length,
            # Lengths are checked against the model's positions, which say more than the tokenizer's warning.
            verbose=False,
        )
        return [dict(encoding)]

    def company(self, encoding: Encoding, processor: Any, config: Any) -> int | None:
        """The exact length, where the model does not know the tokenizer's padding.

        A decoder's head reads the last token of a row that is not the padding of its config; without one it takes no batch.
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
        """`labels` [B]: the model's output for the class of each example, or the number."""
        import torch

        labels = [example.label for example in examples]
        if not self.labels:
            return {"labels": torch.tensor(labels, dtype=torch.float32)}
        order = self._order(config)
        return {"labels": torch.tensor([order.index(label) for label in labels])}

    def predict(self, outputs: Any, encodings: Sequence[Encoding], config: Any) -> list[Any]:
        """Take the likeliest class of each row, or the regressed number."""
        logits = outputs.logits.float()
        # An argmax over NaN is class 0, and would pass for a prediction.
        if not logits.isfinite().all():
            raise ApproxError("its logits are not finite on some inputs, so it has no score.", Exit.VERIFICATION)
        if not self.labels:
            return logits.squeeze(-1).tolist()
        order = self._order(config)
        return [order[index] for index in logits.argmax(-1).tolist()]

    def _order(self, config: Any) -> list[int]:
        """Index in `labels` of each of the model's outputs, by name where the names mean something."""
        wanted = list(self.labels) or ["score"]
        found = [str(config.id2label[index]) for index in range(config.num_labels)]
        if len(found) != len(wanted):
            raise ApproxError(
                f"{self.name} has {len(wanted)} outputs ({', '.join(wanted)}), "
                f"but the model has {len(found)} ({', '.join(found)}). Use a checkpoint fine-tuned on {self.name}.",
                Exit.UNSUPPORTED,
            )
        unnamed = all(name in (f"LABEL_{index}", str(index)) for index, name in enumerate(found))
        if unnamed or not self.labels:
            return list(range(len(wanted)))
        plain = [_plain(name) for name in wanted]
        if sorted(map(_plain, found)) != sorted(plain):
            raise ApproxError(
                f"{self.name} has the labels {', '.join(wanted)}, but the model's are {', '.join(found)}. "
                "Use a checkpoint of this task, or name its outputs so in id2label of config.json.",
                Exit.UNSUPPORTED,
            )
        return [plain.index(_plain(name)) for name in found]


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "_").replace(" ", "_")
