"""Tests, intervals and verdicts, compared with scipy where possible and otherwise with simulation."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from approx.evaluation import statistics
from approx.evaluation.statistics import (
    accuracy_interval,
    compare_correct,
    compare_scores,
    fewest_examples,
    holm,
    ratio_interval,
    score_interval,
    verdict,
)


def flags(both: int, lost: int, won: int, neither: int) -> tuple[list[bool], list[bool]]:
    base = [True] * (both + lost) + [False] * (won + neither)
    converted = [True] * both + [False] * lost + [True] * won + [False] * neither
    return base, converted


@pytest.mark.parametrize(("lost", "won"), [(0, 0), (1, 0), (7, 2), (2, 7), (40, 30), (500, 400)])
def test_the_p_value_is_the_exact_binomial_of_the_discordant_examples(lost, won):
    comparison = compare_correct(*flags(700, lost, won, 100))
    assert comparison.p_value == (stats.binomtest(lost, lost + won, 0.5).pvalue if lost + won else 1.0)
    assert comparison.difference == pytest.approx((won - lost) / (800 + lost + won))
    assert comparison.interval is not None
    assert comparison.interval[0] <= comparison.difference <= comparison.interval[1]


def test_the_interval_of_a_difference_of_accuracies_is_that_of_the_paper():
    # Bonett and Price 2012, by hand: p12 = 21/874, p21 = 11/874.
    interval = compare_correct(*flags(700, 20, 10, 142)).interval
    centre, half = -10 / 874, 1.959964 * math.sqrt((32 / 874 - (10 / 874) ** 2) / 874)
    assert interval == pytest.approx((centre - half, centre + half), abs=1e-6)


def test_the_interval_of_an_accuracy_is_wilsons():
    assert accuracy_interval([True] * 781 + [False] * 91) == pytest.approx((0.87359, 0.91423), abs=1e-5)


def test_identical_predictions_on_few_examples_settle_nothing():
    few, many = compare_correct(*flags(9, 0, 0, 1)), compare_correct(*flags(1500, 0, 0, 500))
    assert verdict(few.interval, 0.005, 10)[0] == "inconclusive"
    assert verdict(many.interval, 0.005, 2000)[0] == "no loss"
    same = [compare_scores(lambda rows: 0.0, count, seed=0, resamples=50).interval for count in (10, 2000)]
    assert [verdict(interval, 0.005, 10)[0] for interval in same] == ["inconclusive", "no loss"]


def test_the_bootstrap_agrees_with_theory_on_a_mean():
    values = np.random.default_rng(1).normal(0.3, 1.0, 400)
    comparison = compare_scores(lambda rows: float(values[rows].mean()), 400, seed=0)
    exact: Any = stats.ttest_1samp(values, 0)
    assert comparison.interval == pytest.approx(exact.confidence_interval(0.95), abs=0.005)
    assert comparison.p_value == pytest.approx(exact.pvalue, rel=0.8)
    assert score_interval(lambda rows: float(values[rows].mean()), 400, seed=0) == pytest.approx(
        comparison.interval, abs=0.01
    )


def test_an_interval_does_not_go_beyond_the_largest_possible_difference():
    """Two groups of opposite differences would give an interval of several hundred points."""
    values = np.repeat([0.4, -0.4], 4)
    comparison = compare_scores(
        lambda rows: float(values[rows].mean()), 8, seed=0, groups=np.repeat([0, 1], 4), resamples=200
    )
    assert comparison.interval == (-1.0, 1.0)


@pytest.mark.parametrize("widest", [None, 1.0])
def test_the_p_value_is_the_one_at_which_the_interval_touches_zero(widest):
    values = np.random.default_rng(2).normal(0.15, 1.0, 150)

    def compare(confidence: float) -> statistics.Comparison:
        return compare_scores(
            lambda rows: float(values[rows].mean()), 150, seed=0, widest=widest, confidence=confidence, resamples=200
        )

    p_value = compare(0.95).p_value
    assert 0.001 < p_value < 0.5
    wider, narrower = compare(1 - p_value * 0.999).interval, compare(1 - p_value * 1.001).interval
    assert wider is not None
    assert narrower is not None
    assert wider[0] < 0 < narrower[0]


def test_few_groups_have_the_interval_of_their_means():
    groups = np.repeat(np.arange(4), 25)
    means = np.array([0.1, 0.3, 0.2, 0.5])
    comparison = compare_scores(
        lambda rows: float(means[groups[rows]].mean()), 100, seed=0, groups=groups, widest=None, resamples=20_000
    )
    assert comparison.test == "paired bootstrap over 4 groups"
    exact: Any = stats.ttest_1samp(means, 0)
    assert comparison.interval == pytest.approx(exact.confidence_interval(0.95), abs=0.01)
    assert comparison.p_value == pytest.approx(exact.pvalue, abs=0.003)


@pytest.mark.parametrize("groups", [None, np.zeros(20, int)])
def test_one_example_or_group_settles_nothing(groups):
    count = 1 if groups is None else 20
    comparison = compare_scores(lambda rows: -0.3, count, seed=0, groups=groups, resamples=10)
    assert (comparison.difference, comparison.interval, comparison.p_value) == (-0.3, None, 1.0)
    assert verdict(comparison.interval, 0.01, count) == ("inconclusive", None)
    assert score_interval(lambda rows: 0.5, count, seed=0, groups=groups, resamples=10) is None
    assert verdict(compare_correct([True], [False]).interval, 0.01, 1)[0] == "inconclusive"


def test_holm_is_the_procedure_of_the_paper():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.2]) == [0.2]
    assert holm([0.9, 0.8]) == [1.0, 1.0]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_holm_rejects_step_by_step(p_values):
    adjusted = holm(p_values)
    for level in (0.01, 0.05, 0.3):
        rejected = set()
        for rank, test in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
            if p_values[test] * (len(p_values) - rank) > level:
                break
            rejected.add(test)
        assert {test for test, value in enumerate(adjusted) if value <= level} == rejected


def test_what_is_drawn_depends_on_the_seed_alone():
    values = np.random.default_rng(1).normal(size=50)
    draws = [
        compare_scores(lambda rows: float(values[rows].mean()), 50, seed=seed, resamples=100) for seed in (3, 3, 4)
    ]
    assert draws[0] == draws[1] != draws[2]
    assert ratio_interval(values + 9, values + 8, seed=3) == ratio_interval(values + 9, values + 8, seed=3)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ((-0.004, 0.004), "no loss"),
        ((-0.02, -0.01), "no loss"),
        ((0.0, 0.005), "no loss"),
        ((0.001, 0.005), "loss within margin"),
        ((0.006, 0.02), "loss beyond margin"),
        ((0.005, 0.02), "inconclusive"),
        ((-0.01, 0.01), "inconclusive"),
    ],
)
def test_verdicts_follow_from_the_interval_of_the_loss(loss, expected):
    judged, needed = verdict((-loss[1], -loss[0]), 0.005, 872)
    assert judged == expected
    assert (needed is None) == (expected != "inconclusive")
    if needed is not None:
        assert needed > 872


@given(
    low=st.floats(-0.5, 0.5),
    width=st.floats(1e-4, 0.5),
    margin=st.floats(0, 0.1),
)
def test_a_larger_margin_never_worsens_a_verdict(low, width, margin):
    order = ["loss beyond margin", "inconclusive", "loss within margin", "no loss"]
    interval = (-low - width, -low)
    strict, lenient = (verdict(interval, value, 100)[0] for value in (margin, margin + 0.01))
    assert order.index(lenient) >= order.index(strict)


def test_no_number_of_examples_settles_a_loss_that_is_the_margin():
    assert verdict((-0.5, -0.25), 0.375, 100) == ("inconclusive", None)


def test_the_ratio_of_medians_keeps_its_coverage():
    generator = np.random.default_rng(2)
    covered = 0
    for seed in range(300):
        weather = generator.lognormal(0, 0.3, 40)
        base = 1.5 * weather * generator.lognormal(0, 0.05, 40)
        other = weather * generator.lognormal(0, 0.05, 40)
        low, high = ratio_interval(base, other, seed, resamples=300)
        covered += low <= 1.5 <= high
    assert covered / 300 >= 0.92


def test_drawing_rounds_cancels_what_slows_a_whole_round_down():
    weather = np.random.default_rng(3).lognormal(0, 0.5, 60)
    low, high = ratio_interval(2 * weather, weather)
    assert (low, high) == pytest.approx((2.0, 2.0))
    shuffled = ratio_interval(2 * weather, weather[::-1])
    assert shuffled[1] - shuffled[0] > 0.2


def test_unpaired_samples_are_refused():
    with pytest.raises(ValueError, match="equal sizes"):
        ratio_interval([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="at least 1"):
        compare_correct([], [])


def test_without_a_change_the_interval_is_that_of_one_example_more_each_way():
    """Two examples of -1 and 1 add 2 / n² to the variance of a mean of n."""
    interval = compare_scores(lambda rows: 0.0, 50, seed=0, resamples=50).interval
    half = float(stats.t.ppf(0.975, 49)) * math.sqrt(2) / 50
    assert interval == pytest.approx((-half, half))


def test_where_every_resample_gives_the_same_the_p_value_is_all_or_nothing():
    for difference, p_value in ((0.0, 1.0), (-0.25, 0.0)):
        comparison = compare_scores(lambda rows, same=difference: same, 50, seed=0, widest=None, resamples=20)
        assert (comparison.p_value, comparison.interval) == (p_value, (difference, difference))


def test_the_interval_of_a_score_reaches_as_far_as_students_t_says():
    """Scores like those of a bootstrap of five examples from a normal distribution with standard deviation 1."""
    drawn = iter(stats.norm.ppf((np.arange(20_000) + 0.5) / 20_000))
    interval = score_interval(lambda rows: float(next(drawn)), 5, seed=0, resamples=20_000)
    reach = float(stats.t.ppf(0.975, 4)) * math.sqrt(5 / 4)
    assert interval == pytest.approx((-reach, reach), rel=0.02)


def test_as_many_examples_are_needed_as_make_the_interval_short_enough():
    """With a loss of 0 and an interval of twice the margin: (1 + 0.8416 / 1.96)² times four as many."""
    assert verdict((-0.01, 0.01), 0.005, 100) == ("inconclusive", math.ceil(400 * (1 + 0.841621 / 1.959964) ** 2))
    # A loss of three times the margin is two margins away from it.
    needed = verdict((-0.035, 0.005), 0.005, 100)[1]
    assert needed == math.ceil(100 * 2**2 * (1 + 0.841621 / 1.959964) ** 2)


@pytest.mark.parametrize("margin", [0.5, 0.01, 0.005])
def test_the_fewest_examples_settle_a_margin_and_one_less_does_not(margin):
    fewest = fewest_examples(margin)
    settled = []
    for count in (fewest - 1, fewest):
        same = np.ones(count, bool)
        settled.append(verdict(compare_correct(same, same).interval, margin, count)[0])
    assert settled == ["inconclusive", "no loss"]
