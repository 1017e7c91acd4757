"""The environment of all tests: no network, one thread, fixed seeds, and optional real data."""

import atexit
import gc
import os
import random
import shutil
import signal
import sys
import tempfile
import tomllib
from collections import Counter, defaultdict
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import pytest

# Libraries read these on import, and child processes inherit them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# As in the command line, which would set it too late if another test has imported transformers.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
import numpy as np
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)
# If the test runner ignores Ctrl-C, as in the background, so would every process that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Stored outputs must not be shared with other runs or workers, but compiled code is shared by all workers.
if "APPROX_TESTS_RUN" not in os.environ:
    os.environ["APPROX_TESTS_RUN"] = tempfile.mkdtemp(prefix="approx-tests-")
    atexit.register(shutil.rmtree, os.environ["APPROX_TESTS_RUN"], ignore_errors=True)
COMPILED = Path(os.environ["APPROX_TESTS_RUN"], "compiled")
COMPILED.mkdir(mode=0o700, exist_ok=True)
os.environ["APPROX_CACHE"] = tempfile.mkdtemp(dir=COMPILED.parent)
Path(os.environ["APPROX_CACHE"], "compiled").symlink_to(COMPILED)

# The same examples in every run, without a deadline, since the machine may be busy.
settings.register_profile("suite", deadline=None, derandomize=True, database=None)
settings.load_profile("suite")

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser):
    parser.addoption("--sample", action="store_true", help="run some cases of tests that are marked with `sample`")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Leave out cases of tests that have many near-equal ones; which ones stay depends only on their names."""
    if not config.getoption("--sample"):
        return
    cases = defaultdict(list)
    for item in items:
        if mark := item.get_closest_marker("sample"):
            cases[item.nodeid.partition("[")[0], mark.args[0]].append(item)
    left_out = set()
    for (_, number), same_family in cases.items():
        left_out.update(sorted(same_family, key=lambda item: sha256(item.nodeid.encode()).digest())[number:])
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    # After a CUDA error its process cannot use the GPU any more, and every other test in it would fail too. A worker of
    # pytest-xdist ends instead; the test counts as failed, and another worker goes on with the others.
    broken = call.excinfo is not None and "CUDA error" in str(call.excinfo.value)
    if broken and "PYTEST_XDIST_WORKER" in os.environ:
        sys.stderr.write(f"{item.nodeid} broke its process:\n{report.longreprtext}\n")
        sys.stderr.flush()
        os._exit(1)
    return report


def pytest_collection_finish():
    # Benchmarks collect garbage between repetitions and would traverse all imported modules.
    gc.freeze()


def pytest_sessionfinish(session):
    gc.unfreeze()
    # Worker processes have no terminal reporter.
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter and unexpected_skips(_skips(reporter), os.environ.get("APPROX_EXPECTED_SKIPS")):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    if reasons := _skips(terminalreporter):
        terminalreporter.section("why tests were skipped")
        for reason, count in sorted(reasons.items()):
            terminalreporter.write_line(f"{count:5}  {reason}")
    if wrong := unexpected_skips(reasons, os.environ.get("APPROX_EXPECTED_SKIPS")):
        terminalreporter.section("skipped without being expected", red=True)
        for line in wrong:
            terminalreporter.write_line(line)


def _skips(reporter) -> Counter[str]:
    return Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reporter.stats.get("skipped", []))


def unexpected_skips(reasons: Mapping[str, int], expected: str | None) -> list[str]:
    """Skips beyond those that the file lists, one line per reason; empty without a file."""
    if not expected:
        return []
    listed = tomllib.loads((ROOT / expected).read_text(encoding="utf-8"))["skips"]
    most = {reason: max((n for words, n in listed.items() if words in reason), default=0) for reason in reasons}
    return [f"{n} skipped, {most[reason]} expected: {reason}" for reason, n in reasons.items() if n > most[reason]]


@pytest.fixture(autouse=True)
def seeded():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def own_cache(monkeypatch, tmp_path) -> Path:
    """A cache folder for one test, empty except for compiled code."""
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "compiled").symlink_to(COMPILED)
    monkeypatch.setenv("APPROX_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data; without it, the test is skipped."""
    return _folder("APPROX_DATA_DIR", "data")


@pytest.fixture(scope="session")
def shared_checkpoints() -> Path:
    """The folder of trained exact checkpoints; without it, the test is skipped."""
    return _folder("APPROX_CHECKPOINTS_DIR", "checkpoints")


def _folder(variable: str, name: str) -> Path:
    folder = Path(os.environ.get(variable, ROOT.parent / "shared" / name))
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there; set {variable} to the folder that holds it")
    return folder
