"""Recordings of speech: looked at when a task is loaded, decoded when their batch is due."""

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


@dataclass(frozen=True)
class Recording:
    """One recording, FLAC or WAV, as it is stored; hours of decoded sound would not fit into memory.

    Two recordings are equal, and are written alike, if their bytes are, wherever they lie.

    Args:
        sha256: Of its bytes.
        samples: How many it has.
        rate: Samples a second.
        name: What errors call it.
        source: Its file, or its bytes.
    """

    sha256: str
    samples: int
    rate: int
    name: str = field(compare=False, repr=False)
    source: Path | bytes = field(compare=False, repr=False)

    @classmethod
    def of(cls, name: str, source: Path | bytes) -> Recording:
        """Look at a recording without decoding it.

        Raises:
            ApproxError: if it cannot be read, has several channels, or is too short to hold a sound.
        """
        import soundfile

        stored = _stored(name, source)
        try:
            found = soundfile.info(io.BytesIO(stored))
        except soundfile.SoundFileError as error:
            raise _damaged(name, error) from None
        if found.channels != 1:
            raise ApproxError(f"{name} has {found.channels} channels. Mix them into one first.", Exit.UNAVAILABLE)
        if found.frames < _SHORTEST_SECONDS * found.samplerate:
            raise ApproxError(
                f"{name} holds {found.frames} samples at {found.samplerate:,} Hz, less than {_SHORTEST_SECONDS} seconds. "
                "Remove it with its transcript, or get it again.",
                Exit.UNAVAILABLE,
            )
        return cls(hashlib.sha256(stored).hexdigest(), found.frames, found.samplerate, name, source)

    def samples_at(self, rate: int) -> int:
        """How many samples it has after resampling."""
        return ceil(self.samples * rate / self.rate)

    def decoded(self, rate: int) -> NDArray[np.float32]:
        """Decode it, and resample it with a polyphase filter if it has another rate.

        Args:
            rate: Samples a second.

        Returns:
            [samples_at(rate)], between -1 and 1.

        Raises:
            ApproxError: if it is damaged, or has changed since it was looked at.
        """
        import soundfile
        from scipy.signal import resample_poly

        stored = _stored(self.name, self.source)
        if hashlib.sha256(stored).hexdigest() != self.sha256:
            raise ApproxError(f"{self.name} was changed while it was in use. Run the command again.", Exit.UNAVAILABLE)
        try:
            sound, _ = soundfile.read(io.BytesIO(stored), dtype="float32")
        except soundfile.SoundFileError as error:
            raise _damaged(self.name, error) from None
        if len(sound) != self.samples:
            raise _damaged(self.name, f"{len(sound):,} of {self.samples:,} samples are there")
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
    return ApproxError(f"{name} is not a recording that can be read ({reason}). Get it again.", Exit.UNAVAILABLE)
