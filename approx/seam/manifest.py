"""The manifest of a converted folder: the sha256 of its files, written last, so that incomplete folders are detected.

Copied into converted checkpoints: saving such a model writes its manifest too.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from approx.errors import ApproxError, Exit

MANIFEST = "approx_manifest.json"
# The model's own files; a tokenizer may be saved in the folder later and is not part of it.
_MODEL_FILES = ("config.json", "*.safetensors", "model.safetensors.index.json", "*.py")


def seal(folder: Path) -> None:
    """Write the manifest of every file of a folder, and flush everything to disk."""
    _write(folder, (path for path in folder.rglob("*") if path.is_file()))


def seal_model(folder: Path) -> None:
    """Write the manifest of weights, config and code only."""
    _write(folder, (path for pattern in _MODEL_FILES for path in folder.glob(pattern)))


def check_seal(folder: Path) -> None:
    """Check that a converted folder is complete and undamaged.

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
            name for name, digest in hashes.items() if not (folder / name).is_file() or sha256(folder / name) != digest
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


def flush(path: Path) -> None:
    """Flush a file, or a folder's directory entry, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(folder: Path, files: Iterable[Path]) -> None:
    manifest = folder / MANIFEST
    manifest.unlink(missing_ok=True)
    chosen = sorted(set(files) - {manifest})
    for path in chosen:
        flush(path)
    hashes = {path.relative_to(folder).as_posix(): sha256(path) for path in chosen}
    manifest.write_text(json.dumps({"files": hashes}, indent=1) + "\n", encoding="utf-8")
    flush(manifest)
    flush(folder)
