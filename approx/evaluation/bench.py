"""Speed: contenders timed side by side against the fastest exact attention on this machine.

For each batch size and length: warm up until times are stable, reporting the first call separately; run rounds
in which every contender has a turn and the base two, in rotating order; reject disturbed repetitions; report
medians, and the interval of the *ratio* of two contenders paired by round. The difference of the base from itself
(A/A) shows the noise. Running out of memory is a result.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from approx.errors import ApproxError, Exit
from approx.evaluation.evaluate import BACK_ENDS, DEFAULT, best_exact
from approx.evaluation.options import BenchStage
from approx.evaluation.record import BUSY, ENOUGH, Crossover, Ratio, Relative, Speed, SpeedVariant, Spread, Timing
from approx.evaluation.statistics import ratio_interval
from approx.evaluation.timing import OK, Neighbours, Runner, memory_limit, race, read_prompts, wait_idle
from approx.validation import seconds

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Contender:
    """Something that can be timed.

    Args:
        name: Its name in the report; unique among the contenders.
        run: Runs one forward pass, or decodes all new tokens, on the result of `make_inputs`.
        role: "base" is exact attention with SDPA (exactly one), "exact" is another exact implementation, which replaces
            the base if it is faster, "ceiling" is the same model with attention replaced by its values (at most one),
            everything else is a "variant".
        begin: Prepares one `run` on the same inputs, untimed, such as a cache that holds the prompt; None if nothing
            has to be prepared.
        cache_mb: Megabytes of the cache after a `run`; None if it leaves none.
        prompt: Reads the prompt on the same inputs and writes one token, timed by itself; None if there is no prompt.
        fixed: Name of the attention of a base that has no other, as an exported program; None to choose the fastest.
    """

    name: str
    run: Callable[[Any], object]
    role: Literal["base", "exact", "ceiling", "variant"] = "variant"
    begin: Callable[[Any], object] | None = None
    cache_mb: Callable[[], float] | None = None
    prompt: Callable[[Any], object] | None = None
    fixed: str | None = None


def bench(
    contenders: Sequence[Contender],
    options: BenchStage,
    *,
    make_inputs: Callable[[int, int], Any],
    device: torch.device | str,
    dtype: torch.dtype | str,
    warm_up_seconds: float = 1.0,
    seed: int = 0,
    chosen_in: Callable[[Callable[[], object]], dict[str, str]] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Iterator[Speed]:
    """Time every contender at every batch size and length, as far as the time budget goes.

    Args:
        contenders: One base, at most one ceiling, any number of variants and other exact implementations.
        options: Lengths, batch sizes, duration, and whether the inputs are real, for the record.
        make_inputs: (batch size, length) -> input of the contenders' `run`, on the device.
        device: "cpu" or "cuda"; the contenders are already there.
        dtype: The dtype that the contenders compute in, for the record.
        warm_up_seconds: Maximum warm-up in seconds, per contender, batch size and length.
        seed: Seed of the bootstrap.
        chosen_in: Runs a call and returns the implementation that each op chose; called once per contender, untimed.
            With None, the choices are not recorded.
        progress: Called with the turns done of a row, how many it will have, and a description of the row.

    Yields:
        The "speed" of a record: a row for each batch size and length, as soon as it is measured.

    Raises:
        ApproxError: if roles or names are invalid, or the device is neither.
    """
    device = torch.device(device)
    _check(contenders, device)
    begun = time.monotonic()
    end = begun + (math.inf if options.time_budget is None else seconds(options.time_budget))
    grid = [(batch, length) for batch in sorted(set(options.batches)) for length in sorted(set(options.lengths))]
    cache_mb_of = {contender.name: contender.cache_mb for contender in contenders}
    # Seconds per token of the last row, a guess for the next one: warm-up makes it too high for short sizes, attention
    # too low for long ones.
    pace = 0.0
    for done, (batch, length) in enumerate(grid):
        row_begun = time.monotonic()
        if done and row_begun + pace * batch * length > end:
            left = ", ".join(f"{batch} × {length:,}" for batch, length in grid[done:])
            _LOG.warning(
                f"The time budget of {options.time_budget} is used up after {done} of {len(grid)} sizes. Not timed, as batch × "
                f"tokens: {left}. Raise --time-budget, or leave sizes out."
            )
            break
        number = f" ({done + 1} of {len(grid)})" if len(grid) > 1 else ""
        turn = progress and partial(_turn, progress, f"batch {batch}, {length:,} tokens{number}")
        if turn:
            # How many turns there will be is known once the fastest exact attention has been chosen.
            turn(0, 1)
        if options.wait_idle and device.type == "cpu":
            wait_idle(options.wait_idle)
        neighbours = Neighbours()
        with torch.no_grad(), memory_limit(device):
            tokens = batch * options.new_tokens if options.mode == "generate" else None
            baseline, runners = _prepare(contenders, make_inputs, batch, length, device, tokens)
            race(
                list(runners.values()),
                device,
                rounds=options.rounds,
                seconds=options.seconds,
                warm_up_seconds=warm_up_seconds,
                until=end,
                progress=turn,
            )
            reading = progress and partial(_turn, progress, f"prompts of {length:,} tokens{number}")
            read_prompts(list(runners.values()), device, reading)
            # Not during the race: recording the choices takes time.
            for name, runner in runners.items():
                if chosen_in and runner.status == OK:
                    runner.chosen = runner.attempt(lambda runner=runner: chosen_in(runner.prepared()))
                if runner.status == OK and (cache_mb := cache_mb_of.get(name)):
                    runner.cache_mb = cache_mb()
        row = Speed(
            device=device.type,
            dtype=str(dtype).removeprefix("torch."),
            threads=torch.get_num_threads(),
            batch=batch,
            length=length,
            mode=options.mode,
            new_tokens=options.new_tokens if options.mode == "generate" else None,
            inputs=options.inputs,
            baseline=baseline,
            crowded=device.type == "cpu" and neighbours.crowded(),
            **_results(contenders, runners, seed),
        )
        for variant in row.variants:
            variant.share_of_ceiling, variant.verdict = row.share(variant), row.verdict(variant)
        pace = (time.monotonic() - row_begun) / (batch * length)
        yield row


def _turn(progress: Callable[[int, int, str], None], what: str, done: int, total: int) -> None:
    progress(done, total, what)


def crossover(speed: Sequence[Speed]) -> list[Crossover]:
    """Find the length from which each variant is faster, for each batch size, dtype, device and mode.

    That is the first measured length such that there and at every longer one, the interval of the ratio is above 1
    or only exact attention runs out of memory; None if there is no such length. Lengths that are not settled do not
    count.
    """
    first: dict[tuple[str, int, str, str, str], int | None] = {}
    for row in sorted(speed, key=lambda row: row.length):
        for variant in row.variants:
            key = (variant.name, row.batch, row.dtype, row.device, row.mode)
            first.setdefault(key, None)
            if row.verdict(variant) == BUSY:
                continue
            only_this_runs = variant.status == OK != row.base.status
            wins = only_this_runs or (variant.interval is not None and variant.interval[0] > 1)
            first[key] = (first.get(key) or row.length) if wins else None
    return [
        Crossover(name=name, batch=batch, dtype=dtype, device=device, mode=mode, length=length)
        for (name, batch, dtype, device, mode), length in first.items()
    ]


def _check(contenders: Sequence[Contender], device: torch.device) -> None:
    roles = [contender.role for contender in contenders]
    names = [contender.name for contender in contenders]
    if roles.count("base") != 1 or roles.count("ceiling") > 1 or len({*names, DEFAULT}) <= len(names):
        listed = ", ".join(f"{contender.name} ({contender.role})" for contender in contenders) or "none"
        raise ApproxError(
            f"The contenders are {listed}. There must be one base, at most one ceiling, and unique names other than "
            f"'{DEFAULT}'."
        )
    if device.type not in BACK_ENDS:
        raise ApproxError(
            f"Device '{device.type}' cannot be timed. Use {' or '.join(BACK_ENDS)}.",
            Exit.UNSUPPORTED,
        )


def _prepare(
    contenders: Sequence[Contender],
    make_inputs: Callable[[int, int], Any],
    batch: int,
    length: int,
    device: torch.device,
    tokens: int | None,
) -> tuple[str, dict[str, Runner]]:
    """Make the inputs, choose the baseline, and make a runner for every contender."""
    maker = Runner(lambda: None)
    inputs = maker.attempt(lambda: make_inputs(batch, length))
    runners = {
        contender.name: Runner(
            lambda run=contender.run: run(inputs),
            begin=partial(contender.begin, inputs) if contender.begin else None,
            tokens=tokens,
            prompts=[partial(contender.prompt, inputs)] if contender.prompt else [],
            turns=2 if contender.role == "base" else 1,
            status=maker.status,
        )
        for contender in contenders
    }
    exact = [runners.pop(contender.name) for contender in contenders if contender.role == "exact"]
    names = [contender.name for contender in contenders if contender.role == "exact"]
    others = {name: runner.call for name, runner in zip(names, exact, strict=True)}
    baseline = next((contender.fixed for contender in contenders if contender.fixed), DEFAULT)
    if maker.status == OK and baseline == DEFAULT:
        # Only the base changes: variants that call SDPA keep its default, as their users do.
        base = next(runner for runner in runners.values() if runner.turns == 2)
        default = base.call
        base.prompts += [read for runner in exact for read in runner.prompts]
        baseline, base.call = best_exact(default, device, others, base.begin)
        if baseline != DEFAULT:
            runners[DEFAULT] = Runner(default, base.begin, tokens=tokens)
    return baseline, runners


def _results(contenders: Sequence[Contender], runners: dict[str, Runner], seed: int) -> dict[str, Any]:
    of_role: dict[str, list[str]] = {"base": [], "exact": [], "ceiling": [], "variant": []}
    for contender in contenders:
        of_role[contender.role].append(contender.name)
    base = runners[of_role["base"][0]]

    def relative(name: str) -> Relative:
        return Relative(**_times(runners[name]), **vars(_ratio(base, runners[name], seed)))

    return {
        "base": Timing(**_times(base)),
        "default": relative(DEFAULT) if DEFAULT in runners else None,
        "ceiling": next(map(relative, of_role["ceiling"]), None),
        "spread": _spread(base, seed),
        "variants": [SpeedVariant(name=name, **vars(relative(name))) for name in of_role["variant"]],
    }


def _times(runner: Runner) -> dict[str, Any]:
    """Return the keys of `Timing` of one contender; null if it ran out of memory."""
    entry: dict[str, Any] = dict.fromkeys(("median_ms", "p10_ms", "p90_ms", "first_ms", "peak_mb", "chosen"))
    entry |= {"samples": 0, "rejected": 0, "status": runner.status}
    if runner.status == OK:
        ms, good = runner.by_round()
        low, middle, high = (float(value) for value in np.quantile(ms[good], (0.1, 0.5, 0.9)))
        entry |= {"median_ms": middle, "p10_ms": low, "p90_ms": high}
        entry |= {"first_ms": runner.first_ms, "peak_mb": runner.peak_mb, "chosen": runner.chosen}
        entry |= {"cache_mb": runner.cache_mb, "prompt_ms": runner.prompt_ms}
        entry |= {"tokens_per_second": runner.tokens * 1e3 / middle} if runner.tokens else {}
        entry |= {"samples": int(good.sum()), "rejected": int((~good).sum())}
    return entry


def _ratio(base: Runner, other: Runner, seed: int) -> Ratio:
    """Return base time / other time over the rounds in which both were undisturbed, and its interval."""
    if base.status != OK or other.status != OK:
        return Ratio(ratio=None, interval=None)
    (base_ms, base_good), (other_ms, other_good) = base.by_round(), other.by_round()
    return _paired(base_ms, other_ms, base_good & other_good, seed)


def _spread(base: Runner, seed: int) -> Spread:
    """Return the ratio of the base's first turns to its second ones."""
    if base.status != OK:
        return Spread(ratio=None, interval=None)
    (first, second), (first_good, second_good) = base.by_turn()
    return Spread(**vars(_paired(first, second, first_good & second_good, seed)))


def _paired(base: np.ndarray, other: np.ndarray, good: np.ndarray, seed: int) -> Ratio:
    # All rounds, disturbed ones too, are better evidence than very few undisturbed ones.
    chosen = good if good.sum() >= min(ENOUGH, good.size / 2) else np.ones_like(good)
    ratio = float(np.median(base[chosen]) / np.median(other[chosen]))
    return Ratio(ratio=ratio, interval=list(ratio_interval(base[chosen].tolist(), other[chosen].tolist(), seed)))
