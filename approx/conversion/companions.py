"""The files beside the weights of a checkpoint: tokenizer, feature extractor, generation settings, sentence-transformers' modules."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from approx.checkpoints.receipt import RECEIPT
from approx.errors import ApproxError, Exit
from approx.paths import inside, refuse_leaving
from approx.seam.manifest import MANIFEST

# What sentence-transformers runs after the model (pooling, dense layers), each module with its folder.
MODULES = "modules.json"
# How the list names the folder of the transformer itself.
_OWN_FOLDER = ("", ".", "./")
# Whose setting of the longest input is called what.
_LONGEST = {"tokenizer_config.json": "model_max_length", "sentence_bert_config.json": "max_seq_length"}
_NOT_COPIED = {"config.json", "README.md", "model.safetensors.index.json", MANIFEST, RECEIPT, ".gitattributes"}
_SUFFIXES = {".json", ".txt", ".model", ".jinja"}


def copy_companions(source: Path, target: Path) -> None:
    """Copy the files of a checkpoint that are neither weights nor config nor code, unchanged.

    Raises:
        ApproxError: if `modules.json` cannot be read, names a folder outside the checkpoint or one whose weights are pickled.
    """
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in _SUFFIXES and path.name not in _NOT_COPIED:
            refuse_leaving(source, path)
            shutil.copyfile(path, target / path.name)
    for name in _modules(source):
        (target / name).mkdir(parents=True, exist_ok=True)
        for path in sorted((source / name).iterdir()):
            if path.is_file() and path.suffix in {*_SUFFIXES, ".safetensors"}:
                refuse_leaving(source, path)
                shutil.copyfile(path, target / name / path.name)


def set_longest(folder: Path, tokens: int) -> None:
    """Change the longest input, in tokens, in the settings of a folder that state one."""
    for name, key in _LONGEST.items():
        if (folder / name).is_file() and (key == "model_max_length" or settings(folder / name).get(key) is not None):
            change(folder / name, {key: tokens})


def settings(path: Path) -> dict[str, Any]:
    """The settings in a file; none if there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def change(path: Path, changes: dict[str, Any]) -> None:
    """Write changed settings, if they differ from those in the file."""
    if changes != (before := settings(path)):
        path.write_text(json.dumps(before | changes, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _modules(source: Path) -> list[str]:
    """Names of the folders of sentence-transformers' modules, without the transformer's own."""
    path = source / MODULES
    if not path.is_file():
        return []
    try:
        named = [module["path"] for module in json.loads(path.read_text(encoding="utf-8"))]
    except (ValueError, KeyError, TypeError, RecursionError, OSError):
        raise ApproxError(
            f"{path} is not a list of sentence-transformers' modules, each with its path. Download it again, or delete it to convert "
            "the transformer alone.",
            Exit.UNAVAILABLE,
        ) from None
    # A module without settings, such as a normalisation, may have no folder, and a name may be too long to be looked for.
    folders = [name for name in named if name not in _OWN_FOLDER and os.path.isdir(inside(source, name, path))]
    for name in folders:
        if not [*(source / name).glob("*.safetensors")] and (pickled := [*(source / name).glob("*.bin")]):
            raise ApproxError(
                f"{pickled[0]} is pickled, and converted folders hold no pickle. Save the model again with a current "
                f"sentence-transformers, or delete {MODULES} to convert the transformer alone.",
                Exit.REFUSED,
            )
    return folders
