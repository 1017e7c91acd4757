"""The journal of a run: results of finished stages, so that a run that was cut goes on where it stopped."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def write_whole(path: Path, text: str, writer: str = "") -> None:
    """Write a file so that it is there whole or not at all.

    Args:
        path: The file; its folder is made.
        text: What it holds.
        writer: Names this process, where several may write the same file at once.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}{writer}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class Journal:
    """Results of finished stages in a folder, each written whole.

    Args:
        folder: Where they are kept.
        key: What all of them depend on; a result made under another key is not used.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self.folder = folder
        self._key = key

    def once(self, name: str, make: Callable[[], T], product: Path | None = None, *, about: Any = None) -> T:
        """The result of a stage: read if it is there, made and written otherwise.

        Args:
            name: Of the stage; also of its file.
            make: Makes the result, which must be plain data.
            product: What the stage also leaves on the disk; without it the stage is not finished.
            about: Plain data that this stage depends on besides, such as the hash of a file.
        """
        path = self.folder / f"{name}.json"
        key = hashlib.sha256(json.dumps([self._key, about]).encode()).hexdigest()
        kept = self._read(path, key)
        if kept is not None and (product is None or product.exists()):
            return kept["result"]
        result = make()
        write_whole(path, json.dumps({"key": key, "result": result}))
        return result

    def _read(self, path: Path, key: str) -> dict[str, Any] | None:
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            # A damaged entry is an unfinished stage.
            return None
        fits = isinstance(kept, dict) and kept.get("key") == key and "result" in kept
        return kept if fits else None
