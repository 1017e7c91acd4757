"""Executors for the work of a sweep: processes on this machine, jobs of a cluster, or tasks of Ray.

An executor takes a function and items, and yields each item with its result or its error as it finishes. The function
must be importable by name; it is called with an item and the number of threads to use (None: torch's default).
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
# Submitit's own default is five minutes.
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
    # One family imports almost everything that the others need.
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
                "The executor 'submitit' needs SLURM, but sbatch is not installed. Run the command on a login node, or try it on "
                "this machine with --set-executor cluster=local.",
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


@dataclass(frozen=True)
class Ray:
    """Tasks of a Ray cluster, or of Ray on this machine.

    Args:
        jobs: Number of tasks at once on this machine; on a cluster its resources decide.
        options: `address` of a cluster, and options of a task, such as `num_cpus` and `num_gpus`.
    """

    jobs: int | None
    options: dict[str, Any]

    def map(self, work: Work, items: Sequence[T], *, alone: bool = False) -> Iterator[tuple[T, Any]]:
        """See `Executor`; a task that must be alone requests all cores of this machine."""
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
                    result = ray.get(reference)
                except ray.exceptions.RayError as error:
                    result = error
                yield item, result
        finally:
            if started:
                ray.shutdown()


@contextmanager
def _importable() -> Iterator[None]:
    """Let processes started within the context import this package even if it is not installed."""
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
