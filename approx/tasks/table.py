"""Tables of examples: files of several formats and hub datasets, read row by row."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from approx.errors import ApproxError, Exit, shown
from approx.tasks.hub import load_rows, streamed
from approx.tasks.json_text import parsed

FORMATS = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
"""Endings of files; all but the last may be followed by .gz."""

_HUB = "hub:"


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Args:
        place: Its file and line, or its dataset and number, for messages.
        folder: The folder to which paths in it are relative; None for a hub dataset.
        cells: Values by the names of the columns. Classes of hub datasets have their names.
    """

    place: str
    folder: Path | None
    cells: dict[str, Any]

    def file(self, cell: Any) -> Path | bytes:
        """The file that a cell names, or the bytes that it holds.

        Raises:
            ApproxError: if it does neither.
        """
        held = cell.get("bytes") if isinstance(cell, dict) else cell
        named = cell.get("path") if isinstance(cell, dict) else cell
        if isinstance(held, bytes):
            return held
        if isinstance(named, str | Path):
            return (self.folder or Path()) / named
        raise ApproxError(f"{self.place}: a path or bytes are needed, found {shown(cell)}.", Exit.UNAVAILABLE)


def is_hub(data: str | Path | None) -> bool:
    """Whether data are a dataset of the hub, `hub:OWNER/NAME` or `hub:OWNER/NAME:CONFIGURATION`."""
    return data is not None and str(data).startswith(_HUB)


def is_table(data: Path) -> bool:
    """Whether a file has the name of a table."""
    return data.name.removesuffix(".gz").endswith(FORMATS)


@contextmanager
def readable(task: str, data: str | Path | None) -> Iterator[None]:
    """Report that files cannot even be looked for, such as one whose name is too long.

    Raises:
        ApproxError: in place of the operating system's error.
    """
    try:
        yield
    except OSError as error:
        if data is None or error.errno is None:
            raise
        raise ApproxError(f"{task}: {data} cannot be read: {error.strerror}.", Exit.UNAVAILABLE) from None


def open_table(task: str, data: Path, split: str, *, streaming: bool = False) -> tuple[str, Iterator[Row]]:
    """Open a table.

    Args:
        task: Name of the task, for messages.
        data: A file, a folder with a file named after the split, or a hub dataset.
        split: Name of the split.
        streaming: Whether to read a hub dataset while it downloads.

    Returns:
        Name of the split, and the rows.

    Raises:
        ApproxError: if there is no such file or dataset; while reading, if it is damaged.
    """
    if is_hub(data):
        dataset, _, config = str(data).removeprefix(_HUB).partition(":")
        return split, _hub_rows(dataset, config or None, split, streaming)
    with readable(task, data):
        path = _find(task, data, split)
    return path.name.partition(".")[0], _file_rows(path)


def _find(task: str, data: Path, split: str) -> Path:
    if data.is_file():
        if not is_table(data):
            raise ApproxError(
                f"{task}: {data} is not a {', '.join(FORMATS)} file (or one of these with .gz).", Exit.UNAVAILABLE
            )
        return data
    if not data.is_dir():
        raise ApproxError(f"{task}: {data} does not exist.", Exit.UNAVAILABLE)
    known = [path for path in sorted(data.iterdir()) if is_table(path)]
    matches = [path for path in known if path.name.startswith(split)]
    if len(matches) == 1:
        return matches[0]
    there = ", ".join(path.name for path in known) or f"no {', '.join(FORMATS)}"
    raise ApproxError(
        f"{task}: looked for {split}{{{','.join(FORMATS)}}} in {data}, found {there}. "
        "Give the file itself with --data, or another --split.",
        Exit.UNAVAILABLE,
    )


def _hub_rows(dataset: str, config: str | None, split: str, streaming: bool) -> Iterator[Row]:
    from datasets import Audio, ClassLabel, Image

    rows = load_rows(dataset, config, split, streaming=streaming)
    classes = {}
    for name, feature in (rows.features or {}).items():
        # Lists of classes are features of features.
        inner = getattr(feature, "feature", feature)
        if isinstance(inner, ClassLabel):
            classes[name] = inner
        elif isinstance(feature, Audio | Image):
            rows = rows.cast_column(name, type(feature)(decode=False))
    for number, row in enumerate(streamed(rows, dataset) if streaming else rows):
        named = {name: _named(row[name], kind) for name, kind in classes.items()}
        yield Row(f"{dataset}, {split}, row {number}", None, {**row, **named})


def _named(value: Any, kind: Any) -> Any:
    """Names of classes in place of their numbers; None where a row is not labelled, which is -1."""
    if isinstance(value, list):
        return [_named(one, kind) for one in value]
    return None if value is None or value < 0 else kind.int2str(value)


def _file_rows(path: Path) -> Iterator[Row]:
    """The rows of a file; quoted cells of a csv may span lines."""
    try:
        for number, cells in _cells(path):
            place = f"{path}, line {number}"
            if isinstance(cells, str):
                cells = _object(cells, place)
            elif not isinstance(cells, dict):
                raise ApproxError(f"{place} is not a JSON object. Fix or remove it.", Exit.UNAVAILABLE)
            yield Row(place, path.parent, cells)
    except (UnicodeDecodeError, EOFError, csv.Error, gzip.BadGzipFile, zlib.error) as error:
        raise ApproxError(f"{path} is damaged ({error}). Download it again.", Exit.UNAVAILABLE) from None
    except OSError as error:
        raise ApproxError(f"{path} cannot be read: {error.strerror}.", Exit.UNAVAILABLE) from None


def _cells(path: Path) -> Iterator[tuple[int, Any]]:
    """Numbers and cells of the rows; the lines of jsonl are text."""
    name = path.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        yield from _parquet(path)
        return
    with (
        gzip.open(path, "rt", encoding="utf-8-sig")
        if path.suffix == ".gz"
        else path.open(encoding="utf-8-sig", newline="") as file
    ):
        if name.endswith(".jsonl"):
            yield from ((number, line) for number, line in enumerate(file, start=1) if line.strip())
        elif name.endswith(".json"):
            yield from enumerate(_list(file.read(), path), start=1)
        else:
            # The csv reader's own limit of 128 KiB is too short for documents.
            csv.field_size_limit(2**31 - 1)
            text = io.StringIO(file.read(), newline="")
            reader = csv.DictReader(text, dialect="excel-tab" if name.endswith(".tsv") else "excel")
            yield from ((reader.line_num, row) for row in reader)


def _parquet(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        number = 0
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except pyarrow.ArrowException as error:
        reason = " ".join(str(error).split())[:200]
        raise ApproxError(f"{path} is damaged ({reason}). Download it again.", Exit.UNAVAILABLE) from None


def _list(text: str, path: Path) -> list[Any]:
    try:
        rows = parsed(text)
    except ValueError as error:
        raise ApproxError(f"{path} is not JSON: {error}. Fix it, or download it again.", Exit.UNAVAILABLE) from None
    if isinstance(rows, dict) and isinstance(rows.get("data"), list):
        rows = rows["data"]
    if not isinstance(rows, list):
        raise ApproxError(
            f"{path} is not a list of rows, nor an object with one under 'data'. One object per line is a .jsonl file.",
            Exit.UNAVAILABLE,
        )
    return rows


def _object(line: str, place: str) -> dict[str, Any]:
    try:
        row = parsed(line)
    except ValueError as error:
        raise ApproxError(f"{place} is not JSON: {error}. Fix or remove the line.", Exit.UNAVAILABLE) from None
    if not isinstance(row, dict):
        raise ApproxError(f"{place} is not a JSON object. Fix or remove the line.", Exit.UNAVAILABLE)
    return row
