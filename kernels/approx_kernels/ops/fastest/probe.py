"""Measure the fastest way to compute exact attention on this machine; used only by `approx doctor --probe`."""

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from approx_kernels.dispatch.findings import Finding
from approx_kernels.ops.exact.reference import materialised_attention
from approx_kernels.ops.fastest.choice import Case
from approx_kernels.ops.fastest.ways import DEFAULT, Way, ways

# Head size of the generated inputs.
SIZE = 64
# Keys for measuring errors and detecting hopeless ways; fewer if the case has fewer.
SHORT = 256
# Another way replaces the default only if clearly faster, so that noise does not decide.
GAIN = 1.1
# A way this many times slower than the default is not timed further.
HOPELESS = 3.0
ROUNDS = 12
# Rounds before a way is called hopeless: other processes may delay one or two.
LEAST_ROUNDS = 3
SECONDS = 0.5
# Running programs per core above which they disturb each other; this one may use all cores itself.
CROWDED = 1.5
# Largest relative error that counts as exact in a dtype; in 16 bits the distance between two numbers.
LABEL = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def measure(case: Case) -> Finding:
    """Try every way on random inputs of a case.

    Returns:
        `way`, the name of the fastest; `milliseconds` and `errors` (relative to float64) by name; `refused`, why the
        others are not eligible.

    Raises:
        RuntimeError: if the default itself cannot run; MemoryError likewise.
    """
    errors: dict[str, float] = {}
    refused: dict[str, str] = {}
    known = ways(case.device, padded=case.padded, few=case.few)
    with torch.inference_mode(False), torch.set_grad_enabled(case.training), torch.autocast(case.device, enabled=False):
        length = min(SHORT, case.length)
        short, real, exact = _inputs(case, length)
        calls = {}
        for name, way in known.items():
            try:
                calls[name] = _call(way, short, real, case)
                errors[name] = _error(calls[name](), exact, real)
            except (RuntimeError, MemoryError) as error:
                if name == DEFAULT:
                    raise
                refused[name] = str(error).partition("\n")[0]
                continue
            if errors[name] > LABEL[case.dtype] and name != DEFAULT:
                refused[name] = f"error {errors[name]:.1e} is above {LABEL[case.dtype]:.1e}"
        calls = {name: call for name, call in calls.items() if name not in refused}
        times = _race(calls, case.device)
        # Short inputs measure a GPU's launches rather than its work.
        hopeless = HOPELESS if case.device == "cpu" or length == case.length else float("inf")
        for name in [name for name in times if times[name] > hopeless * times[DEFAULT]]:
            refused[name] = f"{times[name] / times[DEFAULT]:.1f} times the default's time at {length} keys"
        times = {name: ms for name, ms in times.items() if name not in refused}
        if length < case.length:
            long, real, _ = _inputs(case, case.length, oracle=False)
            calls = {name: _call(known[name], long, real, case) for name in times}
            for call in calls.values():
                call()
            times = _race(calls, case.device)
    best = min(times, key=lambda name: times[name])
    if times[DEFAULT] < GAIN * times[best]:
        best = DEFAULT
    return {
        "way": best,
        "milliseconds": {name: round(ms, 4) for name, ms in times.items()},
        "errors": {name: float(f"{error:.3g}") for name, error in errors.items()},
        "refused": refused,
    } | ({"crowded": True} if case.device == "cpu" and crowded() else {})


def crowded() -> bool:
    """Whether other programs use so many cores that measurements would be unreliable."""
    # Systems without a load average count as idle.
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return load > CROWDED * (os.cpu_count() or 1)


@contextlib.contextmanager
def clock() -> Iterator[Callable[[], float]]:
    """A clock, in seconds, for CPU work within the context.

    It is wall time. If other programs would disturb that, this process uses a single thread within the context, and the
    clock is that thread's CPU time.
    """
    threads = torch.get_num_threads()
    if threads > 1 and crowded():
        torch.set_num_threads(1)
    try:
        yield time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    finally:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def _inputs(case: Case, length: int, oracle: bool = True) -> tuple[Any, Tensor | None, Tensor | None]:
    """Random q, k, v laid out as in a model, their mask, and exact attention in float64."""
    generator = torch.Generator().manual_seed(0)
    # Half of the samples are padded by half.
    # As many heads as most models have, so that fixed costs per call do not decide.
    batch, heads = 4 if case.device == "cuda" else 1 + case.padded, 12
    rows = 1 if case.few else length
    q, k, v = (
        torch.randn(batch, n, heads, SIZE, generator=generator).to(case.device, case.dtype).transpose(1, 2)
        for n in (rows, length, length)
    )
    real = None
    if case.padded:
        real = torch.ones(batch, length, dtype=torch.bool)
        real[::2, length // 2 :] = False
        real = real.to(case.device)
    exact = None
    if oracle:
        wide = [x.detach().double() for x in (q, k, v)]
        exact = materialised_attention(
            wide[0], wide[1], wide[2], real, causal=case.causal, scale=SIZE**-0.5, dropout=0.0
        )
    return [x.requires_grad_(case.training) for x in (q, k, v)], real, exact


def _call(way: Way, inputs: Any, real: Tensor | None, case: Case) -> Callable[[], Tensor]:
    def call() -> Tensor:
        out = way(*inputs, real, causal=case.causal, scale=SIZE**-0.5)
        if case.training:
            torch.autograd.grad(out, inputs, out.detach())
        return out

    return call


def _error(out: Tensor, exact: Tensor | None, real: Tensor | None) -> float:
    assert exact is not None
    difference = out.detach().double() - exact
    if real is not None and out.shape[2] == real.shape[1]:
        # Outputs of padded queries are undefined.
        difference, exact = (x.transpose(1, 2)[real] for x in (difference, exact))
    return float(difference.norm() / exact.norm())


def _race(calls: dict[str, Callable[[], Tensor]], device: str) -> dict[str, float]:
    """Milliseconds of each call: the minimum on a CPU, which others disturb, the median on a GPU.

    Hopeless calls drop out after a few rounds; the others continue until there are enough measurements.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    best = statistics.median if device == "cuda" else min
    begun = time.perf_counter()
    with clock() as now:
        for done in range(1, ROUNDS + 1):
            for name, call in calls.items():
                samples[name].append(_cuda_milliseconds(call) if device == "cuda" else _milliseconds(call, now))
            if done < LEAST_ROUNDS:
                continue
            if time.perf_counter() - begun > SECONDS:
                break
            limit = HOPELESS * best(samples[DEFAULT])
            calls = {name: call for name, call in calls.items() if name == DEFAULT or best(samples[name]) < limit}
    return {name: best(ms) for name, ms in samples.items()}


def _milliseconds(call: Callable[[], Tensor], now: Callable[[], float]) -> float:
    begun = now()
    call()
    return (now() - begun) * 1e3


def _cuda_milliseconds(call: Callable[[], Tensor]) -> float:
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    call()
    last.record()
    last.synchronize()
    return first.elapsed_time(last)
