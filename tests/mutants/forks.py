"""Runs of tests in forked processes, each in a copy of the repository of its own."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from changes import Mutant
from watch import Chosen, Recorder

# A changed loop may never end. What a test takes varies with what else the machine does.
_TIMES_AS_LONG, _SECONDS_MORE = 6, 120
_NO_TESTS = 5


@dataclass(frozen=True)
class Room:
    """What is changed and what must notice: sources and tests of `root`, run in `jobs` copies under `scratch`."""

    root: Path
    sources: str
    tests: list[str]
    scratch: Path
    jobs: int

    @cached_property
    def copies(self) -> list[Path]:
        """The copies; made when they are first asked for."""
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=self.root,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        made = [self.scratch / f"copy{number}" for number in range(self.jobs)]
        for name in filter(None, listed.split("\0")):
            for copy in made if (self.root / name).is_file() else ():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.root / name, copy / name)
        for copy in made:
            # Compiled files go by the text of their source, not by its time and size, which a mutant may share.
            command = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash"]
            subprocess.run([*command, "approx", "kernels"], cwd=copy, check=True)
        return made


@dataclass(frozen=True)
class Baseline:
    """What the tests do where nothing is changed; files as in the repository."""

    lines: dict[str, dict[int, list[str]]]
    seconds: dict[str, float]
    processes: set[str]


def baseline_of(room: Room) -> Baseline:
    """Run all tests of the room once.

    Raises:
        RuntimeError: if one of them fails, or there is none.
    """
    copy, told = room.copies[0], room.scratch / "baseline.json"

    def run() -> int:
        recorder = Recorder(copy / room.sources)
        code = _pytest(copy, room.tests, recorder)
        told.write_text(json.dumps(recorder.result()))
        return code

    log = room.scratch / "baseline.log"
    _, status = os.waitpid(_fork(run, log), 0)
    if os.waitstatus_to_exitcode(status):
        raise RuntimeError("the tests fail although nothing is changed; fix them first:\n" + log.read_text()[-3000:])
    found = json.loads(told.read_text())
    lines = {
        Path(file).relative_to(copy).as_posix(): {int(line): tests for line, tests in by_line.items()}
        for file, by_line in found["lines"].items()
    }
    return Baseline(lines, found["seconds"], set(found["processes"]))


def tests_to_run(baseline: Baseline, mutant: Mutant) -> dict[str, float]:
    """The tests that can notice a mutant, and the seconds of each.

    Those that run one of its lines; where a fixture does, all tests of the file; where nothing but an import does, all there are;
    and always those that start processes.
    """
    by_line = baseline.lines.get(mutant.file, {})
    told = {told for line in mutant.lines for told in by_line.get(line, ())}
    inside = {name.removeprefix("call ") for name in told}
    prepared = {name.removeprefix("setup ").partition("::")[0] for name in told if name.startswith("setup ")}
    imported = not told and any(line in by_line for line in mutant.lines)
    return {
        test: seconds
        for test, seconds in baseline.seconds.items()
        if imported or test in inside or test in baseline.processes or test.partition("::")[0] in prepared
    }


def noticed_by(
    room: Room, baseline: Baseline, mutants: Iterable[Mutant], tell: Callable[[Mutant, str | None], None]
) -> dict[Mutant, str | None]:
    """For each mutant the test that noticed it, or None."""
    waiting, idle = list(mutants), list(room.copies)
    running: dict[int, tuple[Mutant, Path, float]] = {}
    found: dict[Mutant, str | None] = {}

    def settle(mutant: Mutant, test: str | None) -> None:
        found[mutant] = test
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
    return found


def _try(room: Room, copy: Path, mutant: Mutant, chosen: dict[str, float]) -> int:
    """Start the chosen tests on a mutant; the process."""
    (copy / mutant.file).write_text(mutant.text, encoding="utf-8")
    told = _told(copy)
    told.unlink(missing_ok=True)
    by_file: dict[str, float] = {}
    for test, seconds in chosen.items():
        file = test.partition("::")[0]
        by_file[file] = by_file.get(file, 0.0) + seconds
    namesake = f"test_{Path(mutant.file).stem}.py"
    files = sorted(by_file, key=lambda file: (Path(file).name != namesake, by_file[file]))
    return _fork(lambda: _pytest(copy, ["-x", *files], Chosen(chosen, files, told)), copy.with_suffix(".log"))


def _noticed(copy: Path, code: int) -> str | None:
    if code in (0, _NO_TESTS):
        return None
    told = _told(copy)
    return told.read_text(encoding="utf-8").splitlines()[0] if told.is_file() else "pytest, which could not go on"


def _told(copy: Path) -> Path:
    return copy.with_suffix(".noticed")


def _pytest(copy: Path, arguments: list[str], plugin: Any) -> int:
    os.chdir(copy)
    ours = [str(copy), str(copy / "kernels")]
    sys.path[:0] = ours
    os.environ["PYTHONPATH"] = os.pathsep.join([*ours, *filter(None, [os.environ.get("PYTHONPATH")])])
    # As tests/conftest.py has it: what one run has compiled serves the others.
    os.environ["APPROX_TESTS_RUN"] = str(copy.parent / "run")
    os.makedirs(os.environ["APPROX_TESTS_RUN"], exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(dir=copy.parent)
    code = pytest.main(["-q", "-p", "no:cacheprovider", *arguments], plugins=[plugin])
    shutil.rmtree(tempfile.tempdir, ignore_errors=True)
    return int(code)


def _fork(run: Callable[[], int], log: Path) -> int:
    """Call a function in a process of its own, in a group that can be ended as one, its output in a file."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        os.setsid()
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        code = run()
    finally:
        os._exit(code)
