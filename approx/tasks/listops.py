"""ListOps: the value of a nested expression over digits, generated or read from the published files.

Source: Nangia and Bowman, 2018, "ListOps: A Diagnostic Dataset for Latent Tree Learning", arXiv 1804.06028; the
settings of long expressions are those of Tay et al., 2021, "Long Range Arena", arXiv 2011.04006.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import ClassVar

import numpy as np

from approx.errors import ApproxError, Exit, shown
from approx.tasks.classification import SequenceClassification
from approx.tasks.settings import switch_setting, whole_setting, wrong_setting
from approx.tasks.task import Example, Groups, Split, Tally
from approx.text_file import lines, read_text
from approx.text_file import words as split_words

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
DIGITS = tuple("0123456789")
END = "]"
WORDS = (*OPERATORS, *DIGITS, END, "(", ")")
"""Every word of an expression; a tokenizer that knows them gives one token per word."""

PRESETS = {
    "original": {"depth": 20, "arguments": 5, "shortest": 3, "longest": 100_000},
    "long-range-arena": {"depth": 10, "arguments": 10, "shortest": 500, "longest": 2000},
}
# The probability that an argument is an expression; otherwise it is a digit.
_NESTED = 0.25
_SPLITS = ("train", "val", "test")
_COLUMNS = ("Source", "Target")
_Tree = tuple[str, list["_Tree"]] | int


class ListOps(SequenceClassification):
    """Ten classes, the digits: the value of an expression of minima, maxima, medians and sums modulo 10.

    Args:
        preset: A key of `PRESETS`, for generated expressions.
        examples: Rows of a generated split.
        brackets: Whether to keep the round brackets of the original notation, which have no meaning.
        seed: Seed of all generated rows, together with the split and the number of the row.
        shortest: Tokens that a generated expression has more than, without round brackets; None is that of the preset.
        longest: Tokens that it has fewer than, at least 16 and twice the shortest; None is that of the preset.

    Raises:
        ApproxError: if the preset is unknown, or a number is out of range.
    """

    name = "listops"
    groups: ClassVar[Groups] = Groups(None, "each expression is drawn by itself")
    metrics = ("accuracy",)
    labels = DIGITS

    def __init__(
        self,
        preset: str = "long-range-arena",
        examples: int = 2000,
        brackets: bool = False,
        seed: int = 0,
        shortest: int | None = None,
        longest: int | None = None,
    ) -> None:
        if preset not in PRESETS:
            raise ApproxError(f"The task '{self.name}' has no preset {shown(preset)}. Known: {', '.join(PRESETS)}.")
        self._size = whole_setting(self.name, "examples", examples, 1)
        self._brackets = switch_setting(self.name, "brackets", brackets)
        self._seed = whole_setting(self.name, "seed", seed, 0)
        limits = PRESETS[preset]
        least = limits["shortest"] if shortest is None else whole_setting(self.name, "shortest", shortest, 3)
        # In a narrow range there are too few expressions, or hardly any is drawn.
        most = (
            limits["longest"] if longest is None else whole_setting(self.name, "longest", longest, max(16, 2 * least))
        )
        if most < 2 * least:
            raise wrong_setting("shortest", least, f"at most {most // 2}, half the longest", self.name)
        self._limits = {**limits, "shortest": least, "longest": most}
        # An expression that is given up draws less, and the rows of the presets must stay what they are.
        self._stops = longest is not None
        self._named = preset if shortest is longest is None else f"{preset}-{least}-{most}"

    def read(
        self, data: Path | None = None, split: str | None = None, limit: int | None = None, *, streaming: bool = False
    ) -> Split:
        """Generate or read a split: `test` (the default), `val` or `train`.

        Args:
            data: A published tsv of either source, or its folder; None generates the split.
            split: Name of the split.
            limit: Keep the first `limit` expressions.

        Raises:
            ApproxError: if the split is unknown, the data do not exist, or a line is not an expression with its value.
        """
        wanted = split or "test"
        if limit is not None:
            whole_setting(self.name, "limit", limit, 1)
        if data is not None:
            path = self._find(Path(data), wanted)
            tally = Tally()
            examples = list(islice(self._file_rows(path, tally), limit))
            if not examples:
                raise ApproxError(f"{self.name}: 0 expressions in {path}.", Exit.UNAVAILABLE)
            return Split(path.stem, examples, subset=len(examples) == limit, tally=tally)
        if wanted not in _SPLITS:
            raise ApproxError(f"Unknown split '{wanted}' of the task '{self.name}'. Known: {', '.join(_SPLITS)}.")
        count = min(self._size, limit or self._size)
        seen: set[str] = set()
        return Split(wanted, [self._generated(wanted, row, seen) for row in range(count)], subset=count < self._size)

    def _find(self, data: Path, wanted: str) -> Path:
        if data.is_file():
            return data
        known = sorted(data.glob("*.tsv")) if data.is_dir() else []
        matches = [path for path in known if path.stem.removeprefix("basic_").startswith(wanted)]
        if len(matches) == 1:
            return matches[0]
        there = ", ".join(path.name for path in known) or "no tsv"
        raise ApproxError(
            f"{self.name}: looked for {wanted}*.tsv or basic_{wanted}.tsv in {data}, found {there}. Give the file "
            "itself with --data, or another --split.",
            Exit.UNAVAILABLE,
        )

    def _file_rows(self, path: Path, tally: Tally) -> Iterator[Example]:
        rows = lines(read_text(path, self.encoding))
        titled = bool(rows) and tuple(rows[0].split("\t")) == _COLUMNS
        for number, line in enumerate(rows[titled:], start=1 + titled):
            if not line.strip():
                tally.skipped["empty lines"] += 1
                continue
            cells = line.split("\t")
            # In the older files the value comes first.
            expression, value = (
                cells if titled and len(cells) == 2 else (cells[1], cells[0]) if len(cells) == 2 else ("", "")
            )
            words = split_words(expression)
            if value not in DIGITS or not words or not set(words) <= set(WORDS):
                raise ApproxError(
                    f"{path}, line {number}: not an expression with a value from 0 to 9: {line[:60]!r}. Fix or remove "
                    "the line, or download the file again.",
                    Exit.UNAVAILABLE,
                )
            tally.read += 1
            yield self._example(f"{path.stem}-{number}", words, DIGITS.index(value))

    def _generated(self, split: str, row: int, seen: set[str]) -> Example:
        """A row that differs from all before it: otherwise short expressions would be most of a split."""
        limits = self._limits
        # With a generator per row, a row does not depend on the number of rows.
        random = np.random.default_rng([self._seed, _SPLITS.index(split), row])
        while True:
            room = _Room(limits["longest"] if self._stops else None)
            tree = _grow(random, 1, limits["depth"], limits["arguments"], room)
            if room.full:
                continue
            words = list(_words(tree))
            text, length = " ".join(words), sum(word not in "()" for word in words)
            if limits["shortest"] < length < limits["longest"] and text not in seen:
                seen.add(text)
                break
        name = f"listops/{split}/{self._named}-{self._seed}/{row}"
        return self._example(name, words, evaluate(tree))

    def _example(self, name: str, words: list[str], value: int) -> Example:
        tokens = words if self._brackets else [word for word in words if word not in "()"]
        return Example(name, {"text": " ".join(tokens)}, value)


def evaluate(tree: _Tree) -> int:
    """The value of an expression, a digit; medians are rounded down."""
    if isinstance(tree, int):
        return tree
    operator, arguments = tree
    values = [evaluate(argument) for argument in arguments]
    if operator == "[SM":
        return sum(values) % 10
    return {"[MIN": min, "[MAX": max, "[MED": lambda v: int(statistics.median(v))}[operator](values)


def parse(words: list[str]) -> _Tree:
    """Parse the words of an expression, with or without round brackets.

    Raises:
        ValueError: if they are not an expression.
    """
    stack: list[list[_Tree]] = [[]]
    operators: list[str] = []
    for word in words:
        if word in OPERATORS:
            operators.append(word)
            stack.append([])
        elif word == END:
            if not operators or not stack[-1]:
                raise ValueError("an expression is empty, or ends without a beginning")
            arguments = stack.pop()
            stack[-1].append((operators.pop(), arguments))
        elif word in DIGITS:
            stack[-1].append(int(word))
        elif word not in "()":
            raise ValueError(f"unknown word '{word}'")
    if operators or len(stack[0]) != 1:
        raise ValueError("not one complete expression")
    return stack[0][0]


class _Room:
    """How many more tokens an expression may have; None for any number."""

    def __init__(self, tokens: int | None) -> None:
        self._left = tokens

    def take(self, tokens: int) -> None:
        if self._left is not None:
            self._left -= tokens

    @property
    def full(self) -> bool:
        return self._left is not None and self._left <= 0


def _grow(random: np.random.Generator, depth: int, deepest: int, most: int, room: _Room) -> _Tree:
    room.take(1)
    if room.full:
        # Too long in any case.
        return 0
    if depth > 1 and (depth >= deepest or random.random() > _NESTED):
        return int(random.integers(10))
    count = int(random.integers(2, most + 1))
    operator = OPERATORS[random.integers(len(OPERATORS))]
    # Its end.
    room.take(1)
    return operator, [_grow(random, depth + 1, deepest, most, room) for _ in range(count)]


def _words(tree: _Tree) -> Iterator[str]:
    if isinstance(tree, int):
        yield DIGITS[tree]
        return
    operator, arguments = tree
    # The original notation binds an operator to its arguments one by one.
    yield from ["("] * (len(arguments) + 1)
    yield operator
    for argument in arguments:
        yield from _words(argument)
        yield ")"
    yield END
    yield ")"
