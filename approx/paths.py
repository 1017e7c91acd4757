"""Names of files that a file of a checkpoint or a record states: relative, normalised, and inside their folder.

Folders come from the hub and from other people. Without this check, a manifest, an index or a link in such a folder
makes a command read, copy or upload any file of the machine.
"""

import posixpath
from pathlib import Path, PureWindowsPath
from typing import Any

from approx.errors import ApproxError, Exit, shown


def inside(folder: Path, name: Any, named_by: str | Path) -> Path:
    """The path of a file or folder that a file names; it need not exist.

    Args:
        folder: The folder that the name is relative to.
        name: The name as it was read.
        named_by: The file that states the name, for the error.

    Raises:
        ApproxError: if the name is not a normalised relative one, or a symbolic link on its way leaves the folder (exit
            code 8), or it is not a text at all (exit code 5).
    """
    if not is_inside(name):
        raise ApproxError(
            f"{named_by} names {shown(name)}, but only relative names inside {folder} are allowed, with single slashes and "
            "without '..'. Correct that name if you wrote it. Download it again if it is damaged, but only from someone you trust.",
            Exit.REFUSED if isinstance(name, str) else Exit.UNAVAILABLE,
        )
    refuse_leaving(folder, folder / name, named_by)
    return folder / name


def is_inside(name: Any) -> bool:
    """Whether a name is a normalised relative one, on every system, that stays inside its folder, judged by its text alone."""
    return (
        isinstance(name, str)
        and name.isprintable()
        and "\\" not in name
        and name == posixpath.normpath(name)
        and name.split("/")[0] not in ("", ".", "..")
        and not PureWindowsPath(name).anchor
    )


def refuse_leaving(folder: Path, path: Path, named_by: str | Path | None = None) -> None:
    """Check that no symbolic link leads from a path in a folder to a place outside of it.

    The links of the hub's cache are allowed: a snapshot consists of links into the `blobs` next to it.

    Args:
        folder: The folder.
        path: A path in it, which need not exist.
        named_by: The file that states the name, for the error.

    Raises:
        ApproxError: naming the link and where it leads (exit code 8).
    """
    try:
        root, target = folder.resolve(), path.resolve()
    except (OSError, RuntimeError):
        # A loop of links.
        root, target = folder, None
    if target is not None and (target.is_relative_to(root) or target.is_relative_to(_blobs(root))):
        return
    by = "" if named_by is None else f"{named_by} names it, but "
    where = "in a circle" if target is None else f"to {target}, outside the folder"
    raise ApproxError(
        f"{path} is refused: {by}it is a symbolic link that leads {where}. Replace the link by the file itself if it belongs there.",
        Exit.REFUSED,
    )


def _blobs(root: Path) -> Path:
    """Where the links of a snapshot in the hub's cache lead: `models--owner--name/snapshots/commit` -> `models--owner--name/blobs`."""
    cached = root.parent.name == "snapshots" and "--" in root.parent.parent.name
    return (root.parent.parent / "blobs").resolve() if cached else root
