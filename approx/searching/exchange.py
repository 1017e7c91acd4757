"""The rate between divergence and the loss of a task's metric."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from approx.searching.judging import Measured


@dataclass(frozen=True)
class Exchange:
    """How many points of the task's metric a nat of divergence costs.

    The divergence of a plan is measured far more precisely than its score, and the two rise together, so the loss is estimated
    from both: the measured one weighted by its error, the exchanged one by half its own size.
    """

    rate: float

    @classmethod
    def of(cls, plans: Sequence[Measured]) -> "Exchange":
        """The rate of the plans whose loss is beyond its noise; of the most damaging one if there is none."""
        clear = [one.loss / one.divergence for one in plans if one.loss and one.error and one.loss > 2 * one.error]
        if clear:
            return cls(float(np.exp(np.mean(np.log(clear)))))
        worst = max(plans, key=lambda one: one.divergence)
        return cls(max((worst.loss or 0.0) + (worst.error or 0.0), 1e-9) / max(worst.divergence, 1e-12))

    def loss(self, one: Measured) -> float:
        """The estimated loss of a plan, in points."""
        expected = self.rate * one.divergence
        if one.loss is None or not one.error:
            return expected if one.loss is None else one.loss
        precise, exchanged = one.error**-2, (0.5 * expected + 1e-9) ** -2
        return (precise * one.loss + exchanged * expected) / (precise + exchanged)
