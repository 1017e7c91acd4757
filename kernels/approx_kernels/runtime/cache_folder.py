"""The cache folder shared between processes, and whether code may be loaded from it."""

import os
import stat
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """$APPROX_CACHE, or `approx` in $XDG_CACHE_HOME or ~/.cache; a temporary folder for users without a home."""
    if chosen := os.environ.get("APPROX_CACHE"):
        return Path(chosen)
    if caches := os.environ.get("XDG_CACHE_HOME"):
        return Path(caches) / "approx"
    try:
        return Path.home() / ".cache" / "approx"
    except RuntimeError:  # neither $HOME nor an entry in the user database, as in many containers
        return Path(tempfile.gettempdir()) / f"approx-{os.getuid() if hasattr(os, 'getuid') else 'user'}"


def private_folder(name: str) -> Path:
    """A folder in the cache folder that only this user can write to, created if missing.

    Returns:
        Its path without symbolic links.

    Raises:
        OSError: if it cannot be created, or other users could put files into it; the message says how to fix it.
    """
    folder = cache_folder() / name
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = folder.resolve()
    if why := _open_to_others(folder.stat()):
        raise PermissionError(f"{folder} {why}, so code in it cannot be trusted. Remove it")
    for parent in folder.parents:
        mode = parent.stat().st_mode
        # With the sticky bit, as on /tmp, only the owner of a folder can replace it.
        if os.name == "posix" and mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise PermissionError(
                f"{parent} can be written by all users, so code in {folder} cannot be trusted. Run chmod o-w on it"
            )
    return folder


def is_private(file: Path) -> bool:
    """Whether a file is a regular file, not a link, that this user owns and nobody else can write to."""
    status = file.lstat()
    return stat.S_ISREG(status.st_mode) and _open_to_others(status) is None


def _open_to_others(status: os.stat_result) -> str | None:
    # Windows has no user ids or permission bits.
    if os.name != "posix":
        return None
    if status.st_uid != os.getuid():
        return f"belongs to user {status.st_uid}, not to {os.getuid()}"
    return "can be written by other users" if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else None
