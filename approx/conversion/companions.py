"""The files beside the weights of a checkpoint: tokenizer, feature extractor, generation settings, sentence-transformers' modules,
licence. Code that they name stays behind, unless the user trusts it."""

import ast
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers

from approx.checkpoints.checkpoint import Source, processor
from approx.checkpoints.foreign import MODULES, Reference, is_code, names_only, never_ours, references
from approx.checkpoints.integrity import ADAPTER, INDEX, PICKLE_INDEX
from approx.checkpoints.receipt import RECEIPT
from approx.errors import ApproxError, Exit
from approx.paths import inside, refuse_leaving
from approx.seam.manifest import MANIFEST, sha256

# How the list of modules names the folder of the transformer itself.
_OWN_FOLDER = ("", ".", "./")
# Whose setting of the longest input is called what.
_LONGEST = {"tokenizer_config.json": "model_max_length", "sentence_bert_config.json": "max_seq_length"}
_NOT_COPIED = {"config.json", "README.md", INDEX, PICKLE_INDEX, ADAPTER, MANIFEST, RECEIPT, ".gitattributes"}
_SUFFIXES = {".json", ".txt", ".model", ".jinja"}
_LICENCES = re.compile(r"(?:licen[sc]e|notice|copying|use_policy)", re.IGNORECASE)
# Settings that name the class of a tokenizer or processor.
_CLASSES = (
    "tokenizer_class",
    "processor_class",
    "feature_extractor_type",
    "image_processor_type",
    "video_processor_type",
)
# A full hash of a commit: branches and tags can move.
_COMMIT = re.compile(r"[0-9a-f]{40}")


def copy_companions(source: Source, target: Path, carried: Mapping[str, str] | None = None) -> list[str]:
    """Copy the files of a checkpoint that are neither weights nor config nor code, and its licence.

    They are copied unchanged, except that settings no longer name code that stays behind.

    Args:
        source: The checkpoint.
        target: A folder.
        carried: Name -> sha256 of the files of the checkpoint's own code that go along.

    Returns:
        Notes for the user: what stays behind.

    Raises:
        ApproxError: as for `refuse_foreign`; if `modules.json` cannot be read, names a folder outside the checkpoint, or one whose
            weights are pickled.
    """
    carried = carried or {}
    left = refuse_foreign(source, carried)
    for path in sorted(source.folder.iterdir()):
        if path.is_file() and (_is_licence(path) or (path.suffix in _SUFFIXES and path.name not in _NOT_COPIED)):
            refuse_leaving(source.folder, path)
            shutil.copyfile(path, target / path.name)
    for name in _modules(source.folder):
        (target / name).mkdir(parents=True, exist_ok=True)
        for path in sorted((source.folder / name).iterdir()):
            if path.is_file() and path.suffix in {*_SUFFIXES, ".safetensors"}:
                refuse_leaving(source.folder, path)
                shutil.copyfile(path, target / name / path.name)
    for name, digest in carried.items():
        shutil.copyfile(inside(source.folder, name, source.folder / "config.json"), target / name)
        if sha256(target / name) != digest:
            raise ApproxError(
                f"{source.folder / name} is not the code that was converted. Convert the base again.", Exit.REFUSED
            )
    for one in left:
        if (target / one.file).is_file():
            _forget(target, one)
    return [
        f"{one.place} names code of others ({', '.join(one.classes)}); it was left out, and that code is not run."
        for one in left
    ]


def refuse_foreign(source: Source, carried: Mapping[str, str]) -> list[Reference]:
    """What the settings of a checkpoint name and a converted folder does without: code of the checkpoint or of others.

    Args:
        source: The checkpoint.
        carried: Name -> sha256 of the files of the checkpoint's own code that go along.

    Raises:
        ApproxError: naming the setting, if the checkpoint cannot be used without that code.
    """
    left = [one for one in _foreign(source) if not names_only(one, carried)]
    for one in left:
        if one.path[-1] == "custom_pipelines" or (one.path[-1] == "auto_map" and _reads(source, one.file)):
            continue
        raise ApproxError(
            f"{source.name} needs code that transformers and sentence-transformers do not have ({one.place} names "
            f"{', '.join(one.classes)}), and approx runs none. To take that code along unread, for whoever loads the converted model, "
            "pass --trust-remote-code, and for a model of the hub --revision with the commit that you read.",
            Exit.UNSUPPORTED,
        )
    return left


def code_to_carry(source: Source, revision: str | None) -> dict[str, str]:
    """Name -> sha256 of the files of a checkpoint's own code that its tokenizer and modules need.

    Args:
        source: The checkpoint.
        revision: The revision that the user named.

    Raises:
        ApproxError: if a checkpoint of the hub is not pinned to a commit, or the code is not in the checkpoint.
    """
    if source.revision is not None and not _COMMIT.fullmatch(revision or ""):
        raise ApproxError(
            f"--trust-remote-code needs the commit whose code you read, and {revision or 'no revision'} was given; it is now "
            f"--revision {source.revision}."
        )
    found: dict[str, str] = {}
    for one in _foreign(source):
        if one.path[-1] == "custom_pipelines":
            continue
        for name in one.classes:
            if "--" in name:
                raise ApproxError(
                    f"{one.place} of {source.name} names {name}: code of another repository, which no revision pins. Save the "
                    "tokenizer with its code beside the weights, and convert that folder.",
                    Exit.UNSUPPORTED,
                )
            _carry(source.folder, f"{name.rpartition('.')[0]}.py", one.place, found)
    return found


def _carry(folder: Path, name: str, place: str, found: dict[str, str]) -> None:
    """Add a file of code and the files that it imports from beside it."""
    if name in found:
        return
    path = folder / name
    if Path(name).name != name or not path.is_file() or not never_ours([name]):
        raise ApproxError(
            f"{place} in {folder} names code in {name}, which is no file beside the weights whose name is free. Put it there.",
            Exit.UNSUPPORTED,
        )
    refuse_leaving(folder, path)
    found[name] = sha256(path)
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ApproxError(f"{path} is not Python: {error}. Download it again.", Exit.UNAVAILABLE) from None
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            modules = [node.module] if node.module else [alias.name for alias in node.names]
            for module in modules:
                _carry(folder, f"{module}.py", place, found)


def _foreign(source: Source) -> list[Reference]:
    """What the settings that go along name, apart from the code of the model itself."""
    modules = {f"{name.rstrip('/')}/" for name in _modules(source.folder)}
    return [
        one
        for one in references(source.folder)
        if (one.file, one.path[0]) != ("config.json", "auto_map")
        and ("/" not in one.file or any(one.file.startswith(name) for name in modules))
        and one.file not in _NOT_COPIED - {"config.json"}
    ]


def _reads(source: Source, file: str) -> bool:
    """Whether transformers reads the tokenizer or processor of a checkpoint as the class that a settings file names."""
    named = [settings(source.folder / file).get(key) for key in _CLASSES]
    # Without its code, transformers may take the tokenizer that models of this family usually have, without a word.
    if any(isinstance(name, str) and not hasattr(transformers, name) for name in named):
        return False
    try:
        processor(source)
    except ApproxError:
        return False
    return True


def forget_code(folder: Path, *, but: str = "") -> None:
    """Take out of a folder's config what names code, except one of its keys."""
    for one in references(folder):
        if one.file == "config.json" and one.path != (but,):
            _forget(folder, one)


def _forget(folder: Path, reference: Reference) -> None:
    """Take a setting out of a file."""
    data = settings(folder / reference.file)
    *way, last = reference.path
    inner: Any = data
    for step in way:
        inner = inner[step]
    del inner[last]
    (folder / reference.file).write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _is_licence(path: Path) -> bool:
    return bool(_LICENCES.match(path.name)) and not is_code(path.name) and path.suffix not in {".safetensors", ".json"}


def set_longest(folder: Path, tokens: int) -> None:
    """Change the longest input, in tokens, in the settings of a folder that state one."""
    for name, key in _LONGEST.items():
        if (folder / name).is_file() and (key == "model_max_length" or settings(folder / name).get(key) is not None):
            change(folder / name, {key: tokens})


def settings(path: Path) -> dict[str, Any]:
    """The settings in a file; none if there is no file.

    Raises:
        ApproxError: if it is not a JSON object.
    """
    try:
        read = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if not isinstance(read, dict):
            raise ValueError("it is not an object")
    except (OSError, ValueError, RecursionError) as error:
        raise ApproxError(
            f"{path} cannot be read as JSON settings: {error}. Correct it, or download it again.", Exit.UNAVAILABLE
        ) from None
    return read


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
