"""Jobs in processes of their own, so that what kills a process, or never ends, costs one contender and not the run.

An illegal access on a GPU leaves its process without the GPU, and a kernel that hangs cannot be called off. So whoever
waits for jobs touches no GPU; the processes say what they are about to run, and when one is lost that is not run again.
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
# From what a job is given, a way to say what it runs next, and what not to run for which reason, to what it found.
Work = Callable[[dict[str, Any], Say, Mapping[str, str]], dict[str, Any]]
# Found under this key: the process should not be used again.
SPENT = "spent"
# A job whose process is lost so often is given up.
TRIES = 4
# Seconds that a process has to begin, which is mostly reading code.
BEGINNING = 300.0


class LostError(Exception):
    """The device answers this process no more."""


class Job(NamedTuple):
    """What one process does in one go: a name of its own, and what the work is given."""

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
    """Do jobs in their order, some at a time.

    Args:
        jobs: What is to be done.
        work: Does one; a function of a module.
        keep: Called here with what a job found, as soon as it is done: `error` alone where it failed.
        lanes: Processes side by side.
        deadline: On the monotonic clock: what is not done then is called off.
        silence: Seconds without a word after which a process is taken to hang.
        log: The file to which the processes write what they print.

    Returns:
        The jobs that were not done in time.
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
                job, found, lost = lane.job, *lane.news(silence)
                if job is None or not (found or lost):
                    continue
                lane.job = None
                if found:
                    keep(job, found)
                    continue
                lane.stop()
                tries = left_out[job.id]
                # Nothing to leave out, or left out already: it would only happen again.
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
    """One process after another, each of which does jobs until it is lost."""

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
        """What the job found, or what has become of its process; neither while it goes on."""
        try:
            while self.pipe.poll():
                kind, said = self.pipe.recv()
                self._heard, self._begun = time.monotonic(), True
                if kind == "found":
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
    """Do what comes through the pipe until it closes."""
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
            found = work(job.given, lambda name: pipe.send(("about", name)), without)
        except LostError as error:
            pipe.send(("lost", told(error)))
            os._exit(1)
        except Exception as error:
            traceback.print_exc()
            found = {"error": told(error), SPENT: True}
        pipe.send(("found", found))
