"""Search the best mix of mechanisms within a budget, fit those that need it, and prove the mix on unseen examples."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median_low
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from scipy import stats
from torch import Tensor

from approx.checkpoints.checkpoint import Checkpoint
from approx.checkpoints.history import LayerDivergence
from approx.conversion import verify
from approx.conversion.stock import Mix, mixes
from approx.errors import ApproxError, Exit, shown
from approx.evaluation.evaluate import default_folder, fingerprint, predict
from approx.evaluation.inputs import Coverage, Prepared, coverage
from approx.evaluation.options import BASE
from approx.evaluation.quality import compare, label_order
from approx.evaluation.record import FOUND, Quality, Speed, Tokens
from approx.evaluation.statistics import Stake, score_interval
from approx.finetuning.divergence import of_layers
from approx.finetuning.finetune import Preparation, finetune, measure_of
from approx.finetuning.options import FinetuneStage
from approx.finetuning.trainer import Measure, Phase, TrainingData, Transfer, mechanism_parameters, train
from approx.measuring.measure import identity, subject_of
from approx.planning import positions
from approx.planning.anatomy import Anatomy, anatomy
from approx.planning.plan import Plan
from approx.progress import Progress
from approx.searching import cost
from approx.searching.cost import (
    Candidate,
    Choice,
    Choices,
    Composer,
    Costs,
    Exchange,
    Front,
    Judge,
    Measured,
    candidates,
    front,
    race,
)
from approx.searching.options import SearchStage, check, read_latency, read_speed
from approx.searching.outcome import LayerReason, Proof, Searched, reasons
from approx.tasks.metrics import METRICS
from approx.tasks.task import Task
from approx.validation import first_mistake
from approx_kernels.runtime.atomic_file import atomic_file, write_whole

_ROUNDS = 12


@dataclass(frozen=True)
class Proven:
    """Models on the proof.

    Attributes:
        proofs: Label -> loss and speed.
        quality: Their scores; None for text.
        speed: Their times.
        divergences: Label -> divergence, for text.
        verified: Label -> whether its conversion passes the checks that need no folder.
    """

    proofs: dict[str, Proof]
    quality: Quality | None
    speed: Speed
    divergences: dict[str, float]
    verified: dict[str, bool]

    def fill(self, outcome: Searched, models: Mapping[str, Checkpoint], chosen: str | None) -> Searched:
        """Put everything into an outcome; the chosen plan is called `found`."""
        names = {name: FOUND if name == chosen else name for name in self.proofs}
        order = sorted(names, key=lambda name: name != chosen)

        def renamed(rows: Any) -> list[Any]:
            known = {row.name: row for row in rows}
            return [known[name].model_copy(update={"name": names[name]}) for name in order]

        if self.quality is not None:
            outcome.quality = self.quality.model_copy(update={"variants": renamed(self.quality.variants)})
        outcome.speed = self.speed.model_copy(update={"variants": renamed(self.speed.variants)})
        outcome.divergences = {names[name]: value for name, value in self.divergences.items()}
        outcome.models = {names[name]: models[name] for name in order}
        outcome.verified = {names[name]: self.verified[name] for name in order}
        if self.speed.crowded:
            outcome.notes.append(
                "Other programs used the machine while the plans were timed. Search again on an idle one."
            )
        return outcome


def prove(
    judge: Judge, models: Mapping[str, Checkpoint], plans: Mapping[str, Plan], seed: int, progress: Progress
) -> Proven:
    """Measure models on the examples that the search did not see, and their times in one race.

    Args:
        judge: The examples, and the base.
        models: Label -> model.
        plans: Label -> its plan.
        seed: Seed of the bootstrap.
        progress: Called with what happens, done and total.
    """
    bound = None if judge.stage.allowed is None else judge.stage.allowed[1]
    scores = None
    if judge.task is not None:
        # Here the margin is the budget.
        scores = quality(judge, models, bound, seed, progress)
    row = race(
        {BASE: judge.base, **models},
        judge.stage,
        seed=seed,
        rounds=_ROUNDS,
        progress=lambda _, done, total: progress("time the plans", done, total),
    )
    times = {one.name: one for one in row.variants}
    proofs, divergences, verified = {}, {}, {}
    for number, (name, one) in enumerate(models.items()):
        progress("check the plans", number, len(models))
        if scores is not None:
            loss, interval, verdict = loss_in_points(scores, name)
            count = scores.examples
        else:
            loss, interval = divergence_interval(judge, one.model, seed)
            verdict, count = _within(interval, bound), judge.proof.inputs
            divergences[name] = loss
        proofs[name] = Proof.of(loss, interval, verdict, count, times.get(name))
        verified[name] = verified_in_memory(judge.base.model, plans[name], one.model)
    return Proven(proofs, scores, row, divergences, verified)


def verified_in_memory(base: Any, plan: Plan, model: Any) -> bool:
    """Whether a conversion passes the checks that need no folder."""
    done = (verify.exact_limit(base, plan), verify.padding(model), verify.causality(model))
    return all(check.passed is not False for check in done)


def _within(interval: tuple[float, float] | None, bound: float | None) -> str:
    if bound is None:
        return "no budget"
    if interval is None or interval[0] <= bound < interval[1]:
        return "inconclusive"
    return "within the budget" if interval[1] <= bound else "beyond the budget"


@dataclass
class Scores:
    """Predictions of a base, and of models compared with it, on the same examples.

    Args:
        base: The exact checkpoint.
        processor: Its tokenizer or feature extractor.
        task: The task.
        read: The examples, as the model reads them.
        ledgers: Folder of stored outputs; None stores none.

    Attributes:
        predictions: Label -> a prediction for each example, the base's first.
    """

    base: Checkpoint
    processor: Any
    task: Task
    read: Prepared
    ledgers: Path | None = None

    def __post_init__(self) -> None:
        self.predictions: dict[str, list[Any]] = {}
        self._covered: dict[str, Coverage] = {}

    def add(self, label: str, one: Checkpoint) -> None:
        """Predict with a model; the base comes first."""
        subject = subject_of(label, one, self.processor)
        self.predictions[label] = predict(
            subject, self.task, self.read, device=subject.model.device, ledgers=self.ledgers, halve=True
        )
        if (reach := coverage(subject, self.task, self.read)) is not None:
            self._covered[label] = reach

    def entry(self, margin: float | None, *, seed: int, settings: dict[str, Any], notes: Sequence[str] = ()) -> Quality:
        """The scores, each model compared with the base.

        Args:
            margin: Acceptable loss, as in `EvaluateOptions`.
            seed: Seed of the bootstrap.
            settings: Of the task, as they were chosen.
            notes: About the examples.
        """
        task, read, base = self.task, self.read, self.predictions[BASE]
        metric, labels = METRICS[task.metrics[0]], [example.label for example in read.split.examples]
        compared = compare(
            task,
            read.split.examples,
            read.lengths,
            self.predictions,
            seed=seed,
            covered=self._covered,
            margin=metric.acceptable(margin, metric.value(base, labels)),
        )
        return Quality(
            task=task.name,
            split=read.split.name,
            examples=len(labels),
            subset=True,
            truncated=read.truncated,
            measures=task.measures,
            notes=[*notes, *label_order(task, base, labels, self.base.model.config)],
            settings=settings,
            tokens=Tokens(median=median_low(read.lengths), longest=max(read.lengths), windows=read.windows),
            outputs=None,
            **vars(compared),
        )


def quality(
    judge: Judge, models: Mapping[str, Checkpoint], margin: float | None, seed: int, progress: Progress
) -> Quality:
    """Score the base and models on the proof; outputs are stored, so that an interrupted search continues.

    Args:
        judge: Of a task.
        models: Label -> model.
        margin: Acceptable loss, as in `EvaluateOptions`.
        seed: Seed of the bootstrap.
        progress: Called with what happens, done and total.
    """
    scores = Scores(judge.base, judge.processor, *judge.of_task(judge.proof), ledgers=default_folder())
    subjects = {BASE: judge.base, **models}
    for number, (label, one) in enumerate(subjects.items()):
        progress("prove", number, len(subjects))
        scores.add(label, one)
    progress("prove", len(subjects), len(subjects))
    notes = ["examples that the search did not see"]
    return scores.entry(margin, seed=seed, settings=judge.stage.settings, notes=notes)


def loss_in_points(entry: Quality, name: str) -> tuple[float, tuple[float, float] | None, str]:
    """The loss of a variant in points, or percent of the base's score, with its interval and verdict."""
    variant = next(one for one in entry.variants if one.name == name)
    metric = METRICS[entry.metric]
    point = max(metric.acceptable(1.0, entry.base.scores[entry.metric]), 1e-12)
    sign = 1 if entry.lower_is_better else -1
    loss = sign * variant.difference / point
    interval = None
    if variant.interval is not None:
        low, high = sorted(sign * end / point for end in variant.interval)
        interval = (low, high)
    return loss, interval, variant.verdict


def divergence_interval(judge: Judge, model: Any, seed: int) -> tuple[float, tuple[float, float] | None]:
    """The mean divergence on the proof, and its interval over inputs, which are rows of a text.

    There is no interval for a single row, nor where no row changes: then nothing is known of other rows.
    """
    apart = judge.divergences(model, judge.proof)
    mean = float(apart.mean())
    if not apart.any():
        return mean, None
    # Divergences have no upper bound: an unseen row may be as bad as the worst one, or not change at all.
    stake = Stake(mean, float(apart.max()))
    return mean, score_interval(
        lambda rows: float(apart[rows].mean()), len(apart), seed=seed, stake=stake, bounds=(0.0, math.inf)
    )


_STEPS, _BATCH, _RATE = 100, 8, 1e-2
_HELD_OUT = 0.1

Advance = Callable[[int, int], None]


def fit(
    composer: Composer, judge: Judge, running: dict[str, Any], file: Path, about: str, seed: int, advance: Advance
) -> None:
    """Fit the mechanisms of uniform models in place, and store their state for every mix.

    Args:
        composer: Makes the mixes; gets the state.
        judge: Its examples for comparing plans are what the mechanisms are fitted on.
        running: Name of a candidate -> a model with it at every site.
        file: Stores the state; read instead of fitting if it exists.
        about: Hash of everything that the state depends on.
        seed: Seed of the order of examples.
        advance: Called with steps done and in all.

    Raises:
        ApproxError: if the file is damaged, or its state was fitted for something else.
    """
    fitted = {name: model for name, model in running.items() if mechanism_parameters(model)}
    stored = _read(file, about) if file.is_file() else {}
    for number, (name, model) in enumerate(fitted.items()):
        sites = {site.layer: model.base_model.get_submodule(site.path) for site in composer.anatomy.sites}
        mechanisms = {layer: one.mechanism for layer, one in sites.items() if hasattr(one, "mechanism")}
        if not stored:
            trainable = {parameter: parameter.requires_grad for parameter in model.parameters()}
            _train(model, judge, seed, lambda done, start=number: advance(start * _STEPS + done, len(fitted) * _STEPS))
            for parameter, before in trainable.items():
                parameter.requires_grad_(before)
            model.eval()
        for layer, mechanism in mechanisms.items():
            prefix = f"{name}/{layer}/"
            if stored:
                state = {key.removeprefix(prefix): value for key, value in stored.items() if key.startswith(prefix)}
                try:
                    mechanism.load_state_dict(state)
                except RuntimeError as error:
                    raise _damaged(file, error) from None
            composer.fitted[layer, name] = {
                key: value.detach().clone() for key, value in mechanism.state_dict().items()
            }
    if fitted and not stored:
        state = {
            f"{name}/{layer}/{key}": value
            for (layer, name), values in composer.fitted.items()
            for key, value in values.items()
        }
        with atomic_file(file) as temporary:
            save_file(state, temporary, {"about": about})


def _read(file: Path, about: str) -> dict[str, Tensor]:
    try:
        with safe_open(file, "pt") as opened:
            known = (opened.metadata() or {}).get("about")
        state = load_file(file)
    except (OSError, SafetensorError) as error:
        raise _damaged(file, error) from None
    if known != about:
        raise ApproxError(
            f"{file} was fitted for another model, other candidates or other examples. Delete it, and the mechanisms "
            "are fitted again, or start over with --force.",
            Exit.REFUSED,
        )
    return state


def _damaged(file: Path, error: Exception) -> ApproxError:
    return ApproxError(
        f"{file} is damaged: {' '.join(str(error).split())[:200]}. Delete it, and the mechanisms are fitted again, or "
        "start over with --force.",
        Exit.UNAVAILABLE,
    )


def _train(model: Any, judge: Judge, seed: int, advance: Callable[[int], None]) -> None:
    if judge.task is not None:
        transfer(model, *judge.of_task(judge.search), judge.processor, seed=seed, advance=advance)
        return
    with TemporaryDirectory() as place:
        folder = Path(place)
        # The rest of the text proves the plan.
        rows = [batch.inputs["input_ids"][0].tolist() for batch in judge.search.batches]
        searched = judge.processor.decode([*chain.from_iterable(rows)], skip_special_tokens=True)
        text = folder / "text.txt"
        text.write_text(searched, encoding="utf-8")
        options = FinetuneStage(
            recover=["transfer"],
            text=[str(text)],
            length=max(len(rows[0]), 8),
            steps=_STEPS,
            batch_size=_BATCH,
            seed=seed,
        )
        finetune(
            model,
            judge.processor,
            options,
            folder=folder / "training",
            # The scores before and after are not reported as steps.
            progress=lambda what, done, total: advance(done) if what.startswith("transfer") else None,
        )


def transfer(
    model: Any,
    task: Task,
    read: Prepared,
    processor: Any,
    *,
    seed: int,
    advance: Callable[[int], None],
    seconds: float = math.inf,
) -> int:
    """Fit the mechanisms of a model to exact attention in place, on the examples of a task; the last tenth chooses the best step.

    Args:
        model: The model.
        task: The task.
        read: Its examples, as the model reads them.
        processor: Tokenizer or feature extractor.
        seed: Seed of the order of examples.
        advance: Called with steps done.
        seconds: Time of the training.

    Returns:
        The number of steps that it took.
    """
    data = _training_data(model, task, read, processor)
    phase = Phase(
        mode="transfer",
        objective=Transfer(model, joint=False, match="outputs"),
        trained=mechanism_parameters(model),
        steps=_STEPS,
        batch_size=_BATCH,
        learning_rate=_RATE,
        mechanism_learning_rate=_RATE,
        seconds=seconds,
        evaluate_every=_STEPS // 4 if seconds == math.inf else None,
        warm_up=0.06,
        weight_decay=0.0,
        seed=seed,
    )
    sample = {name: value.to(model.device) for name, value in data.batch([0], 0).items()}
    measure = measure_of(phase, Preparation(data, [phase], set(), Measure("loss", True, None), sample), model)
    with TemporaryDirectory() as folder:
        outcome = train(
            model,
            phase,
            data,
            measure,
            Path(folder),
            resume=False,
            progress=lambda what, done, total: advance(done),
        )
    return outcome.steps


def _training_data(model: Any, task: Task, read: Prepared, processor: Any) -> TrainingData:
    examples = read.split.examples
    count = max(1, round(len(examples) * _HELD_OUT))
    trained = replace(read.split, examples=examples[:-count])
    windows: dict[int, int] = {}
    rows, encodings = [], []
    for owner, encoding in zip(read.owners, read.encodings, strict=True):
        window = windows[owner] = windows.get(owner, -1) + 1
        if owner < len(examples) - count:
            rows.append((owner, window))
            encodings.append(encoding)
    held_out = replace(read.split, examples=examples[-count:])
    return TrainingData(
        task=task,
        split=trained,
        held_out=held_out,
        rows=rows,
        encodings=encodings,
        labelled=False,
        limit=None,
        processor=processor,
        config=model.config,
    )


Floats = NDArray[np.float64]

# A prediction is uncertain by its own size and a share of the mean one; sums over sites miss this share of what is
# measured.
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
    return [_choices_of_row(plans.choices, row) for row in sorted({round(share * last) for share in _ANCHORS})]


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
    """The plan to measure next: the fastest believed to be within the bound, or the safest of the faster ones.

    Args:
        believed: Times and what is believed of the damages.
        measured: The plans that are known.
        faster_than: The time to beat.
        bound: The divergence at which the loss is just allowed.
    """
    plans = front(believed.times, believed.damages)
    rows = [_choices_of_row(plans.choices, row) for row in range(len(plans.times))]
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
    return _choices_of_row(plans.choices, np.flatnonzero(plans.times <= longest)[-1])


def _choices_of_row(choices: NDArray[np.int16], row: int | np.intp) -> Choices:
    return tuple(int(choice) for choice in choices[row])


# Plans to measure after the first ones.
MOST = 30


class _MeasuredFile(BaseModel):
    """The file of measured plans, each with its divergence, loss and standard error; earlier versions had no hash."""

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
        file: Stores the measurements.
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
            [one.name for one in choices],
            [one.heads for one in choices],
            [-float(space.times[site, column]) for site, column in enumerate(plan)],
            [float(space.damages[site, column]) for site, column in enumerate(plan)],
            [self._refused(site, space.damage(plan)) for site in range(len(plan))],
        )

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
            ApproxError: if the file belongs to another search.
        """
        if not self._file.is_file():
            return
        try:
            stored = _MeasuredFile.model_validate_json(self._file.read_bytes())
        except ValidationError as error:
            raise self._damaged(first_mistake(error)) from None
        if stored.about != self._about:
            raise ApproxError(
                f"{self._file.parent} holds a search of another model, other candidates or other examples. Choose "
                "another output, or start over with --force.",
                Exit.REFUSED,
            )
        if stored.sha256 not in (None, fingerprint(stored.plans)):
            raise self._damaged("its plans are not those that were measured")
        sites, last = len(self.composer.anatomy.sites), len(self.candidates)
        if wrong := next(
            (plan for plan, _ in stored.plans if len(plan) != sites or not all(0 <= n <= last for n in plan)), None
        ):
            raise self._damaged(f"there is no plan {shown(wrong)}")
        self.measured = {plan: Measured(*values) for plan, values in stored.plans}
        self.divergences = {plan: one.divergence for plan, one in self.measured.items()}

    def _damaged(self, reason: str) -> ApproxError:
        return ApproxError(
            f"{self._file} is damaged: {reason}. Delete it, and its plans are measured again, or start over with "
            "--force.",
            Exit.UNAVAILABLE,
        )

    def _keep(self) -> None:
        plans = [(plan, (one.divergence, one.loss, one.error)) for plan, one in self.measured.items()]
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._file, json.dumps({"about": self._about, "plans": plans, "sha256": fingerprint(plans)}))


SENSITIVITIES, MEASURED, FITTED = "sensitivities.json", "measured.json", "fitted.safetensors"
# The share of a time budget after which the proof begins.
_BEFORE_PROOF = 0.6
# Predicted times are this much too optimistic at most.
_RESERVE = 0.02
_HEALED = (
    "The figures are after attention transfer. Convert by the plan, then fit it: approx finetune converted --recover "
    "transfer."
)
# Finalists lose at most these shares of the budget by estimate.
_SAFER = (0.5, 0.25)


class Search:
    """One search.

    Args:
        base: The exact checkpoint.
        stage: Its options.
        folder: Stores sensitivities and measurements.
        resume: Whether to use what the folder holds already.
        seed: Seed of everything random.
        progress: Called with what happens, done and total.
    """

    def __init__(
        self, base: Checkpoint, stage: SearchStage, folder: Path, *, resume: bool, seed: int, progress: Progress
    ) -> None:
        check(stage)
        self.stage, self.folder, self.seed, self.progress = stage, folder, seed, progress
        self.begun = time.monotonic()
        # Of one plan that was tried.
        self.trial_seconds = 0.0
        self.facts = facts_of(base, stage)
        self.candidates = candidates(stage, self.facts)
        # Those that one model may mix, with a stock architecture; None for all.
        self.mixes: list[Mix] | None = None
        if stage.stock:
            self.candidates, self.mixes = _expressible(base, self.candidates)
        progress("read the data", 0, 1)
        self.judge = Judge(base, stage, seed)
        self.composer = Composer(base, self.facts)
        self.about = fingerprint(
            identity(base),
            [(one.name, one.rule.to_dict()) for one in self.candidates],
            stage.task,
            stage.settings,
            self.judge.examples_sha256,
            stage.heal,
            seed,
            *(["stock"] if stage.stock else []),
        )
        self.trials = Trials(self.judge, self.composer, self.candidates, folder / MEASURED, self.about, progress)
        self.known: cost.Damages | None = None
        if resume:
            self.trials.remember()

    def know(self, sensitivities: Path) -> None:
        """Use the sensitivities of an earlier search.

        Raises:
            ApproxError: if they are of another model, other candidates or other examples.
        """
        self.known = cost.load(sensitivities, self.about)

    def run(self) -> Searched:
        """Search; after Ctrl-C the outcome is the best plan so far.

        Raises:
            ApproxError: if nothing can reach the speed (exit code 7).
        """
        costs = cost.measure_costs(
            self.composer,
            self.candidates,
            self.stage,
            seed=self.seed,
            progress=lambda _, done, total: self.progress("time the candidates", done, total),
        )
        longest = self._longest(costs)
        self.trials.costs = costs
        self.trials.space = space = Space(costs.saved, self.damages())
        spaces = [
            Space(times, space.damages)
            for times in self._mixed(space.times)
            if longest is None or times.min(1).sum() <= longest + 1e-9
        ]
        plans = _fitting(_joined([front(one.times, one.damages) for one in spaces]), longest)
        try:
            first = (plan for one in spaces for plan in anchors(one, np.inf if longest is None else longest))
            self.trials.anchor(list(dict.fromkeys(first)))
            return self._proven(plans, self._best(spaces, longest))
        except KeyboardInterrupt:
            if not self.trials.measured:
                raise
            return self._outcome(self.trials.best_so_far(), None, interrupted=True)

    def damages(self) -> NDArray[np.float64]:
        """Predicted damage of each candidate at each site, [sites, candidates]; the last changes nothing."""
        file = self.folder / SENSITIVITIES
        if self.known is None and file.is_file():
            self.know(file)
        running: dict[str, Any] = {}
        if self.stage.heal or self.known is None:
            whole = [one for one in self.candidates if one.heads is None]
            running = {one.name: self.composer.make(self.composer.everywhere(one)).model for one in whole}
        if self.stage.heal:
            fit(
                self.composer,
                self.judge,
                running,
                self.folder / FITTED,
                self.about,
                self.seed,
                lambda done, total: self.progress("fit the mechanisms", done, total),
            )
        found = self.known or cost.measure_damage(
            self.judge.base.model,
            self.facts,
            running,
            self.judge.calibration.batches,
            self.seed,
            lambda done, total: self.progress("measure the sensitivities", done, total),
        )
        cost.save(file, self.about, found)
        table = np.full((len(self.facts.sites), len(self.candidates) + 1), np.inf)
        table[:, -1] = 0.0
        for column, one in enumerate(self.candidates):
            for site, products in enumerate(found[one.whole]):
                if products is not None and one.on(self.facts.sites[site]):
                    table[site, column], heads = cost.of_heads(products, one.heads)
                    if one.heads is not None:
                        self.trials.heads[site, column] = heads
        return table

    def _longest(self, costs: cost.Costs) -> float | None:
        """The time that a plan may add to the base, by the speed to reach; None without one."""
        if self.stage.speed is None and self.stage.latency is None:
            return None
        if self.stage.latency is not None:
            wanted, goal = read_latency(self.stage.latency), f"a latency of {self.stage.latency}"
            if wanted >= costs.exact:
                raise ApproxError(
                    f"Exact attention takes {costs.exact:.3g} ms at {self.stage.length} tokens, within "
                    f"{self.stage.latency} already. Ask for less, or keep it.",
                    Exit.REFUSED,
                )
        else:
            wanted, goal = costs.exact / read_speed(self.stage.speed or ""), f"a speed of {self.stage.speed}"
        fastest = costs.unchanged + min(float(times.min(1).sum()) for times in self._mixed(costs.saved))
        for reached, what in (
            (costs.ceiling, "even without any attention"),
            (fastest, "the fastest mix of the candidates"),
        ):
            if wanted < reached:
                raise ApproxError(
                    f"Infeasible: the goal is {goal} at {self.stage.length} tokens, but {what} is "
                    f"{costs.speed(reached):.2f}× ({reached:.3g} ms; exact attention takes {costs.exact:.3g} ms). Ask "
                    "for less, or for longer inputs.",
                    Exit.THRESHOLD,
                )
        return max(wanted * (1 - _RESERVE), fastest) - costs.unchanged

    def _mixed(self, times: Floats) -> list[Floats]:
        """The times of candidates, [sites, candidates], once for each mix, infinite for what does not belong to it."""
        if self.mixes is None:
            return [times]
        found = []
        for mix in self.mixes:
            open_ = np.isin(np.arange(times.shape[1]), mix.rules)
            some = np.where(open_, times, np.inf)
            # Layers that no candidate can convert stay as they are in any mix.
            stays = mix.exact | ~np.isfinite(some).any(1)
            some[:, -1] = np.where(stays, times[:, -1], np.inf)
            found.append(some)
        return found

    def _best(self, spaces: Sequence[Space], longest: float | None) -> Choices | None:
        """The best plan of all spaces, which share the trials and the time among them."""
        trials, found = self.trials, []
        begun, known = self._elapsed(), len(trials.measured)
        until = None if self.stage.seconds is None else _BEFORE_PROOF * self.stage.seconds
        for number, space in enumerate(spaces, 1):
            limit = len(trials.measured) + math.ceil(MOST / len(spaces))
            end = np.inf if until is None else begun + (until - begun) * number / len(spaces)

            def more(limit: int = limit, end: float = end) -> bool:
                return self._elapsed() <= end and len(trials.measured) < limit

            about = (space, trials.divergence)
            if self.stage.allowed is None:
                assert longest is not None
                found.append(least_damage(*about, longest, trials.divergences, more))
            else:
                found.append(fastest_within(*about, trials.loss, self.stage.allowed[1], trials.divergences, more))
        self.trial_seconds = (self._elapsed() - begun) / max(len(trials.measured) - known, 1)
        better = trials.divergence if self.stage.allowed is None else trials.space.time
        return min((plan for plan in found if plan is not None), key=better, default=None)

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
        others = {name: plan for name, plan in self._compared_plans(plans).items() if plan not in labels.values()}
        compared = list(others)[: self._room(len(finalists))]
        labels |= {name: others[name] for name in compared}
        rules = {name: self.composer.plan(self.trials.choices(plan)) for name, plan in labels.items()}
        changed = {name: one for name, one in rules.items() if one is not None}
        models = {name: self.composer.make(self.trials.choices(labels[name])) for name in changed}
        proven = prove(self.judge, models, changed, self.seed, self.progress)
        named = [name for name in models if name.startswith("finalist")]
        meeting = [name for name in named if self._meets(proven.proofs[name])]
        chosen = max(meeting, key=lambda name: proven.proofs[name].speed or 0.0, default=None)
        feasible, reported = chosen is not None, chosen
        if chosen is None and named:
            reported = min(named, key=lambda name: proven.proofs[name].loss)
        outcome = self._outcome(
            labels[reported] if reported else None, proven.proofs[reported] if reported else None, feasible=feasible
        )
        if reported is not None:
            alone = {one.layer: one.divergence for one in self._alone(models[reported].model)}
            outcome.layers = [replace(one, divergence=alone.get(one.layer)) for one in outcome.layers]
        outcome.notes += self._better(proven.proofs, reported)
        if left_out := list(others)[len(compared) :]:
            outcome.notes.append(
                f"The time budget of {self.stage.time_budget} had no room to measure {', '.join(left_out)} for comparison."
            )
        return proven.fill(outcome, models, reported)

    def _alone(self, model: Any) -> list[LayerDivergence]:
        """What each converted layer alone moves the outputs by, on the examples that predict the damage."""
        batches = [batch.inputs for batch in self.judge.calibration.batches]
        return of_layers(model, batches, advance=partial(self.progress, "compare the layers"))

    def _room(self, finalists: int) -> int | None:
        """How many plans the time budget leaves room to compare with the finalists on the proof; None for all."""
        if self.stage.seconds is None:
            return None
        # A plan takes as long as in the trials, for each example; the base is measured too.
        each = self.trial_seconds * self.judge.proof.inputs / self.judge.search.inputs
        left = self.stage.seconds - self._elapsed() - (finalists + 1) * each
        return max(int(left / each), 0) if each > 0 else None

    def _better(self, proofs: Mapping[str, Proof], chosen: str | None) -> list[str]:
        """A note if a uniform plan turned out faster than the chosen one, and within the budget.

        A search takes every change of the outputs for damage, so it misses mechanisms that improve a model.
        """
        speed = (proofs[chosen].speed if chosen is not None else None) or 0.0
        names = [one.name for one in self.candidates if one.name in proofs and self._meets(proofs[one.name])]
        best = max(names, key=lambda name: proofs[name].speed or 0.0, default=None)
        if best is None or (proofs[best].speed or 0.0) <= speed:
            return []
        figures = proofs[best].phrase(self.judge.unit)
        return [
            f"{best} in every layer met the goal and was faster: {figures}. It is the best of {len(self.candidates)} "
            "uniform plans on these examples, so evaluate it on others."
        ]

    def _compared_plans(self, plans: Front) -> dict[str, Choices]:
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
            named[f"front {number + 1}"] = _choices_of_plan(plans, int(np.abs(damages - wanted).argmin()))
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
        goal = " and ".join(text for text in (self.stage.budget, self.stage.speed, self.stage.latency) if text)
        return Searched(
            plan=None if plan is None else self.composer.plan(trials.choices(plan)),
            feasible=feasible,
            interrupted=interrupted,
            goal=f"{goal} at {self.stage.length} tokens",
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
            f"Length {stage.length} is too long: {base.source.name} takes {limit} positions. Use a shorter --length, "
            "or extend the checkpoint first."
        )
    return anatomy(base.model.config, type(base.model))


def _expressible(base: Checkpoint, every: Sequence[Candidate]) -> tuple[list[Candidate], list[Mix]]:
    """The candidates that a stock architecture expresses, and which of them by number one model may mix.

    Raises:
        ApproxError: if there are none.
    """
    found = mixes(base.model.config, type(base.model), [one.rule for one in every])
    kept = sorted({rule for mix in found for rule in mix.rules})
    return [every[rule] for rule in kept], [replace(mix, rules=tuple(map(kept.index, mix.rules))) for mix in found]


def _joined(fronts: Sequence[Front]) -> Front:
    """The plans of several fronts that none of another one beats."""
    times, damages, choices = (np.concatenate(parts) for parts in zip(*fronts, strict=True))
    order = np.lexsort((damages, times))
    least = np.minimum.accumulate(damages[order])
    rows = order[np.concatenate(([True], least[1:] < least[:-1]))]
    return Front(times[rows], damages[rows], choices[rows])


def _choices_of_plan(plans: Front, row: int) -> Choices:
    return tuple(int(choice) for choice in plans.choices[row])


def _fitting(plans: Front, longest: float | None) -> Front:
    """The plans of a front that are fast enough, at most one in a thousandth of the range of times."""
    fast = np.ones(len(plans.times), bool) if longest is None else plans.times <= longest + 1e-9
    cells = np.round(plans.times / max(np.ptp(plans.times), 1e-12) * 1000)
    # The last fast plan of a cell has the least damage.
    last = np.concatenate((cells[1:] != cells[:-1], [True]))
    last[np.flatnonzero(fast)[-1:]] = True
    chosen = fast & last
    return Front(plans.times[chosen], plans.damages[chosen], plans.choices[chosen])
