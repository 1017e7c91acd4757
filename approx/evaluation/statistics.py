"""What a difference between two models is worth: tests, intervals and verdicts. Needs no torch.

Everywhere a difference is converted minus base, so a loss is negative, and a confidence of 0.95 means a
two-sided interval. Everything drawn at random is drawn from the seed that is given.
"""

from __future__ import annotations

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
"""The chance with which `needed_examples` promises a settled verdict."""
TESTED = 0.1
"""The share of the inputs that must be approximated before a small loss says anything about the approximation."""


@dataclass(frozen=True)
class Comparison:
    """A difference of two scores on the same examples, converted minus base, in the units of the score.

    One example, or one group of them, says nothing about others: then there is no interval.
    """

    difference: float
    interval: Interval | None
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

    The bootstrap gives the standard error, corrected for the n - 1 that it leaves out, and the interval reaches as far as
    Student's t for n - 1 says, n being the number of examples or groups; the p-value is that interval's own: it is below
    1 - confidence exactly where 0 lies outside. Percentiles of what was drawn call equal models different in 6 % of cases
    at hundreds of examples and in 10-20 % at 5-20 groups; this keeps to 5 % in both, down to 3 groups, and under heavy
    tails (bench/calibration.py counts it).

    Such an interval shrinks to a point where hardly a prediction changed, as if examples not seen could not change
    either, and a loss that comes from a few examples in hundreds seems surer than it is. For a score between 0 and 1 one
    example more each way, wholly lost and wholly won, is therefore added to the variance, as in the interval for
    accuracies; where nothing changed that is the rule of three.

    Source: Efron and Tibshirani, 1993, "An Introduction to the Bootstrap", chapters 6 and 12; Hesterberg, 2015, "What
    Teachers Should Know About the Bootstrap", on narrowness; Bonett and Price, 2012, on the examples added.

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
    independent = _independent(examples, groups)
    test = "paired bootstrap" if groups is None else f"paired bootstrap over {independent} groups"
    if independent < 2:
        return Comparison(observed, None, confidence, test, 1.0)
    error = float(_resample(difference, examples, seed, resamples, groups).std()) * _narrowness(independent)
    if bounded:
        error = math.hypot(error, math.sqrt(2) / independent)
    half = error * float(student.ppf((1 + confidence) / 2, independent - 1))
    p_value = 2 * float(student.sf(abs(observed) / error, independent - 1)) if error else float(observed == 0)
    return Comparison(observed, (observed - half, observed + half), confidence, test, p_value)


def holm(p_values: Sequence[float]) -> list[float]:
    """Raise p-values for how many they are: the chance of any false alarm among them then stays at the level.

    Source: Holm, 1979, "A simple sequentially rejective multiple test procedure".
    """
    found = np.asarray(p_values, float)
    order = np.argsort(found)
    adjusted = np.empty_like(found)
    adjusted[order] = np.maximum.accumulate(found[order] * np.arange(found.size, 0, -1)).clip(max=1.0)
    return adjusted.tolist()


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
) -> Interval | None:
    """Return the bootstrap interval of one score; `score` takes the rows it is computed on.

    Percentiles, which never leave the range of a score, moved out as far as Student's t is wider than the normal
    distribution. None for one example or one group.

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
    """Judge a difference by its interval against the loss that is acceptable.

    With the loss known to lie between `low` and `high` (the interval of base minus converted):
    `loss beyond margin` when low > margin; `loss within margin` when high <= margin and low > 0;
    `no loss` when high <= margin and low <= 0; otherwise `inconclusive`: the interval holds the margin, or there is none.

    Where a converted model computes exact attention on more than nine tenths of the examples, a small loss says nothing
    about its approximation: the verdict is then `not tested: exact on N % of these inputs`. A loss that is beyond the margin
    all the same stays what it is.

    Args:
        interval: Of converted minus base, as `Comparison` gives it.
        margin: The acceptable loss, in the units of the score, at least 0.
        examples: How many the interval was computed on.
        approximated: On how many of them the model computes anything but exact attention; None for a model that is not
            converted.

    Returns:
        The verdict, and for `inconclusive` about how many examples of the same kind would settle it with a
        chance of 80 % if the loss is what it seems; None where it is settled, or where no number would
        settle it because the loss seems to be the margin itself. Where examples come in groups, as many more groups are
        meant as examples; of few groups it says too many rather than too few.
    """
    if interval is not None and -interval[1] > margin:
        return "loss beyond margin", None
    if approximated is not None and approximated < TESTED * examples:
        # Rounded down, so that 100 % means all of them.
        return f"not tested: exact on {100 * (examples - approximated) // examples} % of these inputs", None
    if interval is None:
        return "inconclusive", None
    low, high = -interval[1], -interval[0]
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


def _independent(examples: int, groups: NDArray[np.intp] | None) -> int:
    return examples if groups is None else int(groups.max()) + 1


def _narrowness(independent: int) -> float:
    """How much wider samples spread than a bootstrap of one of them, which takes its mean for the true one."""
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
        raise ValueError(f"paired samples must be equally many, at least one; got {first.size} and {second.size}")
    return first.size
