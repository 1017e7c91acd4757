"""Jobs in separate processes, so that a crash or a hang costs one contender and not the run.

After an illegal access on a GPU its process cannot use the GPU any more, and a kernel that hangs cannot be aborted. So
the main process uses no GPU; processes say which contender they run next, and if one is lost that contender is not run
again.
"""

import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

# What is known of a contender: its name and role, and once it is through, its status and figures.
Row = dict[str, Any]
# What a process says: a contender that runs next, or, with a `status`, one that is through.
Say = Callable[[Row], None]
# From a job's arguments, `Say`, and the rows of an earlier process that was lost, by name, to the result.
Work = Callable[[dict[str, Any], Say, Mapping[str, Row]], dict[str, Any]]
# Key of a result: the process should not be used again.
SPENT = "spent"
# Key of a result: there are rows still to come.
UNFINISHED = "unfinished"
# A process that is lost this often before it names a contender is given up.
TRIES = 2
# Seconds for a process to start, mostly for imports.
BEGINNING = 300.0


class LostError(Exception):
    """The device no longer responds to this process."""


class Job(NamedTuple):
    """A unit of work for one process: a unique name, and the arguments of the work."""

    id: str
    arguments: dict[str, Any]


def in_one_line(error: BaseException) -> str:
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
    preload: Sequence[str] = (),
) -> list[Job]:
    """Run jobs in order, some in parallel.

    Args:
        jobs: The jobs.
        work: Runs one job; a module-level function.
        keep: Called here with the result of a job, only `error` if it failed; and, if the job says rows, after each
            with those so far as its `contenders`, and `unfinished`.
        lanes: Number of parallel processes.
        deadline: On the monotonic clock: unfinished jobs are then aborted.
        silence: Seconds without a message after which a process counts as hung.
        log: The file for the processes' output.
        preload: Modules that all processes share from their start; they must not use the GPU.

    Returns:
        The jobs that did not finish in time.
    """
    waiting, rows, failed = list(jobs), {job.id: dict[str, Row]() for job in jobs}, Counter[str]()
    # A forked process could not use CUDA if its parent did; the parent of these has only imported.
    context = multiprocessing.get_context("forkserver")
    # That parent passes in silence over modules that it cannot import, and knows only this of where they are. Each
    # process would then import them for itself, which took 13 seconds for a row that takes one.
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, sys.path)))
    context.set_forkserver_preload(list(preload))
    crew = [_Lane(context, work, log) for _ in range(max(1, min(lanes, len(waiting))))]
    try:
        while waiting or any(lane.job for lane in crew):
            if time.monotonic() > deadline:
                return [lane.job for lane in crew if lane.job] + waiting
            for lane in crew:
                if lane.job is None and waiting:
                    job = waiting.pop(0)
                    lane.start_on(job, rows[job.id])
            busy = [lane for lane in crew if lane.job]
            wait([lane.pipe for lane in busy], timeout=0.5)
            for lane in busy:
                job, (new, result, lost) = lane.job, lane.news(silence)
                if job is None:
                    continue
                known = rows[job.id]
                known |= {row["name"]: row for row in new}
                failed[job.id] *= not new
                if lost:
                    lane.stop()
                    if lane.about:
                        known[lane.about["name"]] = {**lane.about, "status": lost}
                    else:
                        failed[job.id] += 1
                contenders = {"contenders": list(known.values())} if known else {}
                if result:
                    keep(job, {**contenders, **result})
                elif failed[job.id] == TRIES:
                    keep(job, {**contenders, "error": f"the process: {lost}"})
                elif new or (lost and known):
                    keep(job, {**contenders, UNFINISHED: True})
                if result or lost:
                    lane.job = None
                if lost and failed[job.id] < TRIES:
                    waiting.insert(0, job)
    finally:
        for lane in crew:
            lane.stop()
    return []


class _Lane:
    """Runs jobs in one process after another, each until it is lost."""

    def __init__(self, context: Any, work: Work, log: Path) -> None:
        self._context, self._work, self._log, self._process = context, work, log, None
        self.job: Job | None = None
        self.about: Row = {}
        self._heard, self._begun = 0.0, False
        self.pipe, _ = multiprocessing.Pipe()

    def start_on(self, job: Job, rows: Mapping[str, Row]) -> None:
        if self._process is None or not self._process.is_alive():
            self._start()
        self.job, self.about, self._heard = job, {}, time.monotonic()
        try:
            self.pipe.send((job, dict(rows)))
        except OSError:
            # It ended just now, between two jobs.
            self._start()
            self.pipe.send((job, dict(rows)))

    def _start(self) -> None:
        self.stop()
        self.pipe, other = self._context.Pipe()
        self._process = self._context.Process(target=_serve, args=(other, self._work, str(self._log)))
        self._process.start()
        self._begun = False
        other.close()

    def news(self, silence: float) -> tuple[list[Row], dict[str, Any] | None, str]:
        """New rows; and the result of the job, or why its process was lost, or neither while it runs."""
        rows: list[Row] = []
        try:
            while self.pipe.poll():
                kind, message = self.pipe.recv()
                self._heard, self._begun = time.monotonic(), True
                if kind == "result":
                    if message.pop(SPENT, False):
                        self.stop()
                    return rows, message, ""
                if kind == "lost":
                    return rows, None, message
                through = "status" in message
                rows += [message] if through else []
                self.about = {} if through else message
        except (EOFError, OSError):
            return rows, None, f"its process ended with exit code {self._code()}"
        patience = silence if self._begun else max(silence, BEGINNING)
        if time.monotonic() - self._heard > patience:
            return rows, None, f"it did not end within {patience:.0f} s"
        return rows, None, ""

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
    pipe.send(("row", {}))
    while True:
        try:
            job, rows = pipe.recv()
        except EOFError:
            return
        try:
            result = work(job.arguments, lambda row: pipe.send(("row", row)), rows)
        except LostError as error:
            pipe.send(("lost", in_one_line(error)))
            os._exit(1)
        except Exception as error:
            traceback.print_exc()
            result = {"error": in_one_line(error), SPENT: True}
        pipe.send(("result", result))
