"""Classification of long texts: IMDb, or any file of texts and labels.

Source: Maas et al., 2011, "Learning Word Vectors for Sentiment Analysis", ACL.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import ClassVar

from approx.errors import ApproxError, Exit
from approx.tasks.classification import ONE
from approx.tasks.hub import read_rows
from approx.tasks.labelled import Classification
from approx.tasks.settings import whole_setting
from approx.tasks.task import Example, Groups, Split, Tally
from approx.text_file import read_text

_HUB_DATASET = "stanfordnlp/imdb"
_IMDB = ("negative", "positive")
_IMDB_FOLDERS = {"neg": 0, "pos": 1}
_IMDB_ROWS = 25_000


class Documents(Classification):
    """The class of a text of any length; by default the reviews of IMDb.

    Inputs longer than the model's positions are an error, or with `truncate` are truncated and counted. To see what the
    rest of a text is worth, compare a checkpoint with extended positions with one without.

    Args:
        labels: Names of the classes in the order of the model's outputs, as a list or separated by commas; files may
            hold names or numbers.

    Raises:
        ApproxError: if there are fewer than two labels, or a label twice.
    """

    name = "documents"
    dataset = _HUB_DATASET
    groups: ClassVar[Groups] = Groups("group", "the hub's and other tables of reviews do not name the film")

    def __init__(self, labels: Sequence[str] = _IMDB) -> None:
        super().__init__(labels)
        if self.labels == _IMDB:
            # Its own names are matched with those of the checkpoint.
            self._kind, self._arranged = ONE, None

    def read(
        self, data: Path | None = None, split: str | None = None, limit: int | None = None, *, streaming: bool = False
    ) -> Split:
        """Load a split; the default is `test`.

        Args:
            data: A table (.csv, .tsv, .jsonl, .json, .parquet) with the columns text and label, a folder with a table
                named after the split, or IMDb's own folder aclImdb; None uses IMDb from the hub.
            split: Name of the split.
            limit: Keep the first `limit` texts; the classes take turns, since many sources are sorted by class.
            streaming: Read the hub dataset while it downloads, until every class has its share of the limit.

        Raises:
            ApproxError: if the data do not exist, a line is damaged or has an unknown label, or no text is left.
        """
        if limit is not None:
            whole_setting(self.name, "limit", limit, 1)
        wanted = split or "test"
        tally = Tally()
        if data is None:
            name, source, rows = wanted, Path(_HUB_DATASET), self._hub_rows(wanted, tally, streaming)
        elif (folder := _imdb_folder(Path(data), wanted)) is not None:
            name, source, rows = wanted, folder, self._folder_rows(folder, tally)
        else:
            made = self.read_table(Path(data), wanted, limit)
            return replace(made, subset=self._is_subset(made.name, made.examples, limit))
        examples = list(islice(self.taking_turns(rows, limit), limit))
        if not examples:
            raise ApproxError(f"{self.name}: 0 texts in {source}.", Exit.UNAVAILABLE)
        return Split(name, examples, self._is_subset(name, examples, limit), tally=tally)

    def _is_subset(self, name: str, examples: Sequence[Example], limit: int | None) -> bool:
        whole = name in ("train", "test") and len(examples) >= _IMDB_ROWS
        return limit == len(examples) or (self.labels == _IMDB and not whole)

    def _folder_rows(self, folder: Path, tally: Tally) -> Iterator[Example]:
        for name, label in _IMDB_FOLDERS.items():
            films = _films(folder / f"urls_{name}.txt")
            for path in sorted((folder / name).glob("*.txt")):
                text = read_text(path, self.encoding).replace("\r\n", "\n")
                film = films.get(path.stem.partition("_")[0])
                tally.read += 1
                yield Example(f"{folder.name}/{name}/{path.stem}", {"text": text}, label, group=film)

    def _hub_rows(self, split: str, tally: Tally, streaming: bool) -> Iterator[Example]:
        for number, row in enumerate(read_rows(_HUB_DATASET, "plain_text", split, streaming)):
            if row["label"] == -1:
                raise ApproxError(
                    f"{self.name}: the split '{split}' of {_HUB_DATASET} has no labels; use test or train.",
                    Exit.UNAVAILABLE,
                )
            tally.read += 1
            yield Example(f"{split}-{number}", {"text": row["text"]}, int(row["label"]))


def _films(path: Path) -> dict[str, str]:
    """The film of each review by the review's number, which is its line; up to 30 reviews are of one film."""
    if not path.is_file():
        return {}
    return {str(number): line.strip() for number, line in enumerate(read_text(path).split("\n"))}


def _imdb_folder(data: Path, split: str) -> Path | None:
    """The folder of the split if `data` has IMDb's own layout, else None."""
    candidates = (data / "aclImdb" / split, data / split, data)
    return next((path for path in candidates if all((path / name).is_dir() for name in _IMDB_FOLDERS)), None)
