"""Processes that judge cases: one that hangs, takes too much memory or dies costs itself, and is replaced."""

import contextlib
import faulthandler
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil
import torch

from approx.conversion import verify
from fuzz.cases import Case, Verdict, drawn, judged
from fuzz.mutations import OUTSIDE

SECONDS = 20
GIGABYTES = 2
# A converted folder is reloaded by another process, which imports for seconds.
_WAITING = 15
# Libraries keep some memory of each case.
_CASES = 3000
Order = Case | tuple[str, int, int]


class Worker:
    """A process with a copy of the place.

    Args:
        template: The undamaged place.
        reloads: Whether to start at once what reloads converted folders, which imports for seconds.
    """

    def __init__(self, template: Path, *, reloads: bool = True) -> None:
        self._template, self._reloads = template, reloads
        self._home = Path(tempfile.mkdtemp(prefix="approx-fuzz-"))
        self._start()

    def _start(self) -> None:
        shutil.rmtree(self._home, ignore_errors=True)
        # With the times of the files, by which changes are seen.
        shutil.copytree(self._template, self._home)
        context = multiprocessing.get_context("fork")
        self.connection, end = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(end, self.connection, self._home, self._template, self._reloads)
        )
        self._process.start()
        end.close()
        self.order: Any = None
        self._asked, self._since, self._spent = 0, time.monotonic(), 0.0

    def ask(self, order: Order) -> None:
        """Send a case, or the kind, seed and number of one; `answer` gives its verdict."""
        if self._asked >= _CASES:
            self.close()
            self._start()
        self.order, self._since = order, time.monotonic()
        with contextlib.suppress(psutil.NoSuchProcess):
            self._spent = sum(psutil.Process(self._process.pid).cpu_times()[:2])
        self._asked += 1
        self.connection.send(order)

    @property
    def late(self) -> bool:
        """Whether its case hangs: it computed for too long, or waited for far longer, as on a busy machine."""
        waited = time.monotonic() - self._since
        if waited < SECONDS:
            return False
        try:
            spent = sum(psutil.Process(self._process.pid).cpu_times()[:2]) - self._spent
        except psutil.NoSuchProcess:
            return True
        return spent > SECONDS or waited > _WAITING * SECONDS

    def answer(self) -> tuple[Case, Verdict]:
        """The verdict on the case that was sent, once the connection is ready or the worker late.

        A case that ended its process is judged once more by a fresh one, to which earlier cases left all its memory.
        """
        case, verdict = self._answer()
        if verdict.where.startswith(("a crash", "a hang", "MemoryError")):
            self.close()
            self._start()
            self.ask(case)
            verdict = self._answer()[1]
        return case, verdict

    def _answer(self) -> tuple[Case, Verdict]:
        case = _case(self.order, self._template)
        try:
            while not self.late:
                if self.connection.poll(0.2):
                    return case, self.connection.recv()
            verdict = Verdict("failed", f"a hang of {case.kind}", f"no answer within {SECONDS} seconds")
        except (EOFError, OSError):
            self._process.join(SECONDS)
            verdict = Verdict("failed", f"a crash of {case.kind}", f"exit code {self._process.exitcode}")
        self.close()
        self._start()
        return case, verdict

    def close(self) -> None:
        """End the process."""
        self.connection.close()
        self._process.join(1)
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        shutil.rmtree(self._home, ignore_errors=True)


@contextlib.contextmanager
def workers(template: Path, count: int, *, reloads: bool = True) -> Iterator[list[Worker]]:
    """Several workers, which end with the context."""
    made = [Worker(template, reloads=reloads) for _ in range(count)]
    try:
        yield made
    finally:
        for one in made:
            one.close()


def each(crew: list[Worker], orders: Iterator[Order], report: Callable[[Order, Case, Verdict, float], None]) -> None:
    """Have all orders judged; `report` gets each order, its case, its verdict and the seconds."""
    idle, busy = list(crew), []
    while True:
        while idle and (order := next(orders, None)) is not None:
            idle[-1].ask(order)
            busy.append((idle.pop(), time.monotonic()))
        if not busy:
            return
        ready = wait([one.connection for one, _ in busy], timeout=1)
        for one, since in [pair for pair in busy if pair[0].connection in ready or pair[0].late]:
            busy.remove((one, since))
            order = one.order
            case, verdict = one.answer()
            report(order, case, verdict, time.monotonic() - since)
            idle.append(one)


def _case(order: Order, template: Path) -> Case:
    if isinstance(order, Case):
        return order
    kind, seed, number = order
    return drawn(kind, seed, number, template)


def _serve(connection: Connection, other_end: Connection, place: Path, template: Path, reloads: bool) -> None:
    # Otherwise the pipe would not break when the parent is killed.
    other_end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What libraries print is of no interest, but a crash says where it was.
    silent = os.open(os.devnull, os.O_WRONLY)
    # For foreign code, in processes that start now too.
    os.environ["APPROX_FUZZ_PLACE"] = str(place)
    sys.path.append(str(place / OUTSIDE))
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    faulthandler.disable()
    torch.set_num_threads(1)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = size + GIGABYTES * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if reloads:
        verify.begin()
    while True:
        try:
            order = connection.recv()
        except EOFError:
            return
        case = _case(order, template)
        connection.send(judged(case, place, template))
