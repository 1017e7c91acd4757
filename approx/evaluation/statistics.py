"""What a difference between two models is worth: tests, intervals and verdicts. Needs no torch.

Everywhere a difference is converted minus base, so a loss is negative, and a confidence of 0.95 means a
two-sided interval. Everything drawn at random is drawn from the seed that is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import binomtest

Interval = tuple[float, float]

CONFIDENCE = 0.95
RESAMPLES = 2000
POWER = 0.8
"""The chance with which `needed_examples` promises a settled verdict."""


@dataclass(frozen=True)
class Comparison:
    """A difference of two scores on the same examples, converted minus base, in the units of the score."""

    difference: float
    interval: Interval
    confidence: float
    test: str
    p_value: float


def compare_correct(base: ArrayLike, converted: ArrayLike, confidence: float = CONFIDENCE) -> Comparison:
    """Compare two accuracies by the examples on which only one of the models is right.

    The p-value is the exact McNemar test's. The interval is the adjusted Wald interval, which keeps its
    coverage for few and even for no discordant examples, where Wald's own shrinks to a point.

    Source: McNemar 1947; Bonett and Price, 2012, "Adjusted Wald confidence interval for a difference of
    binomial proportions based on paired data".

    Args:
        base: Whether the base is right, one an example.
        converted: Whether the converted model is right, in the same order.
        confidence: Of the interval.
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
    bounded: bool = True,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
) -> Comparison:
    """Compare two scores that are no mean over examples (F1, Matthews, correlations) by paired bootstrap.

    Examples are drawn with replacement, both models on the same ones, and the metric is computed again. Examples of
    one group are alike, so whole groups are drawn.

    The percentile interval shrinks to a point where hardly a prediction changed, as if examples not seen
    could not change either; for a score between 0 and 1 it is kept at least as wide as the rule of three allows
    (3 / examples each way, or 3 / groups).

    Source: Efron and Tibshirani, 1993, "An Introduction to the Bootstrap", chapters 13 and 16; Hanley and
    Lippman-Hand, 1983, "If nothing goes wrong, is everything all right?".

    Args:
        difference: Rows of examples -> the metric of the converted model minus the base's on these rows.
        examples: How many there are.
        seed: Of the resampling.
        groups: Number of each example's group, from 0; None where examples are independent.
        bounded: Whether the score lies between 0 and 1.
        confidence: Of the interval.
        resamples: How many times the metric is computed again.
    """
    observed = difference(np.arange(examples))
    drawn = _resample(difference, examples, seed, resamples, groups)
    beyond = min(int(np.sum(drawn <= 0)), int(np.sum(drawn >= 0)))
    p_value = min(1.0, 2 * (beyond + 1) / (resamples + 1))
    low, high = _percentiles(drawn, confidence)
    independent = examples if groups is None else int(groups.max()) + 1
    unseen = -math.log(1 - confidence) / independent if bounded else 0.0
    interval = (min(low, observed - unseen), max(high, observed + unseen))
    test = "paired bootstrap" if groups is None else f"paired bootstrap over {independent} groups"
    return Comparison(observed, interval, confidence, test, p_value)


def accuracy_interval(correct: ArrayLike, confidence: float = CONFIDENCE) -> Interval:
    """Return the Wilson score interval of one accuracy."""
    flags = np.asarray(correct, bool)
    found = binomtest(int(flags.sum()), flags.size).proportion_ci(confidence, method="wilson")
    return float(found.low), float(found.high)


def score_interval(
    score: Callable[[NDArray[np.intp]], float],
    examples: int,
    *,
    seed: int,
    groups: NDArray[np.intp] | None = None,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
) -> Interval:
    """Return the bootstrap interval of one score; `score` takes the rows it is computed on."""
    return _percentiles(_resample(score, examples, seed, resamples, groups), confidence)


def verdict(interval: Interval, margin: float, examples: int) -> tuple[str, int | None]:
    """Judge a difference by its interval against the loss that is acceptable.

    With the loss known to lie between `low` and `high` (the interval of base minus converted):
    `loss beyond margin` when low > margin; `loss within margin` when high <= margin and low > 0;
    `no loss` when high <= margin and low <= 0; otherwise `inconclusive`: the interval holds the margin.

    Args:
        interval: Of converted minus base, as `Comparison` gives it.
        margin: The acceptable loss, in the units of the score, at least 0.
        examples: How many the interval was computed on.

    Returns:
        The verdict, and for `inconclusive` about how many examples of the same kind would settle it with a
        chance of 80 % if the loss is what it seems; None where it is settled, or where no number would
        settle it because the loss seems to be the margin itself.
    """
    low, high = -interval[1], -interval[0]
    if low > margin:
        return "loss beyond margin", None
    if high <= margin:
        return ("loss within margin" if low > 0 else "no loss"), None
    half, distance = (high - low) / 2, abs(margin - (high + low) / 2)
    # Intervals shrink with the root of the number of examples; the second term buys the power.
    shrink = half * (1 + _quantile(2 * POWER - 1) / _quantile(CONFIDENCE)) / distance if distance else math.inf
    return "inconclusive", None if shrink > 1e3 else math.ceil(examples * shrink**2)


def ratio_interval(
    base_samples: ArrayLike,
    other_samples: ArrayLike,
    seed: int = 0,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
) -> Interval:
    """Return the bootstrap interval of median(base) / median(other), drawing rounds, not samples.

    Both of a round are drawn together, so what slows a whole round down cancels out.

    Args:
        base_samples: One measurement a round (a time, or anything positive).
        other_samples: The other's, of the same rounds in the same order.
        seed: Of the resampling.
        confidence: Of the interval.
        resamples: How many times the rounds are drawn again.
    """
    base, other = np.asarray(base_samples, float), np.asarray(other_samples, float)
    rows = np.random.default_rng(seed).integers(_paired(base, other), size=(resamples, base.size))
    return _percentiles(np.median(base[rows], axis=1) / np.median(other[rows], axis=1), confidence)


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
        raise ValueError(f"paired samples must be equally many, at least one; got {first.size} and {second.size}")
    return first.size
