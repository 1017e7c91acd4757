"""Run contenders side by side in rounds, so that disturbances of the machine affect all of them."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch

from approx.evaluation.memory import is_out_of_memory, peak_mb
from approx.evaluation.timing import BLOCK_MS, Sample, repeats_for, timed, undisturbed, warm_up

T = TypeVar("T")

OK, OUT_OF_MEMORY = "ok", "out of memory"


@dataclass(eq=False)
class Runner:
    """One contender at one batch size and length: its call and its measurements.

    Args:
        call: Runs one forward pass, or decodes all new tokens.
        begin: Prepares a call, untimed; then every repetition is one call. None if calls need no preparation.
        turns: Turns in each round; a runner with two turns can be compared with itself.
        tokens: Tokens that a call decodes.
    """

    call: Callable[[], object]
    begin: Callable[[], object] | None = None
    turns: int = 1
    tokens: int | None = None
    status: str = OK
    first_ms: float | None = None
    peak_mb: float | None = None
    cache_mb: float | None = None
    chosen: dict[str, str] | None = None
    repeats: int = 1
    rounds: list[list[Sample]] = field(default_factory=list)

    def prepared(self) -> Callable[[], object]:
        """The call, after its preparation."""
        if self.begin:
            self.begin()
        return self.call

    def attempt(self, action: Callable[[], T]) -> T | None:
        """Run an action; if memory runs out, set the status and return None."""
        try:
            return action()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self.status = OUT_OF_MEMORY
        # Outside the handler, whose traceback keeps the tensors of the failed call alive.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return None

    def by_turn(self) -> tuple[np.ndarray, np.ndarray]:
        """Return milliseconds [turns, rounds] and which of them were undisturbed."""
        samples = [sample for turns in self.rounds for sample in turns]
        shape = (len(self.rounds), self.turns)
        return (
            np.array([sample.ms for sample in samples]).reshape(shape).T,
            undisturbed(samples).reshape(shape).T,
        )

    def by_round(self) -> tuple[np.ndarray, np.ndarray]:
        """Return milliseconds [rounds], the mean of a round's undisturbed turns, and which rounds have any."""
        ms, good = self.by_turn()
        mean = (ms * good).sum(0) / np.maximum(good.sum(0), 1)
        return np.asarray(np.where(good.any(0), mean, ms.mean(0))), np.asarray(good.any(0))


def race(
    runners: Sequence[Runner],
    device: torch.device,
    *,
    rounds: int,
    seconds: float,
    warm_up_seconds: float,
    block_ms: float = BLOCK_MS,
    memory: bool = True,
) -> None:
    """Warm up every runner, measure its memory, then time all of them in rounds.

    The order rotates by one place per round (A B C, B C A, …), so that no runner always follows the same one.

    Args:
        runners: Updated in place; a runner that runs out of memory drops out.
        device: The device.
        rounds: Minimum number of rounds; disturbed ones are repeated, at most doubling the number.
        seconds: Minimum duration of all rounds.
        warm_up_seconds: Maximum warm-up of each runner.
        block_ms: Minimum duration of a repetition.
        memory: Whether to measure memory, which takes one more call.
    """
    for runner in runners:
        if runner.status != OK:
            continue
        # Warm-up and memory include the preparation, if there is one.
        call = (lambda runner=runner: runner.prepared()()) if runner.begin else runner.call
        warm = runner.attempt(lambda call=call: warm_up(call, device, warm_up_seconds))
        if warm:
            runner.first_ms, ms = warm
            runner.repeats = 1 if runner.begin else repeats_for(ms, block_ms)
            if memory:
                runner.peak_mb = runner.attempt(lambda call=call: peak_mb(call, device))

    order = _order(runners)
    gc.collect()
    gc.disable()
    try:
        begun, done = time.perf_counter(), 0
        while any(runner.status == OK for runner in runners):
            _round(order[done % len(order) :] + order[: done % len(order)], device)
            done += 1
            enough = done >= rounds and time.perf_counter() - begun >= seconds
            if enough and (done >= 2 * rounds or _believable(runners) >= rounds):
                break
    finally:
        gc.enable()


def _order(runners: Sequence[Runner]) -> list[Runner]:
    """Return the order of turns; second turns come half a round after the first, so that drift shows."""
    once, twice = list(runners), [runner for runner in runners if runner.turns == 2]
    for runner in twice:
        place = once.index(runner) + 1 + len(once) // 2
        once.insert(place % (len(once) + 1), runner)
    return once


def _round(order: list[Runner], device: torch.device) -> None:
    seen: dict[Runner, list[Sample]] = {runner: [] for runner in order}
    for runner in order:
        if runner.status == OK:
            sample = runner.attempt(lambda runner=runner: timed(runner.prepared(), runner.repeats, device))
            if sample:
                seen[runner].append(sample)
    for runner, samples in seen.items():
        if runner.status == OK:
            runner.rounds.append(samples)


def _believable(runners: Sequence[Runner]) -> int:
    """Return the smallest number of undisturbed rounds of any runner."""
    return min((int(runner.by_round()[1].sum()) for runner in runners if runner.status == OK), default=0)
