"""Reading the manifest of a converted folder: whether the files are complete, and which were edited."""

import json
import secrets
from collections.abc import Iterable
from pathlib import Path

from approx.errors import ApproxError, Exit
from approx.paths import inside
from approx.seam.model import MANIFEST, flush, seal_files, sha256

# The index of the weights, which is not edited by hand.
_INDEX = "model.safetensors.index.json"


def seal(folder: Path) -> None:
    """Write the manifest of every file of a folder, and flush everything to disk."""
    seal_files(folder, (path for path in folder.rglob("*") if path.is_file()))


def check_seal(folder: Path, *, but: Iterable[str] = ()) -> None:
    """Check that a converted folder is complete and undamaged.

    Args:
        folder: The folder.
        but: Names of files that may differ.

    Raises:
        ApproxError: if the manifest is missing or a file differs from it.
    """
    wrong = sorted({*differing(folder)} - {*but})
    edited = [name for name in wrong if is_editable(name) and (folder / name).is_file()]
    if wrong and edited == wrong:
        raise ApproxError(
            f"{folder} was edited: {', '.join(wrong[:3])} differs from {MANIFEST}. If you did this, accept it with "
            f"`approx verify {folder} --accept`; otherwise copy the folder again.",
            Exit.UNAVAILABLE,
        )
    if wrong:
        raise ApproxError(
            f"{folder} is damaged: {', '.join(wrong[:3])} missing or different from {MANIFEST}. "
            "Copy it again, or convert the base checkpoint again.",
            Exit.UNAVAILABLE,
        )


def differing(folder: Path) -> list[str]:
    """Names of the files that are missing in a folder or differ from its manifest; only the manifest if it is damaged.

    Raises:
        ApproxError: if there is no manifest, or it names a file outside the folder.
    """
    manifest = folder / MANIFEST
    if not manifest.is_file():
        raise ApproxError(
            f"{folder} has no {MANIFEST}: it was not written completely. Convert the base checkpoint again.",
            Exit.UNAVAILABLE,
        )
    try:
        return [
            name
            for name, digest in _hashes(folder).items()
            if not (folder / name).is_file() or sha256(folder / name) != digest
        ]
    except ApproxError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return [MANIFEST]


def names(folder: Path) -> set[str]:
    """Names of the files in a folder's manifest; empty if it is damaged.

    Raises:
        ApproxError: if it names a file outside the folder.
    """
    try:
        return {*_hashes(folder)}
    except ApproxError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return set()


def is_editable(name: str) -> bool:
    """Whether a user may edit a file: config, card and tokenizer, but neither weights nor code."""
    return name not in (MANIFEST, _INDEX) and name.endswith((".json", ".md", ".txt", ".model", ".jinja"))


def accept(folder: Path, names: Iterable[str]) -> None:
    """Record the present contents of edited files in the manifest, atomically."""
    # The weights in a folder that is being pushed are links, so only what is added is looked at.
    hashes = _read(folder) | {name: sha256(inside(folder, name, folder / MANIFEST)) for name in names}
    temporary = folder / f".{MANIFEST}.{secrets.token_hex(8)}.tmp"
    temporary.write_text(json.dumps({"files": hashes}, indent=1) + "\n", encoding="utf-8")
    flush(temporary)
    temporary.replace(folder / MANIFEST)
    flush(folder)


def _hashes(folder: Path) -> dict[str, str]:
    hashes = _read(folder)
    for name in hashes.keys():  # noqa: SIM118 - what is no object fails here
        inside(folder, name, folder / MANIFEST)
    return hashes


def _read(folder: Path) -> dict[str, str]:
    return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
