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
from scipy.stats import binomtest, norm
from scipy.stats import t as student

Interval = tuple[float, float]

CONFIDENCE = 0.95
RESAMPLES = 2000
POWER = 0.8
"""The probability that `needed_examples` examples settle the verdict."""
TESTED = 0.1
"""The minimum share of approximated inputs for a verdict on a small loss."""


@dataclass(frozen=True)
class Comparison:
    """A difference of two scores on the same examples, converted minus base, in the units of the score.

    A single example, or a single group, gives no interval.
    """

    difference: float
    interval: Interval | None
    confidence: float
    test: str
    p_value: float


def compare_correct(base: ArrayLike, converted: ArrayLike, confidence: float = CONFIDENCE) -> Comparison:
    """Compare two accuracies by the examples on which only one of the models is correct.

    The p-value is from the exact McNemar test. The interval is the adjusted Wald interval, which keeps its coverage for
    few or no discordant examples, where the Wald interval shrinks to a point.

    Source: McNemar 1947; Bonett and Price, 2012, "Adjusted Wald confidence interval for a difference of
    binomial proportions based on paired data".

    Args:
        base: Whether the base is correct, one per example.
        converted: Whether the converted model is correct, in the same order.
        confidence: Confidence of the interval.
    """
    first, second = np.asarray(base, bool), np.asarray(converted, bool)
    total = _paired(first, second)
    lost, won = int(np.sum(first & ~second)), int(np.sum(~first & second))
    p_value = binomtest(lost, lost + won).pvalue if lost + won else 1.0
    lost_share, won_share = (lost + 1) / (total + 2), (won + 1) / (total + 2)
    centre = won_share - lost_share
    half = _quantile(confidence) * math.sqrt((lost_share + won_share - centre**2) / (total + 2))
    interval = (max(-1.0, centre - half), min(1.0, centre + half))
    return Comparison((won - lost) / total, interval, confidence, "exact McNemar", float(p_value))


def compare_scores(
    difference: Callable[[NDArray[np.intp]], float],
    examples: int,
    *,
    seed: int,
    groups: NDArray[np.intp] | None = None,
    widest: float | None = 1.0,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
) -> Comparison:
    """Compare two scores that are not means over examples (F1, Matthews, correlations) by paired bootstrap.

    Examples are drawn with replacement, the same for both models, and the metric is recomputed. Examples of one group
    are correlated, so whole groups are drawn.

    The bootstrap gives the standard error, corrected for narrowness by sqrt(n / (n - 1)), where n is the number of
    examples or groups. The interval is a Student's t interval with n - 1 degrees of freedom; the p-value is below
    1 - confidence exactly if 0 is outside the interval. Percentile intervals call equal models different in 6 % of cases
    at hundreds of examples and in 10-20 % at 5-20 groups; this interval keeps to 5 % in both, down to 3 groups, and
    under heavy tails (measured by bench/calibration.py).

    If hardly any prediction changes, such an interval shrinks to a point, and a loss from a few examples in hundreds
    looks too certain. For a score with a largest difference, the variance of one wholly lost and one wholly won example is
    therefore added, as in the interval for accuracies; if nothing changed, this amounts to the rule of three.

    Source: Efron and Tibshirani, 1993, "An Introduction to the Bootstrap", chapters 6 and 12; Hesterberg, 2015, "What
    Teachers Should Know About the Bootstrap", on narrowness; Bonett and Price, 2012, on the examples added.

    Args:
        difference: Rows of examples -> the converted model's metric on them minus the base's.
        examples: Number of examples.
        seed: Seed of the resampling.
        groups: Number of each example's group, from 0; None if examples are independent.
        widest: Largest possible difference, which ends the interval: 1 for scores between 0 and 1; None without one.
        confidence: Confidence of the interval.
        resamples: Number of bootstrap resamples.
    """
    observed = difference(np.arange(examples))
    independent = _independent(examples, groups)
    test = "paired bootstrap" if groups is None else f"paired bootstrap over {independent} groups"
    if independent < 2:
        return Comparison(observed, None, confidence, test, 1.0)
    error = float(_resample(difference, examples, seed, resamples, groups).std()) * _narrowness(independent)
    if widest is not None:
        error = math.hypot(error, math.sqrt(2) / independent)
    half = error * float(student.ppf((1 + confidence) / 2, independent - 1))
    p_value = 2 * float(student.sf(abs(observed) / error, independent - 1)) if error else float(observed == 0)
    low, high = observed - half, observed + half
    if widest is not None:
        low, high = max(low, -widest), min(high, widest)
    return Comparison(observed, (low, high), confidence, test, p_value)


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
    groups: NDArray[np.intp] | None = None,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
) -> Interval | None:
    """Return the bootstrap interval of one score; `score` takes the rows to compute it on.

    Percentiles, which stay within the range of the score, expanded by the ratio of Student's t to the normal
    distribution. None for a single example or group.

    Source: Hesterberg, 2015, "What Teachers Should Know About the Bootstrap", expanded percentiles.
    """
    independent = _independent(examples, groups)
    if independent < 2:
        return None
    wide = float(student.ppf((1 + confidence) / 2, independent - 1)) * _narrowness(independent)
    return _percentiles(_resample(score, examples, seed, resamples, groups), 1 - 2 * float(norm.sf(wide)))


def verdict(
    interval: Interval | None, margin: float, examples: int, approximated: int | None = None
) -> tuple[str, int | None]:
    """Compare the interval of a difference with the acceptable loss.

    With `low` and `high` the interval of base minus converted:
    `loss beyond margin` if low > margin; `loss within margin` if high <= margin and low > 0;
    `no loss` if high <= margin and low <= 0; otherwise `inconclusive`: the interval includes the margin, or there is none.

    If a converted model computes exact attention on more than nine tenths of the examples, a small loss says nothing
    about its approximation: the verdict is `not tested: exact on N % of these inputs`, unless the loss is beyond the
    margin anyway.

    Args:
        interval: Interval of converted minus base, as in `Comparison`.
        margin: The acceptable loss, in the units of the score, at least 0.
        examples: Number of examples of the interval.
        approximated: Number of examples on which the model approximates; None for a model that is not converted.

    Returns:
        The verdict. For `inconclusive` also the approximate number of similar examples that would settle it with a
        probability of 80 % if the true loss is the measured one; None if the verdict is settled, or if the measured
        loss equals the margin, so that no number would settle it. With groups, the number of groups grows in proportion;
        for few groups, the estimate is too high rather than too low.
    """
    if interval is not None and -interval[1] > margin:
        return "loss beyond margin", None
    if approximated is not None and approximated < TESTED * examples:
        # Rounded down: 100 % means all inputs.
        return f"not tested: exact on {100 * (examples - approximated) // examples} % of these inputs", None
    if interval is None:
        return "inconclusive", None
    low, high = -interval[1], -interval[0]
    if high <= margin:
        return ("loss within margin" if low > 0 else "no loss"), None
    half, distance = (high - low) / 2, abs(margin - (high + low) / 2)
    # Intervals shrink with the square root of the number of examples; the second term is for the power.
    shrink = half * (1 + _quantile(2 * POWER - 1) / _quantile(CONFIDENCE)) / distance if distance else math.inf
    return "inconclusive", None if shrink > 1e3 else math.ceil(examples * shrink**2)


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
    if groups is None:
        return np.array([statistic(generator.integers(examples, size=examples)) for _ in range(resamples)])
    members = [np.flatnonzero(groups == group) for group in range(int(groups.max()) + 1)]
    drawn = (generator.integers(len(members), size=len(members)) for _ in range(resamples))
    return np.array([statistic(np.concatenate([members[group] for group in picks])) for picks in drawn])


def _percentiles(drawn: NDArray[np.float64], confidence: float) -> Interval:
    low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _quantile(confidence: float) -> float:
    return NormalDist().inv_cdf((1 + confidence) / 2)


def _paired(first: NDArray[np.generic], second: NDArray[np.generic]) -> int:
    if first.shape != second.shape or not first.size:
        raise ValueError(f"paired samples need equal sizes of at least 1; got {first.size} and {second.size}")
    return first.size
