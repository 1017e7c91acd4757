"""Recordings of speech, inspected when a task is loaded and decoded for each batch."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass, field
from math import ceil, gcd
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from approx.errors import ApproxError, Exit

_SHORTEST_SECONDS = 0.1
# Floats may exceed 1 a little; integers that were stored as floats exceed it by far.
_LOUDEST = 16.0


@dataclass(frozen=True)
class Recording:
    """One encoded recording, FLAC or WAV; hours of decoded sound would not fit into memory.

    Recordings are equal, and have the same repr, if their bytes are equal.

    Args:
        sha256: Hash of its bytes.
        samples: Number of samples.
        rate: Samples per second.
        name: Its name in errors.
        source: Its file or its bytes.
    """

    sha256: str
    samples: int
    rate: int
    name: str = field(compare=False, repr=False)
    source: Path | bytes = field(compare=False, repr=False)

    @classmethod
    def of(cls, name: str, source: Path | bytes) -> Recording:
        """Inspect a recording without decoding it.

        Raises:
            ApproxError: if it cannot be read, has several channels, or is shorter than 0.1 seconds.
        """
        import soundfile

        stored = _stored(name, source)
        try:
            info = soundfile.info(io.BytesIO(stored))
        except soundfile.SoundFileError as error:
            raise _damaged(name, _reason(error)) from None
        if info.channels != 1:
            raise ApproxError(f"{name} has {info.channels} channels. Mix them to one.", Exit.UNAVAILABLE)
        if info.frames < _SHORTEST_SECONDS * info.samplerate:
            raise ApproxError(
                f"{name} has {info.frames} samples at {info.samplerate:,} Hz, less than {_SHORTEST_SECONDS} seconds. "
                "Remove it with its transcript, or download it again.",
                Exit.UNAVAILABLE,
            )
        return cls(hashlib.sha256(stored).hexdigest(), info.frames, info.samplerate, name, source)

    def samples_at(self, rate: int) -> int:
        """Number of samples after resampling."""
        return ceil(self.samples * rate / self.rate)

    def decoded(self, rate: int) -> NDArray[np.float32]:
        """Decode the recording, and resample it with a polyphase filter if it has another rate.

        Args:
            rate: Samples per second.

        Returns:
            Samples [samples_at(rate)], between -1 and 1.

        Raises:
            ApproxError: if it is damaged, or has changed since it was inspected.
        """
        import soundfile
        from scipy.signal import resample_poly

        stored = _stored(self.name, self.source)
        if hashlib.sha256(stored).hexdigest() != self.sha256:
            raise ApproxError(f"{self.name} changed while it was in use. Run the command again.", Exit.UNAVAILABLE)
        try:
            sound, _ = soundfile.read(io.BytesIO(stored), dtype="float32")
        except soundfile.SoundFileError as error:
            raise _damaged(self.name, _reason(error)) from None
        if len(sound) != self.samples:
            raise _damaged(self.name, f"only {len(sound):,} of {self.samples:,} samples")
        # Samples that are stored as floats may be anything.
        loudest = float(np.abs(sound).max(initial=0))
        if not loudest <= _LOUDEST:
            found = "values that are not numbers" if np.isnan(loudest) else f"values up to {loudest:,.0f}"
            raise ApproxError(
                f"{self.name} holds {found}; samples are between -1 and 1. Write it again as 16-bit WAV or FLAC.",
                Exit.UNAVAILABLE,
            )
        if self.rate == rate:
            return np.asarray(sound, np.float32)
        common = gcd(rate, self.rate)
        return resample_poly(sound, rate // common, self.rate // common).astype(np.float32)


def _stored(name: str, source: Path | bytes) -> bytes:
    if isinstance(source, bytes):
        return source
    try:
        return source.read_bytes()
    except OSError as error:
        raise ApproxError(f"{name} cannot be read: {error.strerror}.", Exit.UNAVAILABLE) from None


def _damaged(name: str, reason: Any) -> ApproxError:
    return ApproxError(f"{name} is not a readable recording ({reason}). Download it again.", Exit.UNAVAILABLE)


def _reason(error: Any) -> str:
    # The whole message names the object in memory that was read.
    return str(getattr(error, "error_string", error)).rstrip(".")
