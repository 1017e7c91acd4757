"""Score base and converted models on the same tokens, in the same order, in the same batches.

Nothing here depends on how a model was converted, so any models can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count as numbers
from pathlib import Path
from statistics import median_low
from typing import Any

import torch

from approx.errors import ApproxError, Exit
from approx.evaluation import distributed
from approx.evaluation.coverage import coverage
from approx.evaluation.inputs import Prepared, Subject, prepare
from approx.evaluation.memory import is_out_of_memory
from approx.evaluation.options import EvaluateOptions
from approx.evaluation.prediction_cache import Ledger, fingerprint
from approx.evaluation.quality import compare, label_order, over_seeds
from approx.evaluation.record import write_outputs
from approx.evaluation.record_model import Quality, Rows, Tokens
from approx.tasks.metrics import METRICS
from approx.tasks.task import Encoding, Task

__all__ = ["Progress", "Subject", "evaluate", "predict", "prepare"]

Progress = Callable[[int, int], None]
"""Called with the number of inputs done and their total number, over all models."""


def evaluate(
    subjects: dict[str, Subject],
    task: Task,
    options: EvaluateOptions | None = None,
    *,
    data: Path | None = None,
    seed: int = 0,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
    outputs: Path | None = None,
    kept: Path | None = None,
) -> Quality:
    """Score models on one split of a task and compare each with the first.

    Under `torchrun` or `accelerate launch`, the processes share the batches, and each returns the same result.

    Args:
        subjects: Name -> model to score; the first is the base.
        task: The task.
        options: Options; None uses the defaults.
        data: Local files in the task's official layout; None uses the task's own source.
        seed: Seed of the resampling.
        device: Device to run on; the models stay there.
        progress: Called after every batch.
        outputs: Parquet file for the per-example outputs.
        kept: Folder of ledgers that store the outputs of subjects with an identity, so that no batch is computed twice.

    Returns:
        One entry of a record's `quality`.

    Raises:
        ApproxError: if there are no examples, a model does not fit the task or its inputs, or memory runs out.
    """
    options = options or EvaluateOptions()
    models = list(subjects.values())
    # Reading the data can take long, so mistakes are reported before.
    for subject in models:
        with _attributed(subject):
            task.check(subject.model)
    loaded = task.load(data, options.split, options.limit, streaming=options.streaming)
    prepared = prepare(
        models, task, loaded,
        batch_size=options.inputs_per_batch, max_length=options.max_length, truncate=options.truncate,
    )  # fmt: skip
    examples, rows = loaded.examples, len(prepared.encodings)
    others = [subject for subject in models[1:] if subject.reseeded]
    total = rows * (len(models) + len(others) * (options.seeds - 1))
    turn = numbers()

    def predicted(subject: Subject) -> list[Any]:
        done = rows * next(turn)

        def advance(count: int) -> None:
            if progress:
                progress(done + count, total)

        return predict(
            subject, task, prepared, device=device, advance=advance, kept=kept, halve=options.inputs_per_batch is None
        )

    predictions = {subject.name: predicted(subject) for subject in models}
    labels = [example.label for example in examples]
    covered = {subject.name: one for subject in models if (one := coverage(subject, task, prepared)) is not None}
    if outputs is not None and distributed.leads():
        columns = {"id": [example.id for example in examples], "label": labels, "tokens": prepared.lengths}
        columns |= {f"prediction/{name}": values for name, values in predictions.items()}
        columns |= {f"approximated/{name}": one.examples for name, one in covered.items()}
        write_outputs(outputs, columns)
    metric = METRICS[task.metrics[0]]
    margin = metric.acceptable(options.margin, metric.value(predictions[models[0].name], labels))
    compared = compare(task, examples, prepared.lengths, predictions, margin=margin, seed=seed, covered=covered)
    if options.seeds > 1:
        for subject, variant in zip(models[1:], compared.variants, strict=True):
            scores = []
            if subject.reseeded:
                scores = [variant.scores[compared.metric]]
                for raised in range(1, options.seeds):
                    with subject.reseeded(raised) as other:
                        scores.append(task.score(predicted(other), labels, [compared.metric])[compared.metric])
            variant.seeds = over_seeds(scores)
    return Quality(
        task=task.name,
        split=loaded.name,
        examples=len(examples),
        subset=loaded.subset,
        truncated=prepared.truncated,
        notes=[
            *loaded.notes,
            *([f"read to {options.max_length:,} tokens"] if options.max_length else []),
            *label_order(task, predictions[models[0].name], labels, models[0].model.config),
        ],
        rows=None if (tally := loaded.tally) is None else Rows(read=tally.read, skipped={**+tally.skipped}),
        tokens=Tokens(median=median_low(prepared.lengths), longest=max(prepared.lengths), windows=prepared.windows),
        **vars(compared),
        outputs=outputs.name if outputs is not None else None,
    )


@torch.inference_mode()
def predict(
    subject: Subject,
    task: Task,
    prepared: Prepared,
    *,
    device: str | torch.device = "cpu",
    advance: Callable[[int], None] | None = None,
    kept: Path | None = None,
    halve: bool = False,
) -> list[Any]:
    """Run one model over a prepared split.

    Args:
        subject: The model; it is moved to the device and keeps its training mode.
        task: Makes predictions from the model's outputs.
        prepared: The split; the same for every compared model.
        device: Device to run on.
        advance: Called with the number of inputs done after every batch.
        kept: Folder of ledgers; None stores no outputs.
        halve: Whether to halve a batch that does not fit in memory.

    Returns:
        One prediction per example, in the order of the split.

    Raises:
        ApproxError: if outputs are not finite, or memory runs out.
    """
    rank, world = distributed.place()
    ledger = None
    if kept is not None and subject.identity is not None:
        about = (task.name, vars(task), prepared.encodings, prepared.batches, str(torch.device(device).type))
        ledger = Ledger(kept, fingerprint(subject.identity, *about), rank)
    parts_by_batch = distributed.agree(ledger.read() if ledger else {})
    waiting = [number for number in range(len(prepared.batches)) if number not in parts_by_batch]
    done = sum(len(prepared.batches[number]) for number in parts_by_batch)
    model, was_training = subject.model.to(device), subject.model.training
    model.eval()
    try:
        for number in waiting[rank::world]:
            rows = prepared.batches[number]
            with _attributed(subject):
                parts = _predict_batch(subject, task, [prepared.encodings[row] for row in rows], device, halve)
            parts_by_batch[number] = ledger.write(number, parts) if ledger else parts
            done += len(rows) * world
            if advance:
                advance(min(done, len(prepared.encodings)))
    finally:
        model.train(was_training)
    for shared in distributed.gather({number: parts_by_batch[number] for number in waiting[rank::world]}):
        parts_by_batch |= shared
    if advance:
        advance(len(prepared.encodings))
    by_row = {
        row: part
        for number, rows in enumerate(prepared.batches)
        for row, part in zip(rows, parts_by_batch[number], strict=True)
    }
    parts_of: list[list[Any]] = [[] for _ in prepared.split.examples]
    for row, owner in enumerate(prepared.owners):
        parts_of[owner].append(by_row[row])
    return [task.combine(example, parts) for example, parts in zip(prepared.split.examples, parts_of, strict=True)]


def _predict_batch(
    subject: Subject, task: Task, encodings: list[Encoding], device: str | torch.device, halve: bool
) -> list[Any]:
    """Predict a batch, in halves if memory runs out."""
    try:
        batch = {
            # Sounds are float32, but the model may compute in another dtype.
            name: value.to(device, subject.model.dtype if value.is_floating_point() else None)
            for name, value in task.collate(encodings, subject.processor).items()
        }
        return task.predict(task.outputs(subject.model, batch), encodings, subject.model.config)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    middle = len(encodings) // 2
    if not halve or not middle:
        longest = max(map(task.tokens, encodings))
        raise ApproxError(
            f"{device} ran out of memory at a batch of {len(encodings)} inputs of up to {longest} tokens. Use a smaller "
            "--batch-size or another --device.",
            Exit.MISSING,
        )
    # Outside the handler, whose traceback keeps the tensors of the failed call alive.
    return [
        part
        for half in (encodings[:middle], encodings[middle:])
        for part in _predict_batch(subject, task, half, device, halve)
    ]


@contextmanager
def _attributed(subject: Subject) -> Iterator[None]:
    """Begin errors with the name of the model."""
    try:
        yield
    except ApproxError as error:
        raise ApproxError(f"{subject.name}: {error}", error.exit_code) from None
