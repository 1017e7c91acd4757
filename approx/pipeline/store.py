"""The store of finished stages: each outcome is stored under a hash of everything it depends on, and computed once.

A stage is idempotent, and its outcome is one file, written atomically. So stages can run anywhere, in any order, twice
or in parallel, and finished stages survive any crash.
"""

import hashlib
import importlib
import json
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from approx.errors import ApproxError, Exit
from approx.evaluation.evaluate import fingerprint
from approx.measuring.measure import code, companions_sha256
from approx.progress import Progress, silent
from approx.version import install
from approx_kernels.runtime.atomic_file import write_whole

T = TypeVar("T")
R = TypeVar("R")
Work = Callable[[T, int | None], R]

EXECUTORS = ("local", "submitit")
# Submitit's default is five minutes.
_MINUTES = 240


class Executor(Protocol):
    """Maps items to results as they finish."""

    def map(self, work: Work, items: Sequence[T], *, alone: bool = False) -> Iterator[tuple[T, Any]]:
        """Yield each item with its result, or with its exception.

        Args:
            work: The function.
            items: Its arguments.
            alone: Whether no two items may share a machine, because they are timed.
        """
        ...


def choose(name: str, *, jobs: int | None, options: dict[str, Any], folder: Path) -> Executor:
    """Make an executor by name.

    Args:
        name: One of `EXECUTORS`.
        jobs: Maximum number of items at once; by default 1 on this machine and unlimited elsewhere.
        options: Options of the cluster.
        folder: Folder for the logs of a cluster, visible to all of its machines.

    Raises:
        ApproxError: if the executor or an option is unknown, or its package is missing.
    """
    if name not in EXECUTORS:
        raise ApproxError(f"The executor '{name}' is unknown; allowed are {', '.join(EXECUTORS)}.")
    if name == "local":
        if options:
            raise ApproxError(f"--set-executor {next(iter(options))}=… is for submitit; local takes --jobs only.")
        return Local(jobs or 1)
    if find_spec("submitit") is None:
        raise ApproxError(
            f"The executor 'submitit' needs the package submitit, which is not installed: {install('sweep')}.",
            Exit.MISSING,
        )
    return Submitit(jobs, options, folder)


class Here:
    """Runs the work in this process; an error ends it."""

    def map(self, work: Work, items: Sequence[T], *, alone: bool = False) -> Iterator[tuple[T, Any]]:
        """See `Executor`."""
        for item in items:
            yield item, work(item, None)


@dataclass(frozen=True)
class Local:
    """Processes on this machine, which share its cores.

    Args:
        jobs: Number of processes.
    """

    jobs: int

    def map(self, work: Work, items: Sequence[T], *, alone: bool = False) -> Iterator[tuple[T, Any]]:
        """See `Executor`."""
        jobs = 1 if alone else max(1, min(self.jobs, len(items)))
        threads = max(1, torch.get_num_threads() // jobs)
        lost: list[T] = []
        yield from self._pooled(work, items, jobs, threads, lost)
        # Any item in flight may have crashed the worker; retry each alone.
        for item in lost:
            dead: list[T] = []
            yield from self._pooled(work, [item], 1, threads, dead)
            for culprit in dead:
                yield culprit, ApproxError("Its process died, most likely because memory ran out.", Exit.MISSING)

    def _pooled(
        self, work: Work, items: Sequence[T], jobs: int, threads: int, lost: list[T]
    ) -> Iterator[tuple[T, Any]]:
        context = processes()
        lifeline, end = context.Pipe(duplex=False)
        arguments = lifeline, dict(os.environ)
        # Only this process holds the end of the pipe, so the pipe breaks even if this process is killed.
        with lifeline, closing(end), ProcessPoolExecutor(jobs, context, _start, arguments) as pool:
            futures: dict[Future[Any], T] = {}
            try:
                for item in items:
                    try:
                        futures[pool.submit(work, item, threads)] = item
                    except BrokenProcessPool:
                        lost.append(item)
                for future in as_completed(futures):
                    error = future.exception()
                    if isinstance(error, BrokenProcessPool):
                        lost.append(futures[future])
                    else:
                        yield futures[future], error or future.result()
            except BaseException:
                # Closing the pipe ends the workers, so that shutdown does not wait for them.
                end.close()
                pool.shutdown(cancel_futures=True)
                raise


def processes() -> BaseContext:
    """The way to start workers: forked from a server that has done the slow imports, or spawned if forking is unsafe."""
    # Libraries of macOS do not survive a fork, nor does CUDA, which the imports may initialise.
    if sys.platform != "linux" or torch.cuda.is_available():
        return get_context("spawn")
    context = get_context("forkserver")
    # One model family imports almost all modules that the others need.
    context.set_forkserver_preload(["transformers.models.bert.modeling_bert"])
    return context


def _start(lifeline: Connection, environment: dict[str, str]) -> None:
    """Initialise a worker: it ignores Ctrl-C, which the parent handles, and exits with the parent."""
    import signal

    # The fork server has the environment of its own start.
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def follow() -> None:
        with suppress(EOFError, OSError):
            lifeline.recv()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


@dataclass(frozen=True)
class Submitit:
    """Jobs of a SLURM cluster, started by submitit; the option `cluster=local` starts them on this machine.

    Args:
        jobs: Maximum number of jobs at once.
        options: Options of submitit's `AutoExecutor`: `slurm_partition`, `timeout_min`, `cpus_per_task`, `mem_gb`, …
        folder: Folder for scripts and logs.
        seconds: Polling interval.
    """

    jobs: int | None
    options: dict[str, Any]
    folder: Path
    seconds: float = 1.0

    def map(self, work: Work, items: Sequence[T], *, alone: bool = False) -> Iterator[tuple[T, Any]]:
        """See `Executor`; a SLURM job counts as alone, which needs a partition that does not share nodes."""
        submitit = importlib.import_module("submitit")
        options = {"timeout_min": _MINUTES, "name": "approx-sweep", **self.options}
        cluster = options.pop("cluster", "slurm")
        if cluster == "slurm" and shutil.which("sbatch") is None:
            raise ApproxError(
                "The executor 'submitit' needs SLURM, but sbatch is not installed. Run the command on a login node, or "
                "try it on this machine with --set-executor cluster=local.",
                Exit.MISSING,
            )
        here = cluster != "slurm"
        threads = max(1, torch.get_num_threads() // (1 if alone else self.jobs or 1)) if here else None
        limit = 1 if here and alone else self.jobs or (1 if here else len(items))
        try:
            executor = submitit.AutoExecutor(folder=self.folder, cluster=cluster)
            executor.update_parameters(**options)
        except (NameError, ValueError, AssertionError, TypeError) as error:
            raise ApproxError(f"Submitit rejects --set-executor: {' '.join(str(error).split())}") from None
        waiting, running = list(items), dict[Any, T]()
        try:
            while waiting or running:
                room = limit - len(running)
                if waiting and room > 0:
                    now, waiting = waiting[:room], waiting[room:]
                    with _importable(), executor.batch():
                        jobs = [executor.submit(work, item, threads) for item in now]
                    running |= dict(zip(jobs, now, strict=True))
                finished = [job for job in running if job.done()]
                for job in finished:
                    error = job.exception()
                    yield running.pop(job), error or job.result()
                if not finished:
                    time.sleep(self.seconds)
        finally:
            for job in running:
                job.cancel()


@contextmanager
def _importable() -> Iterator[None]:
    """Let processes started within the context import this package even if it is not installed."""
    places = [str(Path(sys.modules["approx"].__path__[0]).parent), str(_parent("approx_kernels"))]
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*places, *([inherited] if inherited else [])])
    try:
        yield
    finally:
        if inherited is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = inherited


def _parent(package: str) -> Path:
    spec = find_spec(package)
    return Path(next(iter((spec.submodule_search_locations if spec else None) or ["."]))).parent


SCHEMA = 3
_KEYS = {"schema", "key", "name", "status", "result", "product", "error", "exit_code"}


@dataclass(frozen=True)
class Outcome:
    """What a stage came to.

    Attributes:
        key: The key of the stage.
        name: Its name.
        status: `done` or `failed`.
        result: What it returned.
        product: Hash of its product.
        error: Why it failed.
        exit_code: The exit code of that.
        seconds: How long it took.
        traceback: Where an unexpected error was raised.
    """

    key: str
    name: str
    status: str = "done"
    result: Any = None
    product: str | None = None
    error: str | None = None
    exit_code: int = 0
    seconds: float | None = None
    traceback: str | None = None


@dataclass(frozen=True)
class Stage:
    """One piece of work.

    Attributes:
        name: Description: `evaluate clustered clusters=25 on needle`.
        key: From `stage_key`.
        compute: Makes the product and returns the result, plain data if it is stored; pickled if it runs in another
            process.
        inputs: Stages that must be done before.
        product: The file or folder that it makes, if any; if it is missing or different, the stage is not done.
        alone: Whether nothing may run in parallel, because it is timed.
        noun: The kind of stage, for errors of stages that depend on it.
        stored: Whether to store its outcome; otherwise it is computed every time.
    """

    name: str
    key: str
    compute: Callable[[], Any]
    inputs: tuple["Stage", ...] = ()
    product: Path | None = None
    alone: bool = False
    noun: str = "evaluation"
    stored: bool = True


def stage_key(kind: str, *parts: Any) -> str:
    """Hash everything a stage depends on: its kind, its settings, the keys or hashes of its inputs, and the code."""
    return fingerprint(kind, *parts, code())


class Store:
    """The outcomes of stages, one file each, in the folder `stages` of a run or sweep."""

    def __init__(self, out: Path) -> None:
        self.out, self.folder = out, out / "stages"

    def read(self, stage: Stage) -> Outcome | None:
        """The outcome of a stage; None if it was not computed or its file is damaged."""
        stored = _stored(self._file(stage))
        if stored is None or (stored.pop("schema"), stored["key"]) != (SCHEMA, stage.key):
            return None
        return Outcome(**stored)

    def begun(self) -> bool:
        """Whether any stage has an outcome, of this or an earlier version."""
        return any(_stored(file) is not None for file in self.folder.glob("*.json"))

    def state(self, stage: Stage) -> str:
        """`done`, `failed` or `missing`."""
        outcome = self.read(stage)
        if outcome is None:
            return "missing"
        whole = stage.product is None or outcome.product == _hash(stage.product) is not None
        return "missing" if outcome.status == "done" and not whole else outcome.status

    def keep(self, stage: Stage, **more: Any) -> Outcome:
        """Store the outcome of a stage.

        Raises:
            ApproxError: if the result is not plain data.
        """
        outcome = Outcome(stage.key, stage.name, product=_hash(stage.product), **more)
        try:
            if stage.stored:
                stored = {"schema": SCHEMA, **vars(outcome)}
                text = json.dumps(stored, allow_nan=False)
                write_whole(self._file(stage), json.dumps({**stored, "sha256": fingerprint(json.loads(text))}))
        except (TypeError, ValueError) as error:
            raise ApproxError(f"The result of '{stage.name}' cannot be stored: {error}.", Exit.INTERNAL) from None
        return outcome

    def keep_failure(self, stage: Stage, error: BaseException) -> Outcome:
        """Store the error of a failed stage; the next run tries it again."""
        if isinstance(error, ApproxError):
            return self.keep(stage, status="failed", error=str(error), exit_code=error.exit_code)
        message = f"{type(error).__name__}: {' '.join(str(error).split())}"
        trace = "".join(traceback.format_exception(error))
        return self.keep(stage, status="failed", error=message, exit_code=Exit.INTERNAL, traceback=trace)

    def _file(self, stage: Stage) -> Path:
        return self.folder / f"{stage.key}.json"


def _stored(file: Path) -> dict[str, Any] | None:
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(stored, dict) or not stored.keys() >= _KEYS or stored["status"] not in ("done", "failed"):
            return None
        # Earlier versions stored no hash.
        known = stored.pop("sha256", None)
        return stored if stored["schema"] != SCHEMA or known == fingerprint(stored) else None
    except (OSError, ValueError, RecursionError):
        return None


def complete(
    stages: Sequence[Stage], store: Store, executor: Executor, *, keep_going: bool, progress: Progress = silent
) -> dict[str, Outcome]:
    """Compute the stages that are missing or failed.

    A stage needed only by others is skipped if none of them is computed.

    Args:
        stages: The stages, computed in this order as far as their inputs allow; stages with the same key are one.
            Inputs are computed whether they are listed or not.
        store: The store of outcomes.
        executor: Runs the stages.
        keep_going: Whether a failed stage stops only those that depend on it; otherwise its error is raised.
        progress: Called with the name of the stage that started or finished last, done and total.

    Returns:
        Key -> outcome of each computed stage.
    """
    waiting = _unfinished(_with_inputs(stages), store)
    total, done = max(len(waiting), 1), 0
    computed: dict[str, Outcome] = {}
    failed: dict[str, Outcome] = {}
    progress("", 0, total)
    while waiting:
        ready = [one for one in waiting.values() if waiting.keys().isdisjoint(other.key for other in one.inputs)]
        alone = all(stage.alone for stage in ready)
        now: list[Stage] = []
        for stage in (one for one in ready if one.alone == alone):
            del waiting[stage.key]
            if lost := next((one for one in stage.inputs if one.key in failed), None):
                why = failed[lost.key]
                error = ApproxError(f"Its {lost.noun} failed: {why.error}", Exit(why.exit_code))
                failed[stage.key] = store.keep_failure(stage, error)
                done += 1
            else:
                now.append(stage)
        if now:
            progress(now[0].name, done, total)
        for stage, outcome in executor.map(partial(_compute, store, keep_going), now, alone=alone) if now else ():
            if isinstance(outcome, BaseException):
                outcome = store.keep_failure(stage, outcome)
            computed[stage.key] = outcome
            if outcome.status == "failed":
                failed[stage.key] = outcome
            done += 1
            progress(stage.name, done, total)
    for leftover in store.out.rglob(".*.tmp"):
        # Killed processes leave these files, and the whole folder is ours.
        leftover.unlink(missing_ok=True)
    return computed


def _compute(store: Store, keep_going: bool, stage: Stage, threads: int | None) -> Outcome:
    if threads is not None:
        torch.set_num_threads(threads)
    start = time.monotonic()
    try:
        result = stage.compute()
        return store.keep(stage, result=result, seconds=round(time.monotonic() - start, 3))
    except Exception as error:
        if not keep_going:
            raise
        return store.keep_failure(stage, error)


def _with_inputs(stages: Sequence[Stage]) -> dict[str, Stage]:
    """The stages by key in their order, then the inputs that are not listed."""
    every: dict[str, Stage] = {}
    queue = list(stages)
    for stage in queue:
        if stage.key not in every:
            every[stage.key] = stage
            queue += stage.inputs
    return every


def _unfinished(stages: dict[str, Stage], store: Store) -> dict[str, Stage]:
    """The stages to compute: those that no other needs and their inputs, except the finished ones."""
    needed = {one.key for stage in stages.values() for one in stage.inputs}
    queue, unfinished = [key for key in stages if key not in needed], set[str]()
    while queue:
        key = queue.pop()
        if key not in unfinished and store.state(stages[key]) != "done":
            unfinished.add(key)
            queue += [one.key for one in stages[key].inputs]
    return {key: stage for key, stage in stages.items() if key in unfinished}


def _hash(product: Path | None) -> str | None:
    """Hash a file, or the files of a checkpoint's folder other than weights; the manifest among them hashes the weights."""
    if product is None or not product.exists():
        return None
    return companions_sha256(product) if product.is_dir() else hashlib.sha256(product.read_bytes()).hexdigest()
