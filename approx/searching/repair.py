"""From predicted to measured damage: errors of layers interact, so plans are measured, and predictions learn from them.

Each round solves the knapsack with what is believed of the damages, measures the best plan it gives, and corrects the
beliefs by that measurement: linear regression on the plans so far, with the predictions as its prior.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from approx.searching.assignment import Choices, front

Floats = NDArray[np.float64]

# A prediction is uncertain by its own size and a share of the mean one; sums over sites miss this share of what is measured.
_UNCERTAIN, _FLOOR, _MISSED = 1.0, 0.3, 0.1
# Places of the first plans along the front.
_ANCHORS = (0.0, 0.25, 0.5, 0.75)
# Measured plans whose single changes may be tried.
_NEAR = 5
# Measurements in a row without an advance after which a search ends.
_PATIENCE = 20


@dataclass(frozen=True)
class Space:
    """What plans cost and damage by prediction.

    Attributes:
        times: [sites, candidates], milliseconds beyond the base; infinite where a candidate cannot be used.
        damages: [sites, candidates], divergence.
    """

    times: Floats
    damages: Floats

    def time(self, plan: Choices) -> float:
        """Milliseconds of a plan beyond the base."""
        return float(sum(self.times[site, choice] for site, choice in enumerate(plan)))

    def damage(self, plan: Choices) -> float:
        """Predicted damage of a plan."""
        return float(sum(self.damages[site, choice] for site, choice in enumerate(plan)))

    def changes(self, plan: Choices) -> Iterator[Choices]:
        """The plans that differ at one site."""
        for site, choice in enumerate(plan):
            for other in range(self.times.shape[1]):
                if other != choice and np.isfinite(self.times[site, other]):
                    yield (*plan[:site], other, *plan[site + 1 :])

    def corrected(self, measured: Mapping[Choices, float]) -> "Space":
        """The space after measurements, which change what is predicted of every plan that shares a choice with them.

        Args:
            measured: Plan -> its measured divergence.
        """
        plans = list(measured)
        found = np.array([measured[plan] for plan in plans])
        predicted = np.array([self.damage(plan) for plan in plans])
        known = predicted > 0
        scale = (
            float(np.exp(np.median(np.log(np.maximum(found[known], 1e-12) / predicted[known])))) if known.any() else 1.0
        )
        usable = np.isfinite(self.damages)
        prior = np.where(usable, self.damages, 0.0).ravel() * scale
        chosen = np.zeros((len(plans), prior.size))
        for row, plan in enumerate(plans):
            chosen[row, [site * self.damages.shape[1] + choice for site, choice in enumerate(plan)]] = 1
        spread = (_UNCERTAIN * (prior + _FLOOR * prior.mean()) * (prior > 0)) ** 2
        noise = np.diag((_MISSED * found) ** 2 + (1e-6 * max(found.max(), 1e-12)) ** 2)
        gain = spread[:, None] * chosen.T @ np.linalg.inv(chosen * spread @ chosen.T + noise)
        believed = prior + gain @ (found - chosen @ prior)
        # A choice damages something, whatever the regression says.
        believed = np.maximum(believed, 0.05 * prior).reshape(self.damages.shape)
        return Space(self.times, np.where(usable, believed, np.inf))


def anchors(space: Space, longest: float = np.inf) -> list[Choices]:
    """The plans to measure first: some of the front, from the fastest on, that take no longer than a bound."""
    plans = front(space.times, space.damages)
    last = int((plans.times <= longest).sum()) - 1
    return [_row(plans.choices, row) for row in sorted({round(share * last) for share in _ANCHORS})]


def fastest_within(
    space: Space,
    divergence: Callable[[Choices], float],
    loss: Callable[[Choices], float],
    allowed: float,
    measured: Mapping[Choices, float],
    more: Callable[[], bool],
) -> Choices | None:
    """Find the fastest plan whose loss is allowed.

    Args:
        space: Predicted times and damages.
        divergence: Measures the divergence of a plan; repeated calls cost nothing.
        loss: The loss of a plan, which rises with its divergence.
        allowed: The largest loss.
        measured: Plan -> divergence of all plans measured so far, at least one; it grows as plans are measured.
        more: Whether there is time for another measurement.

    Returns:
        The plan; None if none of those measured is allowed.
    """

    def best() -> Choices | None:
        return min((plan for plan in measured if loss(plan) <= allowed), key=space.time, default=None)

    failures = 0
    while more() and failures < _PATIENCE:
        found = best()
        believed = space.corrected(measured)
        proposed = _likeliest(
            believed, measured, np.inf if found is None else space.time(found), _bound(measured, loss, allowed)
        )
        if proposed is None:
            break
        divergence(proposed)
        failures = 0 if best() != found else failures + 1
    return best()


def least_damage(
    space: Space,
    divergence: Callable[[Choices], float],
    longest: float,
    measured: Mapping[Choices, float],
    more: Callable[[], bool],
) -> Choices:
    """Find the plan with the least divergence within a time.

    Args:
        space: Predicted times and damages.
        divergence: Measures the divergence of a plan.
        longest: Bound of the predicted time, in milliseconds beyond the base.
        measured: As for `fastest_within`.
        more: Whether there is time for another measurement.
    """

    def best() -> Choices:
        return min((plan for plan in measured if space.time(plan) <= longest), key=lambda plan: measured[plan])

    divergence(_safest(space, longest))
    failures = 0
    while more() and failures < _PATIENCE:
        found, believed = best(), space.corrected(measured)
        safest = _safest(believed, longest)
        near = sorted(measured, key=lambda plan: measured[plan])[:_NEAR]
        pool = {
            change for plan in (safest, found, *near) for change in (plan, *believed.changes(plan))
        } - measured.keys()
        pool = {plan for plan in pool if space.time(plan) <= longest}
        if not pool:
            break
        divergence(min(pool, key=lambda plan: (believed.damage(plan), plan)))
        failures = 0 if best() != found else failures + 1
    return best()


def _likeliest(believed: Space, measured: Mapping[Choices, float], faster_than: float, bound: float) -> Choices | None:
    """The plan to measure next: the fastest that is believed to be allowed, or the safest of those that would be an advance.

    Args:
        believed: Times and what is believed of the damages.
        measured: The plans that are known.
        faster_than: The time to beat.
        bound: The divergence at which the loss is just allowed.
    """
    plans = front(believed.times, believed.damages)
    rows = [_row(plans.choices, row) for row in range(len(plans.times))]
    border = next((plan for plan in rows if believed.damage(plan) <= bound), rows[-1])
    if border not in measured and believed.time(border) < faster_than:
        return border
    known = [plan for plan in measured if believed.time(plan) <= faster_than]
    near = {border, min(known, key=believed.damage, default=border)}
    pool = {*rows, *(change for plan in near for change in believed.changes(plan))} - measured.keys()
    pool = {plan for plan in pool if believed.time(plan) < faster_than}
    return min(pool, key=lambda plan: (believed.damage(plan), plan), default=None)


def _bound(measured: Mapping[Choices, float], loss: Callable[[Choices], float], allowed: float) -> float:
    """The divergence at which the loss is just allowed: between those of the plans around it."""
    within = max((measured[plan] for plan in measured if loss(plan) <= allowed), default=None)
    beyond = min((measured[plan] for plan in measured if loss(plan) > allowed), default=None)
    return _between(within, beyond)


def _between(within: float | None, beyond: float | None) -> float:
    if within is None or beyond is None:
        return np.inf if beyond is None else beyond / 2
    return float(np.sqrt(max(within, 1e-12) * beyond)) if within < beyond else beyond


def _safest(space: Space, longest: float) -> Choices:
    plans = front(space.times, space.damages)
    return _row(plans.choices, np.flatnonzero(plans.times <= longest)[-1])


def _row(choices: NDArray[np.int16], row: int | np.intp) -> Choices:
    return tuple(int(choice) for choice in choices[row])
