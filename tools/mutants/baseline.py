"""What the tests of a room do where nothing is changed. It is kept, and only test files that have changed run again."""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from changes import Mutant
from copies import NO_TESTS, Room, fork, run_pytest
from watch import Recorder

# What no test of a room reads.
_APART = ("tools/mutants/", "runs/", "CHANGELOG.md")


@dataclass(frozen=True)
class Baseline:
    """What the tests do where nothing is changed; files as in the repository."""

    lines: dict[str, dict[int, list[str]]]
    seconds: dict[str, float]
    processes: set[str]


def baseline_of(room: Room, kept: Path) -> Baseline:
    """Run those tests of the room that have not run as they are now, and put what they did together with what others did.

    Args:
        room: The room.
        kept: The file that holds what each test file did, and is written again.

    Raises:
        RuntimeError: if a test fails, or there is none.
    """
    copy = room.copies[0]
    files = {path.relative_to(copy).as_posix(): path for path in sorted(copy.rglob("*")) if path.is_file()}
    files = {name: path for name, path in files.items() if path.suffix != ".pyc" and not name.startswith(_APART)}
    tests = {
        name: _digest({name: path})
        for name, path in files.items()
        if path.name.startswith("test_") and name.startswith(tuple(f"{folder}/" for folder in room.tests))
    }
    # A test file stands on everything but other test files.
    ground = _digest(
        {name: path for name, path in files.items() if not path.name.startswith("test_")},
        version("torch"),
        version("transformers"),
        f"slow {room.slow}",
    )
    known = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
    done = known.get("files", {}) if known.get("ground") == ground else {}
    done = {name: did for name, did in done.items() if tests.get(name) == did["sha256"]}
    if changed := [name for name in tests if name not in done]:
        for name, did in _run(room, changed).items():
            done[name] = {"sha256": tests[name], **did}
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps({"ground": ground, "files": done}), encoding="utf-8")
    if not any(did["seconds"] for did in done.values()):
        raise RuntimeError(f"there are no tests in {', '.join(room.tests)}")
    return _together(done.values())


def _run(room: Room, files: list[str]) -> dict[str, dict[str, Any]]:
    """By test file the lines that its tests ran, their seconds, and those that started processes."""
    copy, recorded = room.copies[0], room.scratch / "baseline.json"

    def run() -> int:
        recorder = Recorder(copy / room.sources)
        code = run_pytest(room, copy, files, recorder)
        recorded.write_text(json.dumps(recorder.result()))
        return code

    log = room.scratch / "baseline.log"
    _, status = os.waitpid(fork(run, log), 0)
    if os.waitstatus_to_exitcode(status) not in (0, NO_TESTS):
        raise RuntimeError("the tests fail although nothing is changed; fix them first:\n" + log.read_text()[-3000:])
    return by_test_file(json.loads(recorded.read_text()), files, copy)


def by_test_file(recorded: dict[str, Any], files: list[str], copy: Path) -> dict[str, dict[str, Any]]:
    """Split what a `Recorder` saw among the test files; lines that only imports ran belong to all of them."""
    result: dict[str, dict[str, Any]] = {name: {"lines": {}, "seconds": {}, "processes": []} for name in files}
    for test, seconds in recorded["seconds"].items():
        result[_file_of(test)]["seconds"][test] = seconds
    for test in recorded["processes"]:
        result[_file_of(test)]["processes"].append(test)
    for source, by_line in recorded["lines"].items():
        name = Path(source).relative_to(copy).as_posix()
        for line, tests in by_line.items():
            for file in files if not tests else ():
                result[file]["lines"].setdefault(name, {})[line] = []
            for test in tests:
                result[_file_of(test.partition(" ")[2])]["lines"].setdefault(name, {}).setdefault(line, []).append(test)
    return result


def _together(done: Iterable[dict[str, Any]]) -> Baseline:
    lines: dict[str, dict[int, list[str]]] = {}
    seconds: dict[str, float] = {}
    processes: set[str] = set()
    for did in done:
        seconds |= did["seconds"]
        processes |= set(did["processes"])
        for name, by_line in did["lines"].items():
            for line, tests in by_line.items():
                lines.setdefault(name, {}).setdefault(int(line), []).extend(tests)
    return Baseline(lines, seconds, processes)


def _digest(files: dict[str, Path], *more: str) -> str:
    digest = hashlib.sha256("\0".join(more).encode())
    for name, path in files.items():
        digest.update(f"\0{name}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _file_of(test: str) -> str:
    return test.partition("::")[0]


def tests_to_run(baseline: Baseline, mutant: Mutant) -> dict[str, float]:
    """The tests that can notice a mutant, and the seconds of each.

    Those that run one of its lines; where a fixture does, all tests of the file; where nothing but an import does, all
    there are; and always those that start processes.
    """
    by_line = baseline.lines.get(mutant.file, {})
    ran = {name for line in mutant.lines for name in by_line.get(line, ())}
    inside = {name.removeprefix("call ") for name in ran}
    prepared = {name.removeprefix("setup ").partition("::")[0] for name in ran if name.startswith("setup ")}
    imported = not ran and any(line in by_line for line in mutant.lines)
    return {
        test: seconds
        for test, seconds in baseline.seconds.items()
        if imported or test in inside or test in baseline.processes or test.partition("::")[0] in prepared
    }
