"""The multiple-choice knapsack: one candidate for each site, with the least damage for every time.

Time and damage add up over sites, so the plans that no other plan beats in both are found exactly by dynamic programming
over the sites (Nemhauser and Ullmann 1969).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# More partial plans than this are merged if their times differ by less than this share of the range of times.
_MOST_STATES, _RESOLUTION = 20_000, 1e-5

Floats = NDArray[np.float64]
Choices = tuple[int, ...]


class Front(NamedTuple):
    """The plans that no other plan beats in both time and damage, fastest first.

    Attributes:
        times: Time of each plan, the sum over its sites, [n], rising.
        damages: Damage of each plan, [n], falling.
        choices: Candidate of each site, [n, sites].
    """

    times: Floats
    damages: Floats
    choices: NDArray[np.int16]


def front(times: Floats, damages: Floats) -> Front:
    """Find every plan that no other plan beats in both time and damage.

    Args:
        times: Time of each candidate at each site, [sites, candidates], of any sign; infinite where it cannot be used.
        damages: Its damage, [sites, candidates], at least 0.

    Returns:
        The front. It is exact as long as there are at most 20,000 partial plans; beyond that, plans whose times differ by
        less than 0.001 % of the range are one.

    Raises:
        ValueError: if the shapes differ, or a site has no candidate.
    """
    if times.shape != damages.shape or times.ndim != 2:
        raise ValueError(f"times {times.shape} and damages {damages.shape} must both be [sites, candidates]")
    usable = np.isfinite(times) & np.isfinite(damages)
    if not usable.any(1).all():
        raise ValueError("a site has no candidate")
    worst, best = (np.where(usable, times, fill) for fill in (-np.inf, np.inf))
    range_ = float(worst.max(1).sum() - best.min(1).sum())
    time, damage = np.zeros(1), np.zeros(1)
    chosen = np.zeros((1, 0), np.int16)
    for at_site, lost, open_ in zip(times, damages, usable, strict=True):
        candidates = np.flatnonzero(open_)
        every_time = (time[:, None] + at_site[candidates]).ravel()
        every_damage = (damage[:, None] + lost[candidates]).ravel()
        kept = _undominated(every_time, every_damage, range_)
        rows, columns = np.divmod(kept, len(candidates))
        chosen = np.column_stack([chosen[rows], candidates[columns].astype(np.int16)])
        time, damage = every_time[kept], every_damage[kept]
    return Front(time, damage, chosen)


def _undominated(times: Floats, damages: Floats, range_: float) -> NDArray[np.intp]:
    """Indexes of the plans that no other beats, by rising time."""
    order = np.lexsort((damages, times))
    least = np.minimum.accumulate(damages[order])
    kept = order[np.concatenate(([True], least[1:] < least[:-1]))]
    if len(kept) > _MOST_STATES:
        cells = np.floor((times[kept] - times[kept[0]]) / max(range_ * _RESOLUTION, 1e-300))
        # The last plan of a cell has the least damage.
        kept = kept[np.concatenate((cells[1:] != cells[:-1], [True]))]
    return kept
