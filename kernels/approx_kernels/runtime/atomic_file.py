"""Atomic writing of files: write a temporary one, flush it to disk, rename it last."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_file(path: Path, *, within: Path | None = None) -> Iterator[Path]:
    """Yield a temporary path to write to; on success that file replaces `path` atomically.

    On any error `path` is unchanged and the temporary file is removed. Killed
    processes may leave theirs: nothing in it says whose it is, so it is not removed by its name.

    Args:
        path: The file; its folder is created.
        within: Folder for the temporary file, on the same file system; by default that of the file.

    Raises:
        OSError: if the file cannot be written; it names the file.
    """
    # In the same folder, since a rename is atomic only within one file system; with a unique name, since processes on
    # several machines may write the same file.
    temporary = (within or path.parent) / f".{path.name}.{uuid.uuid4().hex}.tmp"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
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


def write_whole(path: Path, content: str | bytes, *, within: Path | None = None) -> None:
    """Write a file atomically; text in UTF-8, with unchanged line endings. `within` is that of `atomic_file`.

    Raises:
        OSError: if the file cannot be written.
    """
    with atomic_file(path, within=within) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
