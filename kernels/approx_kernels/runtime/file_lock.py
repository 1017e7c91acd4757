"""A lock between processes, on a file that goes with it."""

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


@contextmanager
def locked(file: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold a lock until the context ends or the process dies; where the file system has none, go on without.

    Args:
        file: The file, in a folder that exists; it is made and removed again.
        wait: Whether to wait for another process.

    Raises:
        BlockingIOError: if another process holds the lock and `wait` is false.
        OSError: if the file cannot be made.
    """
    descriptor = _taken(file, wait)
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)
        os.close(descriptor)


def _taken(file: Path, wait: bool) -> int:
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
        try:
            if fcntl is None:
                return descriptor
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            # Whoever held the lock before has removed the file that was opened, and others may have made another.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(file), os.fstat(descriptor)):
                    return descriptor
        except OSError as error:
            if error.errno in _WITHOUT:
                return descriptor
            os.close(descriptor)
            raise
        os.close(descriptor)
