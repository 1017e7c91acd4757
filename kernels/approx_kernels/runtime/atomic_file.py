"""Atomic writing of files: write a temporary one, flush it to disk, rename it last."""

import contextlib
import glob
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

# No write takes this long, so older temporary files are leftovers.
_STALE_SECONDS = 24 * 60 * 60


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; on success that file replaces `path` atomically.

    On any error `path` is unchanged and the temporary file is removed. Leftovers of killed processes are removed too.

    Args:
        path: The file; its folder is created.

    Raises:
        OSError: if the file cannot be written; it names the file.
    """
    # In the same folder, since a rename is atomic only within one file system; with a unique name, since processes on
    # several machines may write the same file.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _tidy_up(path)
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        # A failed write, unlike a failed open, does not name its file.
        error.filename = error.filename or str(path)
        raise
    finally:
        # The parent may not be a folder; do not hide the error about that.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically; text in UTF-8, with unchanged line endings.

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
