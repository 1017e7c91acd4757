"""The parts of the data: for gradients, for comparing plans, and for the proof."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from approx.checkpoints.checkpoint import Checkpoint
from approx.conversion.calibration_text import TEXT
from approx.errors import ApproxError, Exit
from approx.evaluation.evaluate import Prepared, Subject, prepare
from approx.searching.options import SearchStage
from approx.tasks.task import Example, Split, Task
from approx.text_file import read_text

_BATCH, _GRADIENTS = 8, 64
# Fewer examples than this prove nothing.
_FEWEST = 10
_ROWS_OF_TEXT, _FEWEST_TOKENS = 4, 256


@dataclass(frozen=True)
class Batch:
    """Inputs of a model, and what a task needs to read its outputs.

    Attributes:
        inputs: Keyword arguments of the model's forward, on its device.
        rows: Index of each input among the encodings of its part.
    """

    inputs: dict[str, Tensor]
    rows: list[int]

    @property
    def mask(self) -> Tensor | None:
        """True at real tokens, [B, L]."""
        mask = self.inputs.get("attention_mask")
        return None if mask is None else mask.bool()


@dataclass(frozen=True)
class Part:
    """A part of the data.

    Attributes:
        batches: The inputs.
        prepared: The examples of a task as the model reads them; None for text.
    """

    batches: list[Batch]
    prepared: Prepared | None = None

    @property
    def inputs(self) -> int:
        """Number of inputs."""
        return sum(len(batch.rows) for batch in self.batches)


Parts = tuple[Part, Part, Part]
"""For gradients (which are the first of the next), for comparing plans, and for the proof."""


def of_task(base: Checkpoint, processor: Any, task: Task, stage: SearchStage, seed: int) -> Parts:
    """Divide the examples of a task; groups, such as the questions about one article, stay together.

    Raises:
        ApproxError: if the task does not fit the model, or there are too few examples.
    """
    task.check(base.model)
    loaded = task.load(None if stage.data is None else Path(stage.data), stage.split, stage.limit)
    examples = _long_enough(task, processor, loaded.examples, stage.min_length)
    searched, proven = _divided(examples, stage.examples, seed)
    if min(len(searched), len(proven)) < _FEWEST:
        long = "" if stage.min_length is None else f" of at least {stage.min_length} tokens"
        units = len({example.unit for example in examples})
        if units < len(examples):
            long += f" in {units} groups by {task.groups.by}, which stay together"
        raise ApproxError(
            f"{task.name} has {len(examples)} examples{long}; that leaves {len(proven)} for the proof beside {len(searched)} to "
            "compare plans. Give more examples, or fewer to compare with --examples.",
            Exit.UNAVAILABLE,
        )
    if stage.calibration is not None and len(searched) < stage.calibration:
        raise ApproxError(
            f"{stage.calibration} examples were asked for with --calibration, but only {len(searched)} compare plans. Ask for "
            "fewer, raise --examples, or give more data."
        )

    def part(some: list[Example]) -> Part:
        return _part(base, processor, task, Split(loaded.name, some, subset=True), truncate=stage.truncate)

    return part(searched[: stage.calibration or _GRADIENTS]), part(searched), part(proven[: stage.proof])


def of_text(base: Checkpoint, processor: Any, stage: SearchStage) -> Parts:
    """Cut a text into rows of the timed length: the first ones compare plans, the others prove.

    Raises:
        ApproxError: if the model reads no text, or the text cannot be read or is too short.
    """
    model: Any = base.model
    if model.main_input_name != "input_ids":
        raise ApproxError(
            f"A model that takes {model.main_input_name} is searched on the examples of a task. Name one with --task.",
            Exit.UNSUPPORTED,
        )
    text = TEXT if stage.text is None else _read(Path(stage.text))
    tokens = processor(text, add_special_tokens=False)["input_ids"]
    begin, end = _around(processor, text[:100])
    # A short text is read in shorter rows.
    body = max(min(stage.length - len(begin) - len(end), len(tokens) // (2 * _ROWS_OF_TEXT)), 1)
    rows = [begin + tokens[start : start + body] + end for start in range(0, len(tokens) - body + 1, body)]
    if len(tokens) < _FEWEST_TOKENS:
        raise ApproxError(
            f"The text has {len(tokens)} tokens, fewer than the {_FEWEST_TOKENS} that a search needs. Give a longer one with --text.",
            Exit.UNAVAILABLE,
        )
    if tokens.count(processor.unk_token_id) > len(tokens) / 2:
        raise ApproxError(
            f"The tokenizer of {base.source.name} does not know most words of the text. Give one in its language with --text, or a "
            "task with --task.",
            Exit.UNAVAILABLE,
        )
    rows = rows[: 2 * stage.examples]
    inputs = [{"input_ids": torch.tensor([row], device=model.device)} for row in rows]
    half = len(inputs) // 2
    search, proof = ([Batch(one, [row]) for row, one in enumerate(part)] for part in (inputs[:half], inputs[half:]))
    return Part(search[: stage.calibration or _GRADIENTS]), Part(search), Part(proof)


def placed(inputs: dict[str, Any], model: Any) -> dict[str, Tensor]:
    """Inputs on the device of a model; sounds get its dtype."""
    return {
        name: value.to(model.device, model.dtype if value.is_floating_point() else None)
        for name, value in inputs.items()
    }


def _around(processor: Any, text: str) -> tuple[list[int], list[int]]:
    """The special tokens before and after a text."""
    whole, inside = processor(text)["input_ids"], processor(text, add_special_tokens=False)["input_ids"]
    before = next(place for place in range(len(whole)) if whole[place : place + len(inside)] == inside)
    return whole[:before], whole[before + len(inside) :]


def _long_enough(task: Task, processor: Any, examples: list[Example], least: int | None) -> list[Example]:
    if least is None:
        return examples
    longest = [max((task.tokens(one) for one in task.encode(example, processor)), default=0) for example in examples]
    return [example for example, tokens in zip(examples, longest, strict=True) if tokens >= least]


def _part(base: Checkpoint, processor: Any, task: Task, split: Split, *, truncate: bool) -> Part:
    model: Any = base.model
    subject = Subject("the model", model, processor)
    prepared = prepare([subject], task, split, batch_size=_BATCH, truncate=truncate)
    batches = []
    for rows in prepared.batches:
        encodings = [prepared.encodings[row] for row in rows]
        examples = [split.examples[prepared.owners[row]] for row in rows]
        inputs = task.collate(encodings, processor)
        # Decoders of speech need their targets as inputs.
        inputs |= task.targets(examples, encodings, processor, model.config)
        batches.append(Batch(placed(inputs, model), rows))
    return Part(batches, prepared)


def _divided(examples: Sequence[Example], count: int, seed: int) -> tuple[list[Example], list[Example]]:
    """The examples that compare plans, at most half, and those kept for the proof; groups stay together."""
    count = min(count, len(examples) // 2)
    groups: dict[tuple[str, str], list[Example]] = {}
    for example in examples:
        groups.setdefault(example.unit, []).append(example)
    searched: list[Example] = []
    proven: list[Example] = []
    names = list(groups)
    for place in np.random.default_rng(seed).permutation(len(names)):
        members = groups[names[place]]
        # A group that is much too large for the rest of the count goes to the proof.
        (searched if len(searched) + len(members) / 2 <= count else proven).extend(members)
    # The first ones are a sample of all.
    first, second = (np.random.default_rng(seed).permutation(len(one)) for one in (searched, proven))
    return [searched[place] for place in first], [proven[place] for place in second]


def _read(path: Path) -> str:
    text = read_text(path, settable=False)
    if not text.strip():
        raise ApproxError(f"{path} is empty. Give a plain text file with a few thousand words.", Exit.UNAVAILABLE)
    return text
