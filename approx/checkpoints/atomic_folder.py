"""Atomic writing of folders: write a temporary one, seal it with a manifest, rename it last; one process at a time."""

import contextlib
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from approx.errors import ApproxError, Exit
from approx.seam.manifest import flush, seal
from approx_kernels.runtime.file_lock import locked


@contextlib.contextmanager
def atomic_folder(out: Path, *, force: bool = False, sealed: bool = True) -> Iterator[Path]:
    """Yield a temporary folder to write into; on success it replaces `out`.

    On any error `out` is unchanged and the temporary folder is removed. Leftovers of killed runs are removed at the start.

    Args:
        out: The folder to create.
        force: Whether an existing `out` may be replaced; it is removed only after the new one is complete.
        sealed: Whether the folder gets a manifest of its files.

    Raises:
        ApproxError: if `out` may not be replaced, or writing fails.
    """
    out = Path(out).resolve()
    temporary, old = (out.with_name(f"{out.name}.{what}-{os.getpid()}") for what in ("tmp", "old"))
    refuse_existing(out, force=force)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _tidy_up(out)
        temporary.mkdir()
    except OSError as error:
        raise _unwritable(out, error) from None
    # Another process may have created `out` meanwhile, or tidying up may have restored a killed run's original.
    try:
        refuse_existing(out, force=force)
        yield temporary
        if sealed:
            seal(temporary)
        else:
            _flush_all(temporary)
        # Another process may be about to do the same.
        with locked(out.with_name(f".{out.name}.lock")):
            refuse_existing(out, force=force)
            _replace(temporary, out, old)
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno is None:
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise ApproxError(
            f"Writing {out} failed: {reason}. No partial files remain; free some space or choose another folder.",
            Exit.UNAVAILABLE,
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep other processes from holding an output, a folder or file, until the context or this process ends; it need not exist.

    Where the file system has no locks, nothing is kept.

    Raises:
        ApproxError: if another process holds it (exit code 8), or nothing can be written beside it.
    """
    folder = Path(folder).resolve()
    made = not folder.parent.exists()
    with contextlib.ExitStack() as stack:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder.with_name(f".{folder.name}.lock"), wait=False))
        except BlockingIOError:
            raise ApproxError(
                f"Another process is writing {folder}. Wait until it is done, or choose another output.", Exit.REFUSED
            ) from None
        except OSError as error:
            raise _unwritable(folder, error) from None
        yield
    if made:
        # Nothing was written, or it is not empty.
        with contextlib.suppress(OSError):
            folder.parent.rmdir()


def refuse_existing(out: Path, *, force: bool) -> None:
    """Check that `out` may be written, before the long work starts.

    Raises:
        ApproxError: if it exists and `force` is not set, or it is not the folder of a checkpoint.
    """
    out = Path(out)
    try:
        names = {path.name for path in out.iterdir()} if out.is_dir() else set()
        is_file = out.exists() and not out.is_dir()
    except OSError as error:
        raise _unwritable(out, error) from None
    if Path.cwd().is_relative_to(out.resolve()):
        raise ApproxError(
            f"{out} is the current folder or contains it, so it cannot be replaced. Choose another output folder.",
            Exit.REFUSED,
        )
    if is_file:
        raise ApproxError(f"{out} is a file, but the output is a folder. Choose another output.", Exit.REFUSED)
    if out.is_symlink() and not out.exists():
        raise ApproxError(
            f"{out} is a symbolic link to {os.readlink(out)}, which does not exist. Remove the link, or choose another output folder.",
            Exit.REFUSED,
        )
    if names and not force:
        raise ApproxError(
            f"{out} exists already. Choose another output folder, or replace it with --force.", Exit.REFUSED
        )
    if names and "config.json" not in names:
        raise ApproxError(
            f"{out} is not the folder of a checkpoint (it has no config.json), and --force replaces only those. "
            "Choose another output folder.",
            Exit.REFUSED,
        )


def refuse_unwritable(out: Path) -> None:
    """Check that a folder can be created beside `out`, before the long work starts; the check leaves nothing behind.

    Raises:
        ApproxError: if it cannot.
    """
    place = Path(out).resolve().parent
    while not place.exists():
        place = place.parent
    try:
        # Permissions do not tell for root, or on a file system that is read-only or full.
        os.rmdir(tempfile.mkdtemp(prefix=".approx-", dir=place))
    except OSError as error:
        raise _unwritable(out, error) from None


def _unwritable(out: Path, error: OSError) -> ApproxError:
    return ApproxError(f"{out} cannot be written: {error.strerror}. Choose another output folder.")


def refuse_overlap(source: Path, out: Path) -> None:
    """Check that writing `out` neither deletes the folder it is made from nor adds to it.

    Raises:
        ApproxError: if one of the folders is the other or inside it.
    """
    if out.resolve().is_relative_to(source.resolve()) and out.resolve() != source.resolve():
        raise ApproxError(
            f"{out} lies inside the input checkpoint {source} and would become part of it. Choose another output folder.",
            Exit.REFUSED,
        )
    if source.resolve().is_relative_to(out.resolve()):
        raise ApproxError(
            f"{out} contains the input checkpoint {source}, which would be deleted. Choose another output folder.",
            Exit.REFUSED,
        )


def _flush_all(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            flush(path)
    flush(folder)


def _replace(temporary: Path, out: Path, old: Path) -> None:
    try:
        if out.exists():
            os.replace(out, old)
        os.replace(temporary, out)
        flush(out.parent)
    except BaseException:
        if not temporary.exists():
            os.replace(out, temporary)
        if old.exists():
            os.replace(old, out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _tidy_up(out: Path) -> None:
    """Remove leftovers of killed runs; restore an original that was moved aside but not replaced."""
    if (lock := out.with_name(f".{out.name}.lock")).exists():
        # It goes with whoever takes it; another process may hold it.
        with contextlib.suppress(OSError), locked(lock, wait=False):
            pass
    for path in sorted(out.parent.glob(f"{glob.escape(out.name)}.*-*")):
        what, _, pid = path.name[len(out.name) + 1 :].partition("-")
        if what not in ("tmp", "old") or not pid.isdigit() or _alive(int(pid)):
            continue
        if what == "old" and not out.exists():
            os.replace(path, out)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    # Process ids repeat: a container's first process always has the same one.
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
