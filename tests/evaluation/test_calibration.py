"""Calibration of the comparison, by simulation: equal models are rarely called different, planted losses are found.

`bench/calibration.py` has the simulated models, and simulates more of them than these tests.
"""

import math

import numpy as np
import pytest

from approx.evaluation import statistics
from approx.evaluation.statistics import compare_correct, compare_scores, verdict
from approx.tasks.metrics import METRICS
from bench.calibration import (
    LOSS,
    LOST,
    MARGIN,
    RARE,
    STRUCK,
    World,
    alarms,
    alike,
    answers,
    classes,
    compared,
    enough,
    missed,
    needed,
    numbers,
    right,
    settled,
    speakers,
    struck,
)
from bench.calibration import stretches as texts

RESAMPLES = 100


def error(share: float, repetitions: int) -> float:
    """Two standard errors of a simulated share."""
    return 2 * math.sqrt(share * (1 - share) / repetitions)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "repetitions"),
    [
        (World("accuracy", right, 71), 2000),
        (World("accuracy", right, 872), 2000),
        (World("f1", classes, 71), 300),
        (World("f1", classes, 277), 300),
        (World("matthews", classes, 277), 150),
        (World("pearson", numbers, 60), 150),
        (World("answer_f1", answers, 300), 500),
        (World("wer", speakers, 3), 400),
        (World("wer", speakers, 10), 300),
        (World("wer", speakers, 40), 150),
        (World("bits_per_byte", texts, 5), 500),
        (World("bits_per_byte", texts, 60), 500),
    ],
    ids=lambda value: value.name if isinstance(value, World) else "",
)
def test_equal_models_are_rarely_called_different(world, repetitions):
    assert alarms(world, repetitions, RESAMPLES) <= 0.05 + error(0.05, repetitions)


@pytest.mark.parametrize(
    ("world", "repetitions"),
    [
        (World("accuracy", right, 872), 1000),
        (World("answer_f1", answers, 300), 300),
        (World("wer", speakers, 20), 150),
        (World("bits_per_byte", texts, 60), 300),
    ],
    ids=lambda value: value.name if isinstance(value, World) else "",
)
@pytest.mark.sample(1)
def test_a_loss_that_is_the_margin_is_rarely_settled(world, repetitions):
    assert settled(world, LOSS, repetitions, RESAMPLES) <= 0.05 + error(0.05, repetitions)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "repetitions"),
    [
        (World("accuracy", right, 277), 400),
        (World("answer_f1", answers, 300), 150),
        (World("wer", speakers, 40), 60),
        (World("bits_per_byte", texts, 300), 250),
    ],
    ids=lambda value: value.name if isinstance(value, World) else "",
)
def test_a_planted_loss_of_a_point_is_found_with_the_power_that_is_stated(world, repetitions):
    rate = settled(world._replace(count=needed(world, RESAMPLES)), 0.0, repetitions, RESAMPLES)
    assert rate == pytest.approx(statistics.POWER, abs=0.05 + error(statistics.POWER, repetitions))


def test_what_an_inconclusive_pilot_asks_for_settles_pilots_of_that_size():
    # If the true loss is the measured one: more similar examples are resampled from the pilot.
    generator, rates = np.random.default_rng(5), []
    while len(rates) < 60:
        base, converted, _ = right(generator, 400, 0.06)
        judged, needed = verdict(compare_correct(base, converted).interval, 0.01, 400)
        if judged != "inconclusive" or needed is None or needed > 20_000:
            continue
        drawn = [generator.integers(400, size=needed) for _ in range(20)]
        again = [verdict(compare_correct(base[rows], converted[rows]).interval, 0.01, needed)[0] for rows in drawn]
        rates.append(np.mean([word != "inconclusive" for word in again]))
    assert np.mean(rates) == pytest.approx(statistics.POWER, abs=0.05)


@pytest.mark.parametrize("metric", RARE)
@pytest.mark.sample(1)
def test_detects_rare_large_loss(metric):
    """One example in fifty is wholly lost; of sixty examples, 30 % of samples show nothing of it."""
    world = World(metric, struck(metric, RARE[metric]), STRUCK)
    assert missed(world, LOST, MARGIN, 100, 40) <= 0.05
    # The worst case: the loss is the margin, and one sample in twenty shows nothing of it.
    assert missed(world, 3 / STRUCK, None, 100, 40) <= 0.05


def test_detects_loss_of_a_whole_speaker():
    """Losses that cluster by speaker: one speaker in twenty, of whom ten are heard."""
    generator, passed = np.random.default_rng(0), 0
    for seed in range(60):
        base = speakers(generator, 10, 0.0)
        assert base.groups is not None
        gone = (generator.random(10) < 0.05)[base.groups]
        pair = base._replace(converted=np.where(gone[:, None], METRICS["wer"].lost(base.base), base.base))
        made = compared(World("wer", speakers, 10), pair, seed, 40)
        passed += verdict(made.interval, 0.005, len(base.base), rare=made.rare)[0] == "no loss"
    assert passed <= 3


@pytest.mark.parametrize("metric", ["accuracy", "answer_f1", "wer", "bits_per_byte"])
@pytest.mark.sample(2)
def test_models_that_hardly_differ_reach_no_loss(metric):
    size = enough(World(metric, alike(RARE[metric]), 0), 10, 40)
    assert size is not None
    assert size <= 3200


def test_a_test_against_zero_and_its_interval_agree():
    generator = np.random.default_rng(3)
    for seed in range(200):
        values = generator.normal(0.2, 1, 80)
        comparison = compare_scores(lambda rows, values=values: float(values[rows].mean()), 80, seed=seed, resamples=50)
        assert comparison.interval is not None
        assert (comparison.p_value < 0.05) == (not comparison.interval[0] <= 0 <= comparison.interval[1])
