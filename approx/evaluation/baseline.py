"""The baseline: the fastest exact attention on this device for these inputs."""

import statistics
from collections.abc import Callable, Mapping

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from approx.evaluation.interleave import OK, Runner
from approx.evaluation.timing import repeats_for, timed

BACK_ENDS = {
    "cpu": {"math": SDPBackend.MATH},
    "cuda": {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "math": SDPBackend.MATH,
    },
}
DEFAULT = "default SDPA"
# Speed-up that a back end needs to replace the default: noise must not choose the baseline.
GAIN = 1.02
# Candidates this much slower than the best at their second call are not timed further.
HOPELESS = 1.5
REPETITIONS = 5


def best_exact(
    call: Callable[[], object],
    device: torch.device,
    others: Mapping[str, Callable[[], object]] | None = None,
    begin: Callable[[], object] | None = None,
) -> tuple[str, Callable[[], object]]:
    """Choose the fastest exact attention that fits in memory.

    Args:
        call: Runs one forward pass of the exact model with SDPA.
        device: The device.
        others: Name -> call with another exact implementation; they compete with SDPA's back ends.
        begin: Prepares one call of any of them, untimed; None if calls need no preparation.

    Returns:
        The name of the baseline, such as "default SDPA" or "cudnn SDPA", and the call that uses it. If nothing runs,
        the default.
    """
    calls = {DEFAULT: call, **(others or {})} | {
        f"{name} SDPA": _through(back_end, call) for name, back_end in BACK_ENDS[device.type].items()
    }
    milliseconds: dict[str, float] = {}
    for name, candidate in calls.items():
        runner = Runner(candidate, begin)
        try:
            # The first call also compiles and allocates.
            runner.attempt(lambda runner=runner: runner.prepared()())
            sample = runner.attempt(lambda runner=runner: timed(runner.prepared(), 1, device))
        except RuntimeError as error:
            if name == DEFAULT or "kernel" not in str(error).lower():
                raise
            continue
        if runner.status == OK and sample:
            milliseconds[name] = sample.ms
    if not milliseconds:
        return DEFAULT, call

    quickest = min(milliseconds.values())
    near = [name for name, ms in milliseconds.items() if ms < HOPELESS * quickest]
    if len(near) > 1:
        samples: dict[str, list[float]] = {name: [] for name in near}
        for _ in range(REPETITIONS):
            for name in near:
                repeats = 1 if begin else repeats_for(milliseconds[name])
                samples[name].append(timed(Runner(calls[name], begin).prepared(), repeats, device).ms)
        milliseconds = {name: statistics.median(ms) for name, ms in samples.items()}
    best = min(near, key=lambda name: milliseconds[name])
    if DEFAULT in near and milliseconds[DEFAULT] < GAIN * milliseconds[best]:
        best = DEFAULT
    return best, calls[best]


def _through(back_end: SDPBackend, call: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        with sdpa_kernel(back_end):
            return call()

    return run
