"""Classification of long texts: IMDb, or any file of texts and labels.

Source: Maas et al., 2011, "Learning Word Vectors for Sentiment Analysis", ACL.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from approx.errors import ApproxError, Exit
from approx.tasks.classification import SequenceClassification
from approx.tasks.hub import read_rows
from approx.tasks.settings import names_setting, whole_setting
from approx.tasks.task import Example, Split

_FORMATS = (".jsonl", ".csv", ".tsv")
_HUB_DATASET = "stanfordnlp/imdb"
_IMDB = ("negative", "positive")
_IMDB_FOLDERS = {"neg": 0, "pos": 1}
_IMDB_ROWS = 25_000


class Documents(SequenceClassification):
    """The class of a text of any length; by default the reviews of IMDb.

    Inputs longer than the model's positions are an error, or with `truncate` are truncated and counted. To see what the
    rest of a text is worth, compare a checkpoint with extended positions with one without.

    Args:
        labels: Names of the classes in the order of the model's outputs, as a list or separated by commas; files may hold
            names or numbers.
        text: Column of the text in a file.
        label: Column of the class in a file.

    Raises:
        ApproxError: if there are fewer than two labels, or a label twice.
    """

    name = "documents"
    metrics = ("accuracy",)
    dataset = _HUB_DATASET

    def __init__(self, labels: Sequence[str] = _IMDB, text: str = "text", label: str = "label") -> None:
        names = names_setting(self.name, "labels", labels)
        if len(names) < 2 or len(set(names)) < len(names):
            raise ApproxError(
                f"The setting 'labels' of the task '{self.name}' is {labels!r}; it must name at least two different "
                "classes, in the order of the model's outputs."
            )
        self.labels = names
        self._columns = str(text), str(label)

    def load(
        self, data: Path | None = None, split: str | None = None, limit: int | None = None, *, streaming: bool = False
    ) -> Split:
        """Load a split; the default is `test`.

        Args:
            data: A file (.jsonl, .csv, .tsv, each also .gz) with a column for the text and one for the label, a folder
                with a file named after the split, or IMDb's own folder aclImdb; None uses IMDb from the hub.
            split: Name of the split.
            limit: Keep the first `limit` texts; the classes take turns, since many sources are sorted by class.
            streaming: Read the hub dataset while it downloads, until every class has its share of the limit.

        Raises:
            ApproxError: if the data do not exist, a line is damaged or has an unknown label, or no text is left.
        """
        if limit is not None:
            whole_setting(self.name, "limit", limit, 1)
        wanted = split or "test"
        if data is None:
            name, source, rows = wanted, Path(_HUB_DATASET), self._hub_rows(wanted, streaming)
        elif (folder := _imdb_folder(Path(data), wanted)) is not None:
            name, source, rows = wanted, folder, self._folder_rows(folder)
        else:
            source = self._find(Path(data), wanted)
            name, rows = source.name.partition(".")[0], self._file_rows(source)
        examples = list(islice(_taking_turns(rows, len(self.labels), limit), limit))
        if not examples:
            raise ApproxError(f"{self.name}: 0 texts in {source}.", Exit.UNAVAILABLE)
        whole = name in ("train", "test") and len(examples) >= _IMDB_ROWS
        return Split(name, examples, subset=limit == len(examples) or (self.labels == _IMDB and not whole))

    def _find(self, data: Path, wanted: str) -> Path:
        if data.is_file():
            if not data.name.removesuffix(".gz").endswith(_FORMATS):
                raise ApproxError(
                    f"{self.name}: {data} is not a {', '.join(_FORMATS)} file (or one of these with .gz).",
                    Exit.UNAVAILABLE,
                )
            return data
        if not data.is_dir():
            raise ApproxError(f"{self.name}: {data} does not exist.", Exit.UNAVAILABLE)
        known = [path for path in sorted(data.iterdir()) if path.name.removesuffix(".gz").endswith(_FORMATS)]
        matches = [path for path in known if path.name.startswith(wanted)]
        if len(matches) == 1:
            return matches[0]
        there = ", ".join(path.name for path in known) or f"no {', '.join(_FORMATS)}"
        raise ApproxError(
            f"{self.name}: looked for {wanted}{{{','.join(_FORMATS)}}}, or {wanted}/pos and {wanted}/neg, in {data}; found {there}. "
            "Give the file itself with --data, or another --split.",
            Exit.UNAVAILABLE,
        )

    def _file_rows(self, path: Path) -> Iterator[Example]:
        text_column, label_column = self._columns
        stem = path.name.partition(".")[0]
        for number, row in _rows(path):
            missing = [column for column in self._columns if row.get(column) is None]
            if missing:
                raise ApproxError(
                    f"{path}, line {number}: no column {' and no '.join(missing)}; the columns are "
                    f"{', '.join(map(str, row))[:200]}. Name the columns with the task's settings text and label.",
                    Exit.UNAVAILABLE,
                )
            label = self._label(row[label_column], f"{path}, line {number}")
            yield Example(str(row.get("id") or f"{stem}-{number}"), {"text": str(row[text_column])}, label)

    def _folder_rows(self, folder: Path) -> Iterator[Example]:
        for name, label in _IMDB_FOLDERS.items():
            for path in sorted((folder / name).glob("*.txt")):
                yield Example(f"{folder.name}/{name}/{path.stem}", {"text": path.read_text(encoding="utf-8")}, label)

    def _hub_rows(self, split: str, streaming: bool) -> Iterator[Example]:
        for number, row in enumerate(read_rows(_HUB_DATASET, "plain_text", split, streaming)):
            if row["label"] == -1:
                raise ApproxError(
                    f"{self.name}: the split '{split}' of {_HUB_DATASET} has no labels; use test or train.",
                    Exit.UNAVAILABLE,
                )
            yield Example(f"{split}-{number}", {"text": row["text"]}, int(row["label"]))

    def _label(self, value: Any, place: str) -> int:
        text = str(value).strip()
        if text in self.labels:
            return self.labels.index(text)
        if text.isdecimal() and int(text) < len(self.labels):
            return int(text)
        known = ", ".join(f"{name} or {index}" for index, name in enumerate(self.labels))
        raise ApproxError(
            f"{place}: unknown label '{text[:60]}'. Known: {known}. Name the classes with the task's setting labels.",
            Exit.UNAVAILABLE,
        )


def _imdb_folder(data: Path, split: str) -> Path | None:
    """The folder of the split if `data` has IMDb's own layout, else None."""
    candidates = (data / "aclImdb" / split, data / split, data)
    return next((path for path in candidates if all((path / name).is_dir() for name in _IMDB_FOLDERS)), None)


def _taking_turns(rows: Iterator[Example], count: int, limit: int | None) -> Iterator[Example]:
    """Yield rows of the `count` classes in turn; read until the limit is certain to be met."""
    classes: list[list[Example]] = [[] for _ in range(count)]
    for row in rows:
        classes[row.label].append(row)
        if limit is not None and min(map(len, classes)) * count >= limit:
            break
    for index in range(max(map(len, classes))):
        yield from (members[index] for members in classes if index < len(members))


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and rows of a file; quoted cells of a csv may span lines."""
    # The csv reader's own limit of 128 KiB is too short for documents.
    csv.field_size_limit(2**31 - 1)
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8-sig")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8-sig") as file
        ):
            if path.name.removesuffix(".gz").endswith(".jsonl"):
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield number, _object(line, f"{path}, line {number}")
                return
            reader = csv.DictReader(
                io.StringIO(file.read(), newline=""), dialect="excel-tab" if ".tsv" in path.name else "excel"
            )
            for row in reader:
                yield reader.line_num, row
    except (UnicodeDecodeError, EOFError, csv.Error, gzip.BadGzipFile) as error:
        raise ApproxError(f"{path} is damaged ({error}). Download it again.", Exit.UNAVAILABLE) from None
    except OSError as error:
        raise ApproxError(f"{path} cannot be read: {error.strerror}.", Exit.UNAVAILABLE) from None


def _object(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ApproxError(f"{place} is not JSON: {error}. Fix or remove the line.", Exit.UNAVAILABLE) from None
    if not isinstance(row, dict):
        raise ApproxError(f"{place} is not a JSON object. Fix or remove the line.", Exit.UNAVAILABLE)
    return row
