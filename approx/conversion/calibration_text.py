"""The inputs that mechanisms are fitted to and damage is measured on: a person's own text, or one that is always there."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from approx.conversion import checkpoint, positions
from approx.conversion.inputs import example_inputs
from approx.errors import ApproxError, Exit

_TOKENS = 256
_ROWS = 8
_TEXT = (
    "The harbour was quiet when the first boats came back. A clerk wrote down what each of them had caught, the weight, "
    "the price and the name of the buyer, and nobody asked why the northern grounds had given so little this year. "
    "In the office above the market two engineers compared the figures with those of the last ten summers. The water had "
    "grown warmer by half a degree, they said, but the fish had left before that; it was the current that had moved. "
    "Their report would be short. It would say what had been measured, how, and how sure one could be of it, and it would "
    "leave the question of what to do to those who had to live with the answer. "
)


@dataclass(frozen=True)
class CalibrationText:
    """A text file of somebody's own.

    Attributes:
        name: Of the file; the path to it says nothing elsewhere and may say too much.
        sha256: Of its bytes.
        text: What it holds.
    """

    name: str
    sha256: str
    text: str

    @classmethod
    def read(cls, path: Path) -> "CalibrationText":
        """Read a file.

        Raises:
            ApproxError: if it cannot be read, is no UTF-8 text, or holds nothing.
        """
        try:
            data = path.read_bytes()
            text = data.decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise ApproxError(
                f"Calibration text {path} cannot be read: {reason}. Give a plain text file.", Exit.UNAVAILABLE
            ) from None
        if not text.strip():
            raise ApproxError(
                f"Calibration text {path} is empty. Give some paragraphs of what the model reads.", Exit.UNAVAILABLE
            )
        return cls(path.name, hashlib.sha256(data).hexdigest(), text)


def calibration_batch(source: checkpoint.Source, model: Any, text: CalibrationText | None = None) -> dict[str, Tensor]:
    """Inputs of at most 256 tokens a row, without padding.

    Args:
        source: The checkpoint, for its tokenizer.
        model: The stock model.
        text: Up to 8 rows from its start. Without it a row of English, or of random tokens where the tokenizer does not know
            English or is missing; for speech and images random numbers.

    Raises:
        ApproxError: if there is a text and the model cannot read it.
    """
    limit = positions.limit(model.config)
    length = _TOKENS if limit is None else min(limit, _TOKENS)
    if model.main_input_name != "input_ids":
        if text is not None:
            raise ApproxError(
                f"{type(model).__name__} reads no text, so it cannot be calibrated on {text.name}. Leave out --calibrate."
            )
        return example_inputs(model, length, device=model.device)
    try:
        tokenizer = checkpoint.processor(source)
    except ApproxError:
        if text is not None:
            raise
        return example_inputs(model, length, device=model.device)
    # A token has some letters, hardly ever twenty, and a book need not be tokenised for its first pages.
    written = _TEXT * 4 if text is None else text.text[: 20 * length * _ROWS]
    rows = tokenizer(written, truncation=True, max_length=length, return_overflowing_tokens=True)["input_ids"]
    rows = [row for row in rows[: 1 if text is None else _ROWS] if len(row) == len(rows[0])]
    tokens = {token for row in rows for token in row}
    known = bool(tokens) and max(tokens) < model.config.vocab_size
    if text is not None and not known:
        raise ApproxError(
            f"The tokenizer beside {type(model).__name__} does not fit it: it gives {max(tokens, default='no tokens')}, and "
            f"the vocabulary has {model.config.vocab_size} entries. Use the tokenizer that the model was trained with.",
            Exit.UNAVAILABLE,
        )
    # A vocabulary of another language reads our text as unknown tokens, which says nothing.
    if not known or (text is None and len(tokens) < length // 4):
        return example_inputs(model, length, device=model.device)
    return {"input_ids": torch.tensor(rows, device=model.device)}
