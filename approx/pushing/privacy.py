"""What must not leave this machine: secrets, local paths, names of users and machines, and typed commands."""

import contextlib
import getpass
import json
import os
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import get_token

# Forms of access tokens and keys.
_SECRETS = re.compile(
    r"hf_[A-Za-z0-9]{20,}|api_org_[A-Za-z0-9]{20,}|gh[opsur]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}"
    r"|xox[abprs]-[\w-]{10,}|sk-[\w-]{20,}|(?:AKIA|ASIA)[0-9A-Z]{16}|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
_SECRET_VARIABLE = re.compile(r"TOKEN(?!IZER)|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIAL")
_SHORTEST_SECRET = 8
# Folders whose paths exist on one machine only. What follows a scheme or another path is part of an address.
_PATHS = re.compile(
    r"(?<![\w./:}>~-])/(?:home|Users|root|mnt|media|opt|private|scratch|srv|tmp|var|work|workspace)/[\w.@+-]+(?:/[\w.@+-]+)*"
    r"|(?<![\w./])[A-Za-z]:\\{1,2}[\w .$-]+(?:\\{1,2}[\w .$-]+)+|(?<![\w./])~/[\w.@+-]+(?:/[\w.@+-]+)*"
)
# As a record may name them: any path that begins with a folder and not with a name.
_ANY_PATH = re.compile(r"(?<![\w.:/<>~])(?:(?:~|\.{1,2})/|/(?=[\w.@+-]+/))(?:[\w.@+-]+/)*[\w.@+-]+")
# Names of accounts that say nothing about their user.
_ANYBODY = {
    "root",
    "user",
    "users",
    "admin",
    "ubuntu",
    "debian",
    "runner",
    "nobody",
    "docker",
    "jovyan",
    "app",
    "localhost",
}
# Vocabularies hold any word; all words of Python files come from this package.
_VOCABULARIES = {
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
}
# Settings in which transformers notes where it read something.
_ORIGINS = {"_name_or_path", "name_or_path", "tokenizer_file", "vocab_file", "merges_file", "special_tokens_map_file"}
_COMMANDS = {"command", "argv", "cmd"}


@dataclass(frozen=True)
class Private:
    """What is private on this machine.

    Attributes:
        secrets: Values of tokens.
        folders: Folders such as the user's home.
        names: Names of the user and of the machine.
    """

    secrets: tuple[str, ...] = field(repr=False)
    folders: tuple[str, ...]
    names: tuple[str, ...]


def private_here() -> Private:
    """What is private on this machine: the token, secret variables, the home folder, the names of user and machine."""
    values = [value for name, value in os.environ.items() if _SECRET_VARIABLE.search(name.upper())]
    home = str(Path.home())
    names = {Path.home().name, socket.gethostname().partition(".")[0]}
    # A container may run as a user without a name.
    with contextlib.suppress(OSError, KeyError):
        names.add(getpass.getuser())
    return Private(
        tuple({one for one in [get_token() or "", *values] if len(one) >= _SHORTEST_SECRET}),
        (home,) if home.count("/") > 1 or "\\" in home else (),
        tuple(sorted(name for name in names if len(name) > 2 and name.lower() not in _ANYBODY)),
    )


def findings(file: Path, name: str, here: Private, known: str) -> list[str]:
    """What is private in a file: one phrase for each find, with its line. A secret itself is not repeated.

    Args:
        file: The file.
        name: Its name in the repository.
        here: From `private_here`.
        known: Text that is public anyway, such as the model id: names in it are no finds.
    """
    text = _text(file)
    found: list[tuple[int, str]] = []
    for secret in here.secrets:
        found += [(at.start(), "a secret") for at in re.finditer(re.escape(secret), text)]
    found += [(at.start(), "a secret") for at in _SECRETS.finditer(text)]
    folders = "|".join(re.escape(folder) + r"[\w./-]*" for folder in here.folders)
    for pattern in [re.compile(folders)] if folders else []:
        found += [(at.start(), f"the local path {at[0]}") for at in pattern.finditer(text)]
    if Path(name).name not in _VOCABULARIES:
        found += [(at.start(), f"the local path {at[0]}") for at in _PATHS.finditer(text)]
    if file.suffix in (".json", ".md", ".txt") and Path(name).name not in _VOCABULARIES:
        for one in here.names:
            if one.lower() not in known.lower():
                pattern = re.compile(rf"(?<![\w-]){re.escape(one)}(?![\w-])", re.IGNORECASE)
                found += [(at.start(), f"the name {at[0]}") for at in pattern.finditer(text)]
    if file.suffix == ".json" and Path(name).name not in _VOCABULARIES:
        found += [(text.find(said), f"the typed command {said[:40]}") for said in _commands(_json(text))]
    lines = {f"{name}, line {text.count(chr(10), 0, max(at, 0)) + 1}: {what}" for at, what in found}
    return sorted(lines)


def is_private(text: str, here: Private) -> bool:
    """Whether a text holds a secret or a path of this machine."""
    held = any(one in text for one in (*here.secrets, *here.folders))
    return held or bool(_SECRETS.search(text)) or bool(_PATHS.search(text))


def scrubbed(data: Any, here: Private) -> Any:
    """A copy of a record, or of settings, without what is private: paths keep their last part, commands go."""
    if isinstance(data, dict):
        return {
            key: ("" if key in _COMMANDS and isinstance(value, str) else scrubbed(value, here))
            for key, value in data.items()
        }
    if isinstance(data, list):
        return [scrubbed(one, here) for one in data]
    return _without(data, here) if isinstance(data, str) else data


def without_origins(data: Any) -> Any:
    """A copy of settings without the places on this machine that transformers notes in them."""
    if not isinstance(data, dict):
        return data
    return {key: value for key, value in data.items() if not _is_origin(key, value)}


def _is_origin(key: str, value: Any) -> bool:
    return (
        key in _ORIGINS and isinstance(value, str) and (value.startswith(("/", "~", ".")) or bool(_PATHS.match(value)))
    )


def _without(text: str, here: Private) -> str:
    for secret in here.secrets:
        text = text.replace(secret, "…")
    text = _SECRETS.sub("…", text)
    for pattern in (_PATHS, _ANY_PATH):
        text = pattern.sub(_last_part, text)
    for folder in here.folders:
        text = text.replace(folder, "…")
    for name in here.names:
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "…", text, flags=re.IGNORECASE)
    return text


def _last_part(found: re.Match[str]) -> str:
    return re.split(r"[/\\]", found[0])[-1]


def _commands(data: Any) -> Iterator[str]:
    if isinstance(data, dict):
        for key, value in data.items():
            if key in _COMMANDS and isinstance(value, str) and value:
                yield value
            else:
                yield from _commands(value)
    elif isinstance(data, list):
        for one in data:
            yield from _commands(one)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _text(file: Path) -> str:
    """The text of a file; of weights their header, which can hold notes."""
    with file.open("rb") as opened:
        if file.suffix == ".safetensors":
            return opened.read(int.from_bytes(opened.read(8), "little")).decode("utf-8", "replace")
        return opened.read().decode("utf-8", "replace")


def rewritten(file: Path, change: Callable[[Any], Any]) -> None:
    """Change the data of a JSON file; it keeps its bytes if nothing changes."""
    data = _json(file.read_text(encoding="utf-8"))
    if data is not None and (changed := change(data)) != data:
        file.write_text(json.dumps(changed, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
