"""The inputs that mechanisms are fitted to and damage is measured on: a file of somebody's own, or what is always there."""

import hashlib
import io
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from approx.conversion import checkpoint, positions
from approx.conversion.inputs import example_inputs, samples
from approx.errors import ApproxError, Exit

_TOKENS = 256
_ROWS = 8
_FRAMES = 512
_TEXT = (
    "The harbour was quiet when the first boats came back. A clerk wrote down what each of them had caught, the weight, "
    "the price and the name of the buyer, and nobody asked why the northern grounds had given so little this year. "
    "In the office above the market two engineers compared the figures with those of the last ten summers. The water had "
    "grown warmer by half a degree, they said, but the fish had left before that; it was the current that had moved. "
    "Their report would be short. It would say what had been measured, how, and how sure one could be of it, and it would "
    "leave the question of what to do to those who had to live with the answer. "
)


@dataclass(frozen=True)
class CalibrationFile:
    """A text, or for models of speech a recording, of somebody's own.

    Attributes:
        name: Of the file; the path to it says nothing elsewhere and may say too much.
        sha256: Of its bytes.
        data: Its bytes.
    """

    name: str
    sha256: str
    data: bytes

    @classmethod
    def read(cls, path: Path, kind: str) -> "CalibrationFile":
        """Read a file.

        Args:
            path: Of the file.
            kind: The main input of the model: `input_ids` for text, `input_values` for sound.

        Raises:
            ApproxError: if it cannot be read, holds nothing, or is not what the model takes.
        """
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ApproxError(f"{path} cannot be read: {error.strerror}. {_wanted(kind)}", Exit.UNAVAILABLE) from None
        found = cls(path.name, hashlib.sha256(data).hexdigest(), data)
        if kind == "input_values":
            found.sound()
        elif kind == "input_ids":
            found.text()
        else:
            raise ApproxError(
                f"A model that takes {kind} cannot be calibrated on {path}. Leave out --calibrate: it then sees random numbers."
            )
        return found

    def text(self) -> str:
        """What it holds, as text.

        Raises:
            ApproxError: if it is no UTF-8 text, or empty.
        """
        try:
            text = self.data.decode("utf-8")
        except UnicodeDecodeError:
            text = None
        if text is None or not text.strip():
            why = "it is not UTF-8 text" if text is None else "it is empty"
            raise ApproxError(f"{self.name} cannot be read: {why}. {_wanted('input_ids')}", Exit.UNAVAILABLE)
        return text

    def sound(self) -> tuple[Any, int]:
        """What it holds, as samples of one channel, [n] between -1 and 1, and their number a second.

        Raises:
            ApproxError: if it is no recording, or has several channels.
        """
        import soundfile

        try:
            sound, rate = soundfile.read(io.BytesIO(self.data), dtype="float32")
        except soundfile.SoundFileError as error:
            raise ApproxError(
                f"{self.name} is no recording that can be read ({error}). {_wanted('input_values')}", Exit.UNAVAILABLE
            ) from None
        if sound.ndim != 1 or not len(sound):
            held = f"has {sound.shape[1]} channels" if sound.ndim != 1 else "is empty"
            raise ApproxError(f"{self.name} {held}. {_wanted('input_values')}", Exit.UNAVAILABLE)
        return sound, rate


def _wanted(kind: str) -> str:
    return {
        "input_ids": "Give a plain text file with some paragraphs of what the model reads.",
        "input_values": "Give a WAV or FLAC file of one channel with some seconds of what the model hears.",
    }.get(kind, "Leave out --calibrate.")


def calibration_batch(source: checkpoint.Source, model: Any, file: CalibrationFile | None = None) -> dict[str, Tensor]:
    """Inputs without padding: rows of at most 256 tokens, or one of at most 512 frames of speech.

    Args:
        source: The checkpoint, for its tokenizer or feature extractor.
        model: The stock model.
        file: Up to 8 rows from the start of its text, or the start of its sound, resampled if its rate is not the model's.
            Without it a row of English, or of random tokens where the tokenizer does not know English or is missing; for
            speech and images random numbers.

    Raises:
        ApproxError: if there is a file and the model cannot read it.
    """
    limit = positions.limit(model.config)
    length = _TOKENS if limit is None else min(limit, _TOKENS)
    kind = model.main_input_name
    if kind == "input_values" and file is not None:
        return _heard(source, model, file)
    if kind != "input_ids":
        return example_inputs(model, length, device=model.device)
    try:
        tokenizer = checkpoint.processor(source)
    except ApproxError:
        if file is not None:
            raise
        return example_inputs(model, length, device=model.device)
    # A token has some letters, hardly ever twenty, and a book need not be tokenised for its first pages.
    written = _TEXT * 4 if file is None else file.text()[: 20 * length * _ROWS]
    rows = tokenizer(written, truncation=True, max_length=length, return_overflowing_tokens=True)["input_ids"]
    rows = [row for row in rows[: 1 if file is None else _ROWS] if len(row) == len(rows[0])]
    tokens = {token for row in rows for token in row}
    known = bool(tokens) and max(tokens) < model.config.vocab_size
    if file is not None and not known:
        raise ApproxError(
            f"The tokenizer beside {type(model).__name__} does not fit it: it gives {max(tokens, default='no tokens')}, and "
            f"the vocabulary has {model.config.vocab_size} entries. Use the tokenizer that the model was trained with.",
            Exit.UNAVAILABLE,
        )
    # A vocabulary of another language reads our text as unknown tokens, which says nothing.
    if not known or (file is None and len(tokens) < length // 4):
        return example_inputs(model, length, device=model.device)
    return {"input_ids": torch.tensor(rows, device=model.device)}


def _heard(source: checkpoint.Source, model: Any, file: CalibrationFile) -> dict[str, Tensor]:
    from scipy.signal import resample_poly

    processor = checkpoint.processor(source)
    extractor = getattr(processor, "feature_extractor", processor)
    sound, rate = file.sound()
    wanted = extractor.sampling_rate
    if rate != wanted:
        common = gcd(rate, wanted)
        sound = resample_poly(sound, wanted // common, rate // common)
    sound = sound[: samples(model.config, _FRAMES)]
    if len(sound) < samples(model.config, 1):
        raise ApproxError(
            f"{file.name} holds {len(sound)} samples, fewer than the {samples(model.config, 1)} of one frame of "
            f"{type(model).__name__}. {_wanted('input_values')}",
            Exit.UNAVAILABLE,
        )
    heard = extractor(sound, sampling_rate=wanted, return_tensors="pt")["input_values"]
    return {"input_values": heard.to(model.device, model.dtype)}
