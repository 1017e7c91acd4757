"""Copies of the repository, and processes that run tests in them."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

# What pytest says where it found none.
NO_TESTS = 5


@dataclass(frozen=True)
class Room:
    """What is changed and what must notice: sources and tests of `root`, run in `jobs` copies under `scratch`.

    Attributes:
        slow: Whether tests marked slow run too.
    """

    root: Path
    sources: str
    tests: list[str]
    scratch: Path
    jobs: int
    slow: bool = True

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


def run_pytest(room: Room, copy: Path, arguments: list[str], plugin: Any) -> int:
    """Run tests of a copy, on its own code; the exit code."""
    os.chdir(copy)
    ours = [str(copy), str(copy / "kernels")]
    sys.path[:0] = ours
    os.environ["PYTHONPATH"] = os.pathsep.join([*ours, *filter(None, [os.environ.get("PYTHONPATH")])])
    # As tests/conftest.py has it: what one run has compiled serves the others.
    os.environ["APPROX_TESTS_RUN"] = str(copy.parent / "run")
    os.makedirs(os.environ["APPROX_TESTS_RUN"], exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(dir=copy.parent)
    # The slow tests may notice what the quick ones cannot.
    every = ["-m", "not gpu and not network" + " and not slow" * (not room.slow)]
    code = pytest.main(["-q", "-p", "no:cacheprovider", *every, *arguments], plugins=[plugin])
    shutil.rmtree(tempfile.tempdir, ignore_errors=True)
    return int(code)


def fork(run: Callable[[], int], log: Path) -> int:
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
