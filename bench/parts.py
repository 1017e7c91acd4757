"""A benchmark in parts: what is kept of each, a file whole or not at all, and how a part is found in a record."""

import json
from pathlib import Path
from typing import Any


def kept(folder: Path, name: str) -> dict[str, Any] | None:
    """What was kept of a part; None where it was not measured."""
    path = _path(folder, name)
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def keep(folder: Path, name: str, found: dict[str, Any]) -> None:
    """Keep what was found in a part."""
    folder.mkdir(parents=True, exist_ok=True)
    path = _path(folder, name)
    half = path.with_suffix(".half")
    half.write_text(json.dumps(found, allow_nan=False), encoding="utf-8")
    half.replace(path)


def all_kept(folder: Path) -> list[dict[str, Any]]:
    """All that was kept, in the order of the names."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name.replace('/', '.').replace(' ', '_')}.json"


def find(made: dict[str, Any], **wanted: Any) -> dict[str, Any] | None:
    """The part of a record with these properties."""
    return next((part for part in made["parts"] if all(part[key] == value for key, value in wanted.items())), None)


def row(part: dict[str, Any] | None, name: str | None) -> dict[str, Any] | None:
    """What a part says of one contender; None where it did not run, or did not get to an end."""
    rows = [] if part is None else part["contenders"]
    return next((one for one in rows if one["name"] == name and one["status"] == "ok"), None)


def names(parts: list[dict[str, Any]]) -> list[str]:
    """All contenders of some parts, in their order."""
    return list(dict.fromkeys(one["name"] for part in parts for one in part["contenders"]))
