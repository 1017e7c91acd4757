"""How one call is timed: warm-up, repetitions, and the gate that rejects disturbed ones."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import psutil
import torch

# A repetition is long enough to be told from the clock's own noise.
BLOCK_MS = 10.0
# A repetition that had less than this part of the cores it can use was disturbed by other processes.
GATE = 0.85
# Warm-up ends when two consecutive medians, of this many calls each, agree to this fraction.
WINDOW = 3
AGREEMENT = 0.02


@dataclass(frozen=True)
class Sample:
    """One repetition: milliseconds of a call, and the share of the threads' time it had the cores."""

    ms: float
    busy: float


def timed(call: Callable[[], object], repeats: int, device: torch.device) -> Sample:
    """Time `repeats` calls in a row and return the mean of one.

    CUDA events measure the device's time between two points of its queue; on the CPU it is the wall clock,
    with the CPU time of all threads beside it.
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
        Milliseconds of the very first call (it compiles, allocates and fills caches), and the median of
        the last ones.
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
    """Return how many calls make one repetition of `block_ms`, for a call that takes `ms`."""
    return max(1, math.ceil(block_ms / max(ms, 1e-3)))


def undisturbed(samples: list[Sample]) -> np.ndarray:
    """Tell which repetitions of one call are to be believed, [rounds] bool.

    A call that uses half of the threads by its nature has half of their time at best, so each call is held
    against its own best share (the 90th percentile) and not against all of the cores.
    """
    busy = np.array([sample.busy for sample in samples])
    return busy >= GATE * np.quantile(busy, 0.9) if len(busy) else np.zeros(0, dtype=bool)


class Neighbours:
    """Watches what other processes take of the machine's cores between its making and `crowded()`.

    The gate above compares a call with its own best moments and cannot see a load that never lets up.
    """

    def __init__(self) -> None:
        self._begun = self._now()

    def crowded(self) -> bool:
        """Tell whether others left fewer cores than this process's threads could use."""
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
