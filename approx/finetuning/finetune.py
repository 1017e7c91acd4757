"""Train a loaded model, mode after mode, and say what its score was before and after."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from approx.checkpoints import families
from approx.conversion import surgery
from approx.conversion.calibration import mechanisms
from approx.errors import ApproxError, Exit
from approx.evaluation import distributed
from approx.evaluation.evaluate import Subject, predict, prepare
from approx.finetuning import data, parameters
from approx.finetuning.objectives import Distill, Objective, Supervised, Transfer, exactly
from approx.finetuning.options import FinetuneStage, allowed_loss
from approx.finetuning.trainer import Measure, Outcome, Phase, Progress, train
from approx.tasks.metrics import METRICS
from approx_kernels.runtime.atomic_file import write_whole

# Inputs of a step, learning rate, and the share of a time budget, by mode.
_DEFAULTS = {
    "transfer": (16, 1e-2, 1.0),
    "distill": (32, 1e-4, 3.0),
    "task": (32, 5e-5, 3.0),
    "clm": (16, 2e-4, 3.0),
    "mlm": (16, 1e-4, 3.0),
}
# Adapters learn well at rates that would destroy whole matrices, and parameters of mechanisms do too.
_ADAPTERS_FASTER = _OWN_FASTER = 10.0
_FEWEST_STEPS, _MOST_STEPS, _VALIDATIONS = 200, 2000, 10
# Spans are counted in tokens: the weight at which a span of a thousand tokens in each of a hundred heads costs a tenth of a nat.
_SPAN_PENALTY = 1e-6


@dataclass
class Healing:
    """What training did.

    Attributes:
        recover: The modes.
        phases: What each did.
        measure: Name of what was measured on the held-out examples: a metric, or `loss`.
        exact: Its value for the same weights with exact attention, before training; None for a model that is exact.
        before: Its value before the first step.
        after: Its value afterwards.
        held_out: How many examples that was.
        examples: How many were trained on.
        data_sha256: Of both.
        options: As they were given.
    """

    recover: list[str]
    phases: list[Outcome]
    measure: str
    exact: float | None
    before: float
    after: float
    held_out: int
    examples: int
    data_sha256: str
    options: dict[str, Any]

    @property
    def steps(self) -> int:
        """Steps of all modes."""
        return sum(phase.steps for phase in self.phases)

    def to_data(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


@dataclass
class Preparation:
    """Everything that is decided before the first step.

    Attributes:
        data: The examples.
        phases: The modes, without `lora`.
        adapted: Modes that train adapters.
        measure: Of the held-out examples.
    """

    data: data.TrainingData
    phases: list[Phase]
    adapted: set[str]
    measure: Measure


def prepare_training(model: Any, processor: Any, options: FinetuneStage, teacher: Any = None) -> Preparation:
    """Read the data and decide what each mode does; nothing is trained.

    Args:
        model: A transformers model, converted or not.
        processor: Its tokenizer or feature extractor.
        options: What was asked for.
        teacher: The exact model for `distill`; without it a copy of the model with exact attention.

    Raises:
        ApproxError: if a mode cannot be used, or the data do not fit.
    """
    text = options.text is not None
    causal = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    modes: list[str] = list(options.recover or parameters.default_modes(model, text=text, causal=causal))
    parameters.check_modes(modes, model, text=text, projections=options.projections)
    language = next((mode for mode in modes if mode in ("clm", "mlm")), None)
    supervised = {"task", "clm", "mlm"} & set(modes) or ("distill" in modes and options.distill.labels > 0)
    read = data.read(options, model, processor, labelled=bool(supervised), language=language)
    sample = data.tensors_to(model.device, read.batch([0], 0), model.dtype)
    measure = _measure(model, read, options, labelled=bool(supervised))
    phases: list[Phase] = []
    adapted: set[str] = set()
    chosen = [mode for mode in modes if mode != "lora"]
    shares = {mode: _DEFAULTS[mode][2] for mode in chosen}
    for mode in chosen:
        if "lora" in modes[: modes.index(mode)]:
            adapted.add(mode)
        phases.append(
            _phase(model, mode, options, read, sample, teacher, shares[mode] / sum(shares.values()), mode in adapted)
        )
    return Preparation(read, phases, adapted, measure)


def finetune(
    model: Any,
    processor: Any,
    options: FinetuneStage,
    *,
    folder: Path,
    teacher: Any = None,
    resume: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> Healing:
    """Train a model in place.

    Args:
        model: A transformers model, converted or not.
        processor: Its tokenizer or feature extractor.
        options: What to do.
        folder: For checkpoints and finished modes; the caller removes it when the model is saved.
        teacher: The exact model for `distill`; without it a copy of the model with exact attention.
        resume: Whether to go on from what the folder holds.
        progress: Called with what happens, steps done and steps in all.

    Raises:
        ApproxError: if a mode cannot be used, the data do not fit, the budget is met already (exit code 8), the folder holds
            another training, or the loss is not finite.
        Interrupted: after Ctrl-C or SIGTERM; the folder holds the state after the last step.
    """
    progress("read the data", 0, 1)
    prepared = prepare_training(model, processor, options, teacher)
    begun = _claim(folder, model, prepared, options, resume=resume)
    progress("score before training", 0, 1)
    exact, before = begun.get("exact"), begun.get("before")
    if before is None:
        exact, before = _before(model, prepared.measure)
        _keep(folder, {**begun, "exact": exact, "before": before})
    if options.budget is not None:
        prepared.measure.enough = _enough(prepared.measure, exact, before, options)
        if prepared.measure.suffices(before) and not begun.get("before"):
            shutil.rmtree(folder, ignore_errors=True)
            raise ApproxError(
                f"The budget {options.budget} is met before training: {prepared.measure.name} is {before:.4f} on "
                f"{len(prepared.data.held_out.examples)} held-out examples, {exact:.4f} with exact attention. Nothing was trained.",
                Exit.REFUSED,
            )
    outcomes = []
    sample = data.tensors_to(model.device, prepared.data.batch([0], 0), model.dtype)
    for number, phase in enumerate(prepared.phases):
        place = folder / f"{number}-{phase.mode}"
        if (finished := _finished(place, model)) is not None:
            outcomes.append(finished)
            continue
        outcomes.append(_carried_out(model, phase, prepared, options, place, sample, resume=resume, progress=progress))
        if outcomes[-1].ended == "budget":
            break
    progress("score after training", 0, 1)
    model.eval()
    return Healing(
        [phase.mode for phase in prepared.phases] if not prepared.adapted else list(options.recover or []),
        outcomes, prepared.measure.name, exact, before, prepared.measure.value(), len(prepared.data.held_out.examples),
        len(prepared.data.split.examples), prepared.data.sha256, options.model_dump(mode="json", exclude_none=True),
    )  # fmt: skip


def _carried_out(
    model: Any, phase: Phase, prepared: Preparation, options: FinetuneStage, place: Path, sample: dict[str, Any],
    *, resume: bool, progress: Progress,
) -> Outcome:  # fmt: skip
    adapters = []
    if phase.mode in prepared.adapted:
        adapters = parameters.add_adapters(model, options.lora, sample, options.seed)
        head = [name for name in phase.trained if "lora" not in name]
        phase = replace(phase, trained=[*adapters, *head])
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    dropped = getattr(model.config, "layerdrop", None)
    if dropped and phase.mode in ("transfer", "distill"):
        # A layer that is left out has nothing to be compared with.
        model.config.layerdrop = 0.0
    try:
        outcome = train(
            model, phase, prepared.data, _measure_of(phase, prepared, model), place, resume=resume, progress=progress
        )
    finally:
        if dropped:
            model.config.layerdrop = dropped
    if adapters:
        parameters.merge_adapters(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(before.get(name, True))
    _finish(place, model, outcome)
    return outcome


def _phase(
    model: Any, mode: str, options: FinetuneStage, read: data.TrainingData, sample: dict[str, Any], teacher: Any,
    share: float, adapted: bool,
) -> Phase:  # fmt: skip
    batch_size, rate, _ = _DEFAULTS[mode]
    batch_size = options.batch_size or batch_size
    rate = options.learning_rate or rate * (_ADAPTERS_FASTER if adapted else 1.0)
    own_rate = rate if mode == "transfer" or options.learning_rate else rate * _OWN_FASTER
    one_pass = data.steps_of_pass(len(read.rows), batch_size)
    if options.steps is not None:
        steps = options.steps
    elif options.epochs is not None:
        steps = max(1, round(options.epochs * one_pass))
    else:
        # Enough to learn from few examples, and no more of many than a first try should take.
        steps = min(max(one_pass, _FEWEST_STEPS), _MOST_STEPS)
    objective: Objective
    if mode == "transfer":
        projections = _projections(model, sample) if options.projections else []
        own = parameters.own_parameters(model)
        objective = Transfer(model, joint=options.joint, match=options.match, projections=projections)
        trained = [*own, *projections]
        # Projections were trained for long; the parameters of mechanisms are new.
        own_rate, rate = rate, rate / 100
    else:
        if mode == "distill":
            objective = Distill(teacher or _teacher(model), options.distill)
        else:
            objective = Supervised()
        trained = (
            parameters.own_parameters(model) if adapted else parameters.chosen_parameters(model, options.train, sample)
        )
        if adapted and mode == "task" and model.base_model is not model:
            trained += parameters.head_parameters(model)
    spans = families.is_converted(model) and any(each.penalty() is not None for each in mechanisms(model))
    penalty = options.penalty if options.penalty is not None else _SPAN_PENALTY if spans else 0.0
    if penalty and not families.is_converted(model):
        raise ApproxError("--penalty weighs the spans of a converted model, and this one is exact. Leave it out.")
    return Phase(
        mode=mode, objective=objective, trained=trained, steps=steps, batch_size=batch_size, accumulate=options.accumulate,
        learning_rate=rate, own_learning_rate=own_rate,
        seconds=None if options.seconds is None else options.seconds * share,
        evaluate_every=options.evaluate_every or max(1, math.ceil(steps / _VALIDATIONS)), patience=options.patience,
        penalty=penalty, recompute=options.recompute, bfloat16=options.bfloat16, report_to=options.report_to,
        seed=options.seed,
    )  # fmt: skip


def _teacher(model: Any) -> Any:
    from approx.finetuning.objectives import teacher_of

    return teacher_of(model, surgery.revert)


def _projections(model: Any, sample: dict[str, Any]) -> list[str]:
    layers = tuple(f"{layer}." for layer in parameters.attention_layers(model, sample)["before"])
    return [name for name, _ in model.named_parameters() if name.startswith(layers)]


def _measure(model: Any, read: data.TrainingData, options: FinetuneStage, *, labelled: bool) -> Measure:
    """The task's first metric on the held-out examples; without targets each mode has its loss."""
    if not labelled:
        return Measure("loss", True, lambda: float("nan"))
    name = read.task.metrics[0]
    subject = Subject("the model", model, read.processor)
    prepared = prepare([subject], read.task, read.held_out, batch_size=None, max_length=read.limit, truncate=True)
    labels = [example.label for example in read.held_out.examples]

    def value() -> float:
        said = predict(subject, read.task, prepared, device=model.device, halve=True)
        return read.task.score(said, labels, [name])[name]

    return Measure(name, METRICS[name].lower_is_better, value)


def _measure_of(phase: Phase, prepared: Preparation, model: Any) -> Measure:
    """What chooses the best step of a mode: its own loss where it fits something else than the task's targets."""
    if prepared.measure.name != "loss" and phase.mode != "transfer":
        return prepared.measure
    return Measure("loss", True, _held_out_loss(phase, prepared.data, model))


def _held_out_loss(phase: Phase, read: data.TrainingData, model: Any) -> Callable[[], float]:
    held = replace(read, split=read.held_out, rows=[], encodings=[])
    for number, example in enumerate(read.held_out.examples):
        for window, encoding in enumerate(read.task.encode(example, read.processor, read.limit)):
            if read.task.tokens(encoding):
                held.rows.append((number, window))
                held.encodings.append(encoding)

    def value() -> float:
        training = model.training
        model.eval()
        terms, counts = [], []
        rank, world = distributed.place()
        batches = [
            list(range(start, min(start + phase.batch_size, len(held.rows))))
            for start in range(0, len(held.rows), phase.batch_size)
        ]
        with torch.no_grad():
            for rows in batches[rank::world]:
                inputs = data.tensors_to(model.device, held.batch(rows, 0), model.dtype)
                terms.append(float(phase.objective.loss(model, model, inputs)) * len(rows))
                counts.append(len(rows))
        model.train(training)
        both = distributed.gather((sum(terms), sum(counts)))
        return sum(part for part, _ in both) / max(sum(count for _, count in both), 1)

    return value


def _before(model: Any, measure: Measure) -> tuple[float | None, float]:
    before = measure.value()
    if not families.is_converted(model) or measure.name == "loss":
        return None, before
    with exactly(model):
        return measure.value(), before


def _enough(measure: Measure, exact: float | None, before: float, options: FinetuneStage) -> float:
    points = allowed_loss(options.budget or "")
    if measure.name == "loss":
        raise ApproxError(
            f"The budget {options.budget} is about a task's metric, and {', '.join(options.recover or [])} on text has none. "
            "Leave it out, or train on a task."
        )
    allowed = points / (100 if METRICS[measure.name].fraction else 1)
    reference = before if exact is None else exact
    return reference + allowed if measure.lower_is_better else reference - allowed


def _claim(folder: Path, model: Any, prepared: Preparation, options: FinetuneStage, *, resume: bool) -> dict[str, Any]:
    """Take a folder for this training, or see that what it holds is this training; what is kept of it so far."""
    about = {
        "options": options.model_dump(mode="json", exclude={"time_budget", "report_to"}),
        "data": prepared.data.sha256,
        "model": type(model).__name__,
        "sites": (getattr(model.config, "approx", None) or {}).get("sites", {}),
    }
    about = json.loads(json.dumps(about))
    file = folder / "training.json"
    if file.is_file() and resume:
        kept = json.loads(file.read_text(encoding="utf-8"))
        if different := [what for what in about if kept["about"].get(what) != about[what]]:
            words = {"options": "options", "data": "examples", "model": "a model", "sites": "mechanisms"}
            raise ApproxError(
                f"{folder} holds an unfinished training with other {', '.join(words[what] for what in different)}. Continue it "
                "with the same ones, or start over with --force.",
                Exit.REFUSED,
            )
        return kept
    if file.is_file():
        raise ApproxError(
            f"{folder} holds an unfinished training. Continue it with --resume, or start over with --force.",
            Exit.REFUSED,
        )
    if resume:
        raise ApproxError(f"There is nothing to resume: {folder} holds no training.", Exit.UNAVAILABLE)
    kept = {"about": about}
    _keep(folder, kept)
    return kept


def _keep(folder: Path, kept: dict[str, Any]) -> None:
    if distributed.leads():
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "training.json", json.dumps(kept))


def _finish(place: Path, model: Any, outcome: Outcome) -> None:
    """Keep the weights after a mode, and then no checkpoints of it."""
    if not distributed.leads():
        return
    state = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
    save_file(state, place / "finished.safetensors.tmp")
    (place / "finished.safetensors.tmp").replace(place / "finished.safetensors")
    write_whole(place / "finished.json", json.dumps(asdict(outcome)))
    for checkpoint in place.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)


def _finished(place: Path, model: Any) -> Outcome | None:
    if not (place / "finished.json").is_file():
        return None
    model.load_state_dict(load_file(place / "finished.safetensors"))
    return Outcome(**json.loads((place / "finished.json").read_text(encoding="utf-8")))
