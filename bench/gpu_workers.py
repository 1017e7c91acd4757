"""Jobs in separate processes, so that a crash or a hang costs one contender and not the run.

After an illegal access on a GPU its process cannot use the GPU any more, and a kernel that hangs cannot be aborted. So the
main process uses no GPU; processes announce what they will run, and if one is lost that is not run again.
"""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

Say = Callable[[str], None]
# From a job's arguments, a function that announces what runs next, and reasons not to run things, to the result.
Work = Callable[[dict[str, Any], Say, Mapping[str, str]], dict[str, Any]]
# Key of a result: the process should not be used again.
SPENT = "spent"
# A job that loses its process this often is given up.
TRIES = 4
# Seconds for a process to start, mostly for imports.
BEGINNING = 300.0


class LostError(Exception):
    """The device no longer responds to this process."""


class Job(NamedTuple):
    """A unit of work for one process: a unique name, and the arguments of the work."""

    id: str
    given: dict[str, Any]


def told(error: BaseException) -> str:
    """An error in one line."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"[:300].rstrip(": ")


def carry_out(
    jobs: Sequence[Job],
    work: Work,
    keep: Callable[[Job, dict[str, Any]], None],
    *,
    lanes: int,
    deadline: float,
    silence: float,
    log: Path,
) -> list[Job]:
    """Run jobs in order, some in parallel.

    Args:
        jobs: The jobs.
        work: Runs one job; a module-level function.
        keep: Called here with the result of a job as soon as it is done: only `error` if it failed.
        lanes: Number of parallel processes.
        deadline: On the monotonic clock: unfinished jobs are then aborted.
        silence: Seconds without a message after which a process counts as hung.
        log: The file for the processes' output.

    Returns:
        The jobs that did not finish in time.
    """
    waiting, left_out = list(jobs), dict[str, dict[str, str]]()
    crew = [_Lane(work, log) for _ in range(max(1, min(lanes, len(waiting))))]
    try:
        while waiting or any(lane.job for lane in crew):
            if time.monotonic() > deadline:
                return [lane.job for lane in crew if lane.job] + waiting
            for lane in crew:
                if lane.job is None and waiting:
                    job = waiting.pop(0)
                    lane.give(job, left_out.setdefault(job.id, {}))
            busy = [lane for lane in crew if lane.job]
            wait([lane.pipe for lane in busy], timeout=0.5)
            for lane in busy:
                job, result, lost = lane.job, *lane.news(silence)
                if job is None or not (result or lost):
                    continue
                lane.job = None
                if result:
                    keep(job, result)
                    continue
                lane.stop()
                tries = left_out[job.id]
                # Nothing to skip, or already skipped: it would only fail again.
                if not lane.about or lane.about in tries or len(tries) + 1 >= TRIES:
                    keep(job, {"error": f"{lane.about or 'the process'}: {lost}"})
                else:
                    tries[lane.about] = lost
                    waiting.insert(0, job)
    finally:
        for lane in crew:
            lane.stop()
    return []


class _Lane:
    """Runs jobs in one process after another, each until it is lost."""

    def __init__(self, work: Work, log: Path) -> None:
        self._work, self._log, self._process = work, log, None
        self.job: Job | None = None
        self.about, self._heard, self._begun = "", 0.0, False
        self.pipe, _ = multiprocessing.Pipe()

    def give(self, job: Job, without: Mapping[str, str]) -> None:
        if self._process is None or not self._process.is_alive():
            self._start()
        self.job, self.about, self._heard = job, "", time.monotonic()
        try:
            self.pipe.send((job, dict(without)))
        except OSError:
            # It ended just now, between two jobs.
            self._start()
            self.pipe.send((job, dict(without)))

    def _start(self) -> None:
        self.stop()
        # A forked process could not use CUDA.
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, self._work, str(self._log)))
        self._process.start()
        self._begun = False
        other.close()

    def news(self, silence: float) -> tuple[dict[str, Any] | None, str]:
        """The result of the job, or why its process was lost; neither while it runs."""
        try:
            while self.pipe.poll():
                kind, said = self.pipe.recv()
                self._heard, self._begun = time.monotonic(), True
                if kind == "result":
                    if said.pop(SPENT, False):
                        self.stop()
                    return said, ""
                if kind == "lost":
                    return None, said
                self.about = said
        except (EOFError, OSError):
            return None, f"its process ended with exit code {self._code()}"
        patience = silence if self._begun else max(silence, BEGINNING)
        if time.monotonic() - self._heard > patience:
            return None, f"it did not end within {patience:.0f} s"
        return None, ""

    def _code(self) -> int | None:
        if self._process is None:
            return None
        self._process.join(5)
        return self._process.exitcode

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join(10)
            self._process = None


def _serve(pipe: Connection, work: Work, log: str) -> None:
    """Run the jobs that arrive through the pipe until it closes."""
    with open(log, "a", encoding="utf-8") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    pipe.send(("about", ""))
    while True:
        try:
            job, without = pipe.recv()
        except EOFError:
            return
        try:
            result = work(job.given, lambda name: pipe.send(("about", name)), without)
        except LostError as error:
            pipe.send(("lost", told(error)))
            os._exit(1)
        except Exception as error:
            traceback.print_exc()
            result = {"error": told(error), SPENT: True}
        pipe.send(("result", result))
