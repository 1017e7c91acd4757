"""Measure plans on examples: how far their outputs are from the base's, and what that costs in the task's metric."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from approx.checkpoints import checkpoint
from approx.checkpoints.checkpoint import Checkpoint
from approx.evaluation.evaluate import Prepared
from approx.evaluation.quality import groups_of
from approx.evaluation.statistics import standard_error
from approx.searching import parts
from approx.searching.divergence import divergence
from approx.searching.options import SearchStage
from approx.searching.parts import Batch, Part, placed
from approx.tasks import open_task
from approx.tasks.classification import SEVERAL, kind_of_outputs
from approx.tasks.metrics import METRICS
from approx.tasks.task import Task


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
        self.task = None if stage.task is None else open_task(stage.task, **stage.settings)
        self.processor = checkpoint.processor(base.source)
        if self.task is None:
            divided = parts.of_text(base, self.processor, stage)
        else:
            divided = parts.of_task(base, self.processor, self.task, stage, seed)
        self.calibration, self.search, self.proof = divided
        self._known: dict[int, list[dict[str, Tensor]]] = {}
        self._base_scores: dict[int, tuple[Any, float]] = {}

    @property
    def unit(self) -> str:
        """The unit of losses."""
        if self.task is None:
            return "nats"
        return "points" if METRICS[self.task.metrics[0]].fraction else "%"

    @property
    def examples_sha256(self) -> str:
        """Hash of all inputs and labels by which plans are predicted and compared; those of the proof change neither."""
        digest = hashlib.sha256()
        for part in (self.calibration, self.search):
            for batch in part.batches:
                for name, value in batch.inputs.items():
                    digest.update(f"{name} {tuple(value.shape)} ".encode() + value.float().cpu().numpy().tobytes())
            labels = [] if part.prepared is None else [one.label for one in part.prepared.split.examples]
            digest.update(json.dumps(labels, default=str).encode())
        return digest.hexdigest()

    def of_task(self, part: Part) -> tuple[Task, Prepared]:
        """The task, and the examples of a part as the model reads them."""
        assert self.task is not None
        assert part.prepared is not None
        return self.task, part.prepared

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
        apart, several = np.zeros(part.inputs), kind_of_outputs(self.base.model.config) == SEVERAL
        said: list[Any] = [None] * part.inputs
        for number, batch in enumerate(part.batches):
            due = self._due(part, number)
            outputs = model(**batch.inputs)
            apart[batch.rows] = divergence(outputs, due, batch.mask, several=several).cpu().double().numpy()
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
        if self.task is None:
            return [None] * len(batch.rows)
        task, read = self.of_task(part)
        encodings = [read.encodings[row] for row in batch.rows]
        if type(task).outputs is not Task.outputs:
            # Such as transcripts, which are generated.
            outputs = task.outputs(model, placed(task.collate(encodings, self.processor), model))
        return task.predict(outputs, encodings, model.config)

    def _loss(self, said: list[Any], part: Part) -> tuple[float, float]:
        """Loss of the metric in points, and its standard error over the examples, or their groups."""
        task, read = self.of_task(part)
        predictions = _combined(task, read, said)
        metric = METRICS[task.metrics[0]]
        labels = [example.label for example in read.split.examples]
        evidence = metric.evidence(predictions, labels)
        if id(part) not in self._base_scores:
            own: list[Any] = [None] * part.inputs
            for number, batch in enumerate(part.batches):
                outputs = _Outputs(self._due(part, number))
                for row, one in zip(batch.rows, self._said(self.base.model, outputs, part, batch), strict=True):
                    own[row] = one
            base = metric.evidence(_combined(task, read, own), labels)
            self._base_scores[id(part)] = (base, metric.total(base))
        base, score = self._base_scores[id(part)]
        point = metric.acceptable(1.0, score)
        sign = 1 if metric.lower_is_better else -1

        def lost(rows: Any) -> float:
            return sign * (metric.total(evidence[rows]) - metric.total(base[rows])) / max(point, 1e-12)

        groups = groups_of(read.split.examples)
        return lost(slice(None)), standard_error(lost, len(labels), seed=0, groups=groups, resamples=100)


class _Outputs(dict[str, Tensor]):
    """The kept outputs of a model, by name and as attributes."""

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def _combined(task: Task, read: Prepared, said: Sequence[Any]) -> list[Any]:
    pieces: list[list[Any]] = [[] for _ in read.split.examples]
    for row, owner in enumerate(read.owners):
        pieces[owner].append(said[row])
    return [task.combine(example, some) for example, some in zip(read.split.examples, pieces, strict=True)]
