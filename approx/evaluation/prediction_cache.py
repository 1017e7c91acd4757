"""Store the predictions of each batch at once, so that no batch is computed twice, even after an interruption."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import zlib
from pathlib import Path
from typing import Any

from approx_kernels.runtime.cache_folder import cache_folder

_LOG = logging.getLogger(__name__)


def default_folder() -> Path:
    """Folder of stored outputs, in $APPROX_CACHE or `approx` in the user's cache folder."""
    return cache_folder() / "outputs"


def fingerprint(*parts: Any) -> str:
    """Hash plain data; arrays count by their bytes, other values that JSON lacks by their repr."""
    text = json.dumps(parts, sort_keys=True, default=_text)
    return hashlib.sha256(text.encode()).hexdigest()


class Ledger:
    """The finished batches of one model on one split, one per line with a checksum; a damaged line is an unfinished batch.

    The key hashes everything the outputs depend on, so changed weights, settings, data or code use another ledger.

    Args:
        folder: Folder of all ledgers.
        key: Hash of everything the outputs depend on.
        writer: Rank of this process; processes that share the ledger append to separate files.
    """

    def __init__(self, folder: Path, key: str, writer: int = 0) -> None:
        self._folder, self._key, self._writer = folder / key[:2], key, writer
        self._warned = False

    def read(self) -> dict[int, list[Any]]:
        """Number of a batch -> the predictions of its rows; what cannot be read, or was removed meanwhile, is computed again."""
        batches: dict[int, list[Any]] = {}
        for path in sorted(self._folder.glob(f"{self._key}.*.jsonl")):
            try:
                text = path.read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            for line in text.splitlines():
                match _parsed(line):
                    case [int(batch), list(predictions), int(checksum)] if checksum == _checksum(batch, predictions):
                        batches[batch] = predictions
        return batches

    def write(self, batch: int, predictions: list[Any]) -> list[Any]:
        """Store the predictions of a batch and return them as `read` does; where they cannot be stored, say so once."""
        line = json.dumps([batch, predictions, _checksum(batch, predictions)], allow_nan=False)
        path = self._folder / f"{self._key}.{self._writer}.jsonl"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with path.open("a+b") as file:
                # An interrupted write may have left a torn line.
                file.seek(0, os.SEEK_END)
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    torn = file.read(1) != b"\n"
                    file.write(b"\n" if torn else b"")
                file.write(line.encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if not self._warned:
                _LOG.warning(
                    "Outputs cannot be stored in %s: %s. The evaluation goes on, but starts over if it is interrupted. To store "
                    "them, set $APPROX_CACHE to a writable folder.",
                    self._folder.parent,
                    error.strerror,
                )
            self._warned = True
        return json.loads(line)[1]


def _checksum(batch: int, predictions: list[Any]) -> int:
    return zlib.crc32(json.dumps([batch, predictions]).encode())


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _text(value: Any) -> str:
    return value.tobytes().hex() if hasattr(value, "tobytes") else repr(value)
