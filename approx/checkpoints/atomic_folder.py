"""Folders of approx: written atomically, claimed by a file inside them, and never recognised by their names.

Every folder that this tool removes, renames or fills holds a claim, the file `.approx-claim.json`, which names the
folder and its purpose. Anything next to an output without a claim, whatever its name, belongs to the user and stays as
it is.
"""

import contextlib
import glob
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError

from approx.checkpoints.manifest import MANIFEST, flush, names, seal
from approx.errors import ApproxError, Exit
from approx_kernels.runtime.file_lock import locked

CLAIM = ".approx-claim.json"
Kind = Literal["temporary", "output", "failed", "training", "search", "run", "sweep", "arena"]
# Folders in the workplace of an output.
_NEW, _OLD = "new", "old"
# What Python, the hub and its client, and the desktop put into the folder of a model.
_BY_OTHERS = ("__pycache__/", ".cache/huggingface/", ".gitattributes", ".DS_Store")
_SHOWN = 3


class Claim(BaseModel):
    """The content of a claim.

    Attributes:
        approx: Always true; it distinguishes the file from others.
        kind: The purpose of the folder.
        folder: Name of the folder when it was claimed; a copy of a temporary folder under another name is the user's.
        host: Name of the machine or container.
        boot: The kernel that the machine runs since it started; containers on one machine share it, and with it their
            locks.
        files: The files of an output without a manifest.
    """

    model_config = ConfigDict(extra="ignore")

    approx: Literal[True]
    kind: Kind
    folder: str
    host: str = ""
    boot: str = ""
    files: list[str] = []


def claimed(folder: Path) -> Claim | None:
    """The claim on a folder; None if approx did not make it. A link never counts: it may lead anywhere."""
    try:
        if (folder / CLAIM).is_symlink():
            return None
        return Claim.model_validate_json((folder / CLAIM).read_bytes(), strict=True)
    except (OSError, ValidationError):
        return None


def _never(folder: Path) -> bool:
    return False


def claim(folder: Path, kind: Kind, what: str, earlier: Callable[[Path], bool] = _never) -> None:
    """Make a folder ours: a new or empty one, or one that is ours already.

    Args:
        folder: The folder; it is created if it is missing.
        kind: Its purpose.
        what: The same in words for the error, such as "a training".
        earlier: Whether an earlier version, which made no claims, has written a folder.

    Raises:
        ApproxError: if it is a folder or file of the user (exit code 8), or cannot be written.
    """
    refuse_unclaimed(folder, kind, what, earlier)
    if claimed(folder) is None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _write_claim(folder, kind)
        except OSError as error:
            raise _unwritable(folder, error) from None


def refuse_unclaimed(folder: Path, kind: Kind, what: str, earlier: Callable[[Path], bool] = _never) -> None:
    """Check that a folder is missing, empty, or claimed for a purpose; the arguments are those of `claim`.

    Raises:
        ApproxError: naming what was found (exit code 8).
    """
    found = claimed(folder)
    if found is not None and found.kind == kind:
        return
    if (folder / CLAIM).is_symlink():
        raise ApproxError(
            f"{folder / CLAIM} is a link, which is no claim of approx. Remove it, or choose another output.",
            Exit.REFUSED,
        )
    try:
        if not folder.is_symlink() and not folder.exists():
            return
        inside = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else None
    except OSError as error:
        raise _unwritable(folder, error) from None
    if inside is None:
        raise ApproxError(
            f"{folder} is a file or a link to nothing, but the place of {what}. Move it away, or choose another "
            "output.",
            Exit.REFUSED,
        )
    # A process was killed while it claimed the folder.
    torn = inside == [CLAIM] and (folder / CLAIM).is_file() and not (folder / CLAIM).stat().st_size
    if inside and not torn and not earlier(folder):
        raise ApproxError(
            f"{folder} exists and is not {what} of approx: it holds {_listed(inside)}, but no claim ({CLAIM}). Move it "
            "away, or choose another output.",
            Exit.REFUSED,
        )


def remove(folder: Path, kind: Kind, last: str = "") -> None:
    """Remove a folder that is claimed for a purpose, the claim after all else; nothing happens to any other.

    Args:
        folder: The folder.
        kind: The purpose.
        last: The file to remove just before the claim, because it records that the others are not needed.

    Raises:
        ApproxError: if something in it cannot be removed; the claim then remains.
    """
    found = claimed(folder)
    if found is None or found.kind != kind:
        return
    try:
        _remove(folder, last)
    except OSError as error:
        raise ApproxError(
            f"{folder} cannot be removed: {error.strerror}. Remove it yourself.", Exit.UNAVAILABLE
        ) from None


def _remove(folder: Path, last: str = "") -> None:
    for path in sorted(folder.iterdir(), key=lambda path: path.name == last):
        if path.name != CLAIM:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    (folder / CLAIM).unlink()
    folder.rmdir()


def _write_claim(folder: Path, kind: Kind, name: str | None = None) -> None:
    name = name or folder.resolve().name
    _write(folder, Claim(approx=True, kind=kind, folder=name, host=socket.gethostname(), boot=_boot()))


def _write(folder: Path, made: Claim) -> None:
    (folder / CLAIM).write_text(made.model_dump_json(indent=1) + "\n", encoding="utf-8")


def _boot() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return ""


@contextlib.contextmanager
def atomic_folder(out: Path, *, force: bool = False, sealed: bool = True) -> Iterator[Path]:
    """Yield a temporary folder to write into; on success it replaces `out`.

    On any error `out` is unchanged and the temporary folder is removed. Leftovers of killed runs are removed at the
    start.

    Args:
        out: The folder to create.
        force: Whether an existing `out` may be replaced; it is removed only after the new one is complete.
        sealed: Whether the folder gets a manifest of its files; otherwise it gets a claim.

    Raises:
        ApproxError: if `out` may not be replaced, or writing fails.
    """
    out = Path(out).resolve()
    refuse_existing(out, force=force)
    with contextlib.ExitStack() as stack:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            _tidy_up(out)
            # It holds the new folder, later the old one too, so neither needs a separate claim.
            place = _workplace(out)
            stack.callback(_dropped, place)
            stack.enter_context(locked(place / CLAIM, keep=True))
            _write_claim(place, "temporary")
            (place / _NEW).mkdir()
        except OSError as error:
            raise _unwritable(out, error) from None
        try:
            # Another process may have created `out` meanwhile, or tidying up may have restored a killed run's original.
            refuse_existing(out, force=force)
            yield place / _NEW
            if sealed:
                seal(place / _NEW)
            else:
                _claim_output(place / _NEW, out)
                _flush_all(place / _NEW)
            # Another process may be about to do the same.
            with locked(out.with_name(f".{out.name}.lock")):
                refuse_existing(out, force=force)
                _replace(place, out)
        except (OSError, SafetensorError) as error:
            if isinstance(error, OSError) and error.errno is None:
                raise
            reason = getattr(error, "strerror", None) or str(error)
            raise ApproxError(
                f"Writing {out} failed: {reason}. No partial files remain; free some space or choose another folder.",
                Exit.UNAVAILABLE,
            ) from error


def keep_failed(folder: Path, out: Path) -> Path:
    """Keep a folder that did not pass its checks as `OUT.failed`, with a number if the user has a folder of that name.

    Args:
        folder: The folder from `atomic_folder`.
        out: The output that it was meant for.

    Returns:
        Where it is now.
    """
    out, number = Path(out).resolve(), 1
    failed = out.with_name(f"{out.name}.failed")
    while failed.is_symlink() or failed.exists():
        found = claimed(failed)
        if found is not None and (found.kind, found.folder) == ("failed", failed.name):
            _remove(failed)
            break
        number += 1
        failed = out.with_name(f"{out.name}.failed-{number}")
    _write_claim(folder, "failed", failed.name)
    os.replace(folder, failed)
    return failed


@contextlib.contextmanager
def locked_output(folder: Path) -> Iterator[None]:
    """Lock an output, a folder or file, until the context or this process ends; it need not exist.

    Does nothing on file systems without locks.

    Raises:
        ApproxError: if another process holds the lock (exit code 8), or nothing can be written next to it.
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
        ApproxError: if it exists and `force` is not set, or it holds files that this tool did not write.
    """
    out = Path(out)
    try:
        found = {path.name for path in out.iterdir()} if out.is_dir() else set()
        is_file = out.exists() and not out.is_dir()
    except OSError as error:
        raise _unwritable(out, error, Exit.USAGE) from None
    if _here().is_relative_to(out.resolve()):
        raise ApproxError(
            f"{out} is the current folder or contains it, so it cannot be replaced. Choose another output folder.",
            Exit.REFUSED,
        )
    if is_file:
        raise ApproxError(f"{out} is a file, but the output is a folder. Choose another output.", Exit.REFUSED)
    if out.is_symlink() and not out.exists():
        raise ApproxError(
            f"{out} is a symbolic link to {os.readlink(out)}, which does not exist. Remove the link, or choose another "
            "output folder.",
            Exit.REFUSED,
        )
    if found and not force:
        raise ApproxError(
            f"{out} exists already. Choose another output folder, or replace it with --force.", Exit.REFUSED
        )
    if found:
        _refuse_foreign(out, found)


def _here() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:
        # The current folder was deleted, so nothing contains it.
        return Path()


def _refuse_foreign(out: Path, found: set[str]) -> None:
    """Check that all in a folder that is about to be replaced was written by this tool."""
    written = _own_files(out)
    if written is None:
        raise ApproxError(
            f"{out} was not written by approx: it holds {_listed(sorted(found))}, but neither {MANIFEST} nor {CLAIM}, "
            "and --force replaces only what approx wrote. Choose another output folder, or remove it yourself.",
            Exit.REFUSED,
        )
    files = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_symlink() or not path.is_dir()}
    foreign = sorted(name for name in files - written if not name.startswith(_BY_OTHERS))
    if foreign:
        raise ApproxError(
            f"{out} also holds {_listed(foreign)}, which approx did not write, so --force does not replace it. Move "
            "that away, or choose another output folder.",
            Exit.REFUSED,
        )


def _own_files(out: Path) -> set[str] | None:
    """Names of the files that this tool wrote into a folder; None if it is not one of its outputs."""
    if (out / MANIFEST).is_file():
        return {*names(out), MANIFEST, CLAIM}
    found = claimed(out)
    return {*found.files, CLAIM} if found is not None and found.kind == "output" else None


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def refuse_unwritable(out: Path) -> None:
    """Check that a folder can be created next to `out`, before the long work starts; the check leaves nothing behind.

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
        raise _unwritable(out, error, Exit.USAGE) from None


def _unwritable(out: Path, error: OSError, code: Exit = Exit.UNAVAILABLE) -> ApproxError:
    return ApproxError(f"{out} cannot be written: {error.strerror}. Choose another output folder.", code)


def refuse_overlap(source: Path, out: Path) -> None:
    """Check that writing `out` neither deletes the folder it is made from nor adds to it.

    Raises:
        ApproxError: if one of the folders is the other or inside it.
    """
    if out.resolve().is_relative_to(source.resolve()) and out.resolve() != source.resolve():
        raise ApproxError(
            f"{out} lies inside the input checkpoint {source} and would become part of it. Choose another output "
            "folder.",
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


def _workplace(out: Path) -> Path:
    """An empty folder of an unused name next to an output."""
    while True:
        place = out.with_name(f"{out.name}.tmp-{secrets.token_hex(4)}")
        with contextlib.suppress(FileExistsError):
            place.mkdir()
            return place


def _dropped(place: Path) -> None:
    # What cannot be removed now keeps its claim, and the next run tries again.
    with contextlib.suppress(OSError):
        _remove(place)


def _claim_output(folder: Path, out: Path) -> None:
    files = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    # The user may share it, so it does not name this machine.
    _write(folder, Claim(approx=True, kind="output", folder=out.name, files=files))


def _replace(place: Path, out: Path) -> None:
    new, old = place / _NEW, place / _OLD
    try:
        if out.exists():
            os.replace(out, old)
        os.replace(new, out)
        flush(out.parent)
    except BaseException:
        if not new.exists():
            os.replace(out, new)
        if old.exists():
            os.replace(old, out)
        raise


def _tidy_up(out: Path) -> None:
    """Remove leftovers of killed runs; restore an original that was moved aside but not replaced."""
    # Taking a leftover lock removes it; another process may hold it.
    if (lock := out.with_name(f".{out.name}.lock")).is_file():
        with contextlib.suppress(OSError), locked(lock, wait=False):
            pass
    for place in sorted(out.parent.glob(f"{glob.escape(out.name)}.tmp-*")):
        found = None if place.is_symlink() else claimed(place)
        if found is None or (found.kind, found.folder) != ("temporary", place.name):
            continue
        # A living process holds its claim. Only the same kernel is sure to know the locks, or the same machine before
        # it restarted.
        with contextlib.suppress(OSError), locked(place / CLAIM, wait=False, keep=True) as really:
            if really and (found.host == socket.gethostname() or found.boot == _boot() != ""):
                if (place / _OLD).is_dir() and not out.exists():
                    os.replace(place / _OLD, out)
                _remove(place)
