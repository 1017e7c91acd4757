"""A disk that fails at the k-th operation: each write, flush, close, fsync, rename and copy below a folder is counted."""

import builtins
import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import wrapt

ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES)


class Disk:
    """Counts the operations, and fails once.

    Attributes:
        done: What was done so far: name of the operation and file.
    """

    def __init__(self, below: Path, at: int, error: int, for_ever: bool) -> None:
        self._below, self._at, self._error, self._for_ever = str(below), at, error, for_ever
        self.done: list[tuple[str, str]] = []

    @property
    def failed(self) -> bool:
        """Whether it has failed."""
        return len(self.done) >= self._at > 0

    def step(self, what: str, path: Any) -> None:
        """Count an operation on a path or descriptor.

        Raises:
            OSError: if it is the one that fails.
        """
        name = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.path.abspath(os.fspath(path))
        if name.startswith(self._below):
            self.done.append((what, name))
            if len(self.done) == self._at or (self._for_ever and self.failed):
                raise OSError(self._error, os.strerror(self._error))


class File(wrapt.ObjectProxy):
    """An open file whose operations are counted; where a write fails, half of it is on the disk."""

    def __init__(self, file: Any, disk: Disk) -> None:
        super().__init__(file)
        self._self_disk = disk

    def write(self, data: Any) -> Any:
        """Write."""
        try:
            self._self_disk.step("write", self.name)
        except OSError:
            self.__wrapped__.write(data[: len(data) // 2])
            raise
        return self.__wrapped__.write(data)

    def writelines(self, lines: Any) -> None:
        """Write each."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush."""
        self._self_disk.step("flush", self.name)
        self.__wrapped__.flush()

    def close(self) -> None:
        """Close; where that fails, it is closed all the same."""
        was_open = not self.__wrapped__.closed
        self.__wrapped__.close()
        if was_open:
            self._self_disk.step("close", self.name)

    def __enter__(self) -> Any:
        self.__wrapped__.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


@contextmanager
def failing(below: Path, at: int, error: int, *, for_ever: bool = False) -> Iterator[Disk]:
    """Let the operation number `at` below a folder fail, from 1; none for 0; all after it too if it is `for_ever`."""
    disk, real = Disk(below, at, error, for_ever), io.open
    names = ("fsync", "replace", "rename", "sendfile")
    originals = {name: getattr(os, name) for name in names}

    def opened(file: Any, mode: str = "r", *more: Any, **options: Any) -> Any:
        made = real(file, mode, *more, **options)
        counted = isinstance(file, str | os.PathLike) and set(mode) & set("wax+")
        return File(made, disk) if counted and os.path.abspath(os.fspath(file)).startswith(str(below)) else made

    def counted(name: str) -> Any:
        def call(first: Any, *more: Any, **options: Any) -> Any:
            disk.step(name, first)
            return originals[name](first, *more, **options)

        return call

    io.open = builtins.open = opened  # type: ignore[assignment]  # it is called the same
    for name in names:
        setattr(os, name, counted(name))
    try:
        yield disk
    finally:
        io.open = builtins.open = real  # type: ignore[assignment]  # as above
        for name, function in originals.items():
            setattr(os, name, function)


@contextmanager
def read_only(below: Path) -> Iterator[None]:
    """Let nothing be made, opened for writing, renamed or removed below a folder."""
    real, names = io.open, ("open", "mkdir", "replace", "rename", "unlink", "rmdir")
    originals = {name: getattr(os, name) for name in names}

    def refuse(path: Any) -> None:
        if isinstance(path, str | os.PathLike) and os.path.abspath(os.fspath(path)).startswith(str(below)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    def opened(file: Any, mode: str = "r", *more: Any, **options: Any) -> Any:
        if set(mode) & set("wax+"):
            refuse(file)
        return real(file, mode, *more, **options)

    def guarded(name: str) -> Any:
        def call(first: Any, *more: Any, **options: Any) -> Any:
            if name != "open" or (more and more[0] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
                refuse(first)
            return originals[name](first, *more, **options)

        return call

    io.open = builtins.open = opened  # type: ignore[assignment]  # it is called the same
    for name in names:
        setattr(os, name, guarded(name))
    try:
        yield
    finally:
        io.open = builtins.open = real  # type: ignore[assignment]  # as above
        for name, function in originals.items():
            setattr(os, name, function)
