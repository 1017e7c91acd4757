"""A benchmark in parts: selecting them, storing each atomically, and looking them up."""

import argparse
import json
from pathlib import Path
from typing import Any

from approx.evaluation.record import in_lines


def numbers(text: str) -> tuple[int, ...]:
    """The numbers of an option, such as lengths; argparse reports invalid ones."""
    if not all(one.isdecimal() and int(one) for one in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text} was asked for; allowed are whole numbers from 1 on, as in 512,1024")
    return tuple(int(one) for one in text.split(","))


def stored(folder: Path, name: str) -> dict[str, Any] | None:
    """The stored result of a part; None if it was not measured."""
    path = _path(folder, name)
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def keep(folder: Path, name: str, result: dict[str, Any]) -> None:
    """Store the result of a part."""
    folder.mkdir(parents=True, exist_ok=True)
    path = _path(folder, name)
    half = path.with_suffix(".half")
    half.write_text(json.dumps(result, allow_nan=False), encoding="utf-8")
    half.replace(path)


def seed(folder: Path, made: dict[str, dict[str, Any]]) -> None:
    """Store results that a record has and the folder lacks, by name: a fresh checkout has only the record."""
    for name, result in made.items():
        if not _path(folder, name).is_file():
            keep(folder, name, result)


def all_stored(folder: Path) -> list[dict[str, Any]]:
    """All stored results, ordered by name."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name.replace('/', '.').replace(' ', '_')}.json"


def find(made: dict[str, Any], **wanted: Any) -> dict[str, Any] | None:
    """The part of a record with these properties."""
    return next((part for part in made["parts"] if all(part[key] == value for key, value in wanted.items())), None)


def row(part: dict[str, Any] | None, name: str | None) -> dict[str, Any] | None:
    """The result of one contender in a part; None if it did not run or did not finish."""
    rows = [] if part is None else part["contenders"]
    return next((one for one in rows if one["name"] == name and one["status"] == "ok"), None)


def names(parts: list[dict[str, Any]]) -> list[str]:
    """All contenders of some parts, in order."""
    return list(dict.fromkeys(one["name"] for part in parts for one in part["contenders"]))


def noise(part: dict[str, Any]) -> float:
    """The ratio by which equal contenders of a part may seem to differ: smaller gains are indistinguishable from noise.

    SDPA is compared with itself, and mechanisms with no attention at all, which does strictly less; when decoding, that
    still copies a cache, so a state may be faster.
    """
    seen = [part["spread"] or 1.0]
    free = next((one for one in part["contenders"] if one["role"] == "ceiling" and one["status"] == "ok"), None)
    if free and part["suite"] != "decode":
        seen += [
            free["median_ms"] / one["median_ms"]
            for one in part["contenders"]
            if one["role"] == "variant" and one["status"] == "ok"
        ]
    return max(*seen, 1 / seen[0])


def write_record(path: Path, made: Any) -> None:
    """Write a record as JSON, in which what fits into a line is one, so that rows can be read and compared."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(in_lines(made) + "\n", encoding="utf-8")
