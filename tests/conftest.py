"""What every test stands on: no network, one thread, fixed seeds, and real data where this machine has it."""

import atexit
import gc
import os
import random
import shutil
import signal
import tempfile
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

# Read once at import by the libraries concerned, and inherited by the processes that tests start.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# As the command line does, which a test may call after another has imported transformers.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
import numpy as np
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)
# A runner in the background ignores Ctrl-C, and so would every process that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Outputs that one test keeps must not be found by another run of the tests, nor by another worker of this one; but what one
# worker has compiled serves all of them.
if "APPROX_TESTS_RUN" not in os.environ:
    os.environ["APPROX_TESTS_RUN"] = tempfile.mkdtemp(prefix="approx-tests-")
    atexit.register(shutil.rmtree, os.environ["APPROX_TESTS_RUN"], ignore_errors=True)
COMPILED = Path(os.environ["APPROX_TESTS_RUN"], "compiled")
COMPILED.mkdir(mode=0o700, exist_ok=True)
os.environ["APPROX_CACHE"] = tempfile.mkdtemp(dir=COMPILED.parent)
Path(os.environ["APPROX_CACHE"], "compiled").symlink_to(COMPILED)

# The same examples in every run; a loaded machine may take its time over one.
settings.register_profile("suite", deadline=None, derandomize=True, database=None)
settings.load_profile("suite")

ROOT = Path(__file__).resolve().parent.parent


def pytest_collection_finish():
    # What was imported stays; benchmarks collect garbage between repetitions, and would walk through all of it.
    gc.freeze()


def pytest_sessionfinish(session):
    gc.unfreeze()
    # Processes that run tests for another have none.
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
    """Reasons that a file lists less often or not at all, a line each; none where no file is named."""
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
    """A cache folder of the test's own, in which there is nothing but what has been compiled."""
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "compiled").symlink_to(COMPILED)
    monkeypatch.setenv("APPROX_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data; the test is skipped where there is none."""
    return _folder("APPROX_DATA_DIR", "data")


@pytest.fixture(scope="session")
def shared_checkpoints() -> Path:
    """The folder of trained exact checkpoints; the test is skipped where there is none."""
    return _folder("APPROX_CHECKPOINTS_DIR", "checkpoints")


def _folder(variable: str, name: str) -> Path:
    folder = Path(os.environ.get(variable, ROOT.parent / "shared" / name))
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there; set {variable} to the folder that holds it")
    return folder
