"""Tests, intervals and verdicts for the difference between two models. Needs no torch.

A difference is always converted minus base, so a loss is negative. Intervals are two-sided. All random draws come from
the given seed.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.stats import binomtest, norm
from scipy.stats import t as student

from approx.evaluation.record import AT_CHANCE

Interval = tuple[float, float]

CONFIDENCE = 0.95
RESAMPLES = 2000
POWER = 0.8
"""The probability that `needed_examples` examples settle the verdict."""
FEWEST_GROUPS = 5
"""With fewer groups of examples there is no interval: so few do not show how much groups differ."""
TESTED = 0.1
"""The minimum share of approximated inputs for a verdict on a small loss."""
TESTED_PAIRS = 0.05
"""The minimum share of approximated pairs of tokens for a verdict on a small loss, of the average input.

Keys that are left out of a head's attention change its output by at most twice their share of the attention, and
patterns leave out distant keys, which have less than their share: below a twentieth of the pairs, hardly anything was
replaced.
"""


@dataclass(frozen=True)
class Comparison:
    """A difference of two scores on the same examples, converted minus base, in the units of the score.

    A single example, or fewer than `FEWEST_GROUPS` groups, give no interval.
    """

    difference: float
    interval: Interval | None
    confidence: float
    test: str
    p_value: float
    rare: float = 0.0
    """How far a rare loss could reach that no example shows, as a part of the interval."""


def compare_correct(base: ArrayLike, converted: ArrayLike, confidence: float = CONFIDENCE) -> Comparison:
    """Compare two accuracies by the examples on which only one of the models is correct.

    The p-value is from the exact McNemar test. The interval holds two: the adjusted Wald interval for paired
    proportions, and Wald's own joined with the rule of three as in `compare_scores`, which reaches further where few
    examples changed.

    Source: McNemar 1947; Bonett and Price, 2012, "Adjusted Wald confidence interval for a difference of binomial
    proportions based on paired data"; Hanley and Lippman-Hand, 1983, "If Nothing Goes Wrong, Is Everything All Right?"

    Args:
        base: Whether the base is correct, one per example.
        converted: Whether the converted model is correct, in the same order.
        confidence: Confidence of the interval.
    """
    first, second = np.asarray(base, bool), np.asarray(converted, bool)
    total = _paired(first, second)
    lost, won = int(np.sum(first & ~second)), int(np.sum(~first & second))
    p_value = binomtest(lost, lost + won).pvalue if lost + won else 1.0
    difference = (won - lost) / total
    error = math.sqrt(((lost + won) / total - difference**2) / total)
    quantile, rare = _quantile(confidence), unseen(total, confidence)
    half = math.hypot(quantile * error, rare)
    lost_share, won_share = (lost + 1) / (total + 2), (won + 1) / (total + 2)
    centre = won_share - lost_share
    wide = quantile * math.sqrt((lost_share + won_share - centre**2) / (total + 2))
    interval = (max(-1.0, min(difference - half, centre - wide)), min(1.0, max(difference + half, centre + wide)))
    return Comparison(difference, interval, confidence, "exact McNemar", float(p_value), rare)


def unseen(independent: float, confidence: float = CONFIDENCE) -> float:
    """The largest share of examples that a change can strike though none of so many shows it.

    The rule of three, exactly, at each end of a two-sided interval: about 3.7 / n for 95 %.

    Source: Hanley and Lippman-Hand, 1983, "If Nothing Goes Wrong, Is Everything All Right?"
    """
    return 1 - ((1 - confidence) / 2) ** (1 / independent)


@dataclass(frozen=True)
class Stake:
    """What is at stake in one example: the change of a score for each unit of the share of examples that change wholly.

    Args:
        loss: If examples are wholly lost, in the units of the score, at least 0.
        gain: If examples are wholly won.
    """

    loss: float
    gain: float


WHOLE = Stake(1.0, 1.0)
"""The stake of a mean of scores from 0 to 1."""


def compare_scores(
    difference: Callable[[NDArray[np.intp]], float],
    examples: int,
    *,
    seed: int,
    stake: Stake = WHOLE,
    groups: NDArray[np.intp] | None = None,
    clustering: float = 1.0,
    widest: float | None = 1.0,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
) -> Comparison:
    """Compare two scores that are not means over examples (F1, Matthews, correlations) by paired bootstrap.

    Examples are drawn with replacement, the same for both models, and the metric is recomputed. Examples of one group
    are correlated, so whole groups are drawn.

    The bootstrap gives the standard error, corrected for narrowness by sqrt(n / (n - 1)), where n is the number of
    examples or groups; Student's t with n - 1 degrees of freedom makes an interval of it. Percentile intervals call
    equal models different in 6 % of cases at hundreds of examples and in 10-20 % at 5-20 groups.

    A bootstrap knows nothing of what no example shows. A loss that strikes one example in fifty is absent from 30 % of
    all samples of sixty, and the interval would shrink to a point that excludes it. Each end therefore also reaches as
    far as a rare change could: the share of examples that can be struck though none shows it (`unseen`), times what is
    at stake in each. Both reaches are added as independent errors. With groups, the number of examples is divided by
    their design effect: a change may strike a group's examples together.

    Source: Efron and Tibshirani, 1993, "An Introduction to the Bootstrap", chapters 6 and 12; Hesterberg, 2015, "What
    Teachers Should Know About the Bootstrap", on narrowness; Hanley and Lippman-Hand, 1983; Kish, 1965, "Survey
    Sampling", on design effects.

    Args:
        difference: Rows of examples -> the converted model's metric on them minus the base's, oriented so that a loss
            is negative.
        examples: Number of examples.
        seed: Seed of the resampling.
        stake: What is at stake in one example.
        groups: Number of each example's group, from 0; None if examples are independent.
        clustering: Design effect by groups of the base's own score, at least 1: how much changes may cluster that are
            too rare to show how much they do.
        widest: Largest possible difference, which ends the interval: 1 for scores between 0 and 1; None without one.
        confidence: Confidence of the interval.
        resamples: Number of bootstrap resamples.

    Returns:
        The comparison. Fewer than `FEWEST_GROUPS` groups give no interval.
    """
    observed = difference(np.arange(examples))
    independent = _independent(examples, groups)
    test = "paired bootstrap" if groups is None else f"paired bootstrap over {independent} groups"
    if independent < (2 if groups is None else FEWEST_GROUPS):
        return Comparison(observed, None, confidence, test, 1.0)
    error = float(_resample(difference, examples, seed, resamples, groups).std()) * _narrowness(independent)
    effective = examples / clustering
    if groups is not None:
        apart = float(_resample(difference, examples, seed, resamples, None).std())
        # A few resamples cannot distinguish a small effect from no effect; a design effect below 1 is noise.
        effect = max((error / apart) ** 2 if apart else 1.0, clustering, 1.0)
        effective = max(examples / effect, float(independent))

    def reach(towards: float, level: float) -> float:
        noise = error * float(student.ppf((1 + level) / 2, independent - 1))
        return math.hypot(noise, towards * unseen(effective, level))

    low, high = observed - reach(stake.loss, confidence), observed + reach(stake.gain, confidence)
    if widest is not None:
        low, high = max(low, -widest), min(high, widest)
    # The interval touches zero at the end on the other side of the difference.
    towards = stake.gain if observed < 0 else stake.loss
    p_value = 1 - _level_of(abs(observed), lambda level: reach(towards, level))
    return Comparison(observed, (low, high), confidence, test, p_value, stake.loss * unseen(effective, confidence))


def _level_of(distance: float, reach: Callable[[float], float]) -> float:
    """The confidence at which an interval reaches so far; `reach` grows with the confidence."""
    most = 1 - 1e-15
    if not distance or reach(0.0) >= distance:
        return 0.0
    if reach(most) <= distance:
        return 1.0
    level, _ = brentq(lambda level: reach(level) - distance, 0.0, most, xtol=1e-12, full_output=True)
    return float(level)


def design_effect(
    score: Callable[[NDArray[np.intp]], float],
    examples: int,
    groups: NDArray[np.intp],
    *,
    seed: int,
    resamples: int = RESAMPLES,
) -> float:
    """How much larger the variance of a score is because examples come in groups; at least 1.

    Source: Kish, 1965, "Survey Sampling".
    """
    together, apart = (float(_resample(score, examples, seed, resamples, by).std()) for by in (groups, None))
    return max(1.0, (together / apart) ** 2) if apart else 1.0


def standard_error(
    statistic: Callable[[NDArray[np.intp]], float],
    examples: int,
    *,
    seed: int,
    groups: NDArray[np.intp] | None = None,
    resamples: int = RESAMPLES,
) -> float:
    """The bootstrap standard error of a statistic of rows of examples, over groups if there are any."""
    return float(_resample(statistic, examples, seed, resamples, groups).std())


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for multiple tests, controlling the family-wise error rate.

    Source: Holm, 1979, "A simple sequentially rejective multiple test procedure".
    """
    values = np.asarray(p_values, float)
    order = np.argsort(values)
    adjusted = np.empty_like(values)
    adjusted[order] = np.maximum.accumulate(values[order] * np.arange(values.size, 0, -1)).clip(max=1.0)
    return adjusted.tolist()


def fewest_examples(margin: float) -> int:
    """The fewest examples that can show `no loss` of accuracy at a margin: so many, and none of them changes.

    Args:
        margin: The acceptable loss, above 0 and below 1: 0.01 for a point.
    """
    if not 0 < margin < 1:
        raise ValueError(f"a margin between 0 and 1 is needed, not {margin}")

    def settle(count: int) -> bool:
        same = np.ones(count, bool)
        return verdict(compare_correct(same, same).interval, margin, count)[0] == "no loss"

    enough = 1
    while not settle(enough):
        enough *= 2
    return bisect.bisect_left(range(enough), True, lo=enough // 2, key=settle)


def accuracy_interval(correct: ArrayLike, confidence: float = CONFIDENCE) -> Interval:
    """Return the Wilson score interval of one accuracy."""
    flags = np.asarray(correct, bool)
    interval = binomtest(int(flags.sum()), flags.size).proportion_ci(confidence, method="wilson")
    return float(interval.low), float(interval.high)


def score_interval(
    score: Callable[[NDArray[np.intp]], float],
    examples: int,
    *,
    seed: int,
    stake: Stake = WHOLE,
    bounds: Interval = (0.0, 1.0),
    groups: NDArray[np.intp] | None = None,
    clustering: float = 1.0,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
) -> Interval | None:
    """Return the bootstrap interval of one score.

    Percentiles, which stay within the range of the score, expanded by the ratio of Student's t to the normal
    distribution, and reaching as far as changes that no example shows, as in `compare_scores`.

    Source: Hesterberg, 2015, "What Teachers Should Know About the Bootstrap", expanded percentiles.

    Args:
        score: Rows of examples -> the score on them, which may be better in either direction.
        examples: Number of examples.
        seed: Seed of the resampling.
        stake: `loss` is what is at stake towards smaller scores, `gain` towards larger ones.
        bounds: Smallest and largest possible score.
        groups: Number of each example's group, from 0; None if examples are independent.
        clustering: Design effect by groups of the score, at least 1.
        confidence: Confidence of the interval.
        resamples: Number of bootstrap resamples.

    Returns:
        The interval; None for a single example, or fewer than `FEWEST_GROUPS` groups.
    """
    independent = _independent(examples, groups)
    if independent < (2 if groups is None else FEWEST_GROUPS):
        return None
    wide = float(student.ppf((1 + confidence) / 2, independent - 1)) * _narrowness(independent)
    low, high = _percentiles(_resample(score, examples, seed, resamples, groups), 1 - 2 * float(norm.sf(wide)))
    share, observed = unseen(max(examples / clustering, independent), confidence), score(np.arange(examples))
    low = observed - math.hypot(observed - low, share * stake.loss)
    high = observed + math.hypot(high - observed, share * stake.gain)
    return max(low, bounds[0]), min(high, bounds[1])


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """Return Student's interval of the mean of independent values, such as scores over seeds; None for a single one."""
    if len(values) < 2:
        return None
    mean, error = float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values))
    wide = float(student.ppf((1 + confidence) / 2, len(values) - 1)) * error
    return mean - wide, mean + wide


def verdict(
    interval: Interval | None,
    margin: float,
    examples: int,
    approximated: int | None = None,
    pairs: float | None = None,
    *,
    at_chance: bool = False,
    rare: float = 0.0,
) -> tuple[str, int | None]:
    """Compare the interval of a difference with the acceptable loss.

    With `low` and `high` the interval of base minus converted:
    `loss beyond margin` if low > margin; `loss within margin` if high <= margin and low > 0;
    `no loss` if high <= margin and low <= 0; otherwise `inconclusive`: the interval includes the margin, or there is
    none.

    A base that is no better than guessing has nothing to lose: the verdict is `the base is at chance`.

    If a converted model computes exact attention on more than nine tenths of the examples, or of the average input on
    all but a twentieth of the pairs of tokens, a small loss says nothing about its approximation: the verdict is `not
    tested: exact on N % of these inputs`, or `of the pairs`, unless the loss is beyond the margin anyway.

    Args:
        interval: Interval of converted minus base, as in `Comparison`.
        margin: The acceptable loss, in the units of the score, at least 0.
        examples: Number of examples of the interval.
        approximated: Number of examples on which the model approximates; None for a model that is not converted.
        pairs: Share of the pairs of tokens whose weight is not exact, of the average input; None if it is not known.
        at_chance: Whether the interval of the base's own score reaches the score of guessing.
        rare: How far the interval reaches for losses that no example shows, as in `Comparison`.

    Returns:
        The verdict. For `inconclusive` also the approximate number of similar examples that would settle it with a
        probability of 80 % if the true loss is the measured one; None if the verdict is settled, or if the measured
        loss equals the margin, so that no number would settle it. With groups, the number of groups grows in
        proportion; for few groups, the estimate is too high rather than too low.
    """
    if at_chance:
        return AT_CHANCE, None
    if interval is not None and -interval[1] > margin:
        return "loss beyond margin", None
    if approximated is not None and approximated < TESTED * examples:
        # Rounded down: 100 % means all inputs.
        return f"not tested: exact on {100 * (examples - approximated) // examples} % of these inputs", None
    if pairs is not None and pairs < TESTED_PAIRS:
        return f"not tested: exact on {math.floor(100 * (1 - pairs))} % of the pairs of tokens", None
    if interval is None:
        return "inconclusive", None
    low, high = -interval[1], -interval[0]
    if high <= margin:
        return ("loss within margin" if low > 0 else "no loss"), None
    half, distance = (high - low) / 2, abs(margin - (high + low) / 2)
    return "inconclusive", _needed(examples, math.sqrt(max(half**2 - rare**2, 0.0)), rare, distance)


def use_of(part: str, interval: Interval | None, margin: float) -> str:
    """What switching a part of a model off shows.

    Args:
        part: What the part is called: `linear part`.
        interval: Interval of the score with the part minus that without it, oriented so that a gain is positive; None for
            a single example or group.
        margin: The smallest difference that counts, in the units of the score.

    Returns:
        `the linear part is unused`: the interval includes 0 and lies within the margin on either side. `helps`: it lies above 0,
        and `helps by less than the margin` if it does not reach the margin; `harms` likewise below 0. `no effect of the linear
        part shows`: it includes 0 and reaches the margin, or there is none.
    """
    if interval is None:
        return f"no effect of the {part} shows"
    low, high = interval
    within = max(-low, high) <= margin
    if low <= 0 <= high:
        return f"the {part} is unused" if within else f"no effect of the {part} shows"
    return f"the {part} {'helps' if low > 0 else 'harms'}{' by less than the margin' if within else ''}"


def _needed(examples: int, noise: float, rare: float, distance: float) -> int | None:
    """Examples whose interval reaches no further than `distance` with a probability of 80 %."""
    noise *= 1 + _quantile(2 * POWER - 1) / _quantile(CONFIDENCE)
    # For many examples, the share that none shows is -ln(0.025) / n; for few it is less.
    rare *= -math.log((1 - CONFIDENCE) / 2) / examples / unseen(examples)
    # With x times as many examples, noise shrinks by the square root of x, and what no example shows by x.
    share = math.sqrt(noise**4 + 4 * (rare * distance) ** 2) + noise**2
    if not distance or share > 2e6 * distance**2:
        return None
    return math.ceil(examples * share / (2 * distance**2))


def ratio_interval(
    base_samples: ArrayLike,
    other_samples: ArrayLike,
    seed: int = 0,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
) -> Interval:
    """Return the bootstrap interval of median(base) / median(other), resampling rounds.

    The two samples of a round are drawn together, so a slowdown of a whole round cancels out.

    Args:
        base_samples: One positive measurement per round, such as a time.
        other_samples: Measurements of the other contender in the same rounds.
        seed: Seed of the resampling.
        confidence: Confidence of the interval.
        resamples: Number of bootstrap resamples.
    """
    base, other = np.asarray(base_samples, float), np.asarray(other_samples, float)
    rows = np.random.default_rng(seed).integers(_paired(base, other), size=(resamples, base.size))
    return _percentiles(np.median(base[rows], axis=1) / np.median(other[rows], axis=1), confidence)


def _independent(examples: int, groups: NDArray[np.intp] | None) -> int:
    return examples if groups is None else int(groups.max()) + 1


def _narrowness(independent: int) -> float:
    """Correction of the bootstrap's standard error, which divides by n instead of n - 1."""
    return math.sqrt(independent / (independent - 1))


def _resample(
    statistic: Callable[[NDArray[np.intp]], float],
    examples: int,
    seed: int,
    resamples: int,
    groups: NDArray[np.intp] | None,
) -> NDArray[np.float64]:
    generator = np.random.default_rng(seed)
    with np.errstate(divide="ignore", invalid="ignore"):
        if groups is None:
            drawn = np.array([statistic(generator.integers(examples, size=examples)) for _ in range(resamples)])
        else:
            count, rows = int(groups.max()) + 1, np.argsort(groups, kind="stable")
            ordered = groups[rows]
            picks = (np.bincount(generator.integers(count, size=count), minlength=count) for _ in range(resamples))
            drawn = np.array([statistic(np.repeat(rows, times[ordered])) for times in picks])
    # A resample may have no value, such as the word error rate of empty transcripts alone.
    return drawn[np.isfinite(drawn)]


def _percentiles(drawn: NDArray[np.float64], confidence: float) -> Interval:
    low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _quantile(confidence: float) -> float:
    return NormalDist().inv_cdf((1 + confidence) / 2)


def _paired(first: NDArray[np.generic], second: NDArray[np.generic]) -> int:
    if first.shape != second.shape or not first.size:
        raise ValueError(f"paired samples need equal sizes of at least 1; got {first.size} and {second.size}")
    return first.size
