"""Tables of examples: files of several formats and hub datasets, read row by row."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from approx.errors import ApproxError, Exit, shown
from approx.tasks.example import Tally
from approx.tasks.hub import load_rows, streamed
from approx.tasks.json_text import parsed
from approx.text_file import lines, read_text

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
        content = cell.get("bytes") if isinstance(cell, dict) else cell
        named = cell.get("path") if isinstance(cell, dict) else cell
        if isinstance(content, bytes):
            return content
        if isinstance(named, str | Path):
            return (self.folder or Path()) / named
        raise ApproxError(f"{self.place}: a path or bytes are needed, found {shown(cell)}.", Exit.UNAVAILABLE)


def text_of(value: Any, place: str) -> str:
    """The text in a cell; a number is written out.

    Raises:
        ApproxError: if it is a list or a mapping, which has no text.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return str(value)
    raise ApproxError(f"{place}: a text is needed, found {shown(value)}. Fix or remove it.", Exit.UNAVAILABLE)


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


def open_table(
    task: str, data: Path, split: str, tally: Tally, *, encoding: str | None = None, streaming: bool = False
) -> tuple[str, Iterator[Row]]:
    """Open a table.

    Quotes are those of CSV in a .csv. In a .tsv they have no meaning, unless the whole file is quoted as CSV is.

    Args:
        task: Name of the task, for messages.
        data: A file, a folder with a file named after the split, or a hub dataset.
        split: Name of the split.
        tally: Counts the rows.
        encoding: Of a text file, as in `approx.text_file.read_text`.
        streaming: Whether to read a hub dataset while it downloads.

    Returns:
        Name of the split, and the rows.

    Raises:
        ApproxError: if there is no such file or dataset; while reading, if it is damaged.
    """
    if is_hub(data):
        dataset, _, config = str(data).removeprefix(_HUB).partition(":")
        return split, _hub_rows(dataset, config or None, split, tally, streaming)
    with readable(task, data):
        path = _find(task, data, split)
    return path.name.partition(".")[0], _file_rows(path, tally, encoding)


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


def _hub_rows(dataset: str, config: str | None, split: str, tally: Tally, streaming: bool) -> Iterator[Row]:
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
        tally.read += 1
        yield Row(f"{dataset}, {split}, row {number}", None, {**row, **named})


def _named(value: Any, kind: Any) -> Any:
    """Names of classes in place of their numbers; None where a row is not labelled, which is -1."""
    if isinstance(value, list):
        return [_named(one, kind) for one in value]
    return None if value is None or value < 0 else kind.int2str(value)


def _file_rows(path: Path, tally: Tally, encoding: str | None) -> Iterator[Row]:
    """The rows of a file."""
    for number, cells in _cells(path, tally, encoding):
        place = f"{path}, line {number}"
        if isinstance(cells, str):
            cells = _object(cells, place)
        elif not isinstance(cells, dict):
            raise ApproxError(f"{place} is not a JSON object. Fix or remove it.", Exit.UNAVAILABLE)
        tally.read += 1
        yield Row(place, path.parent, cells)


def _cells(path: Path, tally: Tally, encoding: str | None) -> Iterator[tuple[int, Any]]:
    """Numbers and cells of the rows; the lines of jsonl are text."""
    name = path.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        try:
            yield from _parquet(path)
        except OSError as error:
            raise ApproxError(f"{path} cannot be read: {error.strerror}.", Exit.UNAVAILABLE) from None
        return
    text = read_text(path, encoding)
    if name.endswith(".jsonl"):
        for number, line in enumerate(lines(text), start=1):
            if line.strip():
                yield number, line
            else:
                tally.skipped["empty lines"] += 1
    elif name.endswith(".json"):
        yield from enumerate(table_of(text, path), start=1)
    else:
        rows = _tab_separated(text, path) if name.endswith(".tsv") else _comma_separated(text, path)
        yield from _with_header(rows, path, tally)


def _with_header(
    rows: Sequence[tuple[int, list[str]]], path: Path, tally: Tally
) -> Iterator[tuple[int, dict[str, str]]]:
    """Each row by the names of the columns."""
    header: list[str] | None = None
    for number, row in rows:
        if not row:
            tally.skipped["empty lines"] += 1
        elif header is None:
            if twice := next((name for name in row if row.count(name) > 1), None):
                raise ApproxError(f"{path} has two columns '{twice[:60]}'. Rename one of them.", Exit.UNAVAILABLE)
            header = row
        elif len(row) > len(header):
            separator = "tab" if path.name.removesuffix(".gz").endswith(".tsv") else "comma"
            raise ApproxError(
                f"{path}, line {number}: {len(row)} cells where the first line has {len(header)}. Fix or remove the "
                f"line; a {separator} inside a cell needs quotes around it"
                f"{' in every such cell of the file, or write a .csv or .jsonl' if separator == 'tab' else ''}.",
                Exit.UNAVAILABLE,
            )
        else:
            yield number, dict(zip(header, row, strict=False))


def _comma_separated(text: str, path: Path) -> list[tuple[int, list[str]]]:
    try:
        return _quoted(text, ",")
    except _QuoteError as wrong:
        raise ApproxError(
            f"{path}, line {wrong.line} is not CSV ({wrong}). In a cell that begins with a quote, double the quotes "
            "inside and close it with one; put quotes around a cell with a comma or a line end.",
            Exit.UNAVAILABLE,
        ) from None


def _tab_separated(text: str, path: Path) -> list[tuple[int, list[str]]]:
    """Rows of a .tsv: its lines, cut at tabs; or as CSV if it was clearly written so, with a cell that spans lines or tabs.

    Raises:
        ApproxError: if it could be either, with different rows.
    """
    plain = [(number, line.split("\t") if line else []) for number, line in enumerate(lines(text), start=1)]
    if '"' not in text:
        return plain
    try:
        quoted = _quoted(text, "\t")
    except _QuoteError:
        return plain
    if len({len(row) for _, row in quoted if row}) > 1 or not _consistent(text, quoted):
        return plain
    width = next(len(row) for _, row in plain if row)
    regular = all(len(row) == width for _, row in plain if row)
    spanning = next((number for number, row in quoted if any("\n" in cell for cell in row)), None)
    if spanning is None:
        return quoted
    if regular and width > 1:
        return plain
    inside = [line for _, row in quoted for cell in row for line in cell.split("\n")[1:-1]]
    if regular or any(line.count("\t") + 1 >= width for line in inside):
        raise ApproxError(
            f"{path}, line {spanning}: a cell begins with a quote that is closed on a later line, so this is one row "
            "or several. Write the table as .csv if quotes hold cells together, or as .jsonl.",
            Exit.UNAVAILABLE,
        )
    return quoted


class _QuoteError(ValueError):
    """The quotes of a table are not those of CSV; `line` is where the cell begins."""

    def __init__(self, error: csv.Error, line: int) -> None:
        super().__init__(str(error))
        self.line = line


def _quoted(text: str, separator: str) -> list[tuple[int, list[str]]]:
    """Rows of a table with quotes, and the line on which each begins."""
    # The default limit of the csv reader, 128 KiB, is too short for documents.
    csv.field_size_limit(2**31 - 1)
    # Lines are cut here, since a lone carriage return or U+2028 ends none.
    reader = csv.reader((line + "\n" for line in text.split("\n")), delimiter=separator, strict=True)
    rows, begin = [], 1
    try:
        for row in reader:
            rows.append((begin, row))
            begin = reader.line_num + 1
    except csv.Error as error:
        raise _QuoteError(error, begin) from None
    # After the last line end nothing follows.
    return rows[:-1] if rows and not rows[-1][1] and text.endswith("\n") else rows


def _consistent(text: str, rows: Sequence[tuple[int, list[str]]]) -> bool:
    """Whether quotes are as a program writes them: where a cell needs them, and otherwise around all cells of a column."""
    place, needless, bare = 0, set[int](), set[int]()
    for number, (_, row) in enumerate(rows):
        for column, cell in enumerate(row):
            doubled = cell.replace('"', '""')
            if text.startswith(f'"{doubled}"', place):
                place += len(doubled) + 2
                if not any(character in cell for character in '"\t\n\r'):
                    needless.add(column)
            else:
                place += len(cell)
                if '"' in cell:
                    return False
                # The first line may be without quotes.
                if number:
                    bare.add(column)
            place += 1
        if not row:
            place += 1
        # A line that ends in two characters.
        if text[place - 1 : place] == "\r":
            place += 1
    return not needless & bare


def _parquet(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        number = 0
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield number, row
    # Texts that are not UTF-8, and dates that Python does not have, are found only in the rows.
    except (pyarrow.ArrowException, ValueError, ArithmeticError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ApproxError(f"{path} is damaged ({reason}). Download it again.", Exit.UNAVAILABLE) from None


def table_of(text: str, path: Path) -> list[Any]:
    """The rows of a table in JSON.

    Raises:
        ApproxError: if it is neither a list nor an object with one under `data`.
    """
    try:
        rows = parsed(text)
    except ValueError as error:
        raise ApproxError(
            f"{path} is not JSON: {error}. Fix it; one object per line is a .jsonl file.", Exit.UNAVAILABLE
        ) from None
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
