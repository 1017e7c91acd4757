"""Code that a checkpoint brings along or names, found without running any of it."""

import difflib
import hashlib
import json
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from approx.checkpoints import bundle, families
from approx.checkpoints.history import conversion
from approx.errors import ApproxError, Exit
from approx.paths import refuse_leaving
from approx.version import __version__

# Files that Python or the linker would run, or that tell Python where to look for such files.
_RUNS = re.compile(r"\.(?:py|pyw|pyi|pyc|pyo|pyd|pyx|so(?:\.[\d.]+)?|dll|dylib|pth|egg|whl)$")
# Vocabularies and indexes are large, and nothing looks for classes in them.
_ONLY_DATA = {"tokenizer.json", "vocab.json", "model.safetensors.index.json"}
MODULES = "modules.json"
# What sentence-transformers imports by the name in a setting, and what it imports without `trust_remote_code`.
_IMPORTED = {"activation_fn", "activation_function", "sbert_ce_default_activation_function"}
_HARMLESS = re.compile(r"(?:torch\.nn|sentence_transformers)(?:\.\w+)+$", re.ASCII)
# transformers downloads and runs a kernel of the hub if the name of an implementation has a slash.
_IMPLEMENTATIONS = {"attn_implementation", "_attn_implementation", "experts_implementation"}
# Settings of real checkpoints are at most a handful deep.
_DEEPEST = 100


@dataclass(frozen=True)
class Reference:
    """A setting that names code.

    Attributes:
        file: Name of the settings file in the checkpoint.
        path: Keys and indexes of the setting.
        value: What it names, as it stands in the file.
    """

    file: str
    path: tuple[str | int, ...]
    value: Any

    @property
    def place(self) -> str:
        """The file and the setting, for messages."""
        return plainly(f"{self.file}: {'.'.join(map(str, self.path))}")

    @property
    def classes(self) -> list[str]:
        """The classes that an `auto_map`, or the type of a module, names."""
        return [one for one in _leaves(self.value) if isinstance(one, str)]


def is_code(name: str) -> bool:
    """Whether a file, by its name, holds code, also on a file system that ignores case or trailing dots."""
    return bool(_RUNS.search(unicodedata.normalize("NFKC", name).casefold().rstrip(". ")))


def plainly(name: str) -> str:
    """A name in ASCII, so that letters that look alike are distinguishable."""
    return name.encode("ascii", "backslashreplace").decode()


def code_files(folder: Path) -> dict[str, bytes]:
    """Every file of code in a folder and in all folders below it, by its name there.

    A folder below it that is a link counts as code too: what it holds is outside, and may change. Its content is empty.
    """
    found: dict[str, bytes] = {}
    for place, folders, files in os.walk(folder):
        inside = Path(place).relative_to(folder)
        found |= {f"{(inside / name).as_posix()}/": b"" for name in folders if Path(place, name).is_symlink()}
        for name in files:
            if is_code(name):
                path = Path(place, name)
                # A link that leads nowhere, or a pipe, is no code of ours either.
                found[(inside / name).as_posix()] = path.read_bytes() if path.is_file() else b""
    return found


def references(folder: Path) -> list[Reference]:
    """Every setting in a folder, and in the folders below it, that names code which a library might import.

    A file that is not JSON names nothing, since no library can read it.

    Raises:
        ApproxError: if a settings file is nested too deeply, or is a link that leaves the folder.
    """
    found: list[Reference] = []
    for place, _, files in sorted(os.walk(folder)):
        for name in sorted(files):
            path = Path(place, name)
            if name.casefold().endswith(".json") and name not in _ONLY_DATA and path.is_file():
                refuse_leaving(folder, path)
                inside = path.relative_to(folder).as_posix()
                found += [Reference(inside, at, value) for at, value in _named(name, _settings(path))]
    return found


def refuse_kernels(config: Mapping[str, Any], path: Path) -> None:
    """Refuse a config that makes transformers download compiled code of the hub, and run it.

    Raises:
        ApproxError: naming the setting.
    """
    for at, value in _named(path.name, config):
        if at[-1] in _IMPLEMENTATIONS:
            raise ApproxError(
                f"{path} sets {'.'.join(map(str, at))} to '{plainly(value)}', which is code on the hub that "
                "transformers would run. Take the setting out.",
                Exit.UNSUPPORTED,
            )


def carried(config: Any) -> dict[str, str]:
    """Name -> sha256 of the files of custom code of the base that a conversion copied at the user's request.

    The author of a folder writes this too, so it only marks code that is not from approx; it may be harmful.
    """
    made = conversion(getattr(config, "approx", None) or {})
    return {} if made is None else made.carried


def differences(folder: Path, config: Any, stock: type) -> dict[str, str]:
    """How the code of a converted folder, and what its settings name, differs from what this version of approx writes.

    Nothing is imported. Equal means byte by byte, in every folder below it too. Code that was carried along is left
    out.

    Args:
        folder: The folder.
        config: The converted config that the code is written for.
        stock: The stock class of the model.

    Returns:
        File, or file and setting, -> the difference, for people; empty if there is none.
    """
    passed = carried(config)
    with TemporaryDirectory() as scratch:
        families.write_code(Path(scratch), config, stock)
        ours = code_files(Path(scratch))
    theirs = {name: data for name, data in code_files(folder).items() if not _is_carried(name, data, passed, ours)}
    found = {
        plainly(name): _difference(name, ours.get(name, b""), theirs.get(name, b""))
        for name in sorted({*ours, *theirs})
        if ours.get(name) != theirs.get(name)
    }
    expected_map = bundle.auto_map(families.stock_class(type(config)), stock)
    named = references(folder)
    if not any(one.file == "config.json" and one.path == ("auto_map",) for one in named):
        named = [Reference("config.json", ("auto_map",), {}), *named]
    for one in named:
        wanted = expected_map if (one.file, one.path) == ("config.json", ("auto_map",)) else None
        if one.value != wanted and not (passed and names_only(one, passed)):
            before = b"" if wanted is None else _lines(wanted)
            # Every version of approx named files of the folder itself.
            ours_once = wanted is not None and not never_ours(f"{name.rpartition('.')[0]}.py" for name in one.classes)
            place = one.place if ours_once else f"{one.place} (code elsewhere)"
            found[place] = _difference(one.place, before, _lines(one.value))
    return found


def never_ours(names: Iterable[str]) -> list[str]:
    """Those of the names of `differences` that no version of approx has written."""
    written = re.compile(r"(?:approx|configuration_approx|modeling_approx)_\w+\.py", re.ASCII)
    return [name for name in names if not written.fullmatch(name) and name != "config.json: auto_map"]


def _is_carried(name: str, data: bytes, passed: Mapping[str, str], ours: Mapping[str, bytes]) -> bool:
    return name not in ours and passed.get(name) == hashlib.sha256(data).hexdigest()


def names_only(reference: Reference, passed: Mapping[str, str]) -> bool:
    """Whether everything that a setting names is in these files, which are next to it."""
    return all("--" not in one and f"{one.rpartition('.')[0]}.py" in passed for one in reference.classes)


def _named(name: str, settings: Any) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Path and value of the settings that name code."""
    waiting: list[tuple[tuple[str | int, ...], Any]] = [((), settings)]
    while waiting:
        path, value = waiting.pop()
        key = path[-1] if path else None
        if key in ("auto_map", "custom_pipelines") and value:
            yield path, value
            continue
        if isinstance(value, str):
            module = (name == MODULES and key == "type") or ("types" in path[:-1] and "." in value)
            imported = key in _IMPORTED and "." in value
            if (module or imported) and not _HARMLESS.match(value):
                yield path, value
            if key in _IMPLEMENTATIONS and "/" in value:
                yield path, value
        elif isinstance(value, dict):
            waiting += [((*path, key), inner) for key, inner in value.items()]
        elif isinstance(value, list):
            waiting += [((*path, number), inner) for number, inner in enumerate(value)]


def _leaves(value: Any) -> Iterator[Any]:
    waiting = [value]
    while waiting:
        one = waiting.pop()
        inner = [*one.values()] if isinstance(one, dict) else one if isinstance(one, list) else None
        if inner is None:
            yield one
        else:
            waiting += inner


def _settings(path: Path) -> Any:
    """The settings in a file; None if it is not JSON."""
    try:
        read = json.loads(path.read_bytes())
        level = [read]
        for _ in range(_DEEPEST):
            level = [
                inner
                for one in level
                for inner in (one.values() if isinstance(one, dict) else one if isinstance(one, list) else ())
            ]
        if level:
            raise RecursionError
    except ValueError:
        return None
    except RecursionError:
        raise ApproxError(
            f"{path} is nested more than {_DEEPEST} deep, which no settings are. Download or copy it again.",
            Exit.UNAVAILABLE,
        ) from None
    return read


def _lines(value: Any) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode()


def _difference(name: str, ours: bytes, theirs: bytes) -> str:
    """A unified difference of two texts; in words where the texts look alike."""
    before, after = (data.decode("utf-8", "backslashreplace").splitlines() for data in (ours, theirs))
    lines = difflib.unified_diff(before, after, f"approx {__version__}", name, lineterm="", n=1)
    return "\n".join(lines) or f"{len(ours):,} bytes written by approx, {len(theirs):,} bytes here"
