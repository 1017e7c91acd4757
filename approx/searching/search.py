"""Search the best mix of mechanisms within a budget, and prove it on examples that the search did not see."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from approx.checkpoints.checkpoint import Checkpoint
from approx.errors import ApproxError, Exit
from approx.evaluation.prediction_cache import fingerprint
from approx.measuring.identity import identity
from approx.measuring.measure import Progress
from approx.planning import positions
from approx.planning.anatomy import Anatomy, anatomy
from approx.searching import cost, damage, fitting, proving
from approx.searching.assignment import Choices, Front, front
from approx.searching.candidates import candidates
from approx.searching.composition import Composer
from approx.searching.judging import Judge
from approx.searching.options import SearchStage, check, read_latency, read_speed
from approx.searching.outcome import Proof, Searched
from approx.searching.repair import Space, anchors, fastest_within, least_damage
from approx.searching.trials import MOST, Trials

SENSITIVITIES, MEASURED, FITTED = "sensitivities.json", "measured.json", "fitted.safetensors"
# The share of a time budget after which the proof begins.
_BEFORE_PROOF = 0.6
# Predicted times are this much too optimistic at most.
_RESERVE = 0.02
_HEALED = "The figures are after attention transfer. Convert by the plan, then fit it: approx finetune converted --recover transfer."
# Finalists lose at most these shares of the budget by estimate.
_SAFER = (0.5, 0.25)


class Search:
    """One search.

    Args:
        base: The exact checkpoint.
        stage: Its options.
        folder: Where sensitivities and measurements are kept.
        resume: Whether to use those that are there.
        seed: Seed of everything random.
        progress: Called with what happens, done and total.
    """

    def __init__(
        self, base: Checkpoint, stage: SearchStage, folder: Path, *, resume: bool, seed: int, progress: Progress
    ) -> None:
        check(stage)
        self.stage, self.folder, self.seed, self.progress = stage, folder, seed, progress
        self.begun = time.monotonic()
        self.facts = facts_of(base, stage)
        self.candidates = candidates(stage, self.facts)
        progress("read the data", 0, 1)
        self.judge = Judge(base, stage, seed)
        self.composer = Composer(base, self.facts)
        self.about = fingerprint(
            identity(base), [(one.name, one.rule.to_dict()) for one in self.candidates], stage.task, stage.settings,
            self.judge.examples_sha256, stage.heal, seed,
        )  # fmt: skip
        self.trials = Trials(self.judge, self.composer, self.candidates, folder / MEASURED, self.about, progress)
        self.known: damage.Damages | None = None
        if resume:
            self.trials.remember()

    def know(self, sensitivities: Path) -> None:
        """Use the sensitivities of an earlier search.

        Raises:
            ApproxError: if they are of another model, other candidates or other examples.
        """
        self.known = damage.load(sensitivities, self.about)

    def run(self) -> Searched:
        """Search; after Ctrl-C the outcome is the best plan so far.

        Raises:
            ApproxError: if nothing could be as fast as asked (exit code 7).
        """
        costs = cost.measure(
            self.composer, self.candidates, self.stage, seed=self.seed,
            progress=lambda _, done, total: self.progress("time the candidates", done, total),
        )  # fmt: skip
        longest = self._longest(costs)
        self.trials.costs = costs
        self.trials.space = space = Space(costs.saved, self.damages())
        plans = _fitting(front(space.times, space.damages), longest)
        try:
            self.trials.anchor(anchors(space, np.inf if longest is None else longest))
            return self._proven(plans, self._best(longest))
        except KeyboardInterrupt:
            if not self.trials.measured:
                raise
            return self._outcome(self.trials.best_so_far(), None, interrupted=True)

    def damages(self) -> NDArray[np.float64]:
        """Predicted damage of each candidate at each site, [sites, candidates]; the last changes nothing."""
        kept = self.folder / SENSITIVITIES
        if self.known is None and kept.is_file():
            self.know(kept)
        running: dict[str, Any] = {}
        if self.stage.heal or self.known is None:
            whole = [one for one in self.candidates if one.heads is None]
            running = {one.name: self.composer.make(self.composer.everywhere(one)).model for one in whole}
        if self.stage.heal:
            fitting.fit(
                self.composer, self.judge, running, self.folder / FITTED, self.about, self.seed,
                lambda done, total: self.progress("fit the mechanisms", done, total),
            )  # fmt: skip
        found = self.known or damage.measure(
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
                        self.trials.heads[site, column] = heads
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
        for reached, what in (
            (costs.ceiling, "even without any attention"),
            (fastest, "the fastest mix of the candidates"),
        ):
            if wanted < reached:
                raise ApproxError(
                    f"Infeasible: {asked} at {self.stage.length} tokens was asked for, but {what} is {costs.speed(reached):.2f}× "
                    f"({reached:.3g} ms; exact attention takes {costs.exact:.3g} ms). Ask for less, or for longer inputs.",
                    Exit.THRESHOLD,
                )
        return max(wanted * (1 - _RESERVE), fastest) - costs.unchanged

    def _best(self, longest: float | None) -> Choices | None:
        limit = len(self.trials.measured) + MOST

        def more() -> bool:
            out = self.stage.seconds is not None and self._elapsed() > _BEFORE_PROOF * self.stage.seconds
            return not out and len(self.trials.measured) < limit

        trials = self.trials
        about = (trials.space, trials.divergence)
        if self.stage.allowed is None:
            assert longest is not None
            return least_damage(*about, longest, trials.divergences, more)
        return fastest_within(*about, trials.loss, self.stage.allowed[1], trials.divergences, more)

    def _elapsed(self) -> float:
        return time.monotonic() - self.begun

    def _finalists(self, best: Choices) -> list[Choices]:
        """The best plan, and the fastest measured ones that should lose less, fastest first."""
        bound = self.stage.allowed[1] if self.stage.allowed else self.trials.loss(best)
        finalists = [best]
        for share in _SAFER:
            safer = [
                plan
                for plan in self.trials.measured
                if self.trials.loss(plan) <= share * bound and self.trials.space.time(plan) < 0
            ]
            if safer and (one := min(safer, key=self.trials.space.time)) not in finalists:
                finalists.append(one)
        return sorted(finalists, key=self.trials.space.time)

    def _proven(self, plans: Front, best: Choices | None) -> Searched:
        """Measure finalists, the front and uniform plans on the proof, and choose among the finalists."""
        finalists = [min(self.trials.measured, key=self.trials.loss)] if best is None else self._finalists(best)
        labels = {f"finalist {number + 1}": plan for number, plan in enumerate(finalists)}
        if self.stage.seconds is None or self._elapsed() < self.stage.seconds:
            for name, plan in self._beside(plans).items():
                if plan not in labels.values():
                    labels[name] = plan
        rules = {name: self.composer.plan(self.trials.choices(plan)) for name, plan in labels.items()}
        changed = {name: one for name, one in rules.items() if one is not None}
        models = {name: self.composer.make(self.trials.choices(labels[name])) for name in changed}
        proven = proving.prove(self.judge, models, changed, self.seed, self.progress)
        named = [name for name in models if name.startswith("finalist")]
        meeting = [name for name in named if self._meets(proven.proofs[name])]
        chosen = max(meeting, key=lambda name: proven.proofs[name].speed or 0.0, default=None)
        feasible, told = chosen is not None, chosen
        if chosen is None and named:
            told = min(named, key=lambda name: proven.proofs[name].loss)
        outcome = self._outcome(
            labels[told] if told else None, proven.proofs[told] if told else None, feasible=feasible
        )
        outcome.notes += self._better(proven.proofs, told)
        return proven.given_to(outcome, models, told)

    def _better(self, proofs: Mapping[str, Proof], chosen: str | None) -> list[str]:
        """A note if a uniform plan turned out faster than the chosen one, and within the budget.

        A search takes every change of the outputs for damage, so it misses mechanisms that improve a model.
        """
        speed = (proofs[chosen].speed if chosen is not None else None) or 0.0
        names = [one.name for one in self.candidates if one.name in proofs and self._meets(proofs[one.name])]
        best = max(names, key=lambda name: proofs[name].speed or 0.0, default=None)
        if best is None or (proofs[best].speed or 0.0) <= speed:
            return []
        told = f"{best} in every layer met the goal and was faster: {proofs[best].told(self.judge.unit)}. It is the best of "
        return [f"{told}{len(self.candidates)} uniform plans on these examples, so evaluate it on others."]

    def _beside(self, plans: Front) -> dict[str, Choices]:
        """Every uniform plan, and plans of the front for other budgets."""
        last = len(self.candidates)
        named = {
            one.name: tuple(column if one.on(site) else last for site in self.facts.sites)
            for column, one in enumerate(self.candidates)
            if one.heads is None
        }
        damages = np.log(np.maximum(plans.damages, 1e-12))
        for number, share in enumerate(np.linspace(0, 1, self.stage.front + 2)[1:-1]):
            wanted = damages[0] + share * (damages[-1] - damages[0])
            named[f"front {number + 1}"] = _row(plans, int(np.abs(damages - wanted).argmin()))
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
        self, plan: Choices | None, proof: Proof | None, *, feasible: bool = False, interrupted: bool = False
    ) -> Searched:
        trials = self.trials
        asked = " and ".join(text for text in (self.stage.budget, self.stage.speed, self.stage.latency) if text)
        return Searched(
            plan=None if plan is None else self.composer.plan(trials.choices(plan)),
            feasible=feasible,
            interrupted=interrupted,
            asked=f"{asked} at {self.stage.length} tokens",
            unit=self.judge.unit,
            layers=[] if plan is None else trials.reasons(plan),
            proof=proof,
            ceiling=trials.costs.speed(trials.costs.ceiling),
            correlation=trials.correlation(),
            measured=len(trials.measured),
            seconds=self._elapsed(),
            notes=[_HEALED] if self.stage.heal and self.composer.fitted else [],
        )


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


def _fitting(plans: Front, longest: float | None) -> Front:
    """The plans of a front that are fast enough, at most one in a thousandth of the range of times."""
    fast = np.ones(len(plans.times), bool) if longest is None else plans.times <= longest + 1e-9
    cells = np.round(plans.times / max(np.ptp(plans.times), 1e-12) * 1000)
    # The last fast plan of a cell has the least damage.
    last = np.concatenate((cells[1:] != cells[:-1], [True]))
    last[np.flatnonzero(fast)[-1:]] = True
    kept = fast & last
    return Front(plans.times[kept], plans.damages[kept], plans.choices[kept])
