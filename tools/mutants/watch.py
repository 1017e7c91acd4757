"""Plugins of pytest: which test runs which line, and only the tests that can notice a change, the likeliest first."""

import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coverage  # pyright: ignore[reportMissingImports]  # it is of the extra `mutants`
import pytest


class Recorder:
    """Records what each test runs, how long it takes and whether it starts processes, whose lines nobody sees.

    Args:
        folder: The sources to watch.
    """

    def __init__(self, folder: Path) -> None:
        self._coverage = coverage.Coverage(data_file=None, source=[str(folder)], config_file=False)
        self.seconds: dict[str, float] = {}
        self.processes: set[str] = set()
        self._started: list[str] = []
        sys.addaudithook(self._hear)
        # From before the first import of ours, which may be that of a conftest.py.
        self._coverage.start()

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen":
            executable, command, *_ = arguments
            self._started.append(str(executable or command))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Time a test, and see whether processes ended that it had started."""
        began, spent = time.perf_counter(), _of_children()
        self._started.clear()
        result = yield
        self.seconds[item.nodeid] = time.perf_counter() - began
        # A compiler runs nothing of ours. What ends may also have been started earlier, or forked.
        compilers_alone = self._started and not any("python" in Path(one).name for one in self._started)
        if _of_children() > spent and not compilers_alone:
            self.processes.add(item.nodeid)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        """Lines of fixtures may serve other tests of the file too."""
        self._coverage.switch_context("setup " + item.nodeid)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Lines of the test itself."""
        self._coverage.switch_context("call " + item.nodeid)
        return (yield)

    def pytest_sessionfinish(self) -> None:
        """Stop watching."""
        self._coverage.stop()

    def result(self) -> dict[str, Any]:
        """What was recorded, with names of tests and files in place of coverage's own."""
        data = self._coverage.get_data()
        lines = {
            file: {str(line): sorted(filter(None, tests)) for line, tests in data.contexts_by_lineno(file).items()}
            for file in data.measured_files()
        }
        return {
            "lines": lines,
            "seconds": self.seconds,
            "processes": sorted(self.processes),
        }


class Chosen:
    """Runs chosen tests only, in a given order of files, in each the quick ones first.

    Args:
        seconds: How long each of the tests takes.
        files: The order of their files.
        noticed: Where the name of the test that failed is written.
    """

    def __init__(self, seconds: dict[str, float], files: list[str], noticed: Path) -> None:
        self._seconds, self._files, self._noticed = seconds, files, noticed

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Choose and sort."""
        chosen = [item for item in items if item.nodeid in self._seconds]
        items[:] = sorted(
            chosen, key=lambda item: (self._files.index(item.nodeid.partition("::")[0]), self._seconds[item.nodeid])
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Tell which test noticed."""
        if report.failed:
            with self._noticed.open("a", encoding="utf-8") as file:
                file.write(report.nodeid + "\n")


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
