"""Calibration inputs, for fitting mechanisms and measuring layer errors: the user's file, or built-in ones."""

import hashlib
import io
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from approx.checkpoints import checkpoint
from approx.conversion.calibration import mechanisms
from approx.conversion.calibration_text import TEXT
from approx.errors import ApproxError, Exit
from approx.planning import positions
from approx.planning.example_inputs import example_inputs, samples
from approx.text_file import decoded

# Long enough for most mechanisms to approximate, and fast.
_USUAL_TOKENS, _USUAL_FRAMES = 1024, 512
# Limits memory, since the dense attention weights of every layer are computed.
_MOST_TOKENS = 2048
# Of this many tokens of English at least a quarter are distinct.
_FIRST_WORDS = 256
# Samples beyond it are no sound in numbers between -1 and 1.
_LOUDEST = 16.0


class CalibrationBatch(NamedTuple):
    """Inputs for fitting mechanisms and measuring layer errors.

    Attributes:
        inputs: Keyword arguments of the model's forward.
        told: Description of the inputs: the name of a file, or of its substitute.
    """

    inputs: dict[str, Tensor]
    told: str


@dataclass(frozen=True)
class CalibrationFile:
    """A text of the user's, or a recording for speech models.

    Attributes:
        name: File name without its path, which may be private.
        sha256: Hash of its bytes.
        data: Its bytes.
    """

    name: str
    sha256: str
    data: bytes

    @classmethod
    def read(cls, path: Path, kind: str) -> "CalibrationFile":
        """Read a file.

        Args:
            path: Path of the file.
            kind: The main input of the model: `input_ids` for text, `input_values` for sound.

        Raises:
            ApproxError: if it cannot be read, is empty, or the model does not take such input.
        """
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ApproxError(f"{path} cannot be read: {error.strerror}. {_wanted(kind)}", Exit.UNAVAILABLE) from None
        file = cls(path.name, hashlib.sha256(data).hexdigest(), data)
        if kind == "input_values":
            file.sound()
        elif kind == "input_ids":
            file.text()
        else:
            raise ApproxError(
                f"A model that takes {kind} cannot be calibrated on {path}. Leave out --calibrate to use random numbers."
            )
        return file

    def text(self) -> str:
        """The content as text.

        Raises:
            ApproxError: if it is not UTF-8 text, or empty.
        """
        text = decoded(self.data, self.name, settable=False)
        if not text.strip():
            raise ApproxError(f"{self.name} cannot be read: it is empty. {_wanted('input_ids')}", Exit.UNAVAILABLE)
        return text

    def sound(self) -> tuple[Any, int]:
        """The content as samples of one channel, [n] between -1 and 1, and the sampling rate.

        Raises:
            ApproxError: if it is not a recording, has several channels, or samples far beyond -1 and 1.
        """
        import soundfile

        try:
            sound, rate = soundfile.read(io.BytesIO(self.data), dtype="float32")
        except soundfile.SoundFileError as error:
            # The whole message names the object in memory that was read.
            reason = str(getattr(error, "error_string", error)).rstrip(".")
            raise ApproxError(
                f"{self.name} is not a readable recording ({reason}). {_wanted('input_values')}",
                Exit.UNAVAILABLE,
            ) from None
        if sound.ndim != 1 or not len(sound):
            held = f"has {sound.shape[1]} channels" if sound.ndim != 1 else "is empty"
            raise ApproxError(f"{self.name} {held}. {_wanted('input_values')}", Exit.UNAVAILABLE)
        # Samples that are stored as floats may be anything.
        if not abs(sound).max() <= _LOUDEST:
            raise ApproxError(
                f"{self.name} holds samples that are not between -1 and 1. {_wanted('input_values')}", Exit.UNAVAILABLE
            )
        return sound, rate


def _wanted(kind: str) -> str:
    return {
        "input_ids": "Give a plain text file with a few paragraphs like those the model reads.",
        "input_values": "Give a single-channel WAV or FLAC file with a few seconds of speech like the model's inputs.",
    }.get(kind, "Leave out --calibrate.")


def calibration_length(model: Any) -> int:
    """Tokens per calibration row: enough for all layers to approximate, if positions and memory allow.

    1,024 tokens, or 512 frames of speech, or twice the length from which all layers approximate if that is more; at most
    2,048 and at most the model's positions.

    Args:
        model: A converted model, fitted or not.
    """
    wanted = _USUAL_FRAMES if model.main_input_name == "input_values" else _USUAL_TOKENS
    for mechanism in mechanisms(model):
        start = mechanism.approximates_from()
        if start is not None:
            wanted = max(wanted, 2 * max(start, mechanism.exact_below))
    return min(wanted, _MOST_TOKENS, positions.limit(model.config) or wanted)


def calibration_batch(
    source: checkpoint.Source, model: Any, length: int, file: CalibrationFile | None = None
) -> CalibrationBatch:
    """Inputs without padding: rows of at most `length` tokens, 2,048 in all, or one of at most `length` frames of speech.

    Args:
        source: The checkpoint, for its tokenizer or feature extractor.
        model: The model, stock or converted.
        length: Most tokens per row; see `calibration_length`.
        file: Provides as many rows as fit from the start of its text, or the start of its sound, resampled to the model's
            rate. Without it the batch is one row of English, or of random tokens if the tokenizer is missing or not for
            English; for speech and images it is random numbers.

    Raises:
        ApproxError: if the model cannot read the file.
    """
    kind = model.main_input_name
    if kind == "input_values" and file is not None:
        return CalibrationBatch(_heard(source, model, file, length), file.name)
    noise = "random tokens" if kind == "input_ids" else "random numbers"
    random = CalibrationBatch(example_inputs(model, length, device=model.device), noise)
    if kind != "input_ids":
        return random
    try:
        tokenizer = checkpoint.processor(source)
    except ApproxError:
        if file is not None:
            raise
        return random
    most = max(1, _MOST_TOKENS // length)
    # Tokens rarely exceed twenty letters; tokenising a whole book for its first pages would be slow.
    written = file.text()[: 20 * length * most] if file is not None else TEXT
    rows = _rows(tokenizer, written, length)
    repeated = file is None and bool(rows) and len(rows[0]) < length
    if repeated:
        rows = _rows(tokenizer, TEXT * -(-length // len(rows[0])), length)
    rows = [row for row in rows[: 1 if file is None else most] if len(row) == len(rows[0])]
    tokens = {token for row in rows for token in row}
    known = bool(tokens) and max(tokens) < model.config.get_text_config().vocab_size
    if file is not None and not known:
        raise ApproxError(
            f"The tokenizer does not match {type(model).__name__}: it gives {max(tokens, default='no tokens')}, but "
            f"the vocabulary has {model.config.get_text_config().vocab_size} entries. Use the tokenizer that the model was trained with.",
            Exit.UNAVAILABLE,
        )
    # With a vocabulary of another language, the built-in text would be all unknown tokens.
    if not known or (file is None and len(tokens) < min(length, _FIRST_WORDS) // 4):
        return random
    told = file.name if file is not None else f"built-in English text{', repeated' if repeated else ''}"
    return CalibrationBatch({"input_ids": torch.tensor(rows, device=model.device)}, told)


def _rows(tokenizer: Any, text: str, length: int) -> list[list[int]]:
    return tokenizer(text, truncation=True, max_length=length, return_overflowing_tokens=True)["input_ids"]


def _heard(source: checkpoint.Source, model: Any, file: CalibrationFile, length: int) -> dict[str, Tensor]:
    from scipy.signal import resample_poly

    processor = checkpoint.processor(source)
    extractor = getattr(processor, "feature_extractor", processor)
    sound, rate = file.sound()
    wanted = extractor.sampling_rate
    if rate != wanted:
        common = gcd(rate, wanted)
        sound = resample_poly(sound, wanted // common, rate // common)
    sound = sound[: samples(model.config, length)]
    if len(sound) < samples(model.config, 1):
        raise ApproxError(
            f"{file.name} holds {len(sound)} samples, fewer than the {samples(model.config, 1)} of one frame of "
            f"{type(model).__name__}. {_wanted('input_values')}",
            Exit.UNAVAILABLE,
        )
    heard = extractor(sound, sampling_rate=wanted, return_tensors="pt")["input_values"]
    return {"input_values": heard.to(model.device, model.dtype)}
