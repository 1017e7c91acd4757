"""One part of `bench/gpu.py`: each contender in turns with exact attention, eagerly or as CUDA graphs, and its measurements."""

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from approx.evaluation.statistics import ratio_interval
from approx.evaluation.timing import OK, OUT_OF_MEMORY, Runner, is_out_of_memory, race, timed
from bench import gpu_cases, gpu_models
from bench.gpu_graphs import captured
from bench.gpu_machine import watched
from bench.gpu_peers import COMPILED_TRAIN, rotating
from bench.gpu_workers import LostError, Row, Say, in_one_line

T = TypeVar("T")
_CPU = torch.device("cpu")

ROUNDS, BLOCK_MS, WARM_UP_SECONDS = 20, 2.0, 0.05
# Twenty turns of slower contenders would take the time of others.
SLOW_MS = 200.0
# A whole model takes longer, and varies less.
ROUNDS_OF_MODELS = 10
# Minimum duration of a graph, and maximum number of calls in it.
GRAPH_MS, MOST_CALLS = 1.0, 64
# Enough for an interval of two digits; the default would take longer than the rounds.
RESAMPLES = 1000


class Part(NamedTuple):
    """A race: the contenders of a suite on one kind of inputs, `eager` or as a `graph`."""

    suite: str
    mode: str
    dtype: str
    length: int
    batch: int
    way: str

    @property
    def id(self) -> str:
        """The name that `--only` matches, and that of its file."""
        return f"{self.suite}/{self.mode}/{self.dtype}/{self.length}x{self.batch}/{self.way}"


def importance(name: str, role: str) -> int:
    """Place of a contender in the order in which a part measures them."""
    if role in ("base", "exact"):
        return 0
    return {"ceiling": 1, "user": 1, "peer": 3}.get(role, 2 if name in gpu_cases.FIRST else 4)


def compiled_for(part: Part) -> bool:
    """Whether it includes contenders that must be compiled for its shape."""
    whole = part.batch * part.length == gpu_cases.TOKENS and part.dtype == "bfloat16"
    return whole and part.suite in gpu_cases.SUITES and (part.mode == "forward" or part.length in COMPILED_TRAIN)


@dataclass(eq=False)
class Guarded(Runner):
    """A runner that turns errors into its status; if the device no longer responds, the process is abandoned.

    Args:
        name: Name of the contender.
        role: Role of the contender.
        say: Receives the name and role before the contender runs.
        device: Device it runs on.
        calls: Calls of the contender per call of the runner.
    """

    name: str = ""
    role: str = ""
    say: Say = print
    device: torch.device = _CPU
    calls: int = 1
    first_s: float | None = None

    def attempt(self, action: Callable[[], T]) -> T | None:
        """Run a function for this runner; returns None if it fails."""
        self.say({"name": self.name, "role": self.role})
        try:
            return action()
        except Exception as error:  # one that fails must not stop the others
            self.status = OUT_OF_MEMORY if is_out_of_memory(error) else in_one_line(error)
        # Outside the handler, where the traceback no longer holds the tensors of the failed call.
        gc.collect()
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except RuntimeError:
                raise LostError(self.status) from None
        return None


Contenders = Iterator[tuple[str, str, Callable[[], object], int]]


def measure(
    part: Part,
    device: torch.device,
    say: Say,
    refuse: Callable[[str, str], str | None] = lambda name, role: None,
    before: Mapping[str, Row] | None = None,
    rounds: int | None = None,
) -> dict[str, Any]:
    """Run all contenders of a part: exact attention first, then each other one in turns with the base and the best exact.

    Args:
        part: The part.
        device: Its device.
        say: Receives the name and role of each contender before it runs, and its row as soon as it is measured.
        refuse: From a contender's name and role to the reason not to run it, or None.
        before: The rows of an earlier process that was lost; other contenders than exact attention are not run again.
        rounds: Turns of each; None for as many as a record needs.
    """
    begun, known = time.perf_counter(), before or {}
    rounds = rounds or (ROUNDS if part.suite in gpu_cases.SUITES else ROUNDS_OF_MODELS)

    def prepared(name: str, role: str, call: Callable[[], object], sets: int) -> Guarded:
        runner = Guarded(call, name=name, role=role, say=say, device=device, turns=2 if role == "base" else 1)
        lost = known[name]["status"] if name in known and known[name]["status"] != OK else None
        if why := lost or refuse(name, role):
            runner.status = why
            return runner
        runner.attempt(lambda: _first(runner))
        if runner.status == OK and part.way == "graph":
            runner.attempt(lambda: _as_graph(runner, sets))
            # The memory of an aborted capture stays allocated, and the next graph might use it.
            if runner.status != OK and device.type == "cuda":
                raise LostError(f"cannot be captured: {runner.status}")
        return runner

    def raced(runners: list[Guarded]) -> None:
        race(
            runners,
            device,
            rounds=rounds,
            seconds=0.0,
            warm_up_seconds=WARM_UP_SECONDS,
            block_ms=BLOCK_MS,
            memory=part.way == "eager",
        )

    with torch.set_grad_enabled(part.mode == "train"):
        contenders = sorted(_contenders(part, device), key=lambda one: importance(one[0], one[1]))
        exact = [prepared(*one) for one in contenders if one[1] in ("base", "exact")]
        raced(exact)
        best = min((one for one in exact if one.status == OK), key=lambda one: float(np.median(_ms(one))), default=None)
        base = next((one for one in exact if one.role == "base"), None)
        for one in exact:
            say(_row(one, base, best))
        for name, role, call, sets in contenders[len(exact) :]:
            if name in known:
                continue
            runner = prepared(name, role, call, sets)
            rivals = [_again(one) for one in dict.fromkeys((base, best)) if one is not None and one.status == OK]
            if runner.status == OK:
                raced([*rivals, runner])
            again = {one.name: one for one in rivals}
            say(_row(runner, *(again.get(one.name) if one else None for one in (base, best))))
    turns = None if base is None or base.status != OK else base.by_turn()[0]
    return {
        **part._asdict(),
        "best_exact": None if best is None else best.name,
        "spread": None if turns is None else float(np.median(turns[0]) / np.median(turns[1])),
        "took_s": time.perf_counter() - begun,
        "watched": watched(),
    }


def _again(one: Guarded) -> Guarded:
    """The same contender, to be measured anew."""
    return replace(one, rounds=[], turns=1)


def _contenders(part: Part, device: torch.device) -> Contenders:
    """Name, role and call of all contenders, and the number of calls after which inputs repeat."""
    dtype = getattr(torch, part.dtype)
    if not part.suite.startswith("attention"):
        for name, role, call in gpu_models.contenders(part.suite, part.length, part.batch, dtype, device):
            yield name, role, call, 1
        return
    train = part.mode == "train"
    sets = gpu_cases.sets_for(part.batch, part.length, dtype, device)
    how = {"batch": part.batch, "length": part.length, "dtype": dtype, "device": device, "sets": sets, "train": train}
    inputs = gpu_cases.inputs(part.suite, **how)
    for one in gpu_cases.contenders(part.suite, part.mode, part.length, dtype, device, compiled_for(part)):
        yield one.name, one.role, rotating(one.make, inputs, train), sets


def _first(runner: Guarded) -> None:
    """The first call, which compiles what is not compiled yet; very slow contenders get only one more."""
    begun = time.perf_counter()
    runner.call()
    if runner.device.type == "cuda":
        torch.cuda.synchronize()
    runner.first_s = time.perf_counter() - begun
    if runner.device.type == "cuda" and runner.role != "base":
        ms = timed(runner.call, 1, runner.device).ms
        runner.status = f"{ms:.0f} ms, too slow to take turns" if ms > SLOW_MS else runner.status


def _as_graph(runner: Guarded, sets: int) -> None:
    """Capture enough calls in one graph for timing, and at least as many as there are inputs."""
    ms = timed(runner.call, sets, runner.device).ms
    rounds = math.ceil(GRAPH_MS / max(ms, 1e-3) / sets)
    calls = sets * max(1, min(rounds, MOST_CALLS // sets))
    runner.call, runner.calls = captured(runner.call, calls), calls


def _ms(runner: Guarded) -> np.ndarray:
    """Milliseconds per call, for each round."""
    return runner.by_round()[0] / runner.calls


def _row(one: Guarded, base: Guarded | None, best: Guarded | None) -> dict[str, Any]:
    row: dict[str, Any] = {"name": one.name, "role": one.role, "status": one.status, "first_s": one.first_s}
    if one.status != OK:
        return row
    ms = _ms(one)
    low, middle, high = (float(x) for x in np.quantile(ms, (0.1, 0.5, 0.9)))
    row |= {"median_ms": middle, "p10_ms": low, "p90_ms": high, "least_ms": float(ms.min()), "samples": len(ms)}
    row |= {"peak_mb": one.peak_mb, "calls": one.calls}
    return row | {"against_sdpa": _ratio(base, one), "against_best": _ratio(best, one)}


def _ratio(base: Guarded | None, other: Guarded) -> list[float] | None:
    """Ratio of base to other, with its interval."""
    if base is None or base.status != OK:
        return None
    first, second = _ms(base), _ms(other)
    low, high = ratio_interval(first.tolist(), second.tolist(), resamples=RESAMPLES)
    return [float(np.median(first) / np.median(second)), low, high]
