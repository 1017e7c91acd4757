"""What a model said of each batch, kept as soon as it is said: a cache for later, and a journal for what was cut."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from approx.errors import ApproxError, Exit
from approx_kernels.runtime.cache_folder import cache_folder


def default_folder() -> Path:
    """Where outputs are kept: $APPROX_CACHE, or `approx` in the user's cache folder."""
    return cache_folder() / "outputs"


def fingerprint(*parts: Any) -> str:
    """Hash plain data; arrays and what else JSON has no word for count by their text."""
    text = json.dumps(parts, sort_keys=True, default=_text)
    return hashlib.sha256(text.encode()).hexdigest()


class Ledger:
    """The finished batches of one model on one split, a line each; a torn last line is a batch not finished.

    Whatever the outputs depend on is in the key, so a changed weight, setting, file or line of code finds another ledger.

    Args:
        folder: Where ledgers are kept.
        key: The hash of all that the outputs depend on.
        writer: Number of this process among those that share the ledger; each appends to a file of its own.
    """

    def __init__(self, folder: Path, key: str, writer: int = 0) -> None:
        self._folder, self._key, self._writer = folder / key[:2], key, writer

    def read(self) -> dict[int, list[Any]]:
        """Number of a batch -> what was said of each of its rows."""
        found: dict[int, list[Any]] = {}
        for path in sorted(self._folder.glob(f"{self._key}.*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    batch, said = json.loads(line)
                except ValueError:
                    continue
                found[int(batch)] = said
        return found

    def write(self, batch: int, said: list[Any]) -> list[Any]:
        """Keep what was said of a batch; returns it as `read` will give it.

        Raises:
            ApproxError: if it cannot be written.
        """
        line = json.dumps([batch, said], allow_nan=False)
        path = self._folder / f"{self._key}.{self._writer}.jsonl"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with path.open("a+b") as file:
                # After a torn line the next one begins on its own line.
                file.seek(0, os.SEEK_END)
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    torn = file.read(1) != b"\n"
                    file.write(b"\n" if torn else b"")
                file.write(line.encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ApproxError(
                f"The outputs cannot be kept in {self._folder}: {error.strerror}. Set $APPROX_CACHE to a folder that can be "
                "written, or keep none with --fresh.",
                Exit.UNAVAILABLE,
            ) from None
        return json.loads(line)[1]


def _text(value: Any) -> str:
    return value.tobytes().hex() if hasattr(value, "tobytes") else repr(value)
