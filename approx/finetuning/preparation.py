"""Prepare a training: read the examples and choose loss, parameters and settings of each mode."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from approx.checkpoints import families
from approx.conversion.calibration import mechanisms
from approx.errors import ApproxError, Exit
from approx.evaluation import distributed
from approx.evaluation.evaluate import Subject, predict, prepare
from approx.evaluation.quality import label_order
from approx.finetuning import data, parameters
from approx.finetuning.objectives import Distill, Objective, Supervised, Transfer, teacher_of
from approx.finetuning.options import FinetuneStage
from approx.finetuning.phase import Measure, Phase
from approx.tasks.metrics import METRICS

# Inputs per step, learning rate, and relative share of a time budget, by mode.
_DEFAULTS = {
    "transfer": (16, 1e-2, 1.0),
    "distill": (32, 1e-4, 3.0),
    "task": (32, 5e-5, 3.0),
    "clm": (16, 2e-4, 3.0),
    "mlm": (16, 1e-4, 3.0),
}
# Adapters and mechanisms' parameters tolerate higher rates than full matrices.
_ADAPTERS_FASTER = _OWN_FASTER = 10.0
_FEWEST_STEPS, _MOST_STEPS, _VALIDATIONS = 200, 2000, 10
# With a smaller share of approximated inputs, much of the training is lost.
_ENOUGH_APPROXIMATED = 0.8
# At this weight, spans of 1,000 tokens in 100 heads add 0.1 nats to the loss.
_SPAN_PENALTY = 1e-6


@dataclass
class Preparation:
    """A prepared training.

    Attributes:
        data: Training and held-out examples.
        phases: Modes, without `lora`.
        adapted: Names of modes that train adapters.
        measure: Measure of the held-out examples.
        sample: One input on the model's device, to find out which layers run.
        approximated: Share of the training inputs on which the mechanisms approximate; None for an exact model.
        approximates_from: Tokens of the shortest of these inputs; None if there are none.
    """

    data: data.TrainingData
    phases: list[Phase]
    adapted: set[str]
    measure: Measure
    sample: dict[str, Tensor]
    approximated: float | None = None
    approximates_from: int | None = None

    @property
    def notes(self) -> list[str]:
        """What a user should know before training."""
        if self.approximated is None or self.approximated > _ENOUGH_APPROXIMATED:
            return []
        note = f"The mechanisms approximate on {100 * self.approximated:.0f} % of the training inputs; the others teach them nothing."
        if self.approximates_from is None:
            return [f"{note} Train on longer inputs."]
        return [f"{note} --min-length {self.approximates_from} leaves those out."]


def prepare_training(model: Any, processor: Any, options: FinetuneStage, teacher: Any = None) -> Preparation:
    """Read the data and prepare each mode; nothing is trained.

    Args:
        model: A transformers model, converted or not.
        processor: Its tokenizer or feature extractor.
        options: Options of the training.
        teacher: The exact model for `distill`; by default a copy of the model with exact attention.

    Raises:
        ApproxError: if a mode cannot be used, the data do not fit, or FSDP was asked for.
    """
    refuse_sharding()
    text = options.text is not None
    causal = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    modes: list[str] = list(options.recover or parameters.default_modes(model, text=text, causal=causal))
    parameters.check_modes(modes, model, text=text, projections=options.projections)
    _refuse_missing("accelerate", "'approx-attention[train]'", "Training")
    if options.report_to is not None:
        _refuse_missing(options.report_to, options.report_to, f"Reporting to {options.report_to}")
    masked = type(model).__name__.endswith("ForMaskedLM")
    language = next((mode for mode in modes if mode in ("clm", "mlm")), "mlm" if masked else "clm")
    supervised = {"task", "clm", "mlm"} & set(modes) or ("distill" in modes and options.distill.labels > 0)
    read = data.read(options, model, processor, labelled=bool(supervised), language=language)
    sample = data.tensors_to(model.device, read.batch([0], 0), model.dtype)
    measure = _measure(model, read)
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
    return Preparation(read, phases, adapted, measure, sample, *_approximated(model, read))


def _approximated(model: Any, read: data.TrainingData) -> tuple[float | None, int | None]:
    """The share of the inputs on which a model approximates, and the tokens of the shortest of them."""
    if not families.is_converted(model):
        return None, None
    positions = [read.task.positions(encoding, model.config) for encoding in read.encodings]
    known = {length: model.approximates(length, length) for length in set(positions)}
    rows = [row for row, length in enumerate(positions) if known[length]]
    return len(rows) / len(positions), min((read.tokens(row) for row in rows), default=None)


def with_adapters(model: Any, phase: Phase, prepared: Preparation, options: FinetuneStage) -> Phase:
    """Add adapters to a model, in place; return the phase that trains them as well."""
    adapters = parameters.add_adapters(model, options.lora, prepared.sample, options.seed)
    return replace(phase, trained=[*adapters, *phase.trained])


def refuse_sharding() -> None:
    """Refuse FSDP, which `accelerate launch` asks for in the environment.

    Raises:
        ApproxError: if FSDP was asked for.
    """
    # Between the Trainer's steps, every process validates, compares and saves whole weights. On CPUs accelerate ignores the
    # variable, so nothing that was asked for would happen there either.
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        count = os.environ.get("LOCAL_WORLD_SIZE", "1")
        raise ApproxError(
            "FSDP was asked for (ACCELERATE_USE_FSDP=true), but training needs the whole model in each process; it runs with data "
            "parallelism, DDP. Start the same command with torchrun instead of accelerate launch: torchrun --nproc-per-node "
            f"{count} --no-python approx finetune …",
            Exit.UNSUPPORTED,
        )


def _refuse_missing(package: str, install: str, what: str) -> None:
    if find_spec(package) is None:
        raise ApproxError(f"{what} needs the package {package}. Install it: pip install {install}.", Exit.MISSING)


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
        # Enough steps for small data sets, and a bound for large ones.
        steps = min(max(one_pass, _FEWEST_STEPS), _MOST_STEPS)
    objective: Objective
    if mode == "transfer":
        projections = _projections(model, sample) if options.projections else []
        own = parameters.own_parameters(model)
        objective = Transfer(model, joint=options.joint, match=options.match, projections=projections)
        trained = [*own, *projections]
        # Projections are pretrained, so they need a lower rate than new parameters.
        own_rate, rate = rate, rate / 100
    else:
        taught = mode == "distill"
        objective = Distill(teacher or teacher_of(model), options.distill) if taught else Supervised()
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


def _projections(model: Any, sample: dict[str, Any]) -> list[str]:
    layers = tuple(f"{layer}." for layer in parameters.attention_layers(model, sample)["before"])
    return [name for name, _ in model.named_parameters() if name.startswith(layers)]


def _measure(model: Any, read: data.TrainingData) -> Measure:
    """The task's first metric on the held-out examples; no value if the model lacks the head."""
    try:
        read.task.check(model)
    except ApproxError:
        return Measure("loss", True, None)
    name = read.task.metrics[0]
    subject = Subject("the model", model, read.processor)
    prepared = prepare([subject], read.task, read.held_out, batch_size=None, max_length=read.limit, truncate=True)
    labels = [example.label for example in read.held_out.examples]

    def value() -> float:
        said = predict(subject, read.task, prepared, device=model.device, halve=True)
        measure.about_labels = label_order(read.task, said, labels, model.config)
        return read.task.score(said, labels, [name])[name]

    measure = Measure(name, METRICS[name].lower_is_better, value)
    return measure


def measure_of(phase: Phase, prepared: Preparation, model: Any) -> Measure:
    """The measure of a mode: the task's metric, or the mode's own loss for `transfer` or without a score."""
    if prepared.measure.value is not None and phase.mode != "transfer":
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
