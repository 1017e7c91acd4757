"""A lock between processes, on a file; by default the file is made for the lock and goes with it."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_WITHOUT = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
# The content of a file that was made for a lock. Files of the same name with any other content are not removed.
_MARK = b"lock of approx\n"


@contextmanager
def locked(file: Path, *, wait: bool = True, keep: bool = False) -> Iterator[bool]:
    """Hold a lock until the context ends or the process dies; where the file system has none, go on without.

    Args:
        file: The file, in a folder that exists. It is made if it is missing, and removed again if it was made for a
            lock.
        wait: Whether to wait for another process.
        keep: Whether the file is a document of its own: nothing is written into it, and it is never removed.

    Yields:
        Whether the lock is really held; without locks it is not.

    Raises:
        BlockingIOError: if another process holds the lock and `wait` is false.
        OSError: if the file cannot be made.
    """
    descriptor, really = _taken(file, wait, b"" if keep else _MARK)
    try:
        yield really
    finally:
        if not keep and _is_marked(descriptor):
            with suppress(OSError):
                file.unlink(missing_ok=True)
        os.close(descriptor)


def _taken(file: Path, wait: bool, mark: bytes) -> tuple[int, bool]:
    while True:
        descriptor = _opened(file, mark)
        try:
            if fcntl is None:
                return descriptor, False
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            # Whoever held the lock before has removed the file that was opened, and others may have made another.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(file), os.fstat(descriptor)):
                    return descriptor, True
        except OSError as error:
            if error.errno in _WITHOUT:
                return descriptor, False
            os.close(descriptor)
            raise
        os.close(descriptor)


def _opened(file: Path, mark: bytes) -> int:
    flags = getattr(os, "O_NOFOLLOW", 0)
    while True:
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o600)
        except FileExistsError:
            # It may have been removed since, and a folder can be locked as well.
            with suppress(FileNotFoundError):
                return os.open(file, (os.O_RDONLY if file.is_dir() else os.O_RDWR) | flags)
            continue
        try:
            os.write(descriptor, mark)
        except OSError:
            # A full disk.
            os.close(descriptor)
            file.unlink()
            raise
        return descriptor


def _is_marked(descriptor: int) -> bool:
    with suppress(OSError):
        os.lseek(descriptor, 0, os.SEEK_SET)
        return os.read(descriptor, len(_MARK) + 1) == _MARK
    return False
