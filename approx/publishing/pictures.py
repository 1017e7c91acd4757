"""Write pictures to disk."""

from pathlib import Path

from approx.errors import ApproxError, Exit
from approx_kernels.runtime.atomic_file import write_whole


def write_pictures(pictures: dict[str, dict[str, bytes]], folder: Path) -> list[Path]:
    """Write pictures into a folder, each file atomically.

    Args:
        pictures: Name -> suffix -> content.
        folder: Created if missing; older pictures of these names are replaced.

    Returns:
        The written files.

    Raises:
        ApproxError: if the folder cannot be written.
    """
    written = []
    try:
        for name, files in pictures.items():
            for suffix, file in files.items():
                write_whole(folder / f"{name}{suffix}", file)
                written.append(folder / f"{name}{suffix}")
    except OSError as error:
        raise ApproxError(f"Pictures cannot be written to {folder}: {error.strerror}.", Exit.UNAVAILABLE) from None
    return written
