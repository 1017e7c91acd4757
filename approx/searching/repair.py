"""From plans that should fit a budget to a plan that does: errors of layers interact, so joint damage is measured."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from approx.searching.assignment import Choices, Front

Floats = NDArray[np.float64]

# Single changes to try from a plan before it is given up.
_WIDTH = 8


@dataclass(frozen=True)
class Space:
    """What plans cost and damage by prediction.

    Attributes:
        times: [sites, candidates], milliseconds beyond the base; infinite where a candidate cannot be used.
        damages: [sites, candidates].
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


def fastest_within(
    space: Space,
    plans: Front,
    measured: Callable[[Choices], float],
    allowed: float,
    more: Callable[[], bool],
) -> Choices | None:
    """Find the fastest plan whose measured loss is allowed.

    Along the front, which is ordered by predicted damage, the border is found by bisection. Then single changes of the best
    plan that make it faster, and of the next faster one that make it safer, are measured, those with the least predicted
    damage first, until none is allowed.

    Args:
        space: Predicted times and damages.
        plans: The front, fastest first.
        measured: The loss of a plan; repeated calls cost nothing.
        allowed: The largest loss.
        more: Whether there is time for another measurement.

    Returns:
        The plan; None if none of those measured is allowed.
    """
    rows = [tuple(int(choice) for choice in row) for row in plans.choices]
    best: Choices | None = None
    low, high = 0, len(rows) - 1
    while low <= high and (more() or best is None):
        middle = (low + high) // 2
        if measured(rows[middle]) <= allowed:
            best, high = rows[middle], middle - 1
        else:
            low = middle + 1
    if best is None:
        return None
    starts = [rows[high]] if high >= 0 else []
    return _climb(space, best, starts, measured, allowed, more)


def least_damage(
    space: Space, plan: Choices, measured: Callable[[Choices], float], longest: float, more: Callable[[], bool]
) -> Choices:
    """Improve a plan by single changes that keep its predicted time within a bound, while its measured loss falls.

    Args:
        space: Predicted times and damages.
        plan: The plan to begin with.
        measured: The loss of a plan.
        longest: Bound of the predicted time, in milliseconds beyond the base.
        more: Whether there is time for another measurement.
    """
    loss, improved = measured(plan), True
    while improved:
        improved = False
        tried = [one for one in space.changes(plan) if space.time(one) <= longest]
        for one in sorted(tried, key=space.damage)[:_WIDTH]:
            if not more():
                return plan
            if (less := measured(one)) < loss:
                plan, loss, improved = one, less, True
                break
    return plan


def _climb(
    space: Space,
    best: Choices,
    starts: Sequence[Choices],
    measured: Callable[[Choices], float],
    allowed: float,
    more: Callable[[], bool],
) -> Choices:
    improved = True
    while improved:
        improved = False
        tried = {one for start in (best, *starts) for one in space.changes(start) if space.time(one) < space.time(best)}
        for one in sorted(tried, key=lambda plan: (space.damage(plan), plan))[:_WIDTH]:
            if not more():
                return best
            if measured(one) <= allowed:
                best, improved = one, True
                break
    return best
