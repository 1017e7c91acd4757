"""Calibration of the comparison: how often equal models are called different, and how often a planted loss is detected.

    python bench/calibration.py -o reports/calibration

Simulated models with equal error rates, with and without a planted loss, are compared as `approx evaluate` does: about
5 % of pairs without a loss may have an interval that excludes 0, and about 5 % of pairs whose loss equals the margin
may be settled. The number of examples that an inconclusive verdict asks for must then settle four in five. A loss that
strikes few examples, but wholly, must not pass for no loss. Writes `record.json` and, from it, `report.md`; `--redraw`
rebuilds only the page.
"""

import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

# In a checkout that is not installed, both packages lie beside this folder.
sys.path.extend(str(Path(__file__).resolve().parent.parent / name) for name in (".", "kernels"))

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from approx.evaluation.record import environment
from approx.evaluation.statistics import (
    CONFIDENCE,
    POWER,
    Comparison,
    Stake,
    compare_correct,
    compare_scores,
    design_effect,
    verdict,
)
from approx.tasks.metrics import METRICS
from bench.pages import main, table

LOSS = 0.01
REPETITIONS, RESAMPLES = 1000, 200
# A rare loss: this share of examples is wholly lost, of so many, at a margin of half a point or per cent.
LOST, STRUCK, MARGIN = 0.02, 60, 0.5
# Sizes at which equal models are tried for the verdict "no loss" at a margin of one point or per cent.
SIZES = tuple(round(100 * 2 ** (step / 2)) for step in range(13))

Evidence = NDArray[np.float64]


class Pair(NamedTuple):
    """The outputs of two models on the same examples, as evidence for the metric."""

    base: Evidence
    converted: Evidence
    groups: NDArray[np.intp] | None = None


def classes(generator: Generator, count: int, harm: float, changed: float = 0.05) -> Pair:
    """Two classes, 85 % right; each model errs independently in `changed` of the cases, the converted one in `harm` more."""
    labels = generator.random(count) < 0.6
    shared = np.where(generator.random(count) < 0.85, labels, ~labels)
    base, converted = (np.where(generator.random(count) < changed, ~shared, shared) for _ in range(2))
    converted = np.where(generator.random(count) < harm, ~labels, converted)
    return Pair(np.stack([base, labels], 1).astype(float), np.stack([converted, labels], 1).astype(float))


def right(generator: Generator, count: int, harm: float, changed: float = 0.05) -> Pair:
    """Whether each of `classes` is right."""
    base, converted, _ = classes(generator, count, harm, changed)
    return Pair(*(np.equal(*side.T)[:, None].astype(float) for side in (base, converted)))


def numbers(generator: Generator, count: int, harm: float) -> Pair:
    """A number with shared and independent noise; `harm` adds to it."""
    labels = generator.normal(size=count)
    shared = labels + generator.normal(0, 0.6, count)
    base, converted = (shared + generator.normal(0, 0.3, count) for _ in range(2))
    converted = converted + generator.normal(0, 1, count) * math.sqrt(harm)
    return Pair(np.stack([base, labels], 1), np.stack([converted, labels], 1))


def answers(generator: Generator, count: int, harm: float) -> Pair:
    """The F1 of answers, mostly 0 or 1; one in twenty changes, and `harm` of all are lost."""
    values = np.repeat([0, 0.4, 0.5, 0.67, 0.8, 1], [2, 1, 1, 1, 1, 8])
    shared = generator.choice(values, count)
    base, converted = (
        np.where(generator.random(count) < 0.05, generator.choice(values, count), shared) for _ in range(2)
    )
    return Pair(base[:, None], np.where(generator.random(count) < harm, 0.0, converted)[:, None])


def speakers(generator: Generator, count: int, harm: float) -> Pair:
    """Words and errors in 5 to 120 utterances of each of `count` speakers, some of whom favour one of the models; `harm` is a
    share of errors that is added."""
    sizes = generator.integers(5, 121, count)
    groups = np.repeat(np.arange(count), sizes)
    words = generator.integers(5, 35, groups.size)
    rates = generator.gamma(1.5, 0.05, count).clip(0.005, 0.6)[groups] * words
    suits = np.exp(generator.normal(0, 0.15, count))[groups]
    base, converted = generator.poisson(rates * suits), generator.poisson(rates / suits * (1 + harm))
    return Pair(np.stack([base, words], 1).astype(float), np.stack([converted, words], 1).astype(float), groups)


def stretches(generator: Generator, count: int, harm: float) -> Pair:
    """Losses of stretches of text; models differ by noise so heavy-tailed that its fourth moment is infinite."""
    size = generator.integers(1500, 2500, count).astype(float)
    loss = 0.8 * size * np.exp(generator.normal(0, 0.3, count))
    base, converted = (loss * (1 + 0.02 * generator.standard_t(3, count)) for _ in range(2))
    empty = np.ones(count)
    return Pair(np.stack([base, empty, size], 1), np.stack([converted * (1 + harm), empty, size], 1))


def struck(metric: str, models: Callable[[Generator, int, float], Pair]) -> Callable[[Generator, int, float], Pair]:
    """The converted model is the base, but for a share `harm` of examples that it loses wholly."""

    def made(generator: Generator, count: int, harm: float) -> Pair:
        base, _, groups = models(generator, count, 0.0)
        lost = METRICS[metric].lost(base)
        return Pair(base, np.where(generator.random(len(base))[:, None] < harm, lost, base), groups)

    return made


def alike(models: Callable[[Generator, int, float], Pair]) -> Callable[[Generator, int, float], Pair]:
    """The converted model is the base, but for one example in fifty, on which it does as an independent model would."""

    def made(generator: Generator, count: int, harm: float) -> Pair:
        base, converted, groups = models(generator, count, 0.0)
        return Pair(base, np.where(generator.random(len(base))[:, None] < 0.02, converted, base), groups)

    return made


def utterances(generator: Generator, count: int, harm: float) -> Pair:
    """Words and errors in utterances of as many speakers."""
    base, converted, groups = speakers(generator, count, harm)
    assert groups is not None, "utterances are grouped by speaker"
    _, first = np.unique(groups, return_index=True)
    return Pair(base[first], converted[first])


class World(NamedTuple):
    """A metric, models to score with it, and the number of examples or groups."""

    metric: str
    models: Callable[[Generator, int, float], Pair]
    count: int

    @property
    def name(self) -> str:
        """The metric and the size."""
        of = ", hardly changed" if isinstance(self.models, partial) else ""
        return f"{self.metric}, {self.count:,} {'speakers' if self.models is speakers else 'examples'}{of}"


WORLDS = (
    *(World("accuracy", right, count) for count in (71, 277, 872)),
    World("accuracy", partial(right, changed=0.01), 277),
    *(World("f1", classes, count) for count in (71, 277, 872)),
    World("f1", partial(classes, changed=0.01), 277),
    *(World("matthews", classes, count) for count in (71, 277, 872)),
    *(World(metric, numbers, count) for metric in ("pearson", "spearman") for count in (60, 300)),
    *(World("answer_f1", answers, count) for count in (50, 300)),
    *(World("wer", speakers, count) for count in (3, 5, 10, 20, 40)),
    *(World("bits_per_byte", stretches, count) for count in (5, 20, 60, 300)),
)


def compared(world: World, pair: Pair, seed: int, resamples: int = RESAMPLES) -> Comparison:
    """The comparison used for tasks with this metric; losses are negative whichever direction is better."""
    metric = METRICS[world.metric]
    if world.metric == "accuracy":
        return compare_correct(pair.base[:, 0], pair.converted[:, 0])
    sign = -1 if metric.lower_is_better else 1

    def difference(rows: NDArray[np.intp]) -> float:
        return sign * (metric.total(pair.converted[rows]) - metric.total(pair.base[rows]))

    clustering = 1.0
    if pair.groups is not None:
        clustering = design_effect(
            lambda rows: metric.total(pair.base[rows]), len(pair.base), pair.groups, seed=seed, resamples=resamples
        )
    low, high = metric.bounds
    return compare_scores(
        difference,
        len(pair.base),
        seed=seed,
        stake=Stake(*metric.at_stake(pair.base)),
        groups=pair.groups,
        clustering=clustering,
        widest=high - low if math.isfinite(high - low) else None,
        resamples=resamples,
    )


def harm_of(world: World, loss: float) -> float:
    """The harm that lowers the metric by this much on average; the loss is nearly linear in it."""
    metric, harm = METRICS[world.metric], loss
    for _ in range(3):
        many = 4000 if world.models is speakers else 400_000
        # The same draws, except for the harm.
        harmed, clean = (world.models(np.random.default_rng(99), many, drop).converted for drop in (harm, 0.0))
        harm *= loss / abs(metric.total(harmed) - metric.total(clean))
    return harm


def alarms(world: World, repetitions: int, resamples: int = RESAMPLES, seed: int = 0) -> float:
    """Share of pairs of equal models whose interval excludes 0."""
    generator, missed = np.random.default_rng(seed), 0
    for repetition in range(repetitions):
        low, high = _interval(compared(world, world.models(generator, world.count, 0.0), repetition, resamples))
        missed += not low <= 0 <= high
    return missed / repetitions


def settled(world: World, margin: float, repetitions: int, resamples: int = RESAMPLES, seed: int = 1) -> float:
    """Share of pairs with the planted loss whose verdict is not `inconclusive`."""
    generator, decided, harm = np.random.default_rng(seed), 0, harm_of(world, LOSS)
    for repetition in range(repetitions):
        made = compared(world, world.models(generator, world.count, harm), repetition, resamples)
        decided += verdict(_interval(made), margin, world.count, rare=made.rare)[0] != "inconclusive"
    return decided / repetitions


def needed(world: World, resamples: int = RESAMPLES) -> int:
    """Examples, or groups, that a verdict asks for if the observed loss is exactly the planted one and the margin is 0."""
    generator, harm = np.random.default_rng(2), harm_of(world, LOSS)
    pilots = [compared(world, world.models(generator, world.count, harm), seed, resamples) for seed in range(60)]
    rare = float(np.mean([made.rare for made in pilots]))
    half = float(np.mean([(high - low) / 2 for low, high in map(_interval, pilots)]))
    noise = math.sqrt(max(half**2 - rare**2, 0.0))
    # A pilot large enough to settle would not give a number, so it is presented as a smaller one.
    smaller = max(1.0, (1.5 * LOSS / half) ** 2)
    noise, rare = noise * math.sqrt(smaller), rare * smaller
    half = math.hypot(noise, rare)
    asked = verdict((-LOSS - half, -LOSS + half), 0.0, math.ceil(world.count / smaller), rare=rare)[1]
    if asked is None:
        raise ValueError(f"{world.name}: the verdict asks for no number of examples")
    return asked


def missed(world: World, lost: float, margin: float | None, repetitions: int, resamples: int = RESAMPLES) -> float:
    """Share of pairs with a rare loss whose verdict is that there is none, or none beyond the margin.

    Args:
        world: Of `struck` models.
        lost: Share of examples that are wholly lost.
        margin: In points, or per cent of the base's score; None takes the loss itself.
        repetitions: Number of pairs.
        resamples: Resamples of each comparison.
    """
    metric, passed, generator = METRICS[world.metric], 0, np.random.default_rng(3)
    # What is lost depends on the other examples, so the true loss is a mean over samples of this size.
    drawn = np.random.default_rng(99)
    pairs = [world.models(drawn, world.count, lost) for _ in range(500)]
    score = float(np.mean([metric.total(pair.base) for pair in pairs]))
    loss = abs(float(np.mean([metric.total(pair.converted) for pair in pairs])) - score)
    allowed = loss if margin is None else metric.acceptable(margin, score)
    for repetition in range(repetitions):
        made = compared(world, world.models(generator, world.count, lost), repetition, resamples)
        judged = verdict(_interval(made), allowed, world.count, rare=made.rare)[0]
        passed += judged in ("no loss", "loss within margin")
    return passed / repetitions


def enough(world: World, repetitions: int = 40, resamples: int = RESAMPLES // 2) -> int | None:
    """The first of `SIZES` at which four in five pairs of equal models have no loss at a margin of one point or per cent."""
    metric, generator = METRICS[world.metric], np.random.default_rng(4)
    for size in SIZES:
        passed = 0
        for repetition in range(repetitions):
            pair = world.models(generator, size, 0.0)
            allowed = metric.acceptable(1.0, metric.total(pair.base))
            made = compared(world, pair, repetition, resamples)
            passed += verdict(_interval(made), allowed, size)[0] == "no loss"
        if passed >= POWER * repetitions:
            return size
    return None


RARE = {
    "accuracy": right,
    "f1": classes,
    "matthews": classes,
    "pearson": numbers,
    "spearman": numbers,
    "answer_f1": answers,
    "wer": utterances,
    "bits_per_byte": stretches,
}
"""Metric -> models that are struck by rare losses."""


def measure_rare(metric: str) -> dict[str, Any]:
    """How often a rare loss passes for none, and how many examples equal models need for a verdict."""
    world = World(metric, struck(metric, RARE[metric]), STRUCK)
    return {
        "metric": metric,
        "missed": missed(world, LOST, MARGIN, REPETITIONS),
        "missed_at_margin": {
            str(count): missed(world._replace(count=count), 3 / count, None, REPETITIONS // 2) for count in (60, 300)
        },
        "enough": enough(World(metric, alike(RARE[metric]), 0)),
    }


def measure(world: World) -> dict[str, Any]:
    """All rates of one world."""
    asked = needed(world)
    return {
        "name": world.name,
        "alarms": alarms(world, REPETITIONS),
        "settled_at_margin": settled(world, LOSS, REPETITIONS),
        "needed": asked,
        "power": settled(world._replace(count=asked), 0.0, REPETITIONS // 4, RESAMPLES // 2),
    }


def report(made: dict[str, Any], _: Path) -> str:
    """The page of a record, in Markdown."""
    head = ["metric", "equal models called different", "settled where the loss is the margin", "asked for"]
    rows = []
    for row in made["worlds"]:
        rates = [f"{100 * row[key]:.1f} %" for key in ("alarms", "settled_at_margin", "power")]
        rows.append([row["name"], rates[0], rates[1], f"{row['needed']:,}", rates[2]])
    return (
        "# Whether comparisons keep their word\n\n"
        f"Simulated pairs of models, {made['repetitions']:,} of each kind, compared as `approx evaluate` compares, with "
        f"{made['resamples']} resamples. The first two rates may be {100 * (1 - CONFIDENCE):.0f} % "
        f"(± {100 * made['error']:.1f} of the simulation); they are less where few examples differ. *Asked for* is the number of "
        f"examples, or speakers, that an inconclusive verdict names for a loss of {100 * LOSS:.0f} point ({LOSS} where the metric is no "
        f"fraction) against a margin of 0, and *settled by them* the share of {made['repetitions'] // 4} pairs of that size with a "
        f"verdict; {100 * POWER:.0f} % are promised, and more are kept where the question came from few speakers or stretches. Made by "
        f"`{made['command']}`.\n\n"
        f"{table([*head, 'settled by them'], rows)}\n" + ("\n" + _rare(made) if "rare" in made else "")
    )


def _rare(made: dict[str, Any]) -> str:
    sizes = list(made["rare"][0]["missed_at_margin"])
    margins = [f"3 of {size} lost, which is the margin" for size in sizes]
    head = ["metric", f"{100 * LOST:.0f} % of {STRUCK} lost, margin {MARGIN}", *margins, "equal models need"]
    rows = []
    for row in made["rare"]:
        rates = [row["missed"], *row["missed_at_margin"].values()]
        asked = f"more than {SIZES[-1]:,}" if row["enough"] is None else f"{row['enough']:,}"
        rows.append([row["metric"], *(f"{100 * rate:.1f} %" for rate in rates), asked])
    return (
        "## Rare, large losses\n\n"
        "The converted model is the base, but that it loses a few examples wholly: transcripts and answers without a right word, "
        "the other class, the most distant number, eight bits per byte. The rates are how often the verdict is *no loss*, or *loss within "
        "margin*; the loss is on average of that share of examples. The margin is in points, or per cent of the base's score. *Equal "
        "models need* is the first of some sizes at which "
        f"{100 * POWER:.0f} % of pairs have the verdict *no loss* at a margin of 1, if one model is the other but for one example in fifty.\n\n"
        f"{table(head, rows)}\n"
    )


def _interval(comparison: Comparison) -> tuple[float, float]:
    if comparison.interval is None:
        raise ValueError("a world of one example or group has no interval")
    return comparison.interval


def record() -> dict[str, Any]:
    """Simulate all worlds."""
    return {
        "command": "python bench/calibration.py",
        "repetitions": REPETITIONS,
        "resamples": RESAMPLES,
        "error": math.sqrt(CONFIDENCE * (1 - CONFIDENCE) / REPETITIONS),
        "worlds": [measure(world) for world in track(WORLDS, "simulating", console=Console(stderr=True))],
        "rare": [measure_rare(metric) for metric in track(RARE, "striking", console=Console(stderr=True))],
        "environment": environment(),
    }


if __name__ == "__main__":
    main(__doc__, record, report)
