"""Measure plans on examples: how far their outputs are from the base's, and what that costs in the task's metric."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from approx.checkpoints import checkpoint
from approx.checkpoints.checkpoint import Checkpoint
from approx.conversion.calibration_text import TEXT
from approx.errors import ApproxError, Exit
from approx.evaluation.evaluate import Prepared, Subject, prepare
from approx.evaluation.options import EvaluateStage
from approx.measuring.measure import task_of
from approx.planning import positions
from approx.searching.divergence import divergence
from approx.searching.options import SearchStage
from approx.tasks.metrics import METRICS
from approx.tasks.task import Example, Split, Task

_BATCH = 8
# Fewer examples than this prove nothing.
_FEWEST = 10
_ROWS_OF_TEXT = 4


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
        split: Its examples; None for text.
        prepared: They as the model reads them; None for text.
        batches: The inputs.
    """

    split: Split | None
    prepared: Prepared | None
    batches: list[Batch]

    @property
    def inputs(self) -> int:
        """Number of inputs."""
        return sum(len(batch.rows) for batch in self.batches)


@dataclass(frozen=True)
class Measured:
    """One plan on one part of the data.

    Attributes:
        divergence: Mean divergence of the outputs from the base's.
        loss: Loss of the task's metric, in points or percent of the base's score; None without a task.
        error: Standard error of the loss.
    """

    divergence: float
    loss: float | None = None
    error: float | None = None


class Judge:
    """Measures models on the parts of one split: for gradients, for comparing plans, and for the proof.

    Args:
        base: The exact checkpoint.
        stage: The options of the search.
        seed: Seed of the parts.

    Raises:
        ApproxError: if the task does not fit the model, or there are too few examples.
    """

    def __init__(self, base: Checkpoint, stage: SearchStage, seed: int) -> None:
        self.base, self.stage = base, stage
        self.task = None if stage.task is None else task_of(_evaluation(stage))
        self.processor = checkpoint.processor(base.source)
        if self.task is None:
            self.calibration, self.search, self.proof = _parts_of_text(base, self.processor, stage)
        else:
            self.calibration, self.search, self.proof = self._parts_of_task(self.task, seed)
        self._known: dict[int, list[dict[str, Tensor]]] = {}
        self._base_scores: dict[int, tuple[Any, float]] = {}

    @property
    def unit(self) -> str:
        """The unit of losses."""
        if self.task is None:
            return "nats"
        return "points" if METRICS[self.task.metrics[0]].fraction else "%"

    def _parts_of_task(self, task: Task, seed: int) -> tuple[Part, Part, Part]:
        task.check(self.base.model)
        data = None if self.stage.data is None else Path(self.stage.data)
        loaded = task.load(data, self.stage.split, self.stage.limit)
        examples = self._long_enough(task, loaded.examples)
        searched, proven = _divided(examples, self.stage.examples, seed)
        if min(len(searched), len(proven)) < _FEWEST:
            raise ApproxError(
                f"{task.name} has {len(examples)} such examples, which leaves {len(proven)} for the proof beside "
                f"{len(searched)} to compare plans. Give more examples, or fewer to compare with --examples.",
                Exit.UNAVAILABLE,
            )
        if len(searched) < self.stage.calibration:
            raise ApproxError(
                f"{self.stage.calibration} examples were asked for with --calibration, but only {len(searched)} are used to compare "
                "plans. Ask for fewer, or raise --examples."
            )
        name = loaded.name
        return (
            self._part(task, Split(name, searched[: self.stage.calibration], subset=True)),
            self._part(task, Split(name, searched, subset=True)),
            self._part(task, Split(name, proven[: self.stage.proof], subset=True)),
        )

    def _long_enough(self, task: Task, examples: list[Example]) -> list[Example]:
        least = self.stage.min_length
        if least is None:
            return examples
        longest = [
            max((task.tokens(one) for one in task.encode(example, self.processor)), default=0) for example in examples
        ]
        return [example for example, tokens in zip(examples, longest, strict=True) if tokens >= least]

    def _part(self, task: Task, split: Split) -> Part:
        model: Any = self.base.model
        subject = Subject("the model", model, self.processor)
        prepared = prepare([subject], task, split, batch_size=_BATCH, truncate=self.stage.truncate)
        batches = []
        for rows in prepared.batches:
            encodings = [prepared.encodings[row] for row in rows]
            examples = [split.examples[prepared.owners[row]] for row in rows]
            inputs = task.collate(encodings, self.processor)
            # Decoders of speech need their targets as inputs.
            inputs |= task.targets(examples, encodings, self.processor, model.config)
            batches.append(Batch(_placed(inputs, model), rows))
        return Part(split, prepared, batches)

    def measure(self, model: Any, part: Part) -> Measured:
        """Compare a model with the base on a part of the data."""
        apart, said = self._run(model, part)
        loss, error = self._loss(said, part) if self.task is not None else (None, None)
        return Measured(float(apart.mean()), loss, error)

    def divergences(self, model: Any, part: Part) -> NDArray[np.float64]:
        """The divergence of a model's outputs from the base's, per input, [n]."""
        return self._run(model, part)[0]

    @torch.inference_mode()
    def _run(self, model: Any, part: Part) -> tuple[NDArray[np.float64], list[Any]]:
        apart = np.zeros(part.inputs)
        said: list[Any] = [None] * part.inputs
        for number, batch in enumerate(part.batches):
            due = self._due(part, number)
            outputs = model(**batch.inputs)
            apart[batch.rows] = divergence(outputs, due, batch.mask).cpu().double().numpy()
            for row, one in zip(batch.rows, self._said(model, outputs, part, batch), strict=True):
                said[row] = one
        return apart, said

    def _due(self, part: Part, number: int) -> Any:
        """The base's outputs for a batch; kept if they are small."""
        known = self._known.setdefault(id(part), [])
        if number < len(known):
            return _Outputs(known[number])
        outputs = self.base.model(**part.batches[number].inputs)
        compared = {name: outputs[name] for name in outputs if name == "last_hidden_state" or "logits" in name}
        if number == len(known) and sum(x.numel() for x in compared.values()) * len(part.batches) < 1e8:
            known.append(compared)
        return _Outputs(compared)

    def _said(self, model: Any, outputs: Any, part: Part, batch: Batch) -> list[Any]:
        if self.task is None or part.prepared is None:
            return [None] * len(batch.rows)
        encodings = [part.prepared.encodings[row] for row in batch.rows]
        if type(self.task).outputs is not Task.outputs:
            outputs = self.task.outputs(model, _placed(self.task.collate(encodings, self.processor), model))
        return self.task.predict(outputs, encodings, model.config)

    def _loss(self, said: list[Any], part: Part) -> tuple[float, float]:
        """Loss of the metric in points, and its standard error over the examples."""
        assert self.task is not None and part.prepared is not None and part.split is not None
        predictions = _combined(self.task, part, said)
        metric = METRICS[self.task.metrics[0]]
        labels = [example.label for example in part.split.examples]
        evidence = metric.evidence(predictions, labels)
        if id(part) not in self._base_scores:
            own: list[Any] = [None] * part.inputs
            for number, batch in enumerate(part.batches):
                outputs = _Outputs(self._due(part, number))
                for row, one in zip(batch.rows, self._said(self.base.model, outputs, part, batch), strict=True):
                    own[row] = one
            base = metric.evidence(_combined(self.task, part, own), labels)
            self._base_scores[id(part)] = (base, metric.total(base))
        base, score = self._base_scores[id(part)]
        point = metric.acceptable(1.0, score)
        sign = 1 if metric.lower_is_better else -1

        def lost(rows: Any) -> float:
            return sign * (metric.total(evidence[rows]) - metric.total(base[rows])) / max(point, 1e-12)

        random = np.random.default_rng(0)
        drawn = [lost(random.integers(len(labels), size=len(labels))) for _ in range(100)]
        return lost(slice(None)), float(np.std(drawn))


class _Outputs(dict[str, Tensor]):
    """The kept outputs of a model, by name and as attributes."""

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def _combined(task: Task, part: Part, said: Sequence[Any]) -> list[Any]:
    assert part.prepared is not None and part.split is not None
    pieces: list[list[Any]] = [[] for _ in part.split.examples]
    for row, owner in enumerate(part.prepared.owners):
        pieces[owner].append(said[row])
    return [task.combine(example, parts) for example, parts in zip(part.split.examples, pieces, strict=True)]


def _divided(examples: Sequence[Example], count: int, seed: int) -> tuple[list[Example], list[Example]]:
    """The examples that compare plans, at most half, and those kept for the proof; groups stay together."""
    count = min(count, len(examples) // 2)
    groups: dict[str, list[Example]] = {}
    for example in examples:
        groups.setdefault(example.group or example.id, []).append(example)
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


def _evaluation(stage: SearchStage) -> EvaluateStage:
    return EvaluateStage(task=stage.task or "", data=stage.data, settings=stage.settings)


def _parts_of_text(base: Checkpoint, processor: Any, stage: SearchStage) -> tuple[Part, Part, Part]:
    """Rows of the timed length: the first ones compare plans, the others prove."""
    model: Any = base.model
    if model.main_input_name != "input_ids":
        raise ApproxError(
            f"A model that takes {model.main_input_name} is searched on the examples of a task. Name one with --task.",
            Exit.UNSUPPORTED,
        )
    text = TEXT if stage.text is None else _read(Path(stage.text))
    tokens = processor(text, add_special_tokens=False)["input_ids"]
    length = min(stage.length, positions.limit(model.config) or stage.length)
    special = processor.num_special_tokens_to_add()
    # A short text is read in shorter rows.
    body = min(length - special, max(len(tokens) // (2 * _ROWS_OF_TEXT), 16))
    rows = [
        processor.build_inputs_with_special_tokens(tokens[start : start + body])
        for start in range(0, len(tokens) - body + 1, body)
    ]
    if len(rows) < 2 * _ROWS_OF_TEXT:
        raise ApproxError(
            f"The text has {len(tokens)} tokens, fewer than the {2 * _ROWS_OF_TEXT * body} that a search needs. Give a longer one "
            "with --text.",
            Exit.UNAVAILABLE,
        )
    rows = rows[: 2 * stage.examples]
    batches = [
        Batch({"input_ids": torch.tensor([row], device=model.device)}, [0])
        for row in rows
    ]
    half = len(batches) // 2
    search = [replace(batch, rows=[number]) for number, batch in enumerate(batches[:half])]
    proof = [replace(batch, rows=[number]) for number, batch in enumerate(batches[half:])]
    return Part(None, None, search[: stage.calibration]), Part(None, None, search), Part(None, None, proof)


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ApproxError(f"{path} cannot be read as UTF-8 text: {error}. Give a plain text file.", Exit.UNAVAILABLE) from None
    if not text.strip():
        raise ApproxError(f"{path} is empty. Give a plain text file with a few thousand words.", Exit.UNAVAILABLE)
    return text


def _placed(inputs: dict[str, Any], model: Any) -> dict[str, Tensor]:
    return {
        name: value.to(model.device, model.dtype if value.is_floating_point() else None) for name, value in inputs.items()
    }
