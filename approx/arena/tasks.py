"""The tasks of the arena: their examples as sequences of symbols, and how an encoder reads and classifies them.

Source: Tay et al., 2021, "Long Range Arena: A Benchmark for Efficient Transformers", arXiv 2011.04006.
"""

import ast
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from approx.arena.images import CIFAR_10, CIFAR_SIDE, GRATINGS, cifar, grating, maze
from approx.arena.options import Pool, Size, TaskName
from approx.errors import ApproxError, Exit
from approx.tasks.classification import SequenceClassification
from approx.tasks.documents import Documents
from approx.tasks.listops import DIGITS, WORDS, ListOps
from approx.tasks.table import is_table, open_table, text_of
from approx.tasks.task import Encoding, Example, Groups, Split, Tally

# Tokens before the symbols: padding, and the first token of an input.
_PADDING, _FIRST, _SPECIAL = 0, 1, 2
PROCESSOR = SimpleNamespace(pad_token_id=_PADDING, all_special_ids=[_PADDING, _FIRST])
"""Stands for a tokenizer: examples are symbols already."""

# Most held-out training examples, which choose the best step.
_HELD_OUT = 500
_AAN = "new_aan_pairs.{}.tsv"
_RELATED = ("unrelated", "related")


class Arena(SequenceClassification):
    """A class for a sequence of symbols, or for two that are encoded one by one.

    Args:
        name: Name in the record.
        labels: The classes.
        symbols: Number of different symbols, at most 256.
        pairs: Whether an example is two sequences.
        pool: What of a sequence is classified.
    """

    groups: ClassVar[Groups] = Groups("group", "each is drawn by itself, or is a document of its own")
    fields = ()
    metrics = ("accuracy",)

    def __init__(self, name: str, labels: Sequence[str], symbols: int, *, pairs: bool, pool: Pool) -> None:
        self.name, self.labels, self.symbols = name, tuple(labels), symbols
        self.pairs, self._pool = pairs, pool

    def read(
        self, data: Path | None = None, split: str | None = None, limit: int | None = None, *, streaming: bool = False
    ) -> Split:
        """Examples come from `material`."""
        raise NotImplementedError("A task of the arena has no files of its own: see `material`.")

    def encode(self, example: Example, processor: Any, max_length: int | None = None) -> list[Encoding]:
        """The tokens: a first one, and one for each symbol."""
        return [{name: _tokens(symbols) for name, symbols in example.inputs.items()}]

    def tokens(self, encoding: Encoding) -> int:
        """Tokens, of the longer one of a pair."""
        return max(map(len, encoding.values()))

    def collate(self, encodings: Sequence[Encoding], processor: Any) -> dict[str, Tensor]:
        """`input_ids` and `attention_mask` [B, L], and of pairs `second_ids` and `second_mask`."""
        made = {}
        for name in encodings[0]:
            rows = [torch.from_numpy(one[name].astype(np.int64)) for one in encodings]
            ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=_PADDING)
            mask = "attention_mask" if name == "input_ids" else "second_mask"
            made |= {name: ids, mask: (ids != _PADDING).long()}
        return made

    def outputs(self, model: Any, batch: dict[str, Any]) -> Any:
        """`logits`, [B, classes]."""
        first = self._encoded(model, batch["input_ids"], batch["attention_mask"])
        if not self.pairs:
            return SimpleNamespace(logits=model.classifier(model.dropout(first)))
        second = self._encoded(model, batch["second_ids"], batch["second_mask"])
        joined = torch.cat([first, second, first * second, first - second], -1)
        return SimpleNamespace(logits=model.classifier(model.dropout(joined)))

    def _encoded(self, model: Any, ids: Tensor, mask: Tensor) -> Tensor:
        """One vector a sequence, [B, hidden]."""
        made = model.base_model(input_ids=ids, attention_mask=mask)
        if self._pool == "first":
            return made.pooler_output
        real = mask[..., None].to(made.last_hidden_state.dtype)
        mean = (made.last_hidden_state * real).sum(1, keepdim=True) / real.sum(1, keepdim=True)
        return model.base_model.pooler(mean)

    def encoder(self, size: Size, seed: int) -> Any:
        """A BERT with random weights and a position for each symbol.

        Raises:
            ApproxError: if the heads do not divide the width.
        """
        if size.hidden % size.heads:
            raise ApproxError(
                f"The width {size.hidden} cannot be shared by {size.heads} heads. Give a --hidden that is a multiple of "
                "--heads."
            )
        config = BertConfig(
            vocab_size=self.symbols + _SPECIAL,
            hidden_size=size.hidden,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            intermediate_size=2 * size.hidden,
            max_position_embeddings=size.length + 1,
            type_vocab_size=1,
            pad_token_id=_PADDING,
            # Not every mechanism has weights that could be dropped.
            attention_probs_dropout_prob=0.0,
        )
        config.num_labels = len(self.labels)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model: Any = BertForSequenceClassification(config)
            if self.pairs:
                wide, classes = size.hidden, len(self.labels)
                model.classifier = nn.Sequential(nn.Linear(4 * wide, wide), nn.ReLU(), nn.Linear(wide, classes))
        return model


@dataclass(frozen=True)
class Material:
    """A task with its examples.

    Attributes:
        task: The task.
        train: Training examples.
        held_out: Those of them that choose the best step of a training.
        test: Examples that scores are of.
        source: Where the examples are from, in words.
    """

    task: Arena
    train: list[Example]
    held_out: list[Example]
    test: list[Example]
    source: str

    @property
    def sha256(self) -> str:
        """Hash of all examples."""
        digest = hashlib.sha256()
        for part in (self.train, self.held_out, self.test):
            for example in part:
                digest.update(repr((example.id, example.inputs, example.label)).encode())
        return digest.hexdigest()


def material(name: TaskName, size: Size, data: str | None, pool: Pool) -> Material:
    """Read or generate the examples of a task; they are the same for all mechanisms and seeds.

    Args:
        name: The task.
        size: Lengths and numbers.
        data: Its files; None generates them, or downloads IMDb.
        pool: What of a sequence is classified.

    Raises:
        ApproxError: if there are no such data, a task that generates its own gets some, or too few are left.
    """
    if data is not None and name.startswith("pathfinder"):
        raise ApproxError(f"{name} draws its own pictures and cannot read {data}. Leave out --data {name}=…")
    labels, symbols, read, source = _MATERIAL[name](size, None if data is None else Path(data))
    if data is not None and Path(data).is_file():
        # One file for both: a tenth of it is for scores.
        every = read("train", size.examples + size.test_examples)
        train, test = _apart(every, min(size.test_examples, max(len(every) // 10, 1)), "test")
        source += f"; scored on {len(test):,} of its examples, which are not trained on"
    else:
        train, test = read("train", size.examples), read("test", size.test_examples)
    train, held_out = _apart(train, max(1, min(_HELD_OUT, len(train) // 10)), "held out")
    if not (train and held_out and test):
        raise ApproxError(
            f"{name}: {len(train)} examples to train on, {len(held_out)} to hold out and {len(test)} to score are left of "
            f"{source}. Give more data, or a greater --length.",
            Exit.UNAVAILABLE,
        )
    task = Arena(name, labels, symbols, pairs=name == "retrieval", pool=pool)
    return Material(task, train, held_out, test, source)


_Read = Callable[[str, int], list[Example]]
_Made = tuple[Sequence[str], int, _Read, str]


def _listops(size: Size, data: Path | None) -> _Made:
    most, least = size.length + 1, max(3, size.length // 4 - 1)

    def read(split: str, limit: int) -> list[Example]:
        if data is None:
            task = ListOps(examples=limit, shortest=least, longest=most)
            found = task.load(None, split).examples
        else:
            found = ListOps().load(data, split).examples
        words = ((one, one.inputs["text"].split()) for one in found)
        fitting = ((one, bytes(map(WORDS.index, some))) for one, some in words if len(some) <= size.length)
        return [Example(one.id, {"input_ids": some}, one.label) for one, some in islice(fitting, limit)]

    if data is None:
        return DIGITS, len(WORDS), read, f"generated expressions of {least + 1:,} to {size.length:,} symbols"
    return DIGITS, len(WORDS), read, f"the expressions of {data.name} of at most {size.length:,} symbols"


def _text(size: Size, data: Path | None) -> _Made:
    task = Documents()

    def read(split: str, limit: int) -> list[Example]:
        return [
            Example(one.id, {"input_ids": one.inputs["text"].encode()[: size.length]}, one.label, one.group)
            for one in task.load(data, split, limit).examples
        ]

    source = "IMDb" if data is None else data.name
    return task.labels, 256, read, f"the first {size.length:,} bytes of the texts of {source}"


def _retrieval(size: Size, data: Path | None) -> _Made:
    if data is not None and (data / _AAN.format("train")).is_file():
        official = data

        def read_pairs(split: str, limit: int) -> list[Example]:
            return list(islice(_official_pairs(official / _AAN.format(split), size.length), limit))

        return _RELATED, 256, read_pairs, f"the pairs of {data.name}, the first {size.length:,} bytes of each document"

    def read(split: str, limit: int) -> list[Example]:
        return halves(_documents(data, split, -(-limit // 2)), size.length)[:limit]

    where = "IMDb" if data is None else data.name
    return (
        _RELATED,
        256,
        read,
        f"a stand-in for the AAN papers: halves of one text or of two texts of {where}, the first {size.length:,} bytes of each half",
    )


def halves(documents: Sequence[tuple[str, str]], length: int) -> list[Example]:
    """Two pairs for each document: its two halves (class 1), and its first half with the second half of another (class 0).

    So each half is as often in one class as in the other.

    Args:
        documents: Names and texts, at least two.
        length: Bytes of a half at most; its beginning counts.
    """
    # A text of one character has no second half.
    texts = [(name, raw) for name, text in documents if len(raw := text.encode()) >= 2]
    cut = [(name, raw[: len(raw) // 2][:length], raw[len(raw) // 2 :][:length]) for name, raw in texts]
    made = []
    for place, (name, first, second) in enumerate(cut):
        _, _, other = cut[(place + 1) % len(cut)]
        for label, half in ((1, second), (0, other)):
            made.append(Example(f"{name}/{label}", {"input_ids": first, "second_ids": half}, label, name))
    return made if len(cut) > 1 else []


def _documents(data: Path | None, split: str, limit: int) -> list[tuple[str, str]]:
    if data is None or not (data.is_file() or any(map(is_table, data.glob("*")))):
        found = Documents().load(data, split, limit).examples
        return [(one.id, one.inputs["text"]) for one in found]
    name, rows = open_table("retrieval", data, split, Tally())
    texts = []
    for number, row in enumerate(islice(rows, limit)):
        if row.cells.get("text") is None:
            raise ApproxError(
                f"{row.place}: no column text; the columns are {', '.join(map(str, row.cells))[:200]}. Name it so.",
                Exit.UNAVAILABLE,
            )
        texts.append((f"{name}-{number}", text_of(row.cells["text"], row.place)))
    return texts


def _official_pairs(file: Path, length: int) -> Iterator[Example]:
    """Pairs of the files of the paper: label, two ids and two texts a line, the texts as Python writes bytes."""
    # Several gigabytes, read line by line.
    with file.open(encoding="utf-8", errors="replace") as rows:
        for number, line in enumerate(rows, start=1):
            cells = line.rstrip("\n").split("\t")
            try:
                label = int(float(cells[0]))
                first, second = (_bytes_of(text)[:length] for text in cells[3:])
                if label not in (0, 1) or not (first and second):
                    raise ValueError
            except (ValueError, SyntaxError):
                raise ApproxError(
                    f"{file}, line {number}: not a label 0 or 1, two ids and two texts with tabs between them: "
                    f"{line.strip()[:60]!r}. Fix or remove the line.",
                    Exit.UNAVAILABLE,
                ) from None
            yield Example(f"{file.stem}-{number}", {"input_ids": first, "second_ids": second}, label)


def _bytes_of(text: str) -> bytes:
    written = text.startswith(("b'", 'b"'))
    found = ast.literal_eval(text) if written else text.encode()
    if not isinstance(found, bytes):
        raise ValueError
    return found


def _image(size: Size, data: Path | None) -> _Made:
    if data is not None:
        folder = data
        if size.length != CIFAR_SIDE**2:
            raise ApproxError(
                f"image: pictures of CIFAR-10 have {CIFAR_SIDE**2:,} pixels, and this size takes {size.length:,}. Give --size "
                "small or full, or no data."
            )

        def read_stored(split: str, limit: int) -> list[Example]:
            stored = cifar(folder, split, limit)
            return [Example(name, {"input_ids": grey.tobytes()}, label) for name, grey, label in stored]

        return CIFAR_10, 256, read_stored, "CIFAR-10 in grey"
    side = int(size.length**0.5)

    def read(split: str, limit: int) -> list[Example]:
        return _drawn(
            "image", split, limit, len(GRATINGS), lambda random, label: grating(random, side, label).tobytes()
        )

    return GRATINGS, 256, read, f"a stand-in for CIFAR-10: generated stripes in noise, {side} × {side} pixels"


def _pathfinder(size: Size, data: Path | None) -> _Made:
    side = int(size.length**0.5)

    def read(split: str, limit: int) -> list[Example]:
        return _drawn(
            f"pathfinder-{side}", split, limit, 2, lambda random, label: maze(random, side, label).pixels.tobytes()
        )

    return ("apart", "connected"), 256, read, f"pictures drawn by the rules of Pathfinder, {side} × {side} pixels"


def _drawn(
    name: str, split: str, limit: int, classes: int, draw: Callable[[np.random.Generator, int], bytes]
) -> list[Example]:
    """Pictures, the classes by turns; with a generator for each, a picture does not depend on the number of others."""
    made = []
    for row in range(limit):
        random = np.random.default_rng([("train", "test").index(split), row])
        made.append(Example(f"{name}/{split}/{row}", {"input_ids": draw(random, row % classes)}, row % classes))
    return made


_MATERIAL: dict[TaskName, Callable[[Size, Path | None], _Made]] = {
    "listops": _listops,
    "text": _text,
    "retrieval": _retrieval,
    "image": _image,
    "pathfinder": _pathfinder,
    "pathfinder-128": _pathfinder,
}


def _tokens(symbols: bytes) -> np.ndarray:
    tokens = np.empty(len(symbols) + 1, np.int16)
    tokens[0], tokens[1:] = _FIRST, np.frombuffer(symbols, np.uint8)
    tokens[1:] += _SPECIAL
    return tokens


def _apart(examples: Sequence[Example], count: int, salt: str) -> tuple[list[Example], list[Example]]:
    """Split off so many examples, whole groups, by their names: the same ones in any order."""
    units = sorted({one.unit for one in examples}, key=lambda unit: hashlib.sha256(f"{salt} {unit}".encode()).digest())
    sizes: dict[tuple[str, str], int] = {}
    for one in examples:
        sizes[one.unit] = sizes.get(one.unit, 0) + 1
    chosen: set[tuple[str, str]] = set()
    for unit in units:
        if count <= 0:
            break
        chosen.add(unit)
        count -= sizes[unit]
    return [one for one in examples if one.unit not in chosen], [one for one in examples if one.unit in chosen]
