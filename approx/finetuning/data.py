"""Training data: the examples of a task, some of them held out, in an order fixed by the seed."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from approx.errors import ApproxError, Exit
from approx.finetuning.options import FinetuneStage
from approx.planning import positions
from approx.tasks import open_task
from approx.tasks.task import Encoding, Example, Split, Task
from approx.tasks.text import Text

# Rows are sorted by length within this many batches, so that the inputs of a batch have similar lengths.
_SORTED_TOGETHER = 50


@dataclass(frozen=True)
class TrainingData:
    """Training and held-out examples as one model reads them.

    Attributes:
        task: The task, which encodes examples and gives targets.
        split: Training examples.
        held_out: Examples that choose the best step.
        rows: Example and window of each training input.
        encodings: Training inputs, without padding.
        labelled: Whether batches carry targets.
        limit: Maximum number of tokens of an input; None for no limit.
        processor: Tokenizer or feature extractor.
        config: Config of the model.
    """

    task: Task
    split: Split
    held_out: Split
    rows: list[tuple[int, int]]
    encodings: list[Encoding]
    labelled: bool
    limit: int | None
    processor: Any
    config: Any

    @property
    def sha256(self) -> str:
        """Hash of the examples and of the choice of held-out ones."""
        return hashlib.sha256(f"{_sha256(self.split.examples)} {_sha256(self.held_out.examples)}".encode()).hexdigest()

    def batch(self, rows: Sequence[int], passed: int) -> dict[str, Tensor]:
        """A batch of inputs as tensors, [B, L], with their targets; each pass hides other tokens for `mlm`."""
        examples, encodings = [], []
        for row in rows:
            number, window = self.rows[row]
            example, encoding = self.split.examples[number], self.encodings[row]
            if passed and self.task.draws:
                example = replace(example, id=f"{example.id}, pass {passed}")
                encoding = self.task.encode(example, self.processor, self.limit)[window]
            examples.append(example)
            encodings.append(encoding)
        made = self.task.collate(encodings, self.processor)
        if self.labelled:
            made |= self.task.targets(examples, encodings, self.processor, self.config)
        return made

    def tokens(self, row: int) -> int:
        """Number of tokens of an input."""
        return self.task.tokens(self.encodings[row])


class Schedule(Dataset[tuple[int, int]]):
    """The order of inputs: (row, pass) by position, the same for any number of processes.

    Args:
        data: Training data.
        batch_size: Inputs per step.
        steps: Number of steps.
        seed: Seed of the order.
    """

    def __init__(self, data: TrainingData, batch_size: int, steps: int, seed: int) -> None:
        self._lengths = np.array([data.tokens(row) for row in range(len(data.rows))])
        self._batch, self._steps, self._seed = batch_size, steps, seed
        self._pass, self._order = -1, np.empty(0, int)

    def __len__(self) -> int:
        return self._batch * self._steps

    def __getitem__(self, place: int) -> tuple[int, int]:
        passed, within = divmod(place, steps_of_pass(len(self._lengths), self._batch) * self._batch)
        if passed != self._pass:
            self._pass, self._order = passed, self._shuffled(passed)
        return int(self._order[within]), passed

    def _shuffled(self, passed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        random = np.random.default_rng([self._seed, passed])
        rows, size = random.permutation(len(self._lengths)), self._batch
        if len(rows) < size:
            return np.resize(rows, size)
        # The remaining rows are likely to be taken in the next pass.
        rows = rows[: len(rows) // size * size]
        chunk = size * _SORTED_TOGETHER
        chunks = [rows[start : start + chunk] for start in range(0, len(rows), chunk)]
        ordered = np.concatenate([part[np.argsort(self._lengths[part], kind="stable")] for part in chunks])
        batches = ordered.reshape(-1, size)
        return batches[random.permutation(len(batches))].reshape(-1)


def steps_of_pass(rows: int, batch_size: int) -> int:
    """Steps of one pass over the inputs."""
    return max(rows // batch_size, 1)


def read(options: FinetuneStage, model: Any, processor: Any, *, labelled: bool, language: str) -> TrainingData:
    """Read the training examples that the options name.

    Args:
        options: Options of the training.
        model: The model to train.
        processor: Its tokenizer or feature extractor.
        labelled: Whether any mode needs targets.
        language: `clm` or `mlm`: how text is predicted.

    Raises:
        ApproxError: if there is neither a task nor text, or both, the task does not fit the model, or fewer than two
            examples are left.
    """
    if (options.task is None) == (options.text is None):
        given = "neither was given" if options.task is None else "both were given"
        raise ApproxError(f"Training needs examples: give either a task (--task) or text files (--text); {given}.")
    limit = _limit(model, options.length)
    if options.text is not None:
        task, split = _texts(options.text, language, limit or 512)
    else:
        task = _task_of(options)
        if task.head.is_of(type(model)):
            task.adopt(model.config)
        split = _split_of(task, options)
    if labelled:
        task.check(model)
    elif task.input_name != model.main_input_name:
        raise ApproxError(
            f"{task.name} makes {task.input_name}, but a {type(model).__name__} takes {model.main_input_name}. Train it on a "
            "task for its kind of input.",
            Exit.UNSUPPORTED,
        )
    if options.min_length is not None:
        split = _long_enough(task, split, processor, limit, options.min_length)
    trained, held_out = _held_out(task, split, options.validation, options.seed)
    rows, encodings = [], []
    for number, example in enumerate(trained):
        for window, encoding in enumerate(task.encode(example, processor, limit)):
            if task.tokens(encoding):
                rows.append((number, window))
                encodings.append(encoding)
    if not rows:
        raise ApproxError(f"{task.name}: no training example has any tokens.", Exit.UNAVAILABLE)
    return TrainingData(
        task, replace(split, examples=trained), replace(split, examples=held_out), rows, encodings, labelled, limit,
        processor, model.config,
    )  # fmt: skip


def _limit(model: Any, length: int | None) -> int | None:
    most = positions.limit(model.config)
    if length is not None and most is not None and length > most:
        raise ApproxError(
            f"Inputs of {length} tokens were asked for, but the model takes {most} positions. Convert it with --max-length "
            f"{length} first."
        )
    return length or most


def _task_of(options: FinetuneStage) -> Task:
    task = open_task(options.task or "", **options.settings)
    _refuse_reported(task, options)
    return task


def _split_of(task: Task, options: FinetuneStage) -> Split:
    return task.load(None if options.data is None else Path(options.data), options.split, options.limit)


def _texts(files: Sequence[str], language: str, length: int) -> tuple[Task, Split]:
    # A window of English has about four characters per token.
    stretch = 4 * length
    task = (
        open_task("mlm", window=length, stretch=stretch)
        if language == "mlm"
        else open_task("lm", window=length, stride=length - 1, stretch=stretch)
    )
    splits = [task.load(Path(file)) for file in files]
    return task, Split("text", [example for split in splits for example in split.examples], subset=False)


def _refuse_reported(task: Task, options: FinetuneStage) -> None:
    """Refuse to train on a split used for reported scores, unless a setting selects a part of it."""
    if options.split == "train" or (task.part_setting is not None and task.part_setting in options.settings):
        return
    raise ApproxError(
        f"{task.name} would be trained on its split '{options.split}', which scores are reported on. Train on 'train', or choose "
        "examples by the task's settings (such as the articles of squad) and evaluate on others.",
        Exit.REFUSED,
    )


def _long_enough(task: Task, split: Split, processor: Any, limit: int | None, least: int) -> Split:
    """The examples with an input of at least so many tokens."""
    longest = [
        max((task.tokens(encoding) for encoding in task.encode(example, processor, limit)), default=0)
        for example in split.examples
    ]
    if max(longest) < least:
        raise ApproxError(
            f"{task.name}: no training example has the {least} tokens of --min-length; the longest has {max(longest)}.",
            Exit.UNAVAILABLE,
        )
    kept = [example for example, tokens in zip(split.examples, longest, strict=True) if tokens >= least]
    return replace(split, examples=kept)


def _held_out(task: Task, split: Split, count: int, seed: int) -> tuple[list[Example], list[Example]]:
    """Split off the examples that choose the best step: whole groups, at most a tenth; of a text, its end."""
    examples = split.examples
    if len(examples) < 2:
        raise ApproxError(
            f"{task.name}: {len(examples)} training example. At least two are needed, one of them to choose the best step.",
            Exit.UNAVAILABLE,
        )
    count = max(1, min(count, len(examples) // 10))
    if isinstance(task, Text) and all(example.group is None for example in examples):
        return examples[:-count], examples[-count:]
    groups: dict[tuple[str, str], list[int]] = {}
    for number, example in enumerate(examples):
        groups.setdefault(example.unit, []).append(number)
    names = sorted(groups)
    chosen: set[int] = set()
    for place in np.random.default_rng(seed).permutation(len(names)):
        chosen.update(groups[names[place]])
        if len(chosen) >= count:
            break
    trained = [example for number, example in enumerate(examples) if number not in chosen]
    held_out = [example for number, example in enumerate(examples) if number in chosen]
    if not trained:
        raise ApproxError(
            f"{task.name}: its {len(examples)} training examples are of {len(names)} {task.groups.by}, so that none can be held out to "
            "choose the best step. Give examples of more.",
            Exit.UNAVAILABLE,
        )
    return trained, held_out


def digest_of(options: FinetuneStage) -> str:
    """Hash all examples that the options name, for keys of stages.

    Raises:
        ApproxError: if there are none.
    """
    if options.text is not None:
        return hashlib.sha256(b"".join(Path(file).read_bytes() for file in options.text)).hexdigest()
    return _sha256(_split_of(_task_of(options), options).examples)


def overlap(options: FinetuneStage, evaluated: Sequence[Example]) -> int:
    """Count the evaluation examples that are also training examples."""
    if options.task is None:
        return 0
    trained = {_told(example) for example in _split_of(_task_of(options), options).examples}
    return sum(_told(example) in trained for example in evaluated)


def _told(example: Example) -> str:
    inputs = {name: str(value) for name, value in example.brief.items()}
    return json.dumps([str(example.label), inputs], sort_keys=True)


def _sha256(examples: Sequence[Example]) -> str:
    digest = hashlib.sha256()
    for example in examples:
        digest.update(json.dumps([example.id, _told(example)]).encode())
    return digest.hexdigest()


def tensors_to(device: torch.device, batch: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Move a batch to a device; floats (sounds) get the dtype of the model."""
    return {name: x.to(device, dtype if x.is_floating_point() else None) for name, x in batch.items()}
