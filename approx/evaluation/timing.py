"""Time one call: warm-up, repetitions, and rejection of disturbed ones."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import psutil
import torch

# Minimum duration of a repetition, well above the noise of the clock.
BLOCK_MS = 10.0
# A repetition with less than this share of the cores it can use was disturbed by other processes.
GATE = 0.85
# Warm-up ends when two consecutive medians, of this many calls each, agree to this fraction.
WINDOW = 3
AGREEMENT = 0.02


@dataclass(frozen=True)
class Sample:
    """One repetition: milliseconds per call, and CPU time as a share of all threads' time."""

    ms: float
    busy: float


def timed(call: Callable[[], object], repeats: int, device: torch.device) -> Sample:
    """Time `repeats` consecutive calls and return their mean.

    On CUDA, events measure the device's time; on the CPU, wall clock and CPU time of all threads are measured.
    """
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        torch.cuda.synchronize(device)
        return Sample(begin.elapsed_time(end) / repeats, 1.0)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        call()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Sample(wall * 1e3 / repeats, cpu / max(wall * torch.get_num_threads(), 1e-9))


def warm_up(call: Callable[[], object], device: torch.device, seconds: float) -> tuple[float, float]:
    """Call until the time is stable or `seconds` have passed.

    Returns:
        Milliseconds of the first call, which compiles, allocates and fills caches, and the median of the last calls.
    """
    first = timed(call, 1, device).ms
    times: list[float] = []
    begun = time.perf_counter()
    while True:
        times.append(timed(call, 1, device).ms)
        last, before = times[-WINDOW:], times[-2 * WINDOW : -WINDOW]
        middle = statistics.median(last)
        stable = len(before) == WINDOW and abs(middle / statistics.median(before) - 1) < AGREEMENT
        if stable or time.perf_counter() - begun > seconds:
            return first, middle


def repeats_for(ms: float, block_ms: float = BLOCK_MS) -> int:
    """Return the number of calls that fill a repetition of `block_ms` if each takes `ms`."""
    return max(1, math.ceil(block_ms / max(ms, 1e-3)))


def undisturbed(samples: list[Sample]) -> np.ndarray:
    """Return which repetitions of one call were undisturbed, [rounds] bool.

    A call may use only some of the threads, so its share of CPU time is compared with its own 90th percentile, not with
    all cores.
    """
    busy = np.array([sample.busy for sample in samples])
    return busy >= GATE * np.quantile(busy, 0.9) if len(busy) else np.zeros(0, dtype=bool)


class Neighbours:
    """Measures the CPU time of other processes from its construction to `crowded()`.

    `undisturbed` compares a call with its own best repetitions, so it cannot see a constant load.
    """

    def __init__(self) -> None:
        self._begun = self._now()

    def crowded(self) -> bool:
        """Whether other processes left fewer cores than this process's threads can use."""
        wall, busy, own = (now - then for now, then in zip(self._now(), self._begun, strict=True))
        taken = max(busy - own, 0.0) / max(wall, 1e-9)
        return (psutil.cpu_count() or 1) - taken < GATE * torch.get_num_threads()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        times = psutil.cpu_times()._asdict()
        # Linux counts guest time inside user time as well.
        resting = ("idle", "iowait", "guest", "guest_nice")
        busy = sum(seconds for name, seconds in times.items() if name not in resting)
        return time.perf_counter(), busy, time.process_time()


def wait_idle(seconds: float, look: float = 1.0) -> bool:
    """Wait until other processes leave this one the cores that its threads can use.

    Args:
        seconds: Maximum wait.
        look: Seconds over which the load is measured.

    Returns:
        Whether the cores were free in the end.
    """
    begun = time.perf_counter()
    while True:
        neighbours = Neighbours()
        time.sleep(look)
        if not neighbours.crowded():
            return True
        if time.perf_counter() - begun > seconds:
            return False
