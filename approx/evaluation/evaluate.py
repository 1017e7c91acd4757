"""Score base and converted models on the same tokens, in the same order, in the same batches.

Nothing here depends on how a model was converted, so any models can be compared.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import statistics
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count as numbers
from pathlib import Path
from statistics import median_low
from typing import Any, TypeVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from approx.errors import ApproxError, Exit
from approx.evaluation.inputs import Prepared, Subject, coverage, prepare
from approx.evaluation.options import EvaluateOptions
from approx.evaluation.quality import ablated, compare, label_order, over_seeds
from approx.evaluation.record import Quality, Rows, Tokens, write_outputs
from approx.evaluation.timing import OK, Runner, is_out_of_memory, repeats_for, timed
from approx.tasks.metrics import METRICS
from approx.tasks.task import Encoding, Task
from approx.version import install
from approx_kernels.runtime.cache_folder import cache_folder

__all__ = ["Subject", "evaluate", "predict", "prepare"]

T = TypeVar("T")


def place() -> tuple[int, int]:
    """Rank of this process and number of processes; sets up communication on the first call.

    Raises:
        ApproxError: if there are several processes and accelerate is not installed.
    """
    state = _state()
    return (0, 1) if state is None else (state.process_index, state.num_processes)


def leads() -> bool:
    """Whether this process writes files and prints."""
    return place()[0] == 0


def agree(value: T) -> T:
    """Return the first process's value in every process."""
    if _state() is None:
        return value
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([value])[0]


def gather(value: T) -> list[T]:
    """Return the values of all processes in every process."""
    if _state() is None:
        return [value]
    from accelerate.utils import gather_object

    return gather_object([value])


def _state() -> Any:
    """Accelerate's state, shared with a Trainer in this process; None for a single process."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return None
    try:
        from accelerate import PartialState
    except ImportError as error:
        raise ApproxError(
            f"{os.environ['WORLD_SIZE']} processes need the package accelerate, which is not installed ({error}). "
            f"Install it ({install('train')}), or start one process.",
            Exit.MISSING,
        ) from None
    if not torch.distributed.is_initialized():
        atexit.register(lambda: PartialState().destroy_process_group())
    # NCCL, accelerate's choice on GPUs, does not allow two processes on one GPU.
    return PartialState(cpu=torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


_LOG = logging.getLogger(__name__)


def default_folder() -> Path:
    """Folder of stored outputs, in $APPROX_CACHE or `approx` in the user's cache folder."""
    return cache_folder() / "outputs"


def fingerprint(*parts: Any) -> str:
    """Hash plain data; arrays count by their bytes, other values that JSON lacks by their repr."""
    text = json.dumps(parts, sort_keys=True, default=_text)
    return hashlib.sha256(text.encode()).hexdigest()


class Ledger:
    """The finished batches of one model on one split, one per line with a checksum; damaged lines are ignored.

    The key hashes everything the outputs depend on, so changed weights, settings, data or code use another ledger.

    Args:
        folder: Folder of all ledgers.
        key: Hash of everything the outputs depend on.
        writer: Rank of this process; processes that share the ledger append to separate files.
    """

    def __init__(self, folder: Path, key: str, writer: int = 0) -> None:
        self._folder, self._key, self._writer = folder / key[:2], key, writer
        self._warned = False

    def read(self) -> dict[int, list[Any]]:
        """Number of a batch -> the predictions of its rows, without batches whose line or file cannot be read."""
        batches: dict[int, list[Any]] = {}
        for path in sorted(self._folder.glob(f"{self._key}.*.jsonl")):
            try:
                text = path.read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            for line in text.splitlines():
                match _parsed(line):
                    case [int(batch), list(predictions), int(checksum)] if checksum == _checksum(batch, predictions):
                        batches[batch] = predictions
        return batches

    def write(self, batch: int, predictions: list[Any]) -> list[Any]:
        """Store the predictions of a batch and return them as `read` does; where they cannot be stored, say so once."""
        line = json.dumps([batch, predictions, _checksum(batch, predictions)], allow_nan=False)
        path = self._folder / f"{self._key}.{self._writer}.jsonl"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with path.open("a+b") as file:
                # An interrupted write may have left a torn line.
                file.seek(0, os.SEEK_END)
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    torn = file.read(1) != b"\n"
                    file.write(b"\n" if torn else b"")
                file.write(line.encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if not self._warned:
                _LOG.warning(
                    "Outputs cannot be stored in %s: %s. The evaluation goes on, but starts over if it is interrupted. "
                    "To store them, set $APPROX_CACHE to a writable folder.",
                    self._folder.parent,
                    error.strerror,
                )
            self._warned = True
        return json.loads(line)[1]


def _checksum(batch: int, predictions: list[Any]) -> int:
    return zlib.crc32(json.dumps([batch, predictions]).encode())


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _text(value: Any) -> str:
    return value.tobytes().hex() if hasattr(value, "tobytes") else repr(value)


BACK_ENDS = {
    "cpu": {"math": SDPBackend.MATH},
    "cuda": {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "math": SDPBackend.MATH,
    },
}
DEFAULT = "default SDPA"
# Speed-up that a back end needs to replace the default: noise must not choose the baseline.
GAIN = 1.02
# Candidates this much slower than the best at their second call are not timed further.
HOPELESS = 1.5
REPETITIONS = 5


def best_exact(
    call: Callable[[], object],
    device: torch.device,
    others: Mapping[str, Callable[[], object]] | None = None,
    begin: Callable[[], object] | None = None,
) -> tuple[str, Callable[[], object]]:
    """Choose the fastest exact attention that fits in memory.

    Args:
        call: Runs one forward pass of the exact model with SDPA.
        device: The device.
        others: Name -> call with another exact implementation; they compete with SDPA's back ends.
        begin: Prepares one call of any of them, untimed; None if calls need no preparation.

    Returns:
        The name of the baseline, such as "default SDPA" or "cudnn SDPA", and the call that uses it. If nothing runs,
        the default.
    """
    calls = {DEFAULT: call, **(others or {})} | {
        f"{name} SDPA": _through(back_end, call) for name, back_end in BACK_ENDS[device.type].items()
    }
    milliseconds: dict[str, float] = {}
    for name, candidate in calls.items():
        runner = Runner(candidate, begin)
        try:
            # The first call also compiles and allocates.
            runner.attempt(lambda runner=runner: runner.prepared()())
            sample = runner.attempt(lambda runner=runner: timed(runner.prepared(), 1, device))
        except RuntimeError as error:
            if name == DEFAULT or "kernel" not in str(error).lower():
                raise
            continue
        if runner.status == OK and sample:
            milliseconds[name] = sample.ms
    if not milliseconds:
        return DEFAULT, call

    quickest = min(milliseconds.values())
    near = [name for name, ms in milliseconds.items() if ms < HOPELESS * quickest]
    if len(near) > 1:
        samples: dict[str, list[float]] = {name: [] for name in near}
        for _ in range(REPETITIONS):
            for name in near:
                repeats = 1 if begin else repeats_for(milliseconds[name])
                samples[name].append(timed(Runner(calls[name], begin).prepared(), repeats, device).ms)
        milliseconds = {name: statistics.median(ms) for name, ms in samples.items()}
    best = min(near, key=lambda name: milliseconds[name])
    if DEFAULT in near and milliseconds[DEFAULT] < GAIN * milliseconds[best]:
        best = DEFAULT
    return best, calls[best]


def _through(back_end: SDPBackend, call: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        with sdpa_kernel(back_end):
            return call()

    return run


"""Called with the number of inputs done and their total number, over all models."""


def evaluate(
    subjects: dict[str, Subject],
    task: Task,
    options: EvaluateOptions | None = None,
    *,
    data: Path | None = None,
    seed: int = 0,
    device: str | torch.device = "cpu",
    progress: Callable[[int, int], None] | None = None,
    outputs: Path | None = None,
    ledgers: Path | None = None,
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
        ledgers: Folder of ledgers that store the outputs of subjects with an identity, so that no batch is computed
            twice.

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
    loaded = task.at_least(task.labelled(loaded), models[0].processor, options.min_length)
    prepared = prepare(
        models,
        task,
        loaded,
        batch_size=options.inputs_per_batch,
        max_length=options.max_length,
        truncate=options.truncate,
    )
    examples, rows = loaded.examples, len(prepared.encodings)
    others = [subject for subject in models[1:] if subject.reseeded]
    cut = [subject for subject in models[1:] if subject.ablation and subject.ablation.layers]
    total = rows * (len(models) + len(others) * (options.seeds - 1) + len(cut))
    turn = numbers()

    def predicted(subject: Subject) -> list[Any]:
        done = rows * next(turn)

        def advance(count: int) -> None:
            if progress:
                progress(done + count, total)

        return predict(
            subject,
            task,
            prepared,
            device=device,
            advance=advance,
            ledgers=ledgers,
            halve=options.inputs_per_batch is None,
        )

    predictions = {subject.name: predicted(subject) for subject in models}
    without: dict[str, list[Any]] = {}
    for subject in cut:
        assert subject.ablation is not None
        with subject.ablation.off() as other:
            without[subject.name] = predicted(other)
    labels = [example.label for example in examples]
    covered = {subject.name: one for subject in models if (one := coverage(subject, task, prepared)) is not None}
    if outputs is not None and leads():
        columns = {"id": [example.id for example in examples], "label": labels, "tokens": prepared.lengths}
        columns |= {f"prediction/{name}": values for name, values in predictions.items()}
        columns |= {f"prediction without estimates/{name}": values for name, values in without.items()}
        columns |= {f"approximated/{name}": one.examples for name, one in covered.items()}
        write_outputs(outputs, columns)
    metric = METRICS[task.metrics[0]]
    margin = metric.acceptable(options.margin, metric.value(predictions[models[0].name], labels))
    compared = compare(task, examples, prepared.lengths, predictions, margin=margin, seed=seed, covered=covered)
    for subject, variant in zip(models[1:], compared.variants, strict=True):
        if subject.ablation is not None:
            both = predictions[subject.name], without.get(subject.name)
            variant.ablated = ablated(task, examples, subject.ablation, variant, *both, seed=seed)
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
        measures=task.measures,
        notes=[
            *loaded.notes,
            *([f"read to {options.max_length:,} tokens"] if options.max_length else []),
            *([f"only inputs of at least {options.min_length:,} tokens"] if options.min_length else []),
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
    ledgers: Path | None = None,
    halve: bool = False,
) -> list[Any]:
    """Run one model over a prepared split.

    Args:
        subject: The model; it is moved to the device and keeps its training mode.
        task: Makes predictions from the model's outputs.
        prepared: The split; the same for every compared model.
        device: Device to run on.
        advance: Called with the number of inputs done after every batch.
        ledgers: Folder of ledgers; None stores no outputs.
        halve: Whether to halve a batch that does not fit in memory.

    Returns:
        One prediction per example, in the order of the split.

    Raises:
        ApproxError: if outputs are not finite, or memory runs out.
    """
    rank, world = place()
    ledger = None
    if ledgers is not None and subject.identity is not None:
        about = (task.name, vars(task), prepared.encodings, prepared.batches, str(torch.device(device).type))
        ledger = Ledger(ledgers, fingerprint(subject.identity, *about), rank)
    parts_by_batch = agree(ledger.read() if ledger else {})
    waiting = [number for number in range(len(prepared.batches)) if number not in parts_by_batch]
    done = sum(len(prepared.batches[number]) for number in parts_by_batch)
    model, was_training = subject.model, subject.model.training
    if getattr(model, "device", None) != torch.device(device):
        # Quantised weights cannot be moved under inference mode, not even to where they are.
        model = model.to(device)
    model.eval()
    try:
        for number in waiting[rank::world]:
            rows = prepared.batches[number]
            with _attributed(subject):
                encodings = [prepared.encodings[row] for row in rows]
                if task.in_order:
                    parts = []
                    for part in task.predict_in_order(model, encodings):
                        parts.append(part)
                        if advance:
                            advance(min(done + len(parts) * world, len(prepared.encodings)))
                else:
                    parts = _predict_batch(subject, task, encodings, device, halve)
            parts_by_batch[number] = ledger.write(number, parts) if ledger else parts
            done += len(rows) * world
            if advance:
                advance(min(done, len(prepared.encodings)))
    finally:
        model.train(was_training)
    for shared in gather({number: parts_by_batch[number] for number in waiting[rank::world]}):
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
            f"{device} ran out of memory at a batch of {len(encodings)} inputs of up to {longest} tokens. Use a "
            "smaller --batch-size or another --device.",
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
