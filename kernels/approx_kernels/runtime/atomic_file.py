"""Files that are there whole or not at all: written beside their place, flushed to the disk, renamed last."""

import contextlib
import glob
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

# Nobody writes one file for so long.
_STALE_SECONDS = 24 * 60 * 60


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Give a path to write to; on success that file takes the place of `path` in one step.

    Whatever goes wrong, `path` is untouched and nothing is left beside it; what killed processes left is removed.

    Args:
        path: The file; its folder is made.

    Raises:
        OSError: if the file cannot be written.
    """
    # In the same folder, since a rename is atomic only within one file system; of a name that no other process has, on
    # whatever machine, since several may write the same file.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _tidy_up(path)
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        # The parent may be no folder at all; the error about that is the one to show.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, whole or not at all; a text in UTF-8, with its line ends as they are.

    Raises:
        OSError: if the file cannot be written.
    """
    with atomic_file(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def _tidy_up(path: Path) -> None:
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - leftover.stat().st_mtime > _STALE_SECONDS:
                leftover.unlink()
