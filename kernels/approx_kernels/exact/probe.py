"""Which way to compute exact attention is the fastest on this machine: measured once for each kind of input."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from approx_kernels.exact.reference import dense_attention
from approx_kernels.exact.ways import DEFAULT, Way, ways
from approx_kernels.findings import Finding, clock, crowded, find

# Each speaks for the inputs up to the next, the last for all longer ones. Shorter ones than the first take so little time
# that in whole models nothing is gained any more, in bfloat16 a little lost.
LENGTHS = (128, 256, 512, 1024, 2048)
SIZES = (64, 128)
FEW = 8
# Keys at which errors are measured, and ways that are hopeless found out; as many as there are where those are fewer.
SHORT = 256
# Another way takes the default's place only when clearly faster: noise must not choose.
GAIN = 1.1
# What is this many times slower than the default costs no more time.
HOPELESS = 3.0
ROUNDS = 12
# So many at least, before anything is called hopeless too: whatever else runs may hold up one or two.
LEAST_ROUNDS = 3
SECONDS = 0.5
# The relative error up to which a result is called exact in its dtype; in 16 bits that is the distance of two numbers.
LABEL = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


@dataclass(frozen=True)
class Case:
    """A kind of input.

    Args:
        device: `cpu` or `cuda`.
        dtype: Of queries, keys and values.
        size: Head size, D, one of `SIZES`; the nearest that is no smaller, or the last.
        length: Keys, one of `LENGTHS`; the nearest that is no larger.
        few: Whether there are at most `FEW` queries.
        causal: Whether a query sees only its past.
        padded: Whether there is a mask.
        training: Whether gradients are wanted.
    """

    device: str
    dtype: torch.dtype
    size: int
    length: int
    few: bool = False
    causal: bool = False
    padded: bool = False
    training: bool = False

    def __str__(self) -> str:
        said = [
            "exact attention",
            str(self.dtype).removeprefix("torch."),
            f"head size {self.size}",
            f"{self.length}{'+' if self.length == LENGTHS[-1] else ''} keys",
            *(name for name in ("few", "causal", "padded", "training") if getattr(self, name)),
        ]
        return ", ".join(said)


def case_of(q: Tensor, k: Tensor, key_mask: Tensor | None, *, causal: bool) -> Case | None:
    """The kind that an input is of; None where the default is taken without a question."""
    keys = k.shape[2]
    if keys < LENGTHS[0] or q.device.type not in ("cpu", "cuda") or q.dtype not in LABEL:
        return None
    few = q.shape[2] <= FEW
    training = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
    length = max(length for length in LENGTHS if length <= keys)
    size = next((size for size in SIZES if size >= q.shape[3]), SIZES[-1])
    return Case(q.device.type, q.dtype, size, length, few, causal and not few, key_mask is not None, training)


def fastest(case: Case) -> tuple[str, Way]:
    """The name of the fastest way for a case, and the way; the default where the probe fails."""
    known = ways(case.device, padded=case.padded, few=case.few)
    chosen = find(case.device, str(case), partial(measure, case), otherwise={"way": DEFAULT}).get("way")
    # Kept by a version that knew others, it is as good as nothing.
    return (chosen, known[chosen]) if chosen in known else (DEFAULT, known[DEFAULT])


def measure(case: Case) -> Finding:
    """Try every way on made-up inputs of a case.

    Returns:
        `way`, the name of the fastest; `milliseconds` and `errors` (relative to float64) by name; `refused`, why the others
        are out of the question.

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
        # Short inputs tell a GPU's launches, not its work.
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


def _inputs(case: Case, length: int, oracle: bool = True) -> tuple[Any, Tensor | None, Tensor | None]:
    """Random q, k, v as a model lays them out, their mask, and what exact attention is in float64."""
    generator = torch.Generator().manual_seed(0)
    # Half of what is padded is padding in half of the samples.
    # As many heads as most models have: what a call costs whatever its size is not to choose.
    batch, heads = 4 if case.device == "cuda" else 1 + case.padded, 12
    rows = 1 if case.few else length
    q, k, v = (
        torch.randn(batch, n, heads, case.size, generator=generator).to(case.device, case.dtype).transpose(1, 2)
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
        exact = dense_attention(wide[0], wide[1], wide[2], real, causal=case.causal, scale=case.size**-0.5, dropout=0.0)
    return [x.requires_grad_(case.training) for x in (q, k, v)], real, exact


def _call(way: Way, inputs: Any, real: Tensor | None, case: Case) -> Callable[[], Tensor]:
    def call() -> Tensor:
        out = way(*inputs, real, causal=case.causal, scale=case.size**-0.5)
        if case.training:
            torch.autograd.grad(out, inputs, out.detach())
        return out

    return call


def _error(out: Tensor, exact: Tensor | None, real: Tensor | None) -> float:
    assert exact is not None
    difference = out.detach().double() - exact
    if real is not None and out.shape[2] == real.shape[1]:
        # What padded queries receive has no meaning.
        difference, exact = (x.transpose(1, 2)[real] for x in (difference, exact))
    return float(difference.norm() / exact.norm())


def _race(calls: dict[str, Callable[[], Tensor]], device: str) -> dict[str, float]:
    """Milliseconds of each call: the least on a CPU, which others disturb, the median on a GPU.

    Calls that are hopeless after a few rounds leave the race; the others go on until there is enough of them.
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
