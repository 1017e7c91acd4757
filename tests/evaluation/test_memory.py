"""Memory: what a call needs, how much is available, and how errors are recognised."""

import gc
from pathlib import Path

import psutil
import pytest
import torch

from approx.evaluation import timing
from approx.evaluation.timing import is_out_of_memory, memory_limit, peak_mb

CPU = torch.device("cpu")
MEGABYTE = 1_000_000


class Ring:
    """An object that only the garbage collector frees."""

    def __init__(self, content: torch.Tensor) -> None:
        self.content, self.itself = content, self


def test_garbage_that_is_collected_during_the_call_does_not_lower_its_peak():
    gc.collect()
    Ring(torch.zeros(2 * MEGABYTE, dtype=torch.uint8))

    def call() -> torch.Tensor:
        gc.collect()
        return torch.zeros(MEGABYTE, dtype=torch.uint8)

    assert peak_mb(call, CPU) == pytest.approx(1.0, rel=0.01)


def test_peak_is_the_largest_amount_allocated_at_once():
    def call() -> None:
        for _ in range(3):
            torch.zeros(MEGABYTE, dtype=torch.uint8)

    assert peak_mb(call, CPU) == pytest.approx(1.0, rel=0.01)
    assert peak_mb(lambda: None, CPU) == 0.0


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("not enough memory"), True),
        (RuntimeError("can't allocate memory"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("Expected size 3"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_recognises_errors_of_exhausted_memory(error, expected):
    assert is_out_of_memory(error) is expected


@pytest.mark.skipif(not psutil.LINUX, reason="Linux alone hands out memory that it does not have")
def test_keeps_and_restores_the_users_memory_limit():
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    lines = Path("/proc/self/status").read_text().splitlines()
    current = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))
    available = timing.available_bytes(torch.device("cpu"))
    with memory_limit(CPU):
        inside, _ = resource.getrlimit(resource.RLIMIT_DATA)
        assert inside == pytest.approx(current + available, rel=0.1)
    for limit in (current + available // 2, current + 10 * available):
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
        try:
            with memory_limit(CPU):
                inside, _ = resource.getrlimit(resource.RLIMIT_DATA)
            assert inside <= limit
            assert inside == pytest.approx(min(limit, current + available), rel=0.1)
            assert resource.getrlimit(resource.RLIMIT_DATA) == (limit, hard)
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def test_another_device_has_no_limit():
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with memory_limit(torch.device("meta")):
        assert resource.getrlimit(resource.RLIMIT_DATA) == before


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [("max", "5", None), ("1000\n", "400\n", 600), ("1000", "1001", 0), (None, "5", None)],
)
def test_a_container_may_have_less_than_its_machine(limit, used, expected, tmp_path, monkeypatch):
    folder = tmp_path / "sys" / "fs" / "cgroup"
    folder.mkdir(parents=True)
    (folder / "memory.current").write_text(used)
    if limit is not None:
        (folder / "memory.max").write_text(limit)
    monkeypatch.setattr(timing, "Path", lambda name: tmp_path / name.removeprefix("/"))
    machine = psutil.virtual_memory().available
    assert timing.available_bytes(torch.device("cpu")) == pytest.approx(
        machine if expected is None else expected, rel=0.2
    )
