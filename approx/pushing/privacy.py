"""What must not leave this machine: secrets, local paths, names of users and machines, and typed commands."""

import base64
import contextlib
import getpass
import json
import math
import mmap
import os
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_token

from approx.errors import ApproxError, Exit

# Forms of access tokens and keys. detect-secrets has had no release since May 2024 and lacks several of these.
# The hint is a text that every match contains; a fast search for it spares most regular expressions.
_FORMS = tuple(
    (hint, re.compile(pattern))
    for hint, pattern in (
        ("hf_", r"hf_[A-Za-z0-9]{20,}"),
        ("api_org_", r"api_org_[A-Za-z0-9]{20,}"),
        ("gh", r"gh[opsur]_[A-Za-z0-9]{30,}"),
        ("github_pat_", r"github_pat_\w{30,}"),
        ("gl", r"gl(?:pat|dt|rt|cbt|ptt|soat|ft|imt|agent)-[\w-]{20,}"),
        ("xox", r"xox[abeoprs]-[\w-]{10,}"),
        ("xapp-", r"xapp-\d-[\w-]{10,}"),
        ("hooks.slack.com/", r"hooks\.slack\.com/(?:services|workflows)/[\w/]{20,}"),
        ("sk-", r"sk-(?<![\w-]sk-)[\w-]{20,}"),
        ("_live_", r"[sr]k_live_[A-Za-z0-9]{10,}"),
        ("_test_", r"[sr]k_test_[A-Za-z0-9]{10,}"),
        ("whsec_", r"whsec_[A-Za-z0-9]{20,}"),
        *(
            (start, rf"{start}(?<![0-9A-Za-z]{start})[0-9A-Z]{{16}}(?![0-9A-Za-z])")
            for start in ("AKIA", "ASIA", "ABIA", "ACCA")
        ),
        ("", r"(?i:aws).{0,10}(?i:secret).{0,20}?[^A-Za-z0-9/+]{1,6}[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])"),
        ("AIza", r"AIza[\w-]{35}"),
        ("ya29.", r"ya29\.[\w-]{20,}"),
        ("GOCSPX-", r"GOCSPX-[\w-]{20,}"),
        ("AccountKey=", r"AccountKey=[\w+/%=&.-]{20,}"),
        ("SharedAccess", r"SharedAccess(?:Key|Signature)=[\w+/%=&.-]{20,}"),
        ("sig=", r"[?&]sig=[\w%+/-]{30,}"),
        ("==", r"(?<![A-Za-z0-9+/])[A-Za-z0-9+/]{86}==(?![A-Za-z0-9+/=])"),
        ("npm_", r"npm_[A-Za-z0-9]{30,}"),
        ("pypi-", r"pypi-(?:AgE[\w-]{10,}|[\w-]{50,})"),
        ("SG.", r"SG\.[\w-]{16,}\.[\w-]{16,}"),
        (":AA", r"\d{8,10}:AA[\w-]{33}"),
        ("_v1_", r"do[opr]_v1_[0-9a-f]{40,}"),
        ("dapi", r"dapi[0-9a-f]{32}"),
        ("eyJ", r"eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*"),
        ("PRIVATE KEY", r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----"),
        ("PuTTY-User-Key-File-", r"PuTTY-User-Key-File-\d"),
        ("://", r"://[^\s/@:\"'<>]*:[^\s/@\"'<>]+@"),
    )
)
# User name and password of an address.
_CREDENTIALS = re.compile(r"(?i)([a-z][a-z0-9+.-]*://)[^\s/@\"'<>]+@")
# Forty characters as mixed as a key of AWS; a hash has fewer kinds, and a name repeats its letters.
_KEY = re.compile(r"(?<![A-Za-z0-9/+=._-])[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=._-])")
_MIXED = 4.4
_BASE64 = re.compile(r"(?<![A-Za-z0-9+/=])[A-Za-z0-9+/]{24,2000}={0,2}(?![A-Za-z0-9+/=])")
# Escapes of JSON, YAML and addresses.
_ESCAPES = re.compile(r"\\u([0-9a-fA-F]{4})|\\x([0-9a-fA-F]{2})|%([0-9a-fA-F]{2})|\\(/)")
_SECRET_VARIABLE = re.compile(r"TOKEN(?!IZER)|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIAL")
_SHORTEST_SECRET, _LONG = 8, 16
# A network share, in a text without escapes.
_SHARE = re.compile(r"(?<![\w\\])\\{2}[\w.-]{2,}\\[\w$.-]{2,}(?:\\[\w$.-]+)*")
_PLAIN = {".md", ".txt"}
# Folders whose paths exist on one machine only. What follows a scheme or another path is part of an address.
_PATHS = re.compile(
    r"(?<![\w./:}>~-])/(?:home|Users|Volumes|root|mnt|media|opt|private|scratch|srv|tmp|var|work|workspace)/[\w.@+-]+(?:/[\w.@+-]+)*"
    r"|file:/{1,3}[^\s\"'<>]+|(?<![\w./])[A-Za-z]:/(?:Users|home|Documents and Settings)/[\w.@+-]+(?:/[\w.@+-]+)*"
    r"|(?<!\\)\\{4}[\w.-]{2,}\\{2}[\w$.-]+(?:\\{1,2}[\w$.-]+)*"
    r"|(?<![\w./])[A-Za-z]:\\{1,2}[\w .$-]+(?:\\{1,2}[\w .$-]+)+|(?<![\w./])~/[\w.@+-]+(?:/[\w.@+-]+)*"
)
# For records, where any path that does not begin with a bare name is private.
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
# Where a record holds texts of the data, which may be private, or licensed to their reader alone.
_EXAMPLES = "worst"


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
    for stored in (constants.HF_TOKEN_PATH, constants.HF_STORED_TOKENS_PATH):
        with contextlib.suppress(OSError):
            values += re.findall(r"[\w.-]{16,}", Path(stored).read_text("utf-8", "replace"))
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
    vocabulary = Path(name).name in _VOCABULARIES
    text = _decoded(_text(file))
    found = [(at, "a secret") for at in _secrets(text, here, vocabulary=vocabulary)]
    if not found and _holds(file, here):
        found.append((0, "a secret"))
    folders = "|".join(re.escape(folder) + r"[\w./-]*" for folder in here.folders)
    for pattern in [re.compile(folders)] if folders else []:
        found += [(at.start(), f"the local path {at[0]}") for at in pattern.finditer(text)]
    if not vocabulary:
        patterns = [_PATHS, _SHARE] if file.suffix in _PLAIN else [_PATHS]
        found += [(at.start(), f"the local path {at[0]}") for pattern in patterns for at in pattern.finditer(text)]
    if file.suffix in (".json", ".md", ".txt", "") and not vocabulary:
        found += _names(text, here, known)
    if file.suffix == ".safetensors":
        found += _names(json.dumps((_json(_text(file)) or {}).get("__metadata__"), ensure_ascii=False), here, known)
    if file.suffix == ".json" and not vocabulary:
        found += [(text.find(said), f"the typed command {said[:40]}") for said in _commands(_json(text))]
    # A file name may be a key with an ending.
    words = f"{_decoded(name)} {re.sub(r'[/.]', ' ', _decoded(name))}"
    shown = "a file" if any(True for _ in _secrets(words, here, vocabulary=False)) else name
    lines = {f"{shown}, line {text.count(chr(10), 0, max(at, 0)) + 1}: {what}" for at, what in found}
    if shown != name:
        lines.add("a file whose name holds a secret")
    lines |= {f"{name}: its name holds {what}" for _, what in _names(_decoded(name), here, known)}
    return sorted(lines)


def _secrets(text: str, here: Private, *, vocabulary: bool) -> Iterator[int]:
    """Where a text holds secrets."""
    for secret in here.secrets:
        # A short one may be a word.
        if not vocabulary or len(secret) >= _LONG:
            yield from (at.start() for at in re.finditer(re.escape(secret), text))
    yield from (at.start() for at in _formed(text))
    if vocabulary:
        return
    yield from (at.start() for at in _KEY.finditer(text) if _mixed(at[0]))
    for at in _BASE64.finditer(text):
        with contextlib.suppress(ValueError):
            inner = base64.b64decode(at[0] + "=" * (-len(at[0]) % 4), validate=True).decode("ascii")
            if any(True for _ in _formed(inner)) or any(secret in inner for secret in here.secrets):
                yield at.start()


def _formed(text: str) -> Iterator[re.Match[str]]:
    """Matches of the forms of secrets."""
    for hint, pattern in _FORMS:
        if hint in text:
            yield from pattern.finditer(text)


def _mixed(text: str) -> bool:
    """Whether a text is as mixed as a random key: all kinds of letters, and hardly any twice."""
    kinds = (str.islower, str.isupper, str.isdigit)
    shares = [count / len(text) for count in Counter(text).values()]
    return all(any(map(kind, text)) for kind in kinds) and -sum(p * math.log2(p) for p in shares) > _MIXED


def _names(text: str, here: Private, known: str) -> list[tuple[int, str]]:
    """Names of the user and of the machine in a text."""
    patterns = [
        re.compile(rf"(?<![A-Za-z0-9-]){re.escape(one)}(?![A-Za-z0-9-])", re.IGNORECASE)
        for one in here.names
        if one.lower() not in known.lower()
    ]
    return [(at.start(), f"the name {at[0]}") for pattern in patterns for at in pattern.finditer(text)]


def _decoded(text: str) -> str:
    """A text with its escapes resolved: those of JSON and YAML, and those of addresses."""
    for _ in range(3):
        before = text
        text = _ESCAPES.sub(lambda found: found[4] or chr(int(found[1] or found[2] or found[3], 16)), text)
        if text == before:
            break
    return text


def _holds(file: Path, here: Private) -> bool:
    """Whether the bytes of a file hold a secret of this machine, whatever kind of file it is."""
    long = [secret.encode() for secret in here.secrets if len(secret) >= _LONG]
    if not long or file.stat().st_size == 0:
        return False
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return any(data.find(secret) >= 0 for secret in long)


def is_private(text: str, here: Private) -> bool:
    """Whether a text holds a secret or a path of this machine."""
    listed = any(one in text for one in (*here.secrets, *here.folders))
    text = _decoded(text)
    return listed or any(True for _ in _secrets(text, here, vocabulary=False)) or bool(_PATHS.search(text))


def scrubbed(data: Any, here: Private) -> Any:
    """A copy of a record, or of settings, without what is private: paths keep their last part, commands and examples go."""
    if isinstance(data, dict):
        return {
            key: ("" if key in _COMMANDS and isinstance(value, str) else scrubbed(value, here))
            for key, value in data.items()
            if key != _EXAMPLES
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
    # Escapes may hide a secret, and a secret may look like an escape.
    for resolve in (str, _decoded):
        if (plain := resolve(text)) == text or is_private(plain, here):
            text = plain
        for secret in here.secrets:
            text = text.replace(secret, "…")
    text = _CREDENTIALS.sub(r"\1", text)
    for _, pattern in _FORMS:
        text = pattern.sub("…", text)
    text = _KEY.sub(lambda found: "…" if _mixed(found[0]) else found[0], text)
    text = _BASE64.sub(
        lambda found: "…" if any(True for _ in _secrets(found[0], here, vocabulary=False)) else found[0], text
    )
    for pattern in (_PATHS, _SHARE, _ANY_PATH):
        text = pattern.sub(_last_part, text)
    for folder in here.folders:
        text = text.replace(folder, "…")
    for name in here.names:
        text = re.sub(rf"(?<![A-Za-z0-9-]){re.escape(name)}(?![A-Za-z0-9-])", "…", text, flags=re.IGNORECASE)
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
    """Change the data of a JSON file; it keeps its bytes if nothing changes.

    Raises:
        ApproxError: if it is not UTF-8.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ApproxError(f"{file.name} is not UTF-8: {error}. Copy the folder again.", Exit.UNAVAILABLE) from None
    data = _json(text)
    if data is not None and (changed := change(data)) != data:
        file.write_text(json.dumps(changed, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
