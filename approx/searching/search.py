"""Search the best mix of mechanisms within a budget, and prove it on examples that the search did not see."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from approx.checkpoints.checkpoint import Checkpoint
from approx.errors import ApproxError, Exit
from approx.evaluation.prediction_cache import fingerprint
from approx.measuring.identity import identity
from approx.measuring.measure import Progress
from approx.planning import positions
from approx.planning.anatomy import Anatomy, anatomy
from approx.searching import cost, damage, proving
from approx.searching.assignment import Choices, Front, front
from approx.searching.candidates import Candidate, candidates
from approx.searching.composition import Choice, Composer
from approx.searching.exchange import Exchange
from approx.searching.judging import Judge, Measured
from approx.searching.options import SearchStage, check, read_latency, read_speed
from approx.searching.outcome import LayerReason, Proof, Searched, reasons
from approx.searching.repair import Space, fastest_within, least_damage
from approx_kernels.runtime.atomic_file import write_whole

SENSITIVITIES, MEASURED = "sensitivities.json", "measured.json"
# Plans to measure after the first ones, without a time budget.
_MOST_MEASURED = 30
# The share of a time budget after which the proof begins.
_BEFORE_PROOF = 0.6
# Predicted times are this much too optimistic at most.
_RESERVE = 0.02
# Finalists lose at most these shares of the budget by estimate.
_SAFER = (0.5, 0.25)


class Search:
    """One search.

    Args:
        base: The exact checkpoint.
        stage: Its options.
        folder: Where sensitivities and measurements are kept.
        seed: Seed of everything random.
        progress: Called with what happens, done and total.
    """

    def __init__(self, base: Checkpoint, stage: SearchStage, folder: Path, *, seed: int, progress: Progress) -> None:
        check(stage)
        self.stage, self.folder, self.seed, self.progress = stage, folder, seed, progress
        self.begun = time.monotonic()
        self.facts = facts_of(base, stage)
        self.candidates = candidates(stage, self.facts)
        progress("read the data", 0, 1)
        self.judge = Judge(base, stage, seed)
        self.composer = Composer(base, self.facts)
        self.about = fingerprint(
            identity(base), [(one.name, one.rule.to_dict()) for one in self.candidates], stage.task, stage.data,
            stage.settings, stage.split, stage.limit, stage.text, stage.calibration, stage.examples, stage.truncate,
            stage.min_length, stage.heal, seed,
        )  # fmt: skip
        self.measured: dict[Choices, Measured] = self._remembered()
        self.exchange = Exchange(1.0)
        self.heads: dict[tuple[int, int], list[int]] = {}

    def run(self, sensitivities: Path | None = None) -> Searched:
        """Search; after Ctrl-C the outcome is the best plan so far.

        Args:
            sensitivities: A file of an earlier search of the same model, candidates and examples.

        Raises:
            ApproxError: if nothing could be as fast as asked (exit code 7), or the sensitivities are of something else.
        """
        costs = cost.measure(
            self.composer, self.candidates, self.stage, seed=self.seed, progress=lambda _, done, total: self.progress("time the candidates", done, total)
        )
        longest = self._longest(costs)
        space = Space(costs.saved, self._damages(sensitivities))
        plans = self._fitting(front(space.times, space.damages), longest)
        best, interrupted = None, False
        try:
            self._anchor(plans)
            best = self._best(space, plans, longest)
        except KeyboardInterrupt:
            interrupted = True
            best = self._best_so_far(space)
        if interrupted:
            return self._outcome(space, costs, best, None, interrupted=True)
        return self._proven(space, costs, plans, best)

    def measure(self, plan: Choices) -> Measured:
        """Measure a plan on the examples that compare plans; each only once."""
        if plan not in self.measured:
            tried = len(self.measured)
            best = min((self.exchange.loss(one) for one in self.measured.values()), default=None)
            self.progress("measure plans" + (f" | least loss so far {best:.3g}" if best is not None else ""), tried, max(tried + 1, _MOST_MEASURED))
            model = self.composer.make(self.choices(plan))
            self.measured[plan] = self.judge.measure(model.model, self.judge.search)
            self._remember()
        return self.measured[plan]

    def choices(self, plan: Choices) -> list[Choice]:
        """The choice at each site."""
        return [self._choice(site, column) for site, column in enumerate(plan)]

    def _choice(self, site: int, column: int) -> Choice:
        if column == len(self.candidates):
            return Choice(None)
        return Choice(self.candidates[column], self.heads.get((site, column), ()))

    def _damages(self, given: Path | None) -> Any:
        """Predicted damage of each candidate at each site, [sites, candidates]; the last changes nothing."""
        kept = self.folder / SENSITIVITIES
        if given is not None:
            found = damage.load(given, self.about)
        elif kept.is_file():
            found = damage.load(kept, self.about)
        else:
            whole = [one for one in self.candidates if one.heads is None]
            running = {one.name: self.composer.make(self.composer.everywhere(one)).model for one in whole}
            found = damage.measure(
                self.judge.base.model, self.facts, running, self.judge.calibration.batches, self.seed,
                lambda done, total: self.progress("measure the sensitivities", done, total),
            )  # fmt: skip
        damage.save(kept, self.about, found)
        table = np.full((len(self.facts.sites), len(self.candidates) + 1), np.inf)
        table[:, -1] = 0.0
        for column, one in enumerate(self.candidates):
            for site, products in enumerate(found[one.whole]):
                if products is not None and one.on(self.facts.sites[site]):
                    table[site, column], heads = damage.of_heads(products, one.heads)
                    if one.heads is not None:
                        self.heads[site, column] = heads
        return table

    def _longest(self, costs: cost.Costs) -> float | None:
        """The time that a plan may add to the base, by the speed asked for; None without one."""
        if self.stage.speed is None and self.stage.latency is None:
            return None
        if self.stage.latency is not None:
            wanted, asked = read_latency(self.stage.latency), f"a latency of {self.stage.latency}"
            if wanted >= costs.exact:
                raise ApproxError(
                    f"Exact attention takes {costs.exact:.3g} ms at {self.stage.length} tokens, within {self.stage.latency} already. Ask for "
                    "less, or keep it.",
                    Exit.REFUSED,
                )
        else:
            wanted, asked = costs.exact / read_speed(self.stage.speed or ""), f"a speed of {self.stage.speed}"
        fastest = costs.unchanged + float(np.where(np.isfinite(costs.saved), costs.saved, np.inf).min(1).sum())
        for reached, what in ((costs.ceiling, "even without any attention"), (fastest, "the fastest mix of the candidates")):
            if wanted < reached:
                raise ApproxError(
                    f"Infeasible: {asked} at {self.stage.length} tokens was asked for, but {what} is {costs.speed(reached):.2f}× "
                    f"({reached:.3g} ms; exact attention takes {costs.exact:.3g} ms). Ask for less, or for longer inputs.",
                    Exit.THRESHOLD,
                )
        return max(wanted * (1 - _RESERVE), fastest) - costs.unchanged

    def _fitting(self, plans: Front, longest: float | None) -> Front:
        """The plans of a front that are fast enough, at most one in a thousandth of the range of times."""
        kept = np.ones(len(plans.times), bool) if longest is None else plans.times <= longest + 1e-9
        cells = np.round(plans.times / max(np.ptp(plans.times), 1e-12) * 1000)
        kept &= np.concatenate((cells[1:] != cells[:-1], [True]))
        return Front(plans.times[kept], plans.damages[kept], plans.choices[kept])

    def _anchor(self, plans: Front) -> None:
        """Measure a few plans from the fastest to the safest, for the rate between divergence and loss."""
        rows = sorted({round(share * (len(plans.times) - 1)) for share in (0.0, 0.25, 0.5, 0.75)})
        anchors = [self.measure(_row(plans, row)) for row in rows]
        if self.judge.task is not None:
            self.exchange = Exchange.of(anchors)

    def _best(self, space: Space, plans: Front, longest: float | None) -> Choices | None:
        limit = len(self.measured) + _MOST_MEASURED

        def more() -> bool:
            out = self.stage.seconds is not None and self._elapsed() > _BEFORE_PROOF * self.stage.seconds
            return not out and len(self.measured) < limit

        if self.stage.allowed is None:
            assert longest is not None
            return least_damage(space, _row(plans, -1), self._loss, longest, more)
        return fastest_within(space, plans, self._loss, self.stage.allowed[1], more)

    def _best_so_far(self, space: Space) -> Choices | None:
        """The fastest measured plan within the budget, or the least damaging one."""
        if not self.measured:
            return None
        bound = self.stage.allowed[1] if self.stage.allowed else np.inf
        allowed = [plan for plan in self.measured if self._loss(plan) <= bound]
        return min(allowed, key=space.time) if allowed else min(self.measured, key=self._loss)

    def _loss(self, plan: Choices) -> float:
        return self.exchange.loss(self.measure(plan)) if self.judge.task is not None else self.measure(plan).divergence

    def _elapsed(self) -> float:
        return time.monotonic() - self.begun

    def _finalists(self, space: Space, best: Choices) -> list[Choices]:
        """The best plan, and the fastest measured ones that should lose less, fastest first."""
        bound = self.stage.allowed[1] if self.stage.allowed else self._loss(best)
        finalists = [best]
        for share in _SAFER:
            safer = [plan for plan in self.measured if self._loss(plan) <= share * bound and space.time(plan) < 0]
            if safer and (one := min(safer, key=space.time)) not in finalists:
                finalists.append(one)
        return sorted(finalists, key=space.time)

    def _proven(self, space: Space, costs: cost.Costs, plans: Front, best: Choices | None) -> Searched:
        """Measure finalists, the front and uniform plans on the proof, and choose among the finalists."""
        finalists = [min(self.measured, key=self._loss)] if best is None else self._finalists(space, best)
        labels = {f"finalist {number + 1}": plan for number, plan in enumerate(finalists)}
        if self.stage.seconds is None or self._elapsed() < self.stage.seconds:
            labels |= {name: plan for name, plan in self._beside(plans).items() if plan not in finalists}
        models = {name: self.composer.make(self.choices(plan)) for name, plan in labels.items()}
        models = {name: one for name, one in models.items() if one is not self.judge.base}
        proven = proving.prove(self.judge, models, self.seed, self.progress)
        named = [name for name in models if name.startswith("finalist")]
        chosen = next((name for name in named if self._meets(proven.proofs[name])), None)
        feasible, told = chosen is not None, chosen
        if chosen is None and named:
            told = min(named, key=lambda name: proven.proofs[name].loss)
        outcome = self._outcome(
            space, costs, labels[told] if told else None, proven.proofs[told] if told else None, feasible=feasible
        )
        return proven.given_to(outcome, models, told)

    def _beside(self, plans: Front) -> dict[str, Choices]:
        """Plans of the front for other budgets, and every uniform plan."""
        named: dict[str, Choices] = {}
        if self.stage.front:
            for number, share in enumerate(np.linspace(0, 1, self.stage.front + 2)[1:-1]):
                damages = np.log(np.maximum(plans.damages, 1e-12))
                wanted = damages[0] + share * (damages[-1] - damages[0])
                named[f"front {number + 1}"] = _row(plans, int(np.abs(damages - wanted).argmin()))
        last = len(self.candidates)
        for column, one in enumerate(self.candidates):
            if one.heads is None:
                named[one.name] = tuple(column if one.on(site) else last for site in self.facts.sites)
        return named

    def _meets(self, proof: Proof) -> bool:
        if self.stage.allowed is not None and proof.loss > self.stage.allowed[1]:
            return False
        if self.stage.speed is not None:
            return proof.speed is not None and proof.speed >= read_speed(self.stage.speed)
        if self.stage.latency is not None:
            return proof.milliseconds is not None and proof.milliseconds <= read_latency(self.stage.latency)
        return proof.speed is not None and proof.speed > 1

    def _outcome(
        self, space: Space, costs: cost.Costs, plan: Choices | None, proof: Proof | None, *, feasible: bool = False, interrupted: bool = False
    ) -> Searched:
        layers: list[LayerReason] = []
        choices = [] if plan is None else self.choices(plan)
        if plan is not None:
            layers = reasons(
                [one.name for one in choices], [one.heads for one in choices],
                [-float(space.times[site, column]) for site, column in enumerate(plan)],
                [float(space.damages[site, column]) for site, column in enumerate(plan)],
                [self._refused(space, site, space.damage(plan)) for site in range(len(plan))],
            )  # fmt: skip
        pairs = [(space.damage(one), measured.divergence) for one, measured in self.measured.items()]
        correlation = float(spearmanr(*zip(*pairs, strict=True)).statistic) if len(pairs) >= 5 else None
        asked = " and ".join(text for text in (self.stage.budget, self.stage.speed, self.stage.latency) if text)
        return Searched(
            plan=self.composer.plan(choices) if plan is not None else None,
            feasible=feasible,
            interrupted=interrupted,
            asked=f"{asked} at {self.stage.length} tokens",
            unit=self.judge.unit,
            layers=layers,
            proof=proof,
            ceiling=costs.exact / costs.ceiling,
            correlation=correlation,
            measured=len(self.measured),
            seconds=self._elapsed(),
        )

    def _refused(self, space: Space, site: int, total: float) -> str:
        """What the candidate that damages least would do to a site that stays exact."""
        faster = [column for column in range(len(self.candidates)) if space.times[site, column] < 0]
        if not faster:
            return "no candidate saves time here"
        least = min(faster, key=lambda column: (space.damages[site, column], column))
        added = space.damages[site, least] / total if total > 0 else np.inf
        more = f"{added:.0%} of the plan's predicted damage" if np.isfinite(added) else "damage"
        return f"{self.candidates[least].name} would add {more} to save {-space.times[site, least]:.2f} ms"

    def _remembered(self) -> dict[Choices, Measured]:
        file = self.folder / MEASURED
        if not file.is_file():
            return {}
        data = json.loads(file.read_text(encoding="utf-8"))
        if data["about"] != self.about:
            raise ApproxError(
                f"{self.folder} holds a search of another model, other candidates or other examples. Choose another output, or start "
                "over with --force.",
                Exit.REFUSED,
            )
        return {tuple(plan): Measured(*values) for plan, values in data["plans"]}

    def _remember(self) -> None:
        plans = [(plan, (one.divergence, one.loss, one.error)) for plan, one in self.measured.items()]
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / MEASURED, json.dumps({"about": self.about, "plans": plans}))


def facts_of(base: Checkpoint, stage: SearchStage) -> Anatomy:
    """The anatomy of a base that can be searched.

    Raises:
        ApproxError: if it is converted, or has fewer positions than the timed length.
    """
    if base.source.converted:
        raise ApproxError(
            f"{base.source.name} is converted already. Search for the exact checkpoint it was made from.", Exit.REFUSED
        )
    limit = positions.limit(base.model.config)
    if limit is not None and stage.length > limit:
        raise ApproxError(
            f"Length {stage.length} is too long: {base.source.name} takes {limit} positions. Use a shorter --length, or extend the "
            "checkpoint first."
        )
    return anatomy(base.model.config, type(base.model))


def _row(plans: Front, row: int) -> Choices:
    return tuple(int(choice) for choice in plans.choices[row])
