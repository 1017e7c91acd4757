"""Folders that are either whole or not there: written beside their place, sealed with a manifest, renamed last."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from approx.errors import ApproxError, Exit

MANIFEST = "approx_manifest.json"


@contextlib.contextmanager
def atomic_folder(out: Path, *, force: bool = False) -> Iterator[Path]:
    """Give a temporary folder to write into; on success it is sealed and takes the place of `out`.

    Whatever goes wrong, `out` is untouched and the temporary folder is removed. Leftovers of killed runs are removed at
    the start.

    Args:
        out: The folder to make.
        force: Whether an existing `out` may be replaced; it goes only after the new one is complete.

    Raises:
        ApproxError: if `out` exists without `force`, or the disk does not take the files.
    """
    out = Path(out)
    refuse_existing(out, force=force)
    temporary = out.with_name(f"{out.name}.tmp-{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(out)
        temporary.mkdir()
    except OSError as error:
        raise ApproxError(f"{out} cannot be written: {error.strerror}. Choose another output folder.") from None
    try:
        yield temporary
        seal(temporary)
        _replace(temporary, out)
    except OSError as error:
        if error.errno is None:
            raise
        reason = error.strerror or str(error)
        raise ApproxError(
            f"Writing {out} failed: {reason}. Nothing was left half-written; free some space or choose another folder.",
            Exit.UNAVAILABLE,
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def refuse_existing(out: Path, *, force: bool) -> None:
    """Check that `out` may be written, before the long work starts.

    Raises:
        ApproxError: if it exists and `force` is not given, or it is a file.
    """
    if out.exists() and not out.is_dir():
        raise ApproxError(f"{out} is a file, a folder is to be written there. Choose another output.", Exit.REFUSED)
    if out.exists() and not force and any(out.iterdir()):
        raise ApproxError(
            f"{out} exists already. Choose another output folder, or replace it with --force.", Exit.REFUSED
        )


def seal(folder: Path) -> None:
    """Write the manifest with the sha256 of every file, last, and flush everything to the disk."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    for path in files:
        _flush(path)
    hashes = {str(path.relative_to(folder)): sha256(path) for path in files}
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"files": hashes}, indent=1) + "\n", encoding="utf-8")
    _flush(manifest)
    _flush(folder)


def check_seal(folder: Path) -> None:
    """Check that a converted folder is whole.

    Raises:
        ApproxError: if the manifest is missing or a file differs from it.
    """
    manifest = folder / MANIFEST
    if not manifest.is_file():
        raise ApproxError(
            f"{folder} has no {MANIFEST}: it was not written completely. Convert the base checkpoint again.",
            Exit.UNAVAILABLE,
        )
    try:
        hashes = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        wrong = [
            name for name, found in hashes.items() if not (folder / name).is_file() or sha256(folder / name) != found
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        wrong = [MANIFEST]
    if wrong:
        raise ApproxError(
            f"{folder} is damaged: {', '.join(wrong[:3])} missing or different from {MANIFEST}. "
            "Copy it again, or convert the base checkpoint again.",
            Exit.UNAVAILABLE,
        )


def sha256(path: Path) -> str:
    """Hexadecimal sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _replace(temporary: Path, out: Path) -> None:
    old = out.with_name(f"{out.name}.old-{os.getpid()}")
    if out.exists():
        os.replace(out, old)
    try:
        os.replace(temporary, out)
    except OSError:
        if old.exists():
            os.replace(old, out)
        raise
    _flush(out.parent)
    shutil.rmtree(old, ignore_errors=True)


def _remove_stale(out: Path) -> None:
    for path in out.parent.glob(f"{out.name}.tmp-*"):
        pid = path.name.rpartition("-")[2]
        if pid.isdigit() and not _alive(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
