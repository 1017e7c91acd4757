"""Recommend what to do with a model at the lengths of the user's data: its ceiling, speeds, losses, and what healing gives back.

Stages end as soon as the answer is clear, and share a time that is promised after one step of each kind was measured. What
decides is `approx.publishing.summary.conclude`, as in every report: this file only chooses what to measure.
"""

import math
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from approx.checkpoints import checkpoint
from approx.checkpoints.checkpoint import Checkpoint
from approx.errors import ApproxError, Exit
from approx.evaluation.evaluate import Subject, prepare
from approx.evaluation.options import BASE, BenchStage, EvaluateStage
from approx.evaluation.record import BUSY, Quality, QualityVariant, Record, Speed, SpeedVariant
from approx.evaluation.timing import BLOCK_MS, is_out_of_memory, memory_limit, timed
from approx.finetuning.trainer import mechanism_parameters
from approx.measuring.measure import forwards, input_maker, make_record, measure_speed
from approx.planning import positions
from approx.planning.anatomy import Anatomy, anatomy
from approx.planning.rule import Rule
from approx.progress import Progress, silent
from approx.publishing import wording
from approx.publishing.summary import PAYS, Advice, answer, conclude, standing, variant_of, worthwhile_from
from approx.recipe import HEALED
from approx.searching.cost import Candidate, Composer, proposals
from approx.searching.options import RecommendStage
from approx.searching.search import Scores, transfer, verified_in_memory
from approx.tasks import TASKS, kind_of, open_task
from approx.tasks.generated import Generated
from approx.tasks.task import Example, Split, Task

# Lengths that are timed without data, as far as the positions go.
USUAL = (128, 512, 2048)
# Rounds of a race, which may take twice as many on a busy machine.
_ROUNDS = 6
_SECONDS = 0.3
# The shares of the time for first calls and for races.
_LOOK, _RACE = 0.25, 0.5
# First calls that are timed, and how many times as long as exact attention they may take for a race to be worth it.
_CALLS, _HOPELESS = 3, 2.0
# Where the first calls put the ceiling below this, it is measured before anything else.
_DOUBTFUL = 1.25
# Examples that are read at least, of which the lengths are counted.
_READ = 1000
# Examples of the first scores, which leave out what loses most; so many models need none.
_FIRST, _FEW = 32, 2
# Fewer examples score nothing, and train nothing.
_FEWEST, _FEWEST_TRAINED = 10, 16
_TRAINED = 200
# Steps of a transfer that is worth beginning, of how many examples, and how much longer they take than a forward pass.
_STEPS, _MOST_STEPS, _BATCH, _BACKWARD = 20, 100, 8, 4.0
# Models that are scored on all examples before the rest have to wait.
_FINALISTS = 3
# What is promised is more than what is expected.
_RESERVE = 1.15


@dataclass(frozen=True)
class Lengths:
    """How long the inputs of the examples are, in positions.

    Attributes:
        examples: Number of examples that were counted.
        quartiles: The lengths below which a quarter, half and three quarters of the inputs are.
        ninetieth: The 90th percentile.
        longest: The longest input.
    """

    examples: int
    quartiles: tuple[int, int, int]
    ninetieth: int
    longest: int

    @classmethod
    def of(cls, examples: int, lengths: Sequence[int]) -> "Lengths":
        """Count the lengths of inputs."""
        low, middle, high, late = (int(one) for one in np.quantile(lengths, (0.25, 0.5, 0.75, 0.9), method="higher"))
        return cls(examples, (low, middle, high), late, max(lengths))

    @property
    def sentence(self) -> str:
        """As one sentence."""
        low, middle, high = map(wording.count, self.quartiles)
        if self.quartiles[0] == self.longest:
            return f"The inputs of {wording.count(self.examples)} examples have {middle} tokens each."
        return (
            f"The inputs of {wording.count(self.examples)} examples have {middle} tokens (median; half of them {low} to {high}, a "
            f"tenth more than {wording.count(self.ninetieth)}, the longest {wording.count(self.longest)})."
        )


Scored = tuple[Quality, QualityVariant]


@dataclass(frozen=True)
class Tried:
    """What was found out about one mechanism.

    Attributes:
        name: Its name in the record.
        rule: Mechanism and settings.
        decision: `use`, `do not use`, `stay exact` or `not settled`, as in a report.
        reason: Why.
        speeds: Length -> its entry; lengths at which it was not timed are left out.
        share_of_ceiling: Of the longest length.
        without: Its scores as converted; None if they were not measured.
        healed: Its scores after a transfer; None if there was none.
        needed_examples: Examples that would settle it; None if it is settled, or no number would.
        needed_seconds: How long their scores take.
    """

    name: str
    rule: Rule
    decision: str
    reason: str
    speeds: dict[int, SpeedVariant]
    share_of_ceiling: float | None
    without: Scored | None
    healed: Scored | None
    needed_examples: int | None
    needed_seconds: float | None

    def to_data(self) -> dict[str, Any]:
        """As plain data."""

        def scored(one: Scored | None) -> dict[str, Any] | None:
            keys = ("difference", "interval", "verdict", "margin", "needed_examples")
            return None if one is None else {"examples": one[0].examples, **{key: getattr(one[1], key) for key in keys}}

        return {
            **vars(self),
            "rule": self.rule.to_dict(),
            "speeds": {
                length: {key: getattr(one, key) for key in ("ratio", "interval", "verdict", "median_ms")}
                for length, one in self.speeds.items()
            },
            "without": scored(self.without),
            "healed": scored(self.healed),
        }


@dataclass(frozen=True)
class Recommended:
    """An answer, and what it rests on.

    Attributes:
        answer: In one sentence.
        decision: `use`, `stay exact` or `not settled`.
        best: The mechanism to use, by its name in the record; None for the other decisions.
        lengths: The lengths of the examples; None without a task.
        share: Share of the inputs that are long enough for the best mechanism; None without one.
        ceilings: Length -> speed-up without any attention.
        tried: The mechanisms, fastest first.
        left_out: Mechanism or stage -> why it was left out.
        promised: Seconds that were promised; None if the answer was clear before.
        seconds: Seconds that it took.
        command: The next command.
        record: Everything measured.
    """

    answer: str
    decision: str
    best: str | None
    lengths: Lengths | None
    share: float | None
    ceilings: dict[int, float | None]
    tried: list[Tried]
    left_out: dict[str, str]
    promised: float | None
    seconds: float
    command: str
    record: Record

    def to_data(self) -> dict[str, Any]:
        """As plain data."""
        lengths = None if self.lengths is None else vars(self.lengths)
        return {
            **vars(self),
            "lengths": lengths,
            "tried": [one.to_data() for one in self.tried],
            "record": self.record.to_data(),
        }


def recommend(
    base: Checkpoint,
    stage: RecommendStage,
    *,
    model: str,
    seed: int = 0,
    command: str = "",
    progress: Progress = silent,
    announce: Callable[[str], None] = lambda text: None,
) -> Recommended:
    """Find out which mechanisms are worth it for a model, at the lengths of a task's examples.

    Args:
        base: The exact checkpoint.
        stage: The options.
        model: Its name in the commands of the answer.
        seed: Seed of the choice of examples, the inputs and the intervals.
        command: The command as typed, for the record.
        progress: Called with what happens, done and total.
        announce: Called with how long it will take, as soon as that is known.

    Raises:
        ApproxError: if the base is converted, task and data do not fit it, a length does not fit its positions, or the time
            is not enough to time a single mechanism, with the time that is.
    """
    return _Recommending(base, stage, model, seed, command, progress, announce).run()


@dataclass
class _Contest:
    """A candidate, the model that has it everywhere, and the seconds of its first look."""

    candidate: Candidate
    one: Checkpoint
    seconds: float

    @property
    def name(self) -> str:
        return self.candidate.name


@dataclass
class _Recommending:
    base: Checkpoint
    stage: RecommendStage
    model: str
    seed: int
    command: str
    progress: Progress
    announce: Callable[[str], None]
    left_out: dict[str, str] = field(default_factory=dict)
    speed: list[Speed] = field(default_factory=list)
    quality: list[Quality] = field(default_factory=list)
    # Name in the record -> the model, and its mechanism.
    models: dict[str, Checkpoint] = field(default_factory=dict)
    rules: dict[str, Rule] = field(default_factory=dict)
    verified: set[str] = field(default_factory=set)
    # Name -> seconds of an example.
    pace: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    promised: float | None = None
    # Seconds spent on scores, which another run with more examples repeats.
    scoring: float = 0.0

    def __post_init__(self) -> None:
        self.begun = time.monotonic()
        if self.base.source.converted:
            raise ApproxError(
                f"{self.base.source.name} is converted already. Ask about the exact checkpoint it was made from.",
                Exit.REFUSED,
            )
        self.facts: Anatomy = anatomy(self.base.model.config, type(self.base.model))
        self.limit = positions.limit(self.base.model.config)
        if self.stage.lengths and self.limit is not None and max(self.stage.lengths) > self.limit:
            raise ApproxError(
                f"Length {max(self.stage.lengths)} is too long: {self.base.source.name} takes {self.limit} positions. Use "
                "shorter --lengths, or extend the checkpoint first."
            )
        self.progress("read the data", 0, 1)
        self.task = self._task()
        self.processor = None if self.task is None else checkpoint.processor(self.base.source)
        self.split, self.counts = (None, []) if self.task is None else self._read(self.task)
        self.lengths = None if self.split is None else Lengths.of(len(self.split.examples), self.counts)
        self.timed = self._timed_lengths()

    # What is measured, in order.

    def run(self) -> Recommended:
        """Go through the stages until the answer is clear."""
        longest = self.timed[-1]
        inputs = self._inputs()(self.stage.batch, longest)
        self.progress("first calls", 0, 1)
        exact, free = self._first_calls(inputs)
        self.pace[BASE] = exact
        if (least := _race_seconds([exact], exact)) > self.stage.seconds:
            raise ApproxError(
                f"The time budget of {self.stage.time_budget} is too small: exact attention takes {exact:.2g} s at "
                f"{longest:,} tokens, so that timing one mechanism takes {_spoken(least)}. Give --time-budget "
                f"{_duration(least)} or more, or shorter --lengths."
            )
        if exact < _DOUBTFUL * free and self._ceiling_is_low():
            return self._outcome()
        contests = self._look(exact, inputs)
        raced = self._fitting(contests, exact)
        self._promise(raced, exact)
        self._race(raced)
        paying = self._paying(raced)
        for one in paying:
            plan = self.composer.plan(self.composer.everywhere(one.candidate))
            if plan is not None and verified_in_memory(self.base.model, plan, one.one.model):
                self.verified.add(one.name)
        if paying and self.task is not None:
            self._score(paying)
        return self._outcome()

    def _task(self) -> Task | None:
        stage, kind = self.stage, type(self.base.model)
        name = stage.task
        if name is None and (stage.data is not None or stage.settings):
            name = next((one for one in TASKS if kind_of(one).usual and kind_of(one).head.is_of(kind)), None)
            if name is None:
                fitting = [one for one in TASKS if kind_of(one).head.is_of(kind)]
                known = f" Those for its head: {', '.join(fitting)}." if fitting else ""
                raise ApproxError(f"Data were given for a {kind.__name__}, but no task. Name it with --task.{known}")
        if name is None:
            return None
        settings = dict(stage.settings)
        if issubclass(kind_of(name), Generated):
            # As many as may be scored and trained on.
            settings.setdefault("examples", stage.examples + _FIRST + _TRAINED)
        self.settings, self.task_name = settings, name
        task = open_task(name, **settings)
        task.check(self.base.model)
        return task

    def _read(self, task: Task) -> tuple[Split, list[int]]:
        """The examples in random order, groups together, and the positions of their inputs."""
        loaded = task.labelled(task.load(self._data, self.stage.split, self.stage.limit))
        groups: dict[Any, list[Example]] = {}
        for example in loaded.examples:
            groups.setdefault(example.unit, []).append(example)
        members = [*groups.values()]
        order = np.random.default_rng(self.seed).permutation(len(members))
        self.total, most = len(loaded.examples), max(_READ, 2 * self.stage.examples)
        examples = [example for place in order for example in members[place]][:most]
        split = Split(loaded.name, examples, subset=True)
        subject = Subject(self.base.source.name, self.base.model, self.processor)
        read = prepare([subject], task, split, batch_size=_BATCH, truncate=self.stage.truncate)
        config: Any = self.base.model.config
        return split, [task.positions(encoding, config) for encoding in read.encodings]

    @property
    def _data(self) -> Path | None:
        return None if self.stage.data is None else Path(self.stage.data)

    def _timed_lengths(self) -> list[int]:
        if self.facts.fixed_length is not None:
            return [self.facts.fixed_length]
        if self.stage.lengths:
            return sorted(set(self.stage.lengths))
        if self.lengths is not None:
            return sorted({self.lengths.quartiles[1], self.lengths.ninetieth})
        return [one for one in USUAL if self.limit is None or one <= self.limit] or [self.limit or USUAL[0]]

    @property
    def _texts(self) -> EvaluateStage | None:
        if self.task is None:
            return None
        about = {"data": self.stage.data, "split": self.stage.split, "limit": self.stage.limit or 64}
        return EvaluateStage(task=self.task_name, settings=self.settings, **about)

    def _inputs(self) -> Callable[[int, int], dict[str, torch.Tensor]]:
        return input_maker(self.base.model, self.base.source, self._texts, self.seed)

    def _first_calls(self, inputs: dict[str, torch.Tensor]) -> tuple[float, float]:
        """Seconds of a forward pass at the longest length, with exact attention and without any."""

        call = {one.role: one.run for one in forwards({BASE: self.base.model})}
        exact, free = (self._seconds(lambda role=role: call[role](inputs)) for role in ("base", "ceiling"))
        if exact is None or free is None:
            raise ApproxError(
                f"Exact attention ran out of memory at {self.timed[-1]} tokens, so there is nothing to compare with. Give "
                "shorter --lengths or a smaller --batch-size.",
                Exit.MISSING,
            )
        return exact, free

    def _seconds(self, call: Callable[[], object]) -> float | None:
        """Seconds of the fastest of three calls after one that also compiles, or of fewer slow ones; None where memory runs out."""
        device = self.base.model.device
        try:
            with torch.inference_mode(), memory_limit(device):
                call()
                times = [timed(call, 1, device).ms / 1e3]
                # Other programs only add to a time.
                while len(times) < _CALLS and sum(times) < 1.0:
                    times.append(timed(call, 1, device).ms / 1e3)
                return min(times)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        return None

    def _ceiling_is_low(self) -> bool:
        """Measure the ceiling at all lengths, and whether that answers everything."""
        self.speed = self._bench({}, self.timed)
        made = conclude(self._record())
        if made is not None and made.decision == "stay exact":
            return True
        self.speed = []
        return False

    def _bench(self, models: dict[str, Checkpoint], lengths: Sequence[int]) -> list[Speed]:
        room = max(self._left * (_RACE if self.task is not None else 1.0), 1.0)
        grid = BenchStage(
            lengths=[*lengths],
            batches=[self.stage.batch],
            rounds=_ROUNDS,
            seconds=_SECONDS,
            time_budget=f"{room:.0f}s",
            inputs="synthetic" if self.task is None else "real",
        )
        opened = {BASE: self.base, **models}
        return list(measure_speed(opened, grid, self._texts, seed=self.seed, progress=self.progress))

    def _look(self, exact: float, inputs: dict[str, torch.Tensor]) -> list[_Contest]:
        """Make the candidates and call each a few times; what is far too slow is left out."""
        self.composer = Composer(self.base, self.facts)
        trains = self.task is not None and self.stage.heal is not False
        chosen, refused = proposals(self.stage.mechanisms, self.timed[-1], self.facts, healed=trains)
        self.left_out |= refused
        if not chosen:
            raise ApproxError(
                f"There is no mechanism to try: none fits {self.facts.architecture} at {self.timed[-1]} tokens. "
                "`approx mechanisms` lists them all.",
                Exit.UNSUPPORTED,
            )
        end, found, slow = self.begun + _LOOK * self.stage.seconds, list[_Contest](), list[_Contest]()
        for number, candidate in enumerate(chosen):
            self.progress(f"first calls of {candidate.name}", number, len(chosen))
            if found and time.monotonic() > end:
                self.left_out |= {one.name: self._no_room("first calls") for one in chosen[number:]}
                break
            one = self.composer.make(self.composer.everywhere(candidate))
            seconds = self._seconds(lambda one=one: one.model(**inputs))
            if seconds is None:
                self.left_out[candidate.name] = f"out of memory at {self.timed[-1]:,} tokens"
                continue
            contest = _Contest(candidate, one, seconds)
            (slow if seconds > _HOPELESS * exact else found).append(contest)
        if not found and slow:
            # What is measured must show that nothing is faster.
            slow.sort(key=lambda one: one.seconds)
            found.append(slow.pop(0))
        self.left_out |= {
            one.name: f"it took {one.seconds / exact:.1f} times as long as exact attention in a first look"
            for one in slow
        }
        return found

    def _no_room(self, what: str) -> str:
        return f"no room for its {what} in {self.stage.time_budget}"

    def _fitting(self, contests: list[_Contest], exact: float) -> list[_Contest]:
        """The candidates whose race fits into its share of the time, fastest first."""
        contests = sorted(contests, key=lambda one: one.seconds)
        room = max(_RACE * (self.stage.seconds - self._elapsed), 0.0)
        while len(contests) > 1 and _race_seconds([one.seconds for one in contests], exact) > room:
            slowest = contests.pop()
            self.left_out[slowest.name] = self._no_room("race")
        return contests

    def _promise(self, raced: list[_Contest], exact: float) -> None:
        """Say how long the rest takes at most: races, first scores, scores. Healing has its own promise."""
        times = [one.seconds for one in raced]
        race = _race_seconds(times, exact)
        parts = [(f"time {_number(len(raced), 'mechanism')}", race + (race if len(self.timed) > 1 else 0.0))]
        if self.task is not None and self.split is not None:
            # All may turn out faster.
            count = min(self.stage.examples, len(self.split.examples))
            first = (exact + sum(times)) * _FIRST if len(times) > _FEW else 0.0
            scores = (exact + sum(sorted(times)[-_FINALISTS:])) * count
            parts.append((f"score what is faster on up to {count:,} examples", first + scores))
        self.promised = min(self._elapsed + _RESERVE * sum(seconds for _, seconds in parts), self.stage.seconds)
        stages = ", ".join(f"{what} ({_spoken(seconds)})" for what, seconds in parts)
        self.announce(
            f"This takes {_spoken(self.promised - self._elapsed)} at most, less where the answer is clear earlier: {stages}."
        )

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self.begun

    @property
    def _left(self) -> float:
        return (self.promised or self.stage.seconds) - self._elapsed

    def _race(self, raced: list[_Contest]) -> None:
        """Time all at the longest length, and at the others what may be faster there."""
        *shorter, longest = self.timed
        self.models = {one.name: one.one for one in raced}
        self.rules = {one.name: one.candidate.rule for one in raced}
        (row,) = self._bench(self.models, [longest])
        self.speed = [row]
        faster = {one.name: self.models[one.name] for one in self._paying(raced)}
        for length in reversed(shorter):
            seconds = [(variant_of(row.variants, name) or row.base).median_ms or 0.0 for name in faster]
            # A race at a shorter length is faster than this one.
            if _race_seconds([ms / 1e3 for ms in seconds], (row.base.median_ms or 0.0) / 1e3) > self._left:
                self.left_out[f"{length:,} tokens"] = self._no_room("race")
                continue
            self.speed = [*self._bench(faster, [length]), *self.speed]

    def _paying(self, raced: list[_Contest]) -> list[_Contest]:
        """What is faster at some length, or may be: the machine was too busy to tell."""

        def may_pay(name: str) -> bool:
            for row in self.speed:
                entry = variant_of(row.variants, name)
                kind = standing(row, entry)
                if kind in PAYS or (kind == BUSY and entry is not None and (entry.ratio or 0.0) > 1):
                    return True
            return False

        return [one for one in raced if may_pay(one.name)]

    # Scores.

    def _score(self, paying: list[_Contest]) -> None:
        assert self.task is not None
        assert self.split is not None
        starts = [worthwhile_from(self.speed, one.name) for one in paying]
        start = min((one for one in starts if one is not None), default=self.timed[-1])
        self.min_length = start if start > self.timed[0] and self.facts.fixed_length is None else None
        examples = self.split.examples
        if self.min_length is not None:
            # None may be as long as the --lengths.
            long_ones = self.min_length <= max(self.counts)
            examples = (
                self.task.at_least(self.split, self.processor, self.min_length, self.limit).examples
                if long_ones
                else []
            )
        if len(examples) < 2 * _FEWEST:
            long = "" if self.min_length is None else f" of at least {self.min_length:,} tokens"
            self.left_out["scores"] = f"only {len(examples)} examples{long}; {2 * _FEWEST} are needed"
            return
        queue, begun = paying, time.monotonic()
        room = 0.3 * self._left / (self.pace[BASE] + sum(one.seconds for one in paying))
        first = min(_FIRST, len(examples) // 5, int(room)) if len(paying) > _FEW else 0
        if first >= _FEWEST:
            queue = self._first_scores(paying, examples[:first])
        else:
            first = 0
        self.scoring += time.monotonic() - begun
        begun = time.monotonic()
        able = [one for one in paying if self._can_heal(one)] if self.stage.heal is not False else []
        self.available = len(examples) - first
        if count := self._affordable(queue, able, self.available):
            scores = self._scores(examples[first : first + count])
            self._add(scores, queue)
            self.scoring += time.monotonic() - begun
            self._heal(scores, able, [*examples[first + count :], *examples[:first]])
        else:
            self.left_out["scores"] = self._no_room("scores")

    def _scores(self, examples: list[Example]) -> Scores:
        assert self.task is not None
        assert self.split is not None
        subject = Subject(self.base.source.name, self.base.model, self.processor)
        split = Split(self.split.name, examples, subset=True)
        read = prepare([subject], self.task, split, batch_size=_BATCH, truncate=self.stage.truncate)
        scores = Scores(self.base, self.processor, self.task, read)
        self.progress(f"score {BASE}", 0, 1)
        self._predict(scores, BASE, self.base)
        return scores

    def _predict(self, scores: Scores, name: str, one: Checkpoint) -> None:
        begun = time.monotonic()
        scores.add(name, one)
        self.pace[name] = (time.monotonic() - begun) / len(scores.read.split.examples)

    def _entry(self, scores: Scores, *notes: str) -> Quality:
        long = [] if self.min_length is None else [f"only inputs of at least {self.min_length:,} tokens"]
        return scores.entry(self.stage.margin, seed=self.seed, settings=self.settings, notes=[*long, *notes])

    def _first_scores(self, paying: list[_Contest], examples: list[Example]) -> list[_Contest]:
        """Score all on a few examples. Those that do not clearly lose go on to others: the least losing first."""
        scores = self._scores(examples)
        for number, one in enumerate(paying):
            self.progress(f"first scores of {one.name}", number, len(paying))
            self._predict(scores, one.name, one.one)
        entry = self._entry(scores, "a first look")
        self.quality = [entry]
        found = {one.name: one for one in entry.variants}
        sign = 1 if entry.lower_is_better else -1
        going = [one for one in paying if found[one.name].verdict != "loss beyond margin"]
        # Of equal losses the faster one, as `paying` is sorted.
        return sorted(going, key=lambda one: sign * found[one.name].difference)

    def _affordable(self, queue: list[_Contest], able: list[_Contest], most: int) -> int:
        """How many examples there is time for; 0 where there is none for a few."""
        each = self.pace.get(BASE, 0.0) or max((one.seconds for one in queue), default=0.0)
        finalists = [self.pace.get(one.name, one.seconds) for one in queue[:_FINALISTS]]
        healed = min((self.pace.get(one.name, one.seconds) for one in able), default=0.0)
        room = 0.95 * self._left
        count = min(most, self.stage.examples, int(room / max(each + sum(finalists) + healed, 1e-9)))
        return count if count >= _FEWEST and (queue or able) else 0

    def _add(self, scores: Scores, queue: list[_Contest]) -> None:
        """Score one after the other, but for those that are slower than a good one, and as far as the time goes."""
        earlier = self.quality[:1]
        done = 0
        for number, one in enumerate(queue):
            made = conclude(self._record()) if done else None
            ratio = getattr(variant_of(self.speed[-1].variants, one.name), "ratio", None) or 0.0
            if made is not None and made.best is not None and ratio <= made.best.gain:
                self.left_out[one.name] = f"not scored further: {made.best.name} is faster, and good enough"
                continue
            due = self.pace.get(one.name, one.seconds) * len(scores.read.split.examples)
            if done and due > self._left:
                self.left_out[one.name] = self._no_room("further scores")
                continue
            self.progress(f"score {one.name}", number, len(queue))
            self._predict(scores, one.name, one.one)
            self._take(scores, earlier)
            done += 1

    def _take(self, scores: Scores, earlier: list[Quality]) -> None:
        """Put the scores into the record, and of first scores those of models that have no others."""
        made = self._entry(scores)
        again = {one.name for one in made.variants}
        kept = [
            one.model_copy(update={"variants": [v for v in one.variants if v.name not in again]}) for one in earlier
        ]
        self.quality = [*(one for one in kept if one.variants), made]

    # Healing.

    def _can_heal(self, one: _Contest) -> bool:
        return bool(mechanism_parameters(one.one.model))

    def _heal(self, scores: Scores, able: list[_Contest], others: list[Example]) -> None:
        """Fit mechanisms with parameters to exact attention on other examples, the fastest one first, and score them again."""
        assert self.task is not None
        assert self.split is not None
        made = conclude(self._record())
        if made is not None and made.best is not None and not self.stage.heal:
            return
        gain = made.best.gain if made is not None and made.best is not None else 0.0
        done = set[str]()
        for one in able:
            row = variant_of(self.speed[-1].variants, one.name)
            if one.candidate.rule.mechanism in done or (row is not None and (row.ratio or 0.0) <= gain):
                continue
            each = self.pace.get(one.name, one.seconds)
            scoring = each * len(scores.read.split.examples)
            step = _BATCH * _BACKWARD * (self.pace[BASE] + each) / 2
            room = min(0.9 * (self.stage.seconds - self._elapsed) - scoring, _RESERVE * _MOST_STEPS * step)
            if len(others) < _FEWEST_TRAINED:
                self.left_out[one.name + HEALED] = f"{len(others)} examples are left to train on"
                continue
            if room < _STEPS * step:
                due = _duration(self._elapsed + (_MOST_STEPS * step + scoring) / 0.9)
                self.left_out[one.name + HEALED] = f"{self._no_room('healing')}; --time-budget {due} has"
                continue
            self.promised = self._elapsed + room + scoring
            self.announce(
                f"Nothing that is faster is good enough as converted. To heal {one.name} takes {_spoken(room + scoring)} at most."
            )
            done.add(one.candidate.rule.mechanism)
            name = one.name + HEALED
            subject = Subject(self.base.source.name, self.base.model, self.processor)
            split = Split(self.split.name, others[:_TRAINED], subset=True)
            read = prepare([subject], self.task, split, batch_size=_BATCH, truncate=self.stage.truncate)
            # The untrained one stays as it was scored.
            healed = self.composer.make(self.composer.everywhere(one.candidate))
            try:
                steps = transfer(
                    healed.model,
                    self.task,
                    read,
                    self.processor,
                    seed=self.seed,
                    seconds=room,
                    advance=lambda step, name=one.name: self.progress(f"heal {name}", step, _MOST_STEPS),
                )
            except ApproxError as error:
                # Such as that its loss is not finite, or that it is exact on inputs this short.
                self.left_out[name] = str(error)
                continue
            healed.model.eval()
            self.models[name] = healed
            self.verified |= {name} & {other + HEALED for other in self.verified}
            self.notes.append(
                f"{name}: attention transfer of {steps} steps on {len(split.examples)} other examples; its times are those of "
                f"{one.name}, as only weights differ."
            )
            self.speed = [_with_healed(row, one.name, name) for row in self.speed]
            self._predict(scores, name, healed)
            self._take(scores, self.quality[:-1])

    # The answer.

    def _record(self) -> Record:
        made = make_record(
            {BASE: self.base, **self.models},
            title=f"Recommendation for {self.base.source.name}",
            notice=" ".join(self.notes) or None,
            seed=self.seed,
            command=self.command,
            quality=self.quality,
            speed=self.speed,
        )
        checked = [one.model_copy(update={"verified": one.name in self.verified}) for one in made.variants]
        return made.model_copy(update={"variants": checked})

    def _outcome(self) -> Recommended:
        made = self._record()
        found = conclude(made)
        assert found is not None
        said = answer(made, lambda name, examples: wording.duration(self._scoring_seconds(name, examples)))
        best, share = found.best, None
        if best is not None and self.counts and (start := worthwhile_from(made.speed, best.name)) is not None:
            share = sum(length >= start for length in self.counts) / len(self.counts)
        return Recommended(
            answer=said,
            decision=found.decision,
            best=best.name if best else None,
            lengths=self.lengths,
            share=share,
            ceilings={row.length: row.believed(row.ceiling).ratio if row.ceiling else None for row in made.speed},
            tried=self._tried(made, found.advices),
            left_out=self.left_out,
            promised=self.promised,
            seconds=self._elapsed,
            command=self._next(made, found.decision, best),
            record=made,
        )

    def _scoring_seconds(self, name: str, examples: int) -> float:
        return examples * sum(self.pace.get(one, 0.0) for one in (BASE, name))

    def _tried(self, made: Record, advices: list[Advice]) -> list[Tried]:
        advised = {one.name: one for one in advices}
        rows = []
        for name, rule in self.rules.items():
            scored = {
                label: next(((task, one) for task in made.quality for one in task.variants if one.name == label), None)
                for label in (name, name + HEALED)
            }
            last = scored[name + HEALED] or scored[name]
            about = advised.get(name + HEALED, advised[name])
            needed = last[1].needed_examples if last is not None else None
            entries = {row.length: one for row in made.speed if (one := variant_of(row.variants, name)) is not None}
            rows.append(
                Tried(
                    name,
                    rule,
                    about.decision,
                    about.reason,
                    entries,
                    entries[max(entries)].share_of_ceiling,
                    scored[name],
                    scored[name + HEALED],
                    needed,
                    None if needed is None else self._scoring_seconds(name, needed),
                )
            )
        return sorted(rows, key=lambda one: -(one.speeds[max(one.speeds)].ratio or 0.0))

    def _next(self, made: Record, decision: str, best: Advice | None) -> str:
        """The command to go on with."""
        data = self._data_words()
        if best is not None:
            name = best.name.removesuffix(HEALED)
            words = self._convert(name, worthwhile_from(made.speed, best.name))
            if best.name == name:
                return _line(words)
            healing = ["approx", "finetune", "converted", "--recover", "transfer", *data, "-o", "healed"]
            return f"{_line(words)} && {_line(healing)}"
        longest = self.timed[-1]
        if decision == "stay exact" and (not self.models or not self.quality):
            lengths = ",".join(str(longest * 4**power) for power in range(3))
            return _line(["approx", "plan", self.model, "--lengths", lengths])
        if decision == "stay exact":
            budget = self.stage.margin if self.stage.margin is not None else 1
            goal = ["--budget", f"loss<={budget:g}", "--length", str(longest), "-o", "plan.yaml"]
            return _line(["approx", "search", self.model, *data, *goal])
        return self._settling()

    def _settling(self) -> str:
        """The command that would settle what is open."""
        again = ["approx", "recommend", self.model]
        if self.task is None:
            return _line([*again, "--task", "NAME", "--data", "FILE"])
        open_ = [
            (one.needed_examples, one.name)
            for task in self.quality
            for one in task.variants
            if one.verdict == "inconclusive" and one.needed_examples
        ]
        if not open_:
            return _line([*again, *self._data_words(), *self._options()])
        needed, name = min(open_)
        mechanism = self.rules[name.removesuffix(HEALED)].mechanism
        generated = isinstance(self.task, Generated) and "examples" not in self.stage.settings
        read = len(self.split.examples) if self.split is not None else 1
        if not generated and needed > self.total * self.available / read:
            # More of them would settle it, but there are no more.
            words = self._convert(name.removesuffix(HEALED), worthwhile_from(self.speed, name))
            return f"{_line(words)} && {_line(['approx', 'evaluate', 'converted', '--task', self.task_name, '--data', 'MORE'])}"
        count = int(math.ceil(needed / 100) * 100)
        seconds = (
            self._elapsed - self.scoring + _RESERVE * count * sum(self.pace.get(one, 0.0) for one in (BASE, name)) * 2
        )
        more = ["--mechanisms", mechanism, "--examples", str(count), "--time-budget", _duration(max(seconds, 60.0))]
        return _line([*again, *self._data_words(), *more])

    def _convert(self, name: str, start: int | None) -> list[str]:
        rule = self.rules[name]
        settings = [word for key, value in rule.settings.items() for word in ("--set", f"{key}={_typed(value)}")]
        causal = any(site.causal for site in self.facts.convertible)
        below = ["--exact-below", str(start)] if start and start > self.timed[0] and not causal else []
        return ["approx", "convert", self.model, "-m", rule.mechanism, *settings, *below, "-o", "converted"]

    def _data_words(self) -> list[str]:
        """The options that name the task and its data, as they were given."""
        if self.task is None:
            return []
        words = ["--task", self.task_name]
        given = dict(self.stage.settings)
        columns = given.pop("columns", None)
        words += ["--data", self.stage.data] if self.stage.data else []
        words += ["--columns", ",".join(f"{key}={value}" for key, value in columns.items())] if columns else []
        words += [word for key, value in given.items() for word in ("--set", f"{key}={_typed(value)}")]
        words += ["--split", self.stage.split] if self.stage.split else []
        return words + ["--truncate"] * self.stage.truncate

    def _options(self) -> list[str]:
        stage = self.stage
        words = ["--lengths", ",".join(map(str, stage.lengths))] if stage.lengths else []
        words += ["--mechanisms", ",".join(stage.mechanisms)] if stage.mechanisms else []
        default = type(stage).model_fields["time_budget"].default
        return words if stage.time_budget == default else [*words, "--time-budget", stage.time_budget]


def _with_healed(row: Speed, name: str, healed: str) -> Speed:
    """A row in which the healed model has the times of the model before healing."""
    entry = variant_of(row.variants, name)
    if entry is None:
        return row
    return row.model_copy(update={"variants": [*row.variants, entry.model_copy(update={"name": healed})]})


def _race_seconds(times: Sequence[float], exact: float) -> float:
    """Roughly the seconds of a race: the choice of the best exact attention, warm-up, memory, choices of kernels, and rounds.

    Args:
        times: Seconds of a call of each contender.
        exact: Those of exact attention, which also runs by its default and without attention.
    """
    block = BLOCK_MS / 1e3
    everyone = [exact, exact, exact, *times]
    warm = sum(one + max(min(8 * one, 1.0), one) + 4 * one for one in everyone)
    rounds = 2 * _ROUNDS * sum(max(one, block) for one in [exact, *everyone])
    return 20 * max(exact, block) + warm + max(rounds, _SECONDS)


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _spoken(seconds: float) -> str:
    """A time in words, rounded up."""
    return f"about {math.ceil(seconds / 5) * 5} s" if seconds < 90 else f"about {math.ceil(seconds / 60)} min"


def _duration(seconds: float) -> str:
    """A time as an option takes it, rounded up."""
    return f"{math.ceil(seconds / 5) * 5}s" if seconds < 90 else f"{math.ceil(seconds / 60)}m"


def _typed(value: Any) -> str:
    """A setting as it is typed."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _line(words: Sequence[str]) -> str:
    return shlex.join(words)
