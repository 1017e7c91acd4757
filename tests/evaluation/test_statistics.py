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
    Stake,
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


@pytest.mark.parametrize(("lost", "won"), [(20, 10), (1, 0), (0, 3), (300, 5)])
def test_interval_of_accuracy_difference_joins_two_intervals(lost, won):
    """That of Bonett and Price 2012, and Wald's joined with the rule of three."""
    interval = compare_correct(*flags(400, lost, won, 872 - 400 - lost - won)).interval
    difference, half = (won - lost) / 872, 1.959964 * math.sqrt(((lost + won) / 872 - ((won - lost) / 872) ** 2) / 872)
    half = math.hypot(half, 1 - 0.025 ** (1 / 872))
    shares = (lost + 1) / 874, (won + 1) / 874
    centre, wide = shares[1] - shares[0], 1.959964 * math.sqrt((sum(shares) - (shares[1] - shares[0]) ** 2) / 874)
    expected = min(difference - half, centre - wide), max(difference + half, centre + wide)
    assert interval == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("examples", [10, 60, 872])
def test_no_change_bounds_its_frequency_by_the_rule_of_three(examples):
    bound = 1 - 0.025 ** (1 / examples)
    assert 3 / examples < bound + 1 / examples**1.5 < 5 / examples + 0.1
    assert compare_correct([True] * examples, [True] * examples).interval == pytest.approx((-bound, bound))
    scored = compare_scores(lambda rows: 0.0, examples, seed=0, resamples=5)
    assert scored.interval == pytest.approx((-bound, bound))
    assert scored.rare == pytest.approx(bound)
    # Nothing larger than the whole stake can be lost, and nothing smaller than it is assumed.
    other = compare_scores(lambda rows: 0.0, examples, seed=0, resamples=5, stake=Stake(6.0, 0.5), widest=None)
    assert other.interval == pytest.approx((-6 * bound, 0.5 * bound))


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
    """Five groups of opposite differences would give an interval of more than a hundred points."""
    values = np.repeat([0.9, -0.9, 0.9, -0.9, 0.9], 4)
    comparison = compare_scores(
        lambda rows: float(values[rows].mean()), 20, seed=0, groups=np.repeat(range(5), 4), resamples=200
    )
    assert comparison.interval is not None
    assert comparison.interval[1] == 1.0


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


NOTHING = Stake(0.0, 0.0)


def test_few_groups_have_the_interval_of_their_means():
    groups = np.repeat(np.arange(5), 25)
    means = np.array([0.1, 0.3, 0.2, 0.5, 0.4])
    comparison = compare_scores(
        lambda rows: float(means[groups[rows]].mean()),
        125,
        seed=0,
        groups=groups,
        widest=None,
        stake=NOTHING,
        resamples=20_000,
    )
    assert comparison.test == "paired bootstrap over 5 groups"
    exact: Any = stats.ttest_1samp(means, 0)
    assert comparison.interval == pytest.approx(exact.confidence_interval(0.95), abs=0.01)
    assert comparison.p_value == pytest.approx(exact.pvalue, abs=0.003)


def test_unseen_losses_may_affect_a_whole_group():
    """With groups, the rule of three counts examples as their design effect allows, and never fewer than the groups."""
    groups = np.repeat(np.arange(10), 20)

    def rare(values, clustering: float = 1.0) -> float:
        return compare_scores(
            lambda rows: float(values[rows].mean()), 200, seed=0, groups=groups, clustering=clustering, resamples=400
        ).rare

    same, apart = np.zeros(200), np.repeat(np.random.default_rng(0).normal(size=10), 20)
    assert rare(same) == pytest.approx(statistics.unseen(200))
    assert rare(same, 4.0) == pytest.approx(statistics.unseen(50))
    assert rare(same, 400.0) == pytest.approx(statistics.unseen(10))
    # Differences that cluster wholly leave as many independent ones as there are groups.
    assert statistics.unseen(20) < rare(apart) <= statistics.unseen(10)


@pytest.mark.parametrize(("count", "groups"), [(1, None), (20, np.zeros(20, int)), (24, np.repeat([0, 1, 2], 8))])
def test_one_example_or_few_groups_settle_nothing(count, groups):
    comparison = compare_scores(lambda rows: -0.3, count, seed=0, groups=groups, resamples=10)
    assert (comparison.difference, comparison.interval, comparison.p_value) == (-0.3, None, 1.0)
    assert verdict(comparison.interval, 0.01, count) == ("inconclusive", None)
    assert score_interval(lambda rows: 0.5, count, seed=0, groups=groups, resamples=10) is None
    assert verdict(compare_correct([True], [False]).interval, 0.01, 1)[0] == "inconclusive"


def test_a_design_effect_says_how_far_groups_make_examples_alike():
    groups = np.repeat(np.arange(40), 10)
    alike = np.repeat(np.random.default_rng(0).normal(size=40), 10)
    apart = np.random.default_rng(1).normal(size=400)
    found = [
        statistics.design_effect(
            lambda rows, values=values: float(values[rows].mean()), 400, groups, seed=0, resamples=500
        )
        for values in (alike, apart, np.ones(400))
    ]
    assert found[0] == pytest.approx(10, rel=0.25)
    assert found[1] < 1.5
    assert found[2] == 1.0


def test_a_base_at_chance_has_no_other_verdict():
    assert verdict((-0.9, -0.8), 0.01, 500, at_chance=True) == ("the base is at chance", None)
    assert verdict((-0.001, 0.001), 0.01, 500, 0, at_chance=True)[0] == "the base is at chance"


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [(None, "no loss"), (0.0313, "not tested: exact on 96 % of the pairs of tokens"), (0.05, "no loss")],
)
def test_a_twentieth_of_the_pairs_must_be_approximated(pairs, expected):
    assert verdict((-0.001, 0.001), 0.005, 1000, 1000, pairs) == (expected, None)
    assert verdict((-0.2, -0.1), 0.005, 1000, 1000, pairs)[0] == "loss beyond margin"


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


def test_where_every_resample_gives_the_same_a_change_is_as_certain_as_its_rarity_allows():
    for difference, certain in ((0.0, False), (-0.001, False), (-0.25, True)):
        comparison = compare_scores(lambda rows, same=difference: same, 50, seed=0, widest=None, resamples=20)
        assert (comparison.p_value < 0.05) is certain
        assert comparison.interval is not None
        assert (comparison.interval[1] < 0) is certain
        assert comparison.interval[0] < difference < comparison.interval[1]


def test_the_interval_of_a_score_reaches_as_far_as_students_t_says():
    """Scores like those of a bootstrap of five examples from a normal distribution with standard deviation 1."""
    drawn = iter([*stats.norm.ppf((np.arange(20_000) + 0.5) / 20_000), 0.0])
    interval = score_interval(
        lambda rows: float(next(drawn)), 5, seed=0, resamples=20_000, stake=NOTHING, bounds=(-math.inf, math.inf)
    )
    reach = float(stats.t.ppf(0.975, 4)) * math.sqrt(5 / 4)
    assert interval == pytest.approx((-reach, reach), rel=0.02)


def test_a_score_without_any_spread_has_an_interval_still():
    """Twelve utterances with one error each are no proof that every utterance has one."""
    assert score_interval(lambda rows: 1 / 6, 12, seed=0, stake=Stake(1 / 6, 5 / 6), resamples=20) == pytest.approx(
        (1 / 6 * 0.025 ** (1 / 12), 1 / 6 + 5 / 6 * (1 - 0.025 ** (1 / 12)))
    )
    assert score_interval(lambda rows: 1.0, 12, seed=0, resamples=20) == pytest.approx((0.025 ** (1 / 12), 1.0))


def test_resamples_without_a_value_do_not_count():
    """The error rate of empty transcripts alone is 0 / 0."""
    words = np.array([3.0, 0.0, 0.0, 0.0])
    interval = score_interval(lambda rows: float(words[rows].sum() / words[rows].sum()), 4, seed=0, resamples=50)
    assert interval is not None
    assert np.isfinite(interval).all()


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


def test_fewer_examples_are_needed_where_only_rare_losses_are_in_doubt():
    """What no example shows shrinks with the number of examples, and noise with its square root."""
    made = compare_correct([True] * 60, [True] * 60)
    judged, needed = verdict(made.interval, 0.005, 60, rare=made.rare)
    assert judged == "inconclusive"
    assert needed is not None
    again = compare_correct([True] * needed, [True] * needed)
    assert verdict(again.interval, 0.005, needed, rare=again.rare)[0] == "no loss"
    assert 700 < needed < 800
