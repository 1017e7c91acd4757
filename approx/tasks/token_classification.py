"""Classification of the words of a text, such as named entities.

Source: Tjong Kim Sang and De Meulder, 2003, "Introduction to the CoNLL-2003 Shared Task", CoNLL; entities are read from
tags as in its script conlleval.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from approx.errors import ApproxError, Exit
from approx.tasks.classification import ONE
from approx.tasks.head import TOKEN_CLASSIFICATION, Head
from approx.tasks.labelled import Classification
from approx.tasks.padding import padded, padded_labels
from approx.tasks.table import Row, text_of
from approx.tasks.task import Encoding, Example, Split, Tally, Task
from approx.text_file import lines, read_text, words

_COLUMNS = (".conll", ".iob", ".iob2", ".bio", ".txt")
_OURS = ("firsts",)
_OUTSIDE = "O"


class TokenClassification(Classification):
    """The tag of each word of a text, such as B-PER and I-PER for names of people; a word has the tag of its first token.

    Words that were truncated have the tag O.

    Args:
        labels: Names of the tags in the data, in the order of the model's outputs, as a list or separated by commas;
            the data may also hold numbers in this order. None uses the names in the checkpoint.

    Raises:
        ApproxError: if there are fewer than two labels, or a label twice.
    """

    name = "token-classification"
    usual: ClassVar[bool] = True
    head: ClassVar[Head] = TOKEN_CLASSIFICATION
    metrics = ("entity_f1", "token_accuracy")
    fields = ("tokens", "tags")
    optional_fields = ()

    def read(
        self, data: Path | None = None, split: str | None = None, limit: int | None = None, *, streaming: bool = False
    ) -> Split:
        """Read a file of words and tags, or a table; the default split is `test`.

        Args:
            data: A file of columns (.conll, .iob, .iob2, .bio, .txt) with a word first and its tag last in each line,
                and empty lines between texts; a table with the columns tokens and tags, each a list or a text with
                spaces; a folder with a table named after the split; or `hub:OWNER/NAME`.
            split: Name of the split.
            limit: Keep the first `limit` texts.
            streaming: Read a hub dataset while it downloads.

        Raises:
            ApproxError: if there are no data, a text has more or fewer tags than words, a tag is unknown, or no text is
                left.
        """
        if data is None or data.suffix not in _COLUMNS:
            return super().read(data, split, limit, streaming=streaming)
        tally = Tally()
        sentences = _sentences(data, tally, self.encoding)
        examples = list(islice(Task.from_rows(self, sentences, data.stem, limit), limit))
        if not examples:
            raise ApproxError(f"{self.name}: 0 texts in {data}.", Exit.UNAVAILABLE)
        return Split(data.stem, examples, subset=limit == len(examples), tally=tally)

    def in_words(self, value: Any) -> str:
        """The tags of all words."""
        return " ".join(map(str, value))

    def from_rows(self, rows: Iterator[Row], name: str, limit: int | None) -> Iterator[Example]:
        """One example for each row."""
        return Task.from_rows(self, rows, name, limit)

    def from_cells(self, cells: dict[str, Any], row: Row) -> tuple[dict[str, Any], Any]:
        """Words and tags, from lists or texts with spaces."""
        tokens, tags = (words(one) if isinstance(one, str) else one for one in (cells["tokens"], cells["tags"]))
        if not isinstance(tokens, list) or not isinstance(tags, list):
            raise ApproxError(
                f"{row.place}: words and tags must be lists, or texts with spaces. Fix or remove it.", Exit.UNAVAILABLE
            )
        if not tokens or len(tokens) != len(tags):
            raise ApproxError(
                f"{row.place}: {len(tokens)} words and {len(tags)} tags. Fix or remove it.", Exit.UNAVAILABLE
            )
        known = [self.label_of(tag, row.place) for tag in tags]
        return {"words": [text_of(word, row.place) for word in tokens]}, [
            self.labels[tag] if self.labels else tag for tag in known
        ]

    def _order(self, config: Any) -> list[int]:
        """Tags have names that no other output shares, so they are matched by name wherever that is possible."""
        names = [str(config.id2label[index]) for index in range(config.num_labels)]
        if sorted(names) == sorted(self.labels):
            return [self.labels.index(name) for name in names]
        return super()._order(config)

    def _kind_of(self, config: Any) -> str:
        # A word has one tag, whatever problem_type says of texts.
        return ONE

    def _refuse_kind(self, config: Any) -> None:
        """A head for tokens predicts tags."""

    def encode(self, example: Example, processor: Any, max_length: int | None = None) -> list[Encoding]:
        """Tokenise the words, and find the first token of each."""
        if not getattr(processor, "is_fast", False):
            raise ApproxError(
                f"{self.name} needs to know the word of a token, which {type(processor).__name__} does not tell. Put "
                "the tokenizer's tokenizer.json into the checkpoint's folder.",
                Exit.UNSUPPORTED,
            )
        made = processor(
            example.inputs["words"],
            is_split_into_words=True,
            truncation=max_length is not None,
            max_length=max_length,
            verbose=False,
        )
        firsts: dict[int, int] = {}
        for place, word in enumerate(made.word_ids()):
            if word is not None:
                firsts.setdefault(word, place)
        # A word of characters that the tokenizer drops has no token.
        return [{**made, "firsts": [firsts.get(word) for word in range(len(example.inputs["words"]))]}]

    def company(self, encoding: Encoding, processor: Any, config: Any) -> int:
        """Padding is masked and has no tags, so all may share a batch."""
        return 0

    def collate(self, encodings: Sequence[Encoding], processor: Any) -> dict[str, Any]:
        """Pad to the longest of the batch, on the right."""
        return padded([{name: one[name] for name in one if name not in _OURS} for one in encodings], processor)

    def targets(
        self, examples: Sequence[Example], encodings: Sequence[Encoding], processor: Any, config: Any
    ) -> dict[str, Any]:
        """`labels` [B, L]: the model's output for the tag of each word, at its first token."""
        order = self._order(config)
        rows = []
        for example, one in zip(examples, encodings, strict=True):
            row = [-100] * len(one["input_ids"])
            for place, tag in zip(one["firsts"], example.label, strict=True):
                if place is not None:
                    row[place] = order.index(self.labels.index(tag))
            rows.append(row)
        return {"labels": padded_labels(rows)}

    def predict(self, outputs: Any, encodings: Sequence[Encoding], config: Any) -> list[Any]:
        """The likeliest tag of each word, by name."""
        order = self._order(config)
        predictions = []
        for logits, one in zip(outputs.logits.float(), encodings, strict=True):
            tokens = logits[: len(one["input_ids"])]
            # The argmax of NaN is 0, which looks like a prediction.
            if not tokens.isfinite().all():
                raise ApproxError("its logits are not finite on some inputs, so it has no score.", Exit.VERIFICATION)
            best = tokens.argmax(-1).tolist()
            predictions.append(
                [_OUTSIDE if place is None else self.labels[order[best[place]]] for place in one["firsts"]]
            )
        return predictions


def _sentences(path: Path, tally: Tally, encoding: str | None) -> Iterator[Row]:
    """The texts of a file of columns; columns end at tabs, or in a line without any at blanks."""
    found: list[list[str]] = []
    document = 0
    for number, line in enumerate([*lines(read_text(path, encoding)), ""], start=1):
        # A word may be or contain another kind of space.
        line = line.strip(" \t")
        cells = [one.strip(" ") for one in line.split("\t") if one.strip(" ")] if "\t" in line else words(line)
        if cells and not line.startswith("-DOCSTART-"):
            if len(cells) < 2:
                raise ApproxError(
                    f"{path}, line {number}: a word without a tag. Fix or remove the line.", Exit.UNAVAILABLE
                )
            found.append(cells)
            continue
        tally.skipped["document marks"] += bool(cells)
        if found:
            table: dict[str, Any] = {"tokens": [one[0] for one in found], "tags": [one[-1] for one in found]}
            if document:
                table["group"] = f"document {document}"
            tally.read += 1
            yield Row(f"{path}, line {number - len(found)}", path.parent, table)
            found = []
        document += line.startswith("-DOCSTART-")
