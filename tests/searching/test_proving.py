"""Losses with their signs and units, intervals, and how a proof becomes the outcome of a search."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from approx.evaluation.record import Quality, Speed
from approx.searching.outcome import Proof, Searched
from approx.searching.search import Proven, divergence_interval, loss_in_points
from typed import known, part_of


def quality(metric: str, lower: bool, base: float, difference: float, interval: Any = None) -> Quality:
    rows = [
        {"name": "other", "scores": {metric: 0.0}, "difference": 9.0, "interval": None, "verdict": "no"},
        {
            "name": "a",
            "scores": {metric: base + difference},
            "difference": difference,
            "interval": interval,
            "verdict": "yes",
        },
    ]
    return part_of(
        Quality,
        metric=metric,
        lower_is_better=lower,
        base={"scores": {metric: base}, "interval": None},
        variants=rows,
        outputs=None,
    )


@pytest.mark.parametrize(
    ("entry", "loss", "interval"),
    [
        # Points of a fraction, whatever the base's score.
        (quality("accuracy", False, 0.9, -0.02, [-0.03, 0.01]), 2.0, (-1.0, 3.0)),
        (quality("accuracy", False, 0.9, 0.02), -2.0, None),
        (quality("wer", True, 0.2, 0.03, [0.01, 0.05]), 3.0, (1.0, 5.0)),
        # Percent of the base's score.
        (quality("perplexity", True, 20.0, 1.0, [-0.5, 2.0]), 5.0, (-2.5, 10.0)),
    ],
)
def test_a_loss_is_positive_in_points_or_percent_of_the_base(entry, loss, interval):
    found, between, verdict = loss_in_points(entry, "a")
    assert found == pytest.approx(loss)
    assert between == (None if interval is None else pytest.approx(interval))
    assert verdict == "yes"


def test_the_interval_of_a_divergence_is_that_of_its_mean():
    apart = np.random.default_rng(0).exponential(2.0, 400)
    judge: Any = SimpleNamespace(
        proof="proof", divergences=lambda model, part: apart if (model, part) == ("model", "proof") else None
    )
    mean, ends = divergence_interval(judge, "model", 0)
    low, high = known(ends)
    assert mean == pytest.approx(apart.mean())
    half = 1.96 * apart.std() / 20
    assert (low, high) == (pytest.approx(mean - half, rel=0.05), pytest.approx(mean + half, rel=0.05))
    assert divergence_interval(judge, "model", 0) == (mean, (low, high))
    assert divergence_interval(judge, "model", 1) != (mean, (low, high))


@pytest.mark.parametrize(
    ("apart", "ends"),
    [
        # Eight rows that are alike: one in 2.7 may change wholly though none does, so either end is 0.37 away.
        ([1.0] * 8, (0.63, 1.37)),
        ([1e-6] * 8, (0.63e-6, 1.37e-6)),
        # Three rows bound nothing from below.
        ([0.5] * 3, (0.146, 0.854)),
        # Nothing was approximated, or only one row: nothing is known of others.
        ([0.0] * 8, None),
        ([0.5], None),
        ([0.0], None),
    ],
)
def test_rows_that_are_alike_leave_a_doubt(apart, ends):
    judge: Any = SimpleNamespace(proof="proof", divergences=lambda model, part: np.array(apart))
    mean, found = divergence_interval(judge, "model", 0)
    assert mean == pytest.approx(np.mean(apart))
    assert found == (None if ends is None else pytest.approx(ends, rel=0.02))


def test_a_rare_bad_row_reaches_far():
    judge: Any = SimpleNamespace(proof="proof", divergences=lambda model, part: np.array([0.0] * 59 + [6.0]))
    mean, ends = divergence_interval(judge, "model", 0)
    low, high = known(ends)
    assert mean == pytest.approx(0.1)
    # Six in a hundred rows may be as bad.
    assert low == 0.0
    assert 6 * 0.06 < high < 6 * 0.15


@pytest.mark.parametrize(
    ("chosen", "names"), [("b", ["found", "a", "c"]), ("a", ["found", "b", "c"]), (None, ["a", "b", "c"])]
)
def test_the_chosen_plan_comes_first_and_is_called_found(chosen, names):
    labels = ["a", "b", "c"]
    proof = Proof(0.0, None, "", 9, 1.0, None, None, None)
    rows = [
        {"name": name, "scores": {}, "difference": float(number), "interval": None, "verdict": ""}
        for number, name in enumerate(labels)
    ]
    scores = part_of(Quality, metric="accuracy", base={"scores": {}, "interval": None}, variants=rows, outputs=None)
    times = [
        {"name": name, "median_ms": float(number), "ratio": None, "interval": None}
        for number, name in enumerate(labels)
    ]
    speed = part_of(Speed, base={"median_ms": 1.0}, variants=times)
    numbers: Any = {name: number for number, name in enumerate(labels)}
    proven = Proven(dict.fromkeys(labels, proof), scores, speed, numbers, {name: name != "c" for name in labels})
    outcome = Searched(None, True, False, "", "", [], None, 1.0, None, 0, 0.0)
    assert proven.fill(outcome, numbers, chosen) is outcome
    order = [chosen if name == "found" else name for name in names]
    assert outcome.quality is not None
    assert outcome.speed is not None
    assert [(one.name, one.difference) for one in outcome.quality.variants] == [
        (n, numbers[o]) for n, o in zip(names, order, strict=True)
    ]
    assert [(one.name, one.median_ms) for one in outcome.speed.variants] == [
        (n, numbers[o]) for n, o in zip(names, order, strict=True)
    ]
    assert list(outcome.models.items()) == [(n, numbers[o]) for n, o in zip(names, order, strict=True)]
    assert outcome.verified == {n: o != "c" for n, o in zip(names, order, strict=True)}
    assert outcome.divergences == {n: numbers[o] for n, o in zip(names, order, strict=True)}
    assert outcome.notes == []
    busy = Proven(proven.proofs, None, speed.model_copy(update={"crowded": True}), {}, proven.verified)
    outcome = busy.fill(Searched(None, True, False, "", "", [], None, 1.0, None, 0, 0.0), numbers, chosen)
    assert outcome.quality is None
    assert len(outcome.notes) == 1
