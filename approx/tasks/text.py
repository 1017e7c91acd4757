"""A text as a task's data: read, cut into stretches, tokenised once, and scored by the place of its tokens."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from approx.errors import ApproxError, Exit, shown
from approx.tasks.hub import read_rows
from approx.tasks.padding import padded
from approx.tasks.settings import switch_setting, whole_setting
from approx.tasks.table import Row, is_table, text_of
from approx.tasks.task import Encoding, Example, Groups, Split, Task, doubling
from approx.text_file import read_text

_HUB_DATASET, _HUB_CONFIG = "Salesforce/wikitext", "wikitext-2-raw-v1"
_SUFFIXES = (".txt", ".txt.gz", ".tokens", ".raw")


class Text(Task):
    """A text, cut between words into stretches of about `stretch` characters; each stretch is an example.

    A row of a table is a text of its own: no stretch and no context reaches into another row, unless `join` says that
    the rows are the lines of one text. A row without a text may hold the messages of a conversation, each with its role
    and content, which the tokenizer's chat template writes out; it is one example.
    """

    metrics: tuple[str, ...]
    groups: ClassVar[Groups] = Groups("document", "stretches of one text; the interval is about texts like this one")
    dataset = _HUB_DATASET
    fields = ("text",)
    optional_fields = ("messages",)
    windowed: ClassVar[bool] = True

    def __init__(self, stretch: int = 2000, join: bool = False) -> None:
        self._stretch = whole_setting(self.name, "stretch", stretch, 1)
        self._join = switch_setting(self.name, "join", join)

    def read(
        self, data: Path | None = None, split: str | None = None, limit: int | None = None, *, streaming: bool = False
    ) -> Split:
        """Load a text; the default split is `test` of wikitext-2.

        Args:
            data: A text file (.txt, .tokens, .raw, also .gz), a folder with a file named after the split, a table with
                the column text, or `hub:OWNER/NAME`; None uses wikitext-2 from the hub.
            split: Name of the split.
            limit: Keep the first `limit` stretches.
            streaming: Read the hub dataset while it downloads, until there are enough stretches.

        Raises:
            ApproxError: if the file or dataset does not exist or has no words.
        """
        if limit is not None:
            whole_setting(self.name, "limit", limit, 1)
        if data is None:
            name = (split or "test").replace("valid", "validation").replace("validationation", "validation")
            text = self._beginning(read_rows(_HUB_DATASET, _HUB_CONFIG, name, streaming), limit)
        else:
            path = self._find(Path(data), split)
            if is_table(path):
                return self.read_table(path, split or "test", limit)
            name = path.name.partition(".")[0]
            text = read_text(path, self.encoding).replace("\r\n", "\n")
        stretches = list(self._stretches(text, name))
        if not stretches:
            raise ApproxError(
                f"{self.name}: 0 words in {data or _HUB_DATASET}. Give a file with text.", Exit.UNAVAILABLE
            )
        chosen = list(islice(stretches, limit))
        return Split(name, chosen, subset=len(chosen) < len(stretches))

    def read_table(self, data: Path, split: str, limit: int | None = None, *, streaming: bool = False) -> Split:
        """Read the texts of a table."""
        made = super().read_table(data, split, limit, streaming=streaming)
        if self._join or made.tally is None:
            return made
        texts = {example.id.rpartition("-")[0] for example in made.examples}
        made.tally.skipped["empty texts"] += made.tally.read - len(texts)
        made.tally.read = len(texts)
        if len(texts) > 1:
            return replace(made, notes=("each row is a text of its own",))
        # The stretches of a single text are all that can be resampled.
        return replace(made, examples=[replace(one, group=None) for one in made.examples])

    def from_rows(self, rows: Iterator[Row], name: str, limit: int | None) -> Iterator[Example]:
        """Stretches of each row's text, or of the joined texts, each of which ends its line."""
        if self._join:
            texts = (text_of(self._cells(row)["text"], row.place) for row in rows)
            ended = ({"text": text if text.endswith("\n") else text + "\n"} for text in texts)
            yield from self._stretches(self._beginning(ended, limit), name)
            return
        for number, row in enumerate(rows):
            if (conversation := self._conversation(row, f"{name}-{number}")) is not None:
                yield conversation
                continue
            cells = self._cells(row)
            row_id = str(cells.get("id", f"{name}-{number}"))
            for stretch in self._stretches(text_of(cells["text"], row.place), row_id):
                yield replace(stretch, group=str(cells.get("group", row_id)))

    def _conversation(self, row: Row, row_id: str) -> Example | None:
        """A row's messages as an example; None if it has a text, or no messages."""
        messages = row.cells.get(self.columns.get("messages", "messages"))
        if messages is None or row.cells.get(self.columns.get("text", "text")) is not None:
            return None
        texts = [
            one.get("content") if isinstance(one, dict) and isinstance(one.get("role"), str) else None
            for one in (messages if isinstance(messages, list) else [])
        ]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise ApproxError(
                f"{row.place}: messages are a list of objects, each with a role and a content in words, found "
                f"{shown(messages)[:200]}. Fix or remove it.",
                Exit.UNAVAILABLE,
            )
        row_id = str(row.cells.get(self.columns.get("id", ""), row_id))
        group = row.cells.get(self.columns.get("group", "group"))
        size = sum(len(str(text).encode()) for text in texts)
        return Example(f"{row_id}-0", {"messages": messages}, size, row_id if group in (None, "") else str(group))

    def excerpt(self, example: Example) -> str:
        """The stretch, or what is said in the conversation."""
        if "messages" in example.inputs:
            return " | ".join(str(message["content"]) for message in example.inputs["messages"])
        return example.inputs["text"][example.inputs["start"] : example.inputs["end"]]

    def written(self, example: Example, processor: Any) -> tuple[str, int, int]:
        """A text that holds an example, and where the example begins and ends in it.

        Raises:
            ApproxError: if it is a conversation, and the tokenizer has no chat template or it does not take it.
        """
        if "messages" not in example.inputs:
            return example.inputs["text"], example.inputs["start"], example.inputs["end"]
        if getattr(processor, "chat_template", None) is None:
            raise ApproxError(
                f"{example.id} is a conversation, but this tokenizer has no chat template, which writes one out. Take the "
                "tokenizer of a chat model, or give the conversations as texts.",
                Exit.UNSUPPORTED,
            )
        try:
            text = processor.apply_chat_template(example.inputs["messages"], tokenize=False)
        # Templates raise what they like.
        except Exception as error:
            raise ApproxError(
                f"The tokenizer's chat template does not take the conversation {example.id}: "
                f"{' '.join(str(error).split())[:200]}. Fix or remove it.",
                Exit.UNAVAILABLE,
            ) from error
        return text, 0, len(text)

    def _beginning(self, rows: Iterator[dict[str, Any]], limit: int | None) -> str:
        """The beginning of a text in rows, long enough for more stretches than the limit."""
        text = ""
        looked_at = 0
        for row in rows:
            text += row["text"]
            # Counting only when the text has doubled keeps the total cost linear.
            if limit is not None and len(text) > max(limit * self._stretch, 2 * looked_at):
                looked_at = len(text)
                if sum(1 for _ in self._stretches(text, "")) > limit + 1:
                    break
        return text

    def _find(self, data: Path, split: str | None) -> Path:
        if data.is_file():
            return data
        known = [path for path in sorted(data.glob("*")) if path.name.endswith(_SUFFIXES)] if data.is_dir() else []
        matches = [path for path in known if split is None or split in path.name]
        if len(matches) == 1:
            return matches[0]
        there = ", ".join(path.name for path in known) or "no text"
        raise ApproxError(
            f"{self.name}: looked for one text file{f' of the split {split}' if split else ''} in {data}, found "
            f"{there}. Give the file itself with --data.",
            Exit.UNAVAILABLE,
        )

    def _stretches(self, text: str, name: str) -> Iterator[Example]:
        start = 0
        while start < len(text):
            # Tokens include the space before a word, so stretches begin with a space.
            cut = re.compile(r"\s").search(text, start + self._stretch)
            end = cut.start() if cut else len(text)
            size = len(text[start:end].encode())
            if text[start:end].strip():
                yield Example(f"{name}-{start}", {"text": text, "start": start, "end": end}, size)
            start = end

    def collate(self, encodings: Sequence[Encoding], processor: Any) -> dict[str, Any]:
        """Pad to the longest of the batch, on the right."""
        return padded([{"input_ids": one["input_ids"]} for one in encodings], processor)

    def combine(self, example: Example, parts: list[Any]) -> dict[str, Any]:
        """Add up the windows of a stretch."""
        places: dict[str, list[float]] = {}
        for part in parts:
            for place, (loss, count) in part["places"].items():
                before = places.get(place, (0.0, 0))
                places[place] = [before[0] + loss, before[1] + count]
        loss, count = (sum(column) for column in zip(*places.values(), strict=True)) if places else (0.0, 0)
        return {"loss": loss, "count": int(count), "places": places}


@functools.lru_cache(maxsize=2)
def tokenised(processor: Any, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens of a whole text, and the index of the first character of each; cached for all stretches of a text."""
    if not getattr(processor, "is_fast", False):
        raise ApproxError(
            f"Language modelling needs the positions of tokens in the text, which {type(processor).__name__} does not "
            "give. Put the tokenizer's tokenizer.json into the checkpoint's folder.",
            Exit.UNSUPPORTED,
        )
    encoded = processor(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return np.asarray(encoded["input_ids"]), np.asarray([span[0] for span in encoded["offset_mapping"]])


def by_place(losses: Any, places: Sequence[int], width: int | None = None) -> dict[str, list[float]]:
    """Sum and number of losses in each slice of places: slices of a width, or those that end at 16, 32, 64, …"""
    if not losses.isfinite().all():
        raise ApproxError("its losses are not finite on some inputs, so it has no score.", Exit.VERIFICATION)
    sums: dict[str, list[float]] = {}
    counts = np.asarray(places)
    values = losses.double().cpu().numpy()
    for start, end in _bounds(int(counts.max(initial=0)), width):
        inside = (counts >= start) & (counts < end)
        if inside.any():
            sums[str(start)] = [float(values[inside].sum()), int(inside.sum())]
    return sums


def _bounds(last: int, width: int | None) -> Iterable[tuple[int, int]]:
    """Bounds of the slices of places up to the last one."""
    return doubling(last) if width is None else ((start, start + width) for start in range(0, last + 1, width))


def place_slices(
    labels: Sequence[Any], predictions: Sequence[Any], width: int | None = None
) -> Iterator[tuple[int, int, list[Any], list[Any]]]:
    """Slices, as from `Task.slices`, of predictions that hold their losses by place."""
    deepest = max(int(place) for prediction in predictions for place in prediction["places"])
    for start, end in _bounds(deepest, width):
        rows = [row for row, prediction in enumerate(predictions) if str(start) in prediction["places"]]
        parts = [predictions[row]["places"][str(start)] for row in rows]
        if rows:
            inside = [{"loss": loss, "count": int(count)} for loss, count in parts]
            yield start, end, inside, [labels[row] for row in rows]
