"""GLUE: classification and similarity of single sentences and pairs.

Read from the official tsv files or the hub dataset `nyu-mll/glue`, with the same rows, order and ids.

Source: Wang et al., 2018, "GLUE: A Multi-Task Benchmark and Analysis Platform for Natural Language
Understanding", arXiv 1804.07461.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from approx.errors import ApproxError, Exit
from approx.tasks.classification import SequenceClassification
from approx.tasks.hub import read_rows
from approx.tasks.task import Example, Groups, Split, Tally
from approx.text_file import lines, read_text

HUB_DATASET = "nyu-mll/glue"


@dataclass(frozen=True)
class _Subset:
    """Files and columns of one of the ten tasks.

    `texts` and `label` are columns of the tsv, `hub_texts` columns of the hub dataset, whose label column is always
    `label`. `header` names the columns of a tsv without a header line.
    """

    folder: str
    hub: str
    texts: tuple[str, ...]
    hub_texts: tuple[str, ...]
    label: str
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    train_rows: int
    dev_rows: int
    header: tuple[str, ...] = ()
    dev: str = "dev"


_PAIR = ("sentence1", "sentence2")
_QUESTIONS = ("question1", "question2")
_NLI = ("entailment", "neutral", "contradiction")
_RTE = ("entailment", "not_entailment")
_NLI_COLUMNS = {"texts": _PAIR, "hub_texts": ("premise", "hypothesis"), "label": "gold_label", "labels": _NLI}

GLUE: dict[str, _Subset] = {
    "cola": _Subset(
        "CoLA",
        "cola",
        ("sentence",),
        ("sentence",),
        "label",
        ("unacceptable", "acceptable"),
        ("matthews",),
        8551,
        1043,
        header=("source", "label", "star", "sentence"),
    ),
    "sst2": _Subset(
        "SST-2",
        "sst2",
        ("sentence",),
        ("sentence",),
        "label",
        ("negative", "positive"),
        ("accuracy",),
        67349,
        872,
    ),
    "mrpc": _Subset(
        "MRPC",
        "mrpc",
        ("#1 String", "#2 String"),
        _PAIR,
        "Quality",
        ("not_equivalent", "equivalent"),
        ("f1", "accuracy"),
        3668,
        408,
    ),
    "stsb": _Subset("STS-B", "stsb", _PAIR, _PAIR, "score", (), ("pearson", "spearman"), 5749, 1500),
    "qqp": _Subset(
        "QQP",
        "qqp",
        _QUESTIONS,
        _QUESTIONS,
        "is_duplicate",
        ("not_duplicate", "duplicate"),
        ("f1", "accuracy"),
        363846,
        40430,
    ),
    "mnli": _Subset(
        "MNLI",
        "mnli",
        metrics=("accuracy",),
        train_rows=392702,
        dev_rows=9815,
        dev="dev_matched",
        **_NLI_COLUMNS,
    ),
    "mnli-mm": _Subset(
        "MNLI",
        "mnli",
        metrics=("accuracy",),
        train_rows=392702,
        dev_rows=9832,
        dev="dev_mismatched",
        **_NLI_COLUMNS,
    ),
    "qnli": _Subset(
        "QNLI",
        "qnli",
        ("question", "sentence"),
        ("question", "sentence"),
        "label",
        _RTE,
        ("accuracy",),
        104743,
        5463,
    ),
    "rte": _Subset("RTE", "rte", _PAIR, _PAIR, "label", _RTE, ("accuracy",), 2490, 277),
    "wnli": _Subset("WNLI", "wnli", _PAIR, _PAIR, "label", ("not_entailment", "entailment"), ("accuracy",), 635, 71),
}
"""The ten tasks, in the order and with the labels of the hub dataset."""


class Glue(SequenceClassification):
    """One of the ten tasks of GLUE.

    Args:
        subset: A key of `GLUE`.
    """

    dataset = HUB_DATASET
    groups: ClassVar[Groups] = Groups("premise", "but for MNLI, the files do not say what sentences share")

    def __init__(self, subset: str) -> None:
        self.name = f"glue/{subset}"
        self._subset = GLUE[subset]
        self.labels = self._subset.labels
        self.metrics = self._subset.metrics

    def read(
        self, data: Path | None = None, split: str | None = None, limit: int | None = None, *, streaming: bool = False
    ) -> Split:
        """Load a split, `dev` (the default) or `train`; the labels of `test` are not public.

        Args:
            data: The tsv, its folder (`SST-2`), or the parent folder; None uses the hub dataset.
            split: Name of the split. A tsv without the official name gives its own name to the split.
            limit: Keep the first `limit` rows.
            streaming: Read the hub dataset while it downloads, up to the limit.

        Raises:
            ApproxError: if the file or dataset does not exist, a line is damaged or has an unknown label, or no row is
                left.
        """
        if limit is not None and limit < 1:
            raise ApproxError(f"--limit {limit} leaves no rows; it must be at least 1.")
        wanted = (split or "dev").replace("validation", "dev")
        wanted = self._subset.dev if wanted == "dev" else wanted
        tally = Tally()
        if data is None:
            name, source, rows = wanted, HUB_DATASET, self._hub_rows(wanted, tally, streaming)
        else:
            source = self._find(Path(data), wanted, explicit=split is not None)
            name, rows = source.stem, self._file_rows(source, tally)
        # Each premise was given to a writer for three hypotheses.
        shared = self._subset.folder == "MNLI"
        chosen = [
            Example(f"{name}-{row}", inputs, label, group=inputs["text"] if shared else None)
            for row, (inputs, label) in islice(enumerate(rows), limit)
        ]
        if not chosen:
            raise ApproxError(
                f"{self.name}: 0 rows in {source}. Give a file with a row for each example below its first line.",
                Exit.UNAVAILABLE,
            )
        return Split(name, chosen, self._is_subset(name, len(chosen), limit), tally=tally)

    def _is_subset(self, name: str, rows: int, limit: int | None) -> bool:
        for official, full in (("train", self._subset.train_rows), (self._subset.dev, self._subset.dev_rows)):
            if name.startswith(official):
                return rows < full
        return limit == rows

    def _find(self, data: Path, wanted: str, explicit: bool) -> Path:
        if data.is_file():
            if explicit and not data.stem.startswith(wanted):
                raise ApproxError(f"--data is the file {data}, but --split is {wanted}. Leave --split out.")
            return data
        if not data.is_dir():
            raise ApproxError(f"{self.name}: {data} does not exist.", Exit.UNAVAILABLE)
        folders = [folder for folder in (data / self._subset.folder, data) if folder.is_dir()]
        official = folders[0] / f"{wanted}.tsv"
        # Excerpts carry the split's name and more: dev_matched_1k.tsv.
        candidates = [official] if official.is_file() else sorted(folders[0].glob(f"{wanted}*.tsv"))
        if len(candidates) == 1:
            return candidates[0]
        there = ", ".join(path.name for path in sorted(folders[0].glob("*.tsv"))) or "no tsv"
        raise ApproxError(
            f"{self.name}: looked for {self._subset.folder}/{wanted}.tsv and {wanted}.tsv in {data}, "
            f"found {there}. Give the file itself with --data, or another --split.",
            Exit.UNAVAILABLE,
        )

    def _file_rows(self, path: Path, tally: Tally) -> Iterator[tuple[dict[str, Any], int | float]]:
        """Rows between line ends, cells between tabs; quotes have no meaning in these files."""
        subset = self._subset
        numbered = enumerate(lines(read_text(path, self.encoding)), start=1)
        header = subset.header or next((tuple(line.split("\t")) for _, line in numbered if line), ())
        if not header:
            return
        if missing := [column for column in (*subset.texts, subset.label) if column not in header]:
            raise ApproxError(
                f"{path}: no column {', '.join(missing)} in its first line ({', '.join(header)[:200]}). "
                f"{self.name} needs the official layout with labels; test files have none.",
                Exit.UNAVAILABLE,
            )
        columns = [header.index(column) for column in subset.texts]
        for number, line in numbered:
            if not line:
                tally.skipped["empty lines"] += 1
                continue
            cells = line.split("\t")
            if len(cells) != len(header):
                raise ApproxError(
                    f"{path}, line {number}: {len(cells)} columns where {len(header)} are expected. "
                    "Fix or remove the line, or download the file again.",
                    Exit.UNAVAILABLE,
                )
            label = self.label_of(cells[header.index(subset.label)], f"{path}, line {number}")
            tally.read += 1
            yield _inputs([cells[column] for column in columns]), label

    def _hub_rows(self, split: str, tally: Tally, streaming: bool) -> Iterator[tuple[dict[str, Any], int | float]]:
        hub_split = split.replace("dev", "validation")
        for row in read_rows(HUB_DATASET, self._subset.hub, hub_split, streaming):
            if row["label"] == -1:
                raise ApproxError(
                    f"{self.name}: the split '{split}' of {HUB_DATASET} has no labels; use dev or train.",
                    Exit.UNAVAILABLE,
                )
            tally.read += 1
            yield _inputs([row[column] for column in self._subset.hub_texts]), row["label"]


def _inputs(texts: list[str]) -> dict[str, Any]:
    return dict(zip(("text", "text_pair"), texts, strict=False))
