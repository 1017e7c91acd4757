"""Measure the memory of a call, and detect running out of memory."""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.autograd.profiler_util import MEMORY_EVENT_NAME


def peak_mb(call: Callable[[], object], device: torch.device) -> float:
    """Measure the peak memory of one untimed call in megabytes (1e6 bytes), beyond what was allocated before.

    CUDA: the caching allocator's own peak. CPU: the peak of the running sum of all allocations and releases that
    PyTorch's allocator reports to its profiler. It counts tensors and temporaries to the byte and is reproducible,
    unlike the resident set of the process, which keeps freed pages. Scratch space of MKL and oneDNN is not counted.
    """
    gc.collect()
    if device.type == "cuda":
        resident = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - resident) / 1e6

    # The profiler's native logger writes a line to stderr at every start unless told not to.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        call()
    # The stubs lack `nbytes`, and do not know that a finished profile has results.
    events: list[Any] = profile.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    total = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == MEMORY_EVENT_NAME:
            total += event.nbytes()
            peak = max(peak, total)
    return peak / 1e6


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on CPU or GPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    words = (
        "not enough memory",
        "can't allocate memory",
        "DefaultCPUAllocator",
        "out of memory",
        "ALLOC_FAILED",
    )
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


@contextmanager
def memory_limit(device: torch.device) -> Iterator[None]:
    """Make running out of CPU memory raise an exception within the context.

    Linux overcommits memory and kills the process that uses it. A limit on the process's data, at its current size
    plus the available memory, makes the allocation fail instead. Does nothing on CUDA, which raises by itself, and
    on systems without /proc.
    """
    status = Path("/proc/self/status")
    if device.type != "cpu" or not status.exists():
        yield
        return
    import resource

    held = next(int(line.split()[1]) * 1024 for line in status.open() if line.startswith("VmData:"))
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = held + available_bytes(device)
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def available_bytes(device: torch.device) -> int:
    """Return the available memory of a device: on CPU the machine's or the container's, whichever is less."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = psutil.virtual_memory().available
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, int(text) - int(used.read_text()))
    return max(available, 0)
