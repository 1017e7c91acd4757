"""Where the work of a sweep is done: processes of this machine, jobs of a cluster, or tasks of Ray.

An executor is called with a function and items, and yields each item with its result, or with the error that lost it,
as they finish. The function must be importable by its name; it is given an item and the number of threads it may compute
with (None: as many as torch sees).
"""

import importlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from approx.errors import ApproxError, Exit

T = TypeVar("T")
R = TypeVar("R")
Work = Callable[[T, int | None], R]

EXECUTORS = ("local", "submitit", "ray")
# What submitit gives a job by itself is five minutes.
_MINUTES = 240


class Executor(Protocol):
    """Maps items to results as they finish."""

    def map(self, work: Work, items: Sequence[T], *, alone: bool = False) -> Iterator[tuple[T, Any]]:
        """Yield each item with its result, or with the exception that lost it.

        Args:
            work: The function.
            items: What it is called with.
            alone: Whether no two of them may share a machine, because they are timed.
        """
        ...


def choose(name: str, *, jobs: int | None, options: dict[str, Any], folder: Path) -> Executor:
    """Make an executor by its name.

    Args:
        name: One of `EXECUTORS`.
        jobs: How many items are worked on at once; 1 on this machine and no limit elsewhere without it.
        options: Of the cluster.
        folder: Where a cluster keeps its logs; all of its machines must see it.

    Raises:
        ApproxError: if there is no such executor, its package is missing, or an option is not known.
    """
    if name not in EXECUTORS:
        raise ApproxError(f"The executor '{name}' was asked for; allowed are {', '.join(EXECUTORS)}.")
    if name == "local":
        if options:
            raise ApproxError(
                f"--set-executor {next(iter(options))}=… is for submitit and ray; local takes --jobs only."
            )
        return Local(jobs or 1)
    if find_spec(name) is None:
        raise ApproxError(
            f"The executor '{name}' needs the package {name}, which is not installed: pip install '{name}'.",
            Exit.MISSING,
        )
    return Submitit(jobs, options, folder) if name == "submitit" else Ray(jobs, options)


class Here:
    """This process, which an error ends."""

    def map(self, work: Work, items: Sequence[T], *, alone: bool = False) -> Iterator[tuple[T, Any]]:
        """See `Executor`."""
        for item in items:
            yield item, work(item, None)


@dataclass(frozen=True)
class Local:
    """Processes of this machine, which share its cores.

    Args:
        jobs: How many at once.
    """

    jobs: int

    def map(self, work: Work, items: Sequence[T], *, alone: bool = False) -> Iterator[tuple[T, Any]]:
        """See `Executor`."""
        jobs = 1 if alone else max(1, min(self.jobs, len(items)))
        threads = max(1, torch.get_num_threads() // jobs)
        lost: list[T] = []
        yield from self._pooled(work, items, jobs, threads, lost)
        # Whoever was at work when a process died may have killed it, or only have been near: each gets one of its own.
        for item in lost:
            dead: list[T] = []
            yield from self._pooled(work, [item], 1, threads, dead)
            for culprit in dead:
                yield culprit, ApproxError("Its process died, most likely for want of memory.", Exit.MISSING)

    def _pooled(
        self, work: Work, items: Sequence[T], jobs: int, threads: int, lost: list[T]
    ) -> Iterator[tuple[T, Any]]:
        context = processes()
        lifeline, end = context.Pipe(duplex=False)
        told = lifeline, dict(os.environ)
        # The end is held by this process alone, so that it breaks however this process goes.
        with lifeline, closing(end), ProcessPoolExecutor(jobs, context, _start, told) as pool:
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
                # Nobody waits for what is still at work.
                end.close()
                pool.shutdown(cancel_futures=True)
                raise


def processes() -> BaseContext:
    """How processes are made: forked from one that has done the imports that take seconds, where that can be forked."""
    # Libraries of macOS do not survive it, nor does what has looked for GPUs, and the imports may.
    if sys.platform != "linux" or torch.cuda.is_available():
        return get_context("spawn")
    context = get_context("forkserver")
    # The file of one family brings what those of all import.
    context.set_forkserver_preload(["transformers.models.bert.modeling_bert"])
    return context


def _start(lifeline: Connection, environment: dict[str, str]) -> None:
    """Begin a worker: Ctrl-C is the parent's business, and with the parent the worker goes."""
    import signal

    # What it was forked from has the environment of the moment when that began.
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
    """Jobs of a SLURM cluster, by submitit; `cluster=local` among the options starts them on this machine.

    Args:
        jobs: How many at once.
        options: Of submitit's `AutoExecutor`: `slurm_partition`, `timeout_min`, `cpus_per_task`, `mem_gb` and so on.
        folder: For scripts and logs.
        seconds: Between two looks at the jobs.
    """

    jobs: int | None
    options: dict[str, Any]
    folder: Path
    seconds: float = 1.0

    def map(self, work: Work, items: Sequence[T], *, alone: bool = False) -> Iterator[tuple[T, Any]]:
        """See `Executor`; a SLURM job is thought to be alone where its partition shares no nodes."""
        submitit = importlib.import_module("submitit")
        options = {"timeout_min": _MINUTES, "name": "approx-sweep", **self.options}
        cluster = options.pop("cluster", "slurm")
        if cluster == "slurm" and shutil.which("sbatch") is None:
            raise ApproxError(
                "The executor 'submitit' needs SLURM, and there is no sbatch here. Call it where jobs are submitted, or try it "
                "on this machine by --set-executor cluster=local.",
                Exit.MISSING,
            )
        here = cluster != "slurm"
        threads = max(1, torch.get_num_threads() // (1 if alone else self.jobs or 1)) if here else None
        limit = 1 if here and alone else self.jobs or (1 if here else len(items))
        try:
            executor = submitit.AutoExecutor(folder=self.folder, cluster=cluster)
            executor.update_parameters(**options)
        except (NameError, ValueError, AssertionError, TypeError) as error:
            raise ApproxError(f"--set-executor does not fit submitit: {' '.join(str(error).split())}") from None
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


@dataclass(frozen=True)
class Ray:
    """Tasks of a Ray cluster, or of Ray on this machine.

    Args:
        jobs: How many at once on this machine; the resources of a cluster say it there.
        options: `address` of a cluster; all others are those of a task, such as `num_cpus` and `num_gpus`.
    """

    jobs: int | None
    options: dict[str, Any]

    def map(self, work: Work, items: Sequence[T], *, alone: bool = False) -> Iterator[tuple[T, Any]]:
        """See `Executor`; a task that is to be alone asks for all the cores of this machine."""
        ray = importlib.import_module("ray")
        options = dict(self.options)
        address, cores = options.pop("address", None), torch.get_num_threads()
        threads = cores if alone else options.pop("num_cpus", max(1, cores // (self.jobs or 1)))
        started = not ray.is_initialized()
        if started:
            size = {} if address else {"num_cpus": cores}
            with _importable():
                ray.init(address=address, include_dashboard=None if address else False, log_to_driver=False, **size)
        try:
            task = ray.remote(work).options(**{**options, "num_cpus": threads})
            waiting = {task.remote(item, threads): item for item in items}
            while waiting:
                (reference,), _ = ray.wait(list(waiting))
                item = waiting.pop(reference)
                try:
                    found = ray.get(reference)
                except ray.exceptions.RayError as error:
                    found = error
                yield item, found
        finally:
            if started:
                ray.shutdown()


@contextmanager
def _importable() -> Iterator[None]:
    """Let what is started inside find this package, which need not be installed, where this process does."""
    places = [str(Path(sys.modules["approx"].__path__[0]).parent), str(_parent("approx_kernels"))]
    given = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*places, *([given] if given else [])])
    try:
        yield
    finally:
        if given is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = given


def _parent(package: str) -> Path:
    spec = find_spec(package)
    return Path(next(iter((spec.submodule_search_locations if spec else None) or ["."]))).parent
