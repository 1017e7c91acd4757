"""Base and converted through the same door: the same tokens, in the same order, in the same batches.

What was converted how is not known here; whoever has models and a task can compare them.
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
from approx.evaluation.quality import compare, over_seeds
from approx.evaluation.record import write_outputs
from approx.tasks.metrics import METRICS
from approx.tasks.task import Encoding, Task

__all__ = ["Progress", "Subject", "evaluate", "predict", "prepare"]

Progress = Callable[[int, int], None]
"""Called with the number of inputs that are done and the number there are, over all models."""


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
) -> dict[str, Any]:
    """Score models on one split of a task and compare each with the first.

    Under `torchrun` and its kin the batches are shared out; every process returns the same.

    Args:
        subjects: Name -> what is measured; the first is the base.
        task: What they are measured on.
        options: How; the defaults without it.
        data: Local files in the task's official layout; None means its own source.
        seed: Of the resampling.
        device: Where the models run; they stay there.
        progress: Told after every batch.
        outputs: Parquet file for the per-example outputs.
        kept: Folder of ledgers: batches of a subject with an identity are kept there and never computed twice.

    Returns:
        One entry of a record's `quality` (see `approx.evaluation.record`).

    Raises:
        ApproxError: if there are no examples, a model does not fit the task or its inputs, or memory ends.
    """
    options = options or EvaluateOptions()
    models = list(subjects.values())
    # Before the data is read, which can take long.
    for subject in models:
        with _named(subject):
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
    covered = {subject.name: found for subject in models if (found := coverage(subject, task, prepared)) is not None}
    if outputs is not None and distributed.leads():
        columns = {"id": [example.id for example in examples], "label": labels, "tokens": prepared.lengths}
        columns |= {f"prediction/{name}": found for name, found in predictions.items()}
        columns |= {f"approximated/{name}": found.examples for name, found in covered.items()}
        write_outputs(outputs, columns)
    margin = options.margin / (100 if METRICS[task.metrics[0]].fraction else 1)
    entry = compare(task, examples, prepared.lengths, predictions, margin=margin, seed=seed, covered=covered)
    if options.seeds > 1:
        for subject, variant in zip(models[1:], entry["variants"], strict=True):
            scores = []
            if subject.reseeded:
                scores = [variant["scores"][entry["metric"]]]
                for raised in range(1, options.seeds):
                    with subject.reseeded(raised) as other:
                        scores.append(task.score(predicted(other), labels, [entry["metric"]])[entry["metric"]])
            variant["seeds"] = over_seeds(scores)
    return {
        "task": task.name,
        "split": loaded.name,
        "examples": len(examples),
        "subset": loaded.subset,
        "truncated": prepared.truncated,
        "notes": [*loaded.notes, *([f"read to {options.max_length:,} tokens"] if options.max_length else [])],
        "tokens": {"median": median_low(prepared.lengths), "longest": max(prepared.lengths)},
        **entry,
        "outputs": outputs.name if outputs is not None else None,
    }


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
        subject: The model; it is moved to the device and left in the mode it was in.
        task: Reads the predictions off its outputs.
        prepared: The same for every model that is compared.
        device: Where to run.
        advance: Told how many inputs are done, after every batch.
        kept: Folder of ledgers; None keeps nothing.
        halve: Whether a batch for which memory does not suffice is halved.

    Returns:
        One prediction an example, in the order of the split.

    Raises:
        ApproxError: if the outputs are not finite, or the device's memory does not suffice.
    """
    rank, world = distributed.place()
    ledger = None
    if kept is not None and subject.identity is not None:
        about = (task.name, vars(task), prepared.encodings, prepared.batches, str(torch.device(device).type))
        ledger = Ledger(kept, fingerprint(subject.identity, *about), rank)
    said = distributed.agree(ledger.read() if ledger else {})
    waiting = [number for number in range(len(prepared.batches)) if number not in said]
    done = sum(len(prepared.batches[number]) for number in said)
    model, was_training = subject.model.to(device), subject.model.training
    model.eval()
    try:
        for number in waiting[rank::world]:
            rows = prepared.batches[number]
            with _named(subject):
                parts = _said(subject, task, [prepared.encodings[row] for row in rows], device, halve)
            said[number] = ledger.write(number, parts) if ledger else parts
            done += len(rows) * world
            if advance:
                advance(min(done, len(prepared.encodings)))
    finally:
        model.train(was_training)
    for shared in distributed.gather({number: said[number] for number in waiting[rank::world]}):
        said |= shared
    if advance:
        advance(len(prepared.encodings))
    found = {
        row: part for number, rows in enumerate(prepared.batches) for row, part in zip(rows, said[number], strict=True)
    }
    parts_of: list[list[Any]] = [[] for _ in prepared.split.examples]
    for row, owner in enumerate(prepared.owners):
        parts_of[owner].append(found[row])
    return [task.combine(example, parts) for example, parts in zip(prepared.split.examples, parts_of, strict=True)]


def _said(
    subject: Subject, task: Task, encodings: list[Encoding], device: str | torch.device, halve: bool
) -> list[Any]:
    """What a model says of a batch, in halves if need be."""
    try:
        batch = {
            # Sounds are in single precision, whatever the model computes in.
            name: value.to(device, subject.model.dtype if value.is_floating_point() else None)
            for name, value in task.collate(encodings, subject.processor).items()
        }
        return task.predict(subject.model(**batch), encodings, subject.model.config)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    middle = len(encodings) // 2
    if not halve or not middle:
        longest = max(map(task.tokens, encodings))
        raise ApproxError(
            f"the memory of {device} does not suffice for batches of {len(encodings)} inputs of up to {longest} tokens. Use a "
            "smaller --batch-size or another --device.",
            Exit.MISSING,
        )
    # Outside of the handler, which would hold on to the memory of what failed.
    return [
        part for half in (encodings[:middle], encodings[middle:]) for part in _said(subject, task, half, device, halve)
    ]


@contextmanager
def _named(subject: Subject) -> Iterator[None]:
    """Say whose an error is."""
    try:
        yield
    except ApproxError as error:
        raise ApproxError(f"{subject.name}: {error}", error.exit_code) from None
