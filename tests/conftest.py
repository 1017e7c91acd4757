"""What every test stands on: no network, one thread, fixed seeds, and real data where this machine has it."""

import atexit
import gc
import os
import random
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

# Read once at import by the libraries concerned, and inherited by the processes that tests start.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Outputs that one test keeps must not be found by another run of the tests.
os.environ["APPROX_CACHE"] = tempfile.mkdtemp(prefix="approx-tests-")

import numpy as np
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)
# A runner in the background ignores Ctrl-C, and so would every process that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
atexit.register(shutil.rmtree, os.environ["APPROX_CACHE"], ignore_errors=True)

# The same examples in every run; a loaded machine may take its time over one.
settings.register_profile("suite", deadline=None, derandomize=True, database=None)
settings.load_profile("suite")

ROOT = Path(__file__).resolve().parent.parent


def pytest_collection_finish():
    # What was imported stays; benchmarks collect garbage between repetitions, and would walk through all of it.
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()


@pytest.fixture(autouse=True)
def seeded():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


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
