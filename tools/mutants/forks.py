"""Mutants tried in forked processes, each in a copy of the repository of its own."""

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from baseline import Baseline, tests_to_run
from changes import Mutant
from copies import NO_TESTS, Room, fork, run_pytest
from watch import Chosen

# A changed loop may never end. What a test takes varies with what else the machine does.
_TIMES_AS_LONG, _SECONDS_MORE = 6, 120


def noticed_by(
    room: Room, baseline: Baseline, mutants: Iterable[Mutant], tell: Callable[[Mutant, str | None], None]
) -> dict[Mutant, str | None]:
    """For each mutant the test that noticed it, or None."""
    waiting, idle = list(mutants), list(room.copies)
    running: dict[int, tuple[Mutant, Path, float]] = {}
    noticed: dict[Mutant, str | None] = {}

    def settle(mutant: Mutant, test: str | None) -> None:
        noticed[mutant] = test
        tell(mutant, test)

    while waiting or running:
        while waiting and idle:
            mutant = waiting.pop(0)
            chosen = tests_to_run(baseline, mutant)
            if not chosen:
                settle(mutant, None)
                continue
            copy = idle.pop()
            limit = _TIMES_AS_LONG * sum(chosen.values()) + _SECONDS_MORE
            running[_try(room, copy, mutant, chosen)] = (mutant, copy, time.monotonic() + limit)
        for process, (mutant, copy, end) in list(running.items()):
            ended, status = os.waitpid(process, os.WNOHANG)
            late = not ended and time.monotonic() > end
            if late:
                os.killpg(process, signal.SIGKILL)
                os.waitpid(process, 0)
            if ended or late:
                del running[process]
                (copy / mutant.file).write_text(mutant.source, encoding="utf-8")
                idle.append(copy)
                settle(mutant, "no end in sight" if late else _noticed(copy, os.waitstatus_to_exitcode(status)))
        time.sleep(0.05)
    return noticed


def _try(room: Room, copy: Path, mutant: Mutant, chosen: dict[str, float]) -> int:
    """Start the chosen tests on a mutant; the process."""
    (copy / mutant.file).write_text(mutant.text, encoding="utf-8")
    noticed = _file_of_noticed(copy)
    noticed.unlink(missing_ok=True)
    by_file: dict[str, float] = {}
    for test, seconds in chosen.items():
        file = test.partition("::")[0]
        by_file[file] = by_file.get(file, 0.0) + seconds
    namesake = f"test_{Path(mutant.file).stem}.py"
    files = sorted(by_file, key=lambda file: (Path(file).name != namesake, by_file[file]))
    return fork(
        lambda: run_pytest(room, copy, ["-x", *files], Chosen(chosen, files, noticed)), copy.with_suffix(".log")
    )


def _noticed(copy: Path, code: int) -> str | None:
    if code in (0, NO_TESTS):
        return None
    noticed = _file_of_noticed(copy)
    return noticed.read_text(encoding="utf-8").splitlines()[0] if noticed.is_file() else "pytest, which could not go on"


def _file_of_noticed(copy: Path) -> Path:
    return copy.with_suffix(".noticed")
