"""Speed: contenders timed side by side against the best exact attention the machine offers.

The method, for each batch size and length: warm-up until stable with the first call kept apart; then rounds
in which every contender has its turn, the base twice, in an order that rotates; disturbed repetitions
rejected; medians, and the interval of the *ratio* of two contenders paired by round. What the base differs
from itself (A/A) is reported beside what the others differ from it. Running out of memory is a data point.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from approx.errors import ApproxError, Exit
from approx.evaluation.baseline import BACK_ENDS, DEFAULT, best_exact
from approx.evaluation.interleave import OK, Runner, race
from approx.evaluation.memory import memory_limit
from approx.evaluation.options import BenchStage
from approx.evaluation.statistics import ratio_interval
from approx.evaluation.timing import Neighbours

# Below this gain nobody should give up exactness for speed.
WORTHWHILE = 1.03
# With so many undisturbed rounds of both, the disturbed ones are left out of their ratio.
ENOUGH_PAIRS = 5


@dataclass(frozen=True)
class Contender:
    """Something that can be timed.

    Args:
        name: What the report calls it; unique among the contenders.
        run: Executes one forward (or train step, or generation) on what `make_inputs` made.
        role: "base" is exact attention through SDPA (exactly one), "exact" computes the same as the base in another
            way and takes its place where it is faster, "ceiling" is the same model with attention replaced by its
            values (at most one), everything else is a "variant".
    """

    name: str
    run: Callable[[Any], object]
    role: Literal["base", "exact", "ceiling", "variant"] = "variant"


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
) -> dict[str, list[dict[str, Any]]]:
    """Time every contender at every batch size and length.

    Args:
        contenders: One base, at most one ceiling, any number of variants and of other exact ways.
        options: Lengths, batch sizes, how long, and whether the inputs are real, which is recorded.
        make_inputs: Given batch size and length, what the contenders' `run` takes, already on the device.
        device: "cpu" or "cuda"; the contenders are there already.
        dtype: What the contenders compute in; recorded.
        warm_up_seconds: Seconds of warm-up at most, per contender, batch size and length.
        seed: Of the bootstrap.
        chosen_in: Executes a call and says which implementation each op took in it; every contender runs once more for it,
            untimed. None records nothing of that.
        progress: Called with rows done, rows in all, and what comes next.

    Returns:
        The "speed" and "crossover" entries of a record (`approx.evaluation.record`).

    Raises:
        ApproxError: if roles or names are not usable, or the device is another.
    """
    device = torch.device(device)
    _check(contenders, device)
    grid = [(batch, length) for batch in sorted(set(options.batches)) for length in sorted(set(options.lengths))]
    speed: list[dict[str, Any]] = []
    for done, (batch, length) in enumerate(grid):
        if progress:
            progress(done, len(grid), f"batch {batch}, {length} tokens")
        neighbours = Neighbours()
        with torch.no_grad(), memory_limit(device):
            baseline, runners = _prepare(contenders, make_inputs, batch, length, device)
            race(
                list(runners.values()),
                device,
                rounds=options.rounds,
                seconds=options.seconds,
                warm_up_seconds=warm_up_seconds,
            )
            if chosen_in:
                # Apart from the race, for what is kept of it takes time.
                for runner in runners.values():
                    if runner.status == OK:
                        runner.chosen = runner.attempt(partial(chosen_in, runner.call))
        speed.append(
            {
                "device": device.type,
                "dtype": str(dtype).removeprefix("torch."),
                "threads": torch.get_num_threads(),
                "batch": batch,
                "length": length,
                "mode": "forward",
                "inputs": options.inputs,
                "baseline": baseline,
                "crowded": device.type == "cpu" and neighbours.crowded(),
                **_results(contenders, runners, seed),
            }
        )
    if progress:
        progress(len(grid), len(grid), "")
    return {"speed": speed, "crossover": crossover(speed)}


def crossover(speed: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Find the length from which each variant is faster, for each batch size, dtype and device.

    That is the first measured length from which on, at every longer one as well, the interval of the ratio
    lies above 1 or exact attention runs out of memory where the variant does not. None if there is none.
    """
    found: dict[tuple[str, int, str, str], int | None] = {}
    for row in sorted(speed, key=lambda row: row["length"]):
        for variant in row["variants"]:
            key = (variant["name"], row["batch"], row["dtype"], row["device"])
            only_this_runs = variant["status"] == OK != row["base"]["status"]
            wins = only_this_runs or (variant["interval"] is not None and variant["interval"][0] > 1)
            found[key] = (found.get(key) or row["length"]) if wins else None
    names = ("name", "batch", "dtype", "device")
    return [{**dict(zip(names, key, strict=True)), "length": length} for key, length in found.items()]


def _check(contenders: Sequence[Contender], device: torch.device) -> None:
    roles = [contender.role for contender in contenders]
    names = [contender.name for contender in contenders]
    if roles.count("base") != 1 or roles.count("ceiling") > 1 or len({*names, DEFAULT}) <= len(names):
        found = ", ".join(f"{contender.name} ({contender.role})" for contender in contenders) or "none"
        raise ApproxError(
            f"Contenders found: {found}. Give one base, at most one ceiling, unique names other than '{DEFAULT}'."
        )
    if device.type not in BACK_ENDS:
        raise ApproxError(
            f"Asked to bench on '{device.type}'; what can be timed is {' or '.join(BACK_ENDS)}.",
            Exit.UNSUPPORTED,
        )


def _prepare(
    contenders: Sequence[Contender],
    make_inputs: Callable[[int, int], Any],
    batch: int,
    length: int,
    device: torch.device,
) -> tuple[str, dict[str, Runner]]:
    """Make the inputs, choose the baseline, and give every contender its runner."""
    maker = Runner(lambda: None)
    given = maker.attempt(lambda: make_inputs(batch, length))
    runners = {
        contender.name: Runner(
            lambda run=contender.run: run(given),
            turns=2 if contender.role == "base" else 1,
            status=maker.status,
        )
        for contender in contenders
    }
    others = {contender.name: runners.pop(contender.name).call for contender in contenders if contender.role == "exact"}
    baseline = DEFAULT
    if maker.status == OK:
        # The others keep SDPA's default where they use it at all: that is what their users get.
        base = next(runner for runner in runners.values() if runner.turns == 2)
        default = base.call
        baseline, base.call = best_exact(default, device, others)
        if baseline != DEFAULT:
            runners[DEFAULT] = Runner(default)
    return baseline, runners


def _results(contenders: Sequence[Contender], runners: dict[str, Runner], seed: int) -> dict[str, Any]:
    of_role: dict[str, list[str]] = {"base": [], "exact": [], "ceiling": [], "variant": []}
    for contender in contenders:
        of_role[contender.role].append(contender.name)
    base = runners[of_role["base"][0]]
    spread = _spread(base, seed)
    ceiling = None
    for name in of_role["ceiling"]:
        ceiling = {**_times(runners[name]), **_ratio(base, runners[name], seed)}
    variants = []
    for name in of_role["variant"]:
        ratio = _ratio(base, runners[name], seed)
        variants.append(
            {
                "name": name,
                **_times(runners[name]),
                **ratio,
                "share_of_ceiling": _share(ratio, ceiling),
                "verdict": _verdict(ratio, spread),
            }
        )
    default = None
    if DEFAULT in runners:
        default = {**_times(runners[DEFAULT]), **_ratio(base, runners[DEFAULT], seed)}
    return {"base": _times(base), "default": default, "ceiling": ceiling, "spread": spread, "variants": variants}


def _times(runner: Runner) -> dict[str, Any]:
    """Return what one contender took; without figures where it ran out of memory."""
    entry: dict[str, Any] = dict.fromkeys(("median_ms", "p10_ms", "p90_ms", "first_ms", "peak_mb", "chosen"))
    entry |= {"samples": 0, "rejected": 0, "status": runner.status}
    if runner.status == OK:
        ms, good = runner.by_round()
        low, middle, high = (float(value) for value in np.quantile(ms[good], (0.1, 0.5, 0.9)))
        entry |= {"median_ms": middle, "p10_ms": low, "p90_ms": high}
        entry |= {"first_ms": runner.first_ms, "peak_mb": runner.peak_mb, "chosen": runner.chosen}
        entry |= {"samples": int(good.sum()), "rejected": int((~good).sum())}
    return entry


def _ratio(base: Runner, other: Runner, seed: int) -> dict[str, Any]:
    """Return base time / other time over the rounds in which both are to be believed, and its interval."""
    if base.status != OK or other.status != OK:
        return {"ratio": None, "interval": None}
    (base_ms, base_good), (other_ms, other_good) = base.by_round(), other.by_round()
    return _paired(base_ms, other_ms, base_good & other_good, seed)


def _spread(base: Runner, seed: int) -> dict[str, Any]:
    """Return the base against itself: its first turns over its second ones."""
    if base.status != OK:
        return {"ratio": None, "interval": None}
    (first, second), (first_good, second_good) = base.by_turn()
    return _paired(first, second, first_good & second_good, seed)


def _paired(base: np.ndarray, other: np.ndarray, good: np.ndarray, seed: int) -> dict[str, Any]:
    # Where too few rounds are undisturbed for both, the disturbed ones still say more than those few.
    kept = good if good.sum() >= min(ENOUGH_PAIRS, good.size / 2) else np.ones_like(good)
    ratio = float(np.median(base[kept]) / np.median(other[kept]))
    return {"ratio": ratio, "interval": list(ratio_interval(base[kept].tolist(), other[kept].tolist(), seed))}


def _share(ratio: dict[str, Any], ceiling: dict[str, Any] | None) -> float | None:
    """Return measured speed-up / the ceiling's; None where removing attention altogether gains nothing."""
    if ratio["ratio"] is None or ceiling is None or ceiling["ratio"] is None or ceiling["interval"][0] <= 1:
        return None
    return ratio["ratio"] / ceiling["ratio"]


def _verdict(ratio: dict[str, Any], spread: dict[str, Any]) -> str | None:
    """Say whether the gain is worth having and more than what the base differs from itself."""
    if ratio["ratio"] is None:
        return None
    noise = max(spread["interval"][1], 1 / spread["interval"][0])
    faster = ratio["ratio"] >= WORTHWHILE and ratio["interval"][0] > 1 and ratio["ratio"] > noise
    return "faster" if faster else "exact is better here"
