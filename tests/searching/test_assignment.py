"""The knapsack against every combination, and against another solver."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from approx.searching import cost
from approx.searching.cost import front

_WHOLE = st.integers(-6, 9)


@st.composite
def tables(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    sites, candidates = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    times = np.array(
        draw(st.lists(st.lists(_WHOLE, min_size=candidates, max_size=candidates), min_size=sites, max_size=sites)),
        float,
    )
    damages = np.abs(
        np.array(
            draw(st.lists(st.lists(_WHOLE, min_size=candidates, max_size=candidates), min_size=sites, max_size=sites)),
            float,
        )
    )
    closed = np.array(
        draw(
            st.lists(st.lists(st.booleans(), min_size=candidates, max_size=candidates), min_size=sites, max_size=sites)
        )
    )
    # Changing nothing is always possible.
    closed[:, -1] = False
    # What has no time cannot be used, nor what has no damage.
    (damages if draw(st.booleans()) else times)[closed] = np.inf
    return times, damages


@given(tables())
def test_the_front_holds_every_plan_that_no_other_beats(pair):
    times, damages = pair
    found = front(times, damages)
    sites = range(len(times))
    every = []
    for plan in itertools.product(range(times.shape[1]), repeat=len(times)):
        time, damage = (sum(table[site, plan[site]] for site in sites) for table in (times, damages))
        if np.isfinite(time) and np.isfinite(damage):
            every.append((time, damage))
    best = {(t, d) for t, d in every if not any((a <= t and b < d) or (a < t and b <= d) for a, b in every)}
    assert set(zip(found.times.tolist(), found.damages.tolist(), strict=True)) == best
    # Each once, fastest first.
    assert np.all(np.diff(found.times) > 0)
    assert np.all(np.diff(found.damages) < 0)
    for time, damage, plan in zip(*found, strict=True):
        assert time == sum(times[site, plan[site]] for site in sites)
        assert damage == sum(damages[site, plan[site]] for site in sites)


def test_a_large_front_is_as_good_as_another_solver():
    random = np.random.default_rng(0)
    sites, candidates = 24, 8
    times, damages = -random.random((sites, candidates)), random.random((sites, candidates)) ** 4
    found = front(times, damages)
    one_each = np.kron(np.eye(sites), np.ones(candidates))
    for bound in (-16.0, -12.0, -8.0):
        mine = found.damages[np.flatnonzero(found.times <= bound)[-1]]
        solved = milp(
            damages.ravel(),
            integrality=np.ones(sites * candidates),
            bounds=Bounds(0, 1),
            constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(times.ravel(), -np.inf, bound)],
        )
        # Beyond 20,000 partial plans, times are distinguished to a thousandth of a per cent of their range.
        assert mine == pytest.approx(solved.fun, rel=0.01)
        assert mine >= solved.fun - 1e-9


def test_few_plans_are_kept_where_there_would_be_too_many(monkeypatch):
    random = np.random.default_rng(1)
    times, damages = -random.random((16, 8)), random.random((16, 8)) ** 3
    every = front(times, damages)
    monkeypatch.setattr(cost, "_MOST_STATES", 60)
    monkeypatch.setattr(cost, "_RESOLUTION", 0.02)
    found = front(times, damages)
    # Fifty cells of two hundredths, and one at the border.
    assert len(found.times) <= 60 < len(every.times)
    assert np.all(np.diff(found.times) > 0)
    assert np.all(np.diff(found.damages) < 0)
    # Each site makes a plan later by a cell at most, and none more damaging.
    cell = 0.02 * (times.max(1).sum() - times.min(1).sum())
    for time, damage in zip(every.times, every.damages, strict=True):
        near = found.times <= time + 16 * cell
        assert found.damages[near].min() <= damage + 1e-12
    for time, damage, plan in zip(*found, strict=True):
        assert time == pytest.approx(times[np.arange(16), plan].sum())
        assert damage == pytest.approx(damages[np.arange(16), plan].sum())


def test_a_site_without_a_candidate_is_an_error():
    with pytest.raises(ValueError, match="no candidate"):
        front(np.array([[0.0, 1.0], [np.inf, np.inf]]), np.zeros((2, 2)))
    with pytest.raises(ValueError, match="must both be"):
        front(np.zeros((2, 2)), np.zeros((2, 3)))
