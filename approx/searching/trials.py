"""The plans that a search tries: each measured once, and kept so that a search goes on where it stopped."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError
from scipy import stats

from approx.errors import ApproxError, Exit, shown
from approx.evaluation.prediction_cache import fingerprint
from approx.measuring.measure import Progress
from approx.searching.assignment import Choices
from approx.searching.candidates import Candidate
from approx.searching.composition import Choice, Composer
from approx.searching.cost import Costs
from approx.searching.exchange import Exchange
from approx.searching.judging import Judge, Measured
from approx.searching.outcome import LayerReason, reasons
from approx.searching.repair import Space
from approx.validation import first_mistake
from approx_kernels.runtime.atomic_file import write_whole

# Plans to measure after the first ones.
MOST = 30


class _Kept(BaseModel):
    """The file of measured plans: each with its divergence, loss and standard error. An earlier version kept no hash of them."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    about: str
    plans: list[tuple[tuple[int, ...], tuple[float, float | None, float | None]]]
    sha256: str | None = None


class Trials:
    """Measures plans, which name a candidate for each site by number; the number after the last one is exact attention.

    Args:
        judge: Measures models.
        composer: Makes models.
        candidates: The candidates.
        file: Keeps what was measured.
        about: Hash of everything that measurements depend on.
        progress: Called with what happens, done and total.

    Attributes:
        space: Predicted times and damages; set once they are known.
        costs: Measured times; set once they are known.
        heads: (site, candidate) -> the heads that it converts, where it does not convert all.
    """

    space: Space
    costs: Costs

    def __init__(
        self,
        judge: Judge,
        composer: Composer,
        candidates: Sequence[Candidate],
        file: Path,
        about: str,
        progress: Progress,
    ) -> None:
        self.judge, self.composer, self.candidates = judge, composer, candidates
        self.heads: dict[tuple[int, int], list[int]] = {}
        self._file, self._about, self._progress = file, about, progress
        self._exchange = Exchange(1.0)
        self.measured: dict[Choices, Measured] = {}
        self.divergences: dict[Choices, float] = {}

    @property
    def bound(self) -> float:
        """The largest loss that is allowed; infinite without a budget."""
        allowed = self.judge.stage.allowed
        return np.inf if allowed is None else allowed[1]

    def measure(self, plan: Choices) -> Measured:
        """Measure a plan on the examples that compare plans; each only once."""
        if plan not in self.measured:
            tried = len(self.measured)
            self._progress(f"measure plans{self._so_far()}", tried, max(tried + 1, MOST))
            model = self.composer.make(self.choices(plan))
            self.measured[plan] = self.judge.measure(model.model, self.judge.search)
            self.divergences[plan] = self.measured[plan].divergence
            self._keep()
        return self.measured[plan]

    def divergence(self, plan: Choices) -> float:
        """The measured divergence of a plan."""
        return self.measure(plan).divergence

    def choices(self, plan: Choices) -> list[Choice]:
        """The choice at each site."""
        return [self._choice(site, column) for site, column in enumerate(plan)]

    def loss(self, plan: Choices) -> float:
        """The loss of a plan: estimated points of the task, or its divergence."""
        return self._exchange.loss(self.measure(plan)) if self.judge.task is not None else self.divergence(plan)

    def anchor(self, plans: Sequence[Choices]) -> None:
        """Measure a few plans, and take the rate between divergence and loss from them."""
        anchors = [self.measure(plan) for plan in plans]
        if self.judge.task is not None:
            self._exchange = Exchange.of(anchors)

    def best_so_far(self) -> Choices | None:
        """The fastest measured plan within the budget, or the least damaging one."""
        if not self.measured:
            return None
        allowed = [plan for plan in self.measured if self.loss(plan) <= self.bound]
        return min(allowed, key=self.space.time) if allowed else min(self.measured, key=self.loss)

    def reasons(self, plan: Choices) -> list[LayerReason]:
        """Why each layer of a plan has its choice."""
        space, choices = self.space, self.choices(plan)
        return reasons(
            [one.name for one in choices], [one.heads for one in choices],
            [-float(space.times[site, column]) for site, column in enumerate(plan)],
            [float(space.damages[site, column]) for site, column in enumerate(plan)],
            [self._refused(site, space.damage(plan)) for site in range(len(plan))],
        )  # fmt: skip

    def correlation(self) -> float | None:
        """Rank correlation of predicted and measured divergence; None for fewer than five plans."""
        if len(self.measured) < 5:
            return None
        predicted = [self.space.damage(plan) for plan in self.measured]
        ranks = (stats.rankdata(values) for values in (predicted, [one.divergence for one in self.measured.values()]))
        return float(np.corrcoef(*ranks)[0, 1])

    def _so_far(self) -> str:
        """The best plan so far, for the progress line."""
        best = self.best_so_far()
        if best is None:
            return ""
        speed = self.costs.speed(self.costs.unchanged + self.space.time(best))
        return f" | best so far about {speed:.2f}x at a loss of about {max(self.loss(best), 0.0):.2g} {self.judge.unit}"

    def _choice(self, site: int, column: int) -> Choice:
        if column == len(self.candidates):
            return Choice(None)
        return Choice(self.candidates[column], self.heads.get((site, column), ()))

    def _refused(self, site: int, total: float) -> str:
        """What the candidate that damages least would do to a site that stays exact."""
        space = self.space
        faster = [column for column in range(len(self.candidates)) if space.times[site, column] < 0]
        if not faster:
            return "no candidate saves time here"
        least = min(faster, key=lambda column: (space.damages[site, column], column))
        added = space.damages[site, least] / total if total > 0 else np.inf
        more = f"{added:.0%} of the plan's predicted damage" if np.isfinite(added) else "damage"
        return f"{self.candidates[least].name} would add {more} to save {-space.times[site, least]:.2f} ms"

    def remember(self) -> None:
        """Take over what an earlier search measured.

        Raises:
            ApproxError: if that was a search of something else.
        """
        if not self._file.is_file():
            return
        try:
            kept = _Kept.model_validate_json(self._file.read_bytes())
        except ValidationError as error:
            raise self._damaged(first_mistake(error)) from None
        if kept.about != self._about:
            raise ApproxError(
                f"{self._file.parent} holds a search of another model, other candidates or other examples. Choose another output, "
                "or start over with --force.",
                Exit.REFUSED,
            )
        if kept.sha256 not in (None, fingerprint(kept.plans)):
            raise self._damaged("its plans are not those that were measured")
        sites, last = len(self.composer.anatomy.sites), len(self.candidates)
        if wrong := next(
            (plan for plan, _ in kept.plans if len(plan) != sites or not all(0 <= n <= last for n in plan)), None
        ):
            raise self._damaged(f"there is no plan {shown(wrong)}")
        self.measured = {plan: Measured(*values) for plan, values in kept.plans}
        self.divergences = {plan: one.divergence for plan, one in self.measured.items()}

    def _damaged(self, reason: str) -> ApproxError:
        return ApproxError(
            f"{self._file} is damaged: {reason}. Delete it, and its plans are measured again, or start over with --force.",
            Exit.UNAVAILABLE,
        )

    def _keep(self) -> None:
        plans = [(plan, (one.divergence, one.loss, one.error)) for plan, one in self.measured.items()]
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._file, json.dumps({"about": self._about, "plans": plans, "sha256": fingerprint(plans)}))
