"""Train a checkpoint or a loaded model mode by mode, from folder to folder, and report its score before and after."""

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from approx.checkpoints import checkpoint, families
from approx.checkpoints.atomic_folder import (
    claim,
    locked_output,
    refuse_existing,
    refuse_overlap,
    refuse_unclaimed,
    refuse_unwritable,
    remove,
)
from approx.checkpoints.checkpoint import Checkpoint, state_sha256, weight_files
from approx.checkpoints.foreign import carried
from approx.checkpoints.history import Check, KeptExact, Receipt, Training, read_receipt, trainings
from approx.checkpoints.manifest import sha256
from approx.conversion import convert, surgery, verify
from approx.conversion.calibration import calibrate, calibration_batch, calibration_length, exactly, mechanisms
from approx.conversion.convert import refuse_foreign
from approx.errors import ApproxError, Exit
from approx.evaluation import evaluate, tracking
from approx.evaluation.evaluate import Subject, predict, prepare
from approx.evaluation.quality import label_order
from approx.evaluation.timing import available_bytes, peak_mb
from approx.finetuning import divergence, trainer
from approx.finetuning.options import DEFAULTS, MOST_STEPS, FinetuneStage, allowed_loss
from approx.finetuning.trainer import (
    MOST_VALIDATIONS,
    VALIDATING,
    Distill,
    KeptLogits,
    Measure,
    Objective,
    Outcome,
    Phase,
    Segments,
    Supervised,
    Transfer,
    disk_errors,
    teacher_of,
    train,
)
from approx.paths import refuse_leaving
from approx.progress import Progress, silent
from approx.tasks.carrying import Carried
from approx.tasks.classification import SEVERAL, kind_of_outputs
from approx.tasks.language import LanguageModelling
from approx.tasks.metrics import METRICS
from approx.tasks.text import Text
from approx.validation import first_mistake
from approx.version import __version__, install
from approx_kernels.dispatch import findings
from approx_kernels.runtime.atomic_file import write_whole

# Adapters and mechanisms' parameters tolerate higher rates than full matrices.
_ADAPTERS_FASTER = _MECHANISMS_FASTER = 10.0
_FEWEST_STEPS = 200
# After these steps of transfer, more gained nothing on SQuAD: 640 inputs, 100,000 tokens. Short inputs take more of them.
_TRANSFER_STEPS, _MOST_TRANSFER_STEPS, _TRANSFER_TOKENS = 80, 400, 100_000
# After transfer there is little left to learn, and much to forget.
_STEPS_AFTER_TRANSFER, _SLOWER_AFTER_TRANSFER = 100, 5.0
# With a smaller share of approximated inputs, much of the training is lost.
_ENOUGH_APPROXIMATED = 0.8
# Share of a mode for warm-up, and decay of the base's matrices.
_WARM_UP, _WEIGHT_DECAY = 0.06, 0.01
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
        kept_exact: The layers that were made exact again; None if there are none.
    """

    data: trainer.TrainingData
    phases: list[Phase]
    adapted: set[str]
    measure: Measure
    sample: dict[str, Tensor]
    approximated: float | None = None
    approximates_from: int | None = None
    kept_exact: KeptExact | None = None

    def validating(self, count: int, model: Any) -> "Preparation":
        """The same with at most this many held-out examples in use."""
        data = replace(self.data, used=max(count, _TIMED))
        if len(data.validated.examples) == len(self.data.validated.examples):
            return replace(self, data=data)
        measure = self.measure if self.measure.value is None else _measure(model, data)
        return replace(self, data=data, measure=measure)

    @property
    def notes(self) -> list[str]:
        """What a user should know before training."""
        return [*self._of_validation, *self._of_lengths]

    @property
    def _of_validation(self) -> list[str]:
        used, count = len(self.data.validated.examples), len(self.data.held_out.examples)
        if used == count:
            return []
        return [
            f"Only {used} of the {count} held-out examples are validated on, so that this takes no more than a tenth of the "
            "time of training."
        ]

    @property
    def _of_lengths(self) -> list[str]:
        if self.approximated is None or self.approximated > _ENOUGH_APPROXIMATED:
            return []
        share = f"{100 * self.approximated:.0f} %"
        note = f"The mechanisms approximate on {share} of the training inputs; the others teach them nothing."
        if self.approximates_from is None:
            remedy = "Join texts with --pack." if isinstance(self.data.task, Text) else "Train on longer inputs."
            return [f"{note} {remedy}"]
        return [f"{note} --min-length {self.approximates_from} leaves those out."]


def prepare_training(
    model: Any,
    processor: Any,
    options: FinetuneStage,
    teacher: Any = None,
    kept_exact: KeptExact | None = None,
    progress: Progress = silent,
) -> Preparation:
    """Read the data, make layers exact again if that is asked for, and prepare each mode; nothing is trained.

    Args:
        model: A transformers model, converted or not.
        processor: Its tokenizer or feature extractor.
        options: Options of the training.
        teacher: The exact model for `distill`; by default a copy of the model with exact attention.
        kept_exact: The layers to make exact again, where they were chosen before.
        progress: Called with the current activity, steps done and total steps.

    Raises:
        ApproxError: if a mode cannot be used, the data do not fit, or FSDP is requested.
    """
    refuse_sharding()
    text = options.text is not None
    causal = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))

    def chosen_modes() -> list[str]:
        modes: list[str] = list(
            options.recover or trainer.default_modes(model, text=text, causal=causal, taught=teacher is not None)
        )
        trainer.check_modes(modes, model, text=text, projections=options.projections)
        return modes

    modes = chosen_modes()
    if options.keep_exact is not None:
        _check_keep_exact(model, options.keep_exact, taught=teacher is not None)
    elif teacher is not None and "distill" not in modes:
        raise ApproxError(_IDLE_TEACHER)
    if find_spec("accelerate") is None:
        raise ApproxError(f"Training needs the package accelerate. Install it: {install('train')}.", Exit.MISSING)
    tracking.refuse_missing(options.report_to)
    masked = type(model).__name__.endswith("ForMaskedLM")
    language = next((mode for mode in modes if mode in ("clm", "mlm")), "mlm" if masked else "clm")
    supervised = {"task", "clm", "mlm"} & set(modes) or ("distill" in modes and options.distill.labels > 0)
    read = trainer.read_data(options, model, processor, labelled=bool(supervised), language=language)
    if {"transfer", "distill"} & set(modes) and read.task.writes(model):
        read = replace(read, imitation=trainer.Imitation(teacher or trainer.teacher_of(model), read.task, processor))
    if options.keep_exact is not None:
        # Rounding may differ between processes.
        kept_exact = evaluate.agree(kept_exact or _most_divergent(model, read, options, teacher, progress))
        surgery.keep_exact(model, kept_exact.numbers)
        # Of the layers that stay converted none may have parameters.
        modes = chosen_modes()
    sample = trainer.tensors_to(model.device, read.batch([0], 0), model.dtype)
    measure = _measure(model, read)
    phases: list[Phase] = []
    adapted: set[str] = set()
    chosen = [mode for mode in modes if mode != "lora"]
    shares = {mode: DEFAULTS[mode][2] for mode in chosen}
    for number, mode in enumerate(chosen):
        if "lora" in modes[: modes.index(mode)]:
            adapted.add(mode)
        phases.append(
            _phase(
                model,
                mode,
                options,
                read,
                sample=sample,
                teacher=teacher or (read.imitation and read.imitation.teacher),
                share=shares[mode] / sum(shares.values()),
                gently=mode == "distill" and "transfer" in chosen[:number],
                adapted=mode in adapted,
            )
        )
    prepared = Preparation(read, phases, adapted, measure, sample, *_approximated(model, read), kept_exact)
    return prepared if options.seconds is not None else _with_validations(prepared, model)


_IDLE_TEACHER = (
    "--teacher has an effect only with the mode 'distill', or with --keep-exact. Add one of them, or leave it out."
)
# Rounding alone moves outputs less far than this.
_ROUNDING = 1e-6
# Operations of the inputs that layers are compared on, about a minute of two cores; more of these inputs, and fewer.
_COMPARING, _MOST_COMPARED, _FEWEST_COMPARED = 3e12, 128, 2
# MiniLM with linear attention on SQuAD: untrained, layers 2 and 3 move the outputs most; after 10, 20 and 40 steps 1 and 2.
_STEPS_BEFORE_COMPARING = 10


def _check_keep_exact(model: Any, count: int, *, taught: bool) -> None:
    asked = f"--keep-exact {count}"
    if not families.is_converted(model):
        raise ApproxError(
            f"{asked} chooses among converted layers, and this {type(model).__name__} is exact. Leave it out, or convert "
            "the model first.",
            Exit.UNSUPPORTED,
        )
    layers = len(model.config.approx["sites"])
    if count >= layers:
        most = "Leave it out" if layers == 1 else f"Keep at most {layers - 1}, or leave it out"
        raise ApproxError(
            f"{asked} would leave nothing converted: this model has {layers} converted layer{'s' * (layers > 1)}. {most}."
        )
    if trainer.retrained(model.config.approx) and not taught:
        raise ApproxError(
            f"{asked} compares layers with the exact model, but the weights of this one were trained since it was "
            "converted, so with exact attention they are not its base. Name the base with --teacher."
        )


def _most_divergent(
    model: Any, read: trainer.TrainingData, options: FinetuneStage, teacher: Any, progress: Progress
) -> KeptExact:
    """The layers whose conversion alone moves the outputs most; the numbers of inputs and steps do not depend on times.

    Mechanisms with parameters are first fitted for a few steps of transfer, and then as they were: what a layer does before
    that says little of what training leaves.
    """
    order = torch.randperm(len(read.rows), generator=torch.Generator().manual_seed(options.seed)).tolist()
    sizes = [read.tokens(row) for row in order[:_MOST_COMPARED]]
    weights = sum(parameter.numel() for parameter in model.parameters())
    each = 2 * weights * (1 + len(model.config.approx["sites"])) * sum(sizes) / len(sizes)
    rows = order[: min(max(int(_COMPARING / each), _FEWEST_COMPARED), _MOST_COMPARED)]

    def inputs(some: list[int]) -> dict[str, Tensor]:
        return trainer.without_targets(trainer.tensors_to(model.device, read.batch(some, 0), model.dtype))

    names = trainer.mechanism_parameters(model)
    fitted = bool(names) and not trainings(model.config.approx)
    earlier = trainer.changeable(model, names)
    if fitted:
        progress("fit the mechanisms for a comparison of layers", 0, 1)
        # Other inputs than those below, if there are so many.
        others = [*order[len(rows) :], *order]
        size = DEFAULTS["transfer"][0]
        batches = (
            inputs(others[step * size : (step + 1) * size] or rows[:size]) for step in range(_STEPS_BEFORE_COMPARING)
        )
        bfloat16 = _in_bfloat16(model, "transfer") if options.bfloat16 is None else options.bfloat16
        _fit_briefly(model, names, batches, options, bfloat16=bfloat16)
    try:
        advance = partial(progress, "compare the layers")
        layers = divergence.of_layers(model, [inputs([row]) for row in rows], teacher, advance)
    finally:
        model.load_state_dict(earlier, strict=False)
    most = sorted(layers, key=lambda one: -one.divergence)[: options.keep_exact]
    if most[0].divergence < _ROUNDING:
        raise ApproxError(
            f"--keep-exact {options.keep_exact}: on {len(rows)} training inputs no converted layer changes the outputs "
            "beyond rounding, so none can be chosen. Mechanisms are often exact on short inputs; use longer ones "
            "(--min-length), or leave it out.",
            Exit.UNSUPPORTED,
        )
    steps = _STEPS_BEFORE_COMPARING if fitted else 0
    return KeptExact(divergence.unit(model), len(rows), [replace(one, kept=one in most) for one in layers], steps)


def _fit_briefly(
    model: Any, names: list[str], batches: Iterator[dict[str, Tensor]], options: FinetuneStage, *, bfloat16: bool
) -> None:
    """A few steps of transfer, without validation or checkpoints."""
    objective = Transfer(model, joint=False, match=options.match)
    before = {parameter: parameter.requires_grad for parameter in model.parameters()}
    named = dict(model.named_parameters())
    rate = options.transfer.learning_rate or DEFAULTS["transfer"][1]
    optimizer = torch.optim.AdamW([named[name] for name in names], lr=rate, weight_decay=0.0)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=_STEPS_BEFORE_COMPARING // 2)
    try:
        model.requires_grad_(False)
        for name in names:
            named[name].requires_grad_(True)
        for inputs in batches:
            with torch.autocast(model.device.type, torch.bfloat16, enabled=bfloat16):
                loss = objective.loss(model, model, inputs)
            if loss.requires_grad:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            warm_up.step()
    finally:
        for parameter, trainable in before.items():
            parameter.requires_grad_(trainable)


# Validation takes a tenth of the time of a mode. A step takes three times as long as a forward pass of its inputs.
_PASSES_OF_A_STEP = 3
# Fewer examples choose a step badly, so they may take three times as long as all others; where these are long, fewer are used.
_FEWEST_VALIDATED, _LONGER = 16, 3
# Validations where a tenth of the time is not enough for all held-out examples, and examples that are worth more than another one.
_USUAL_VALIDATIONS, _ENOUGH_EXAMPLES = 5, 100
# Examples whose validation is timed, and that are used at least.
_TIMED = 4


def _with_validations(prepared: Preparation, model: Any) -> Preparation:
    """Choose how many held-out examples are used, and how often, where the number of steps says what a tenth is.

    The count does not depend on times, so that a training can be repeated to the bit.
    """
    phases, inputs = [], _inputs_of_an_example(prepared)
    passes = {phase.mode: VALIDATING * _PASSES_OF_A_STEP * phase.steps * phase.batch_size for phase in prepared.phases}
    affordable = min(passes.values()) / inputs
    # Before the first step, after the last and a few times between; fewer examples would be too few even for that.
    count = int(min(max(affordable / _USUAL_VALIDATIONS, _ENOUGH_EXAMPLES), affordable / 2))
    prepared = prepared.validating(max(count, _FEWEST_VALIDATED), model)
    for phase in prepared.phases:
        affordable = int(passes[phase.mode] / inputs / len(prepared.data.validated.examples)) - 1
        usual = math.ceil(phase.steps / min(max(affordable, 1), MOST_VALIDATIONS))
        phases.append(replace(phase, evaluate_every=phase.evaluate_every or usual))
    return replace(prepared, phases=phases)


def _affordable(prepared: Preparation, model: Any) -> int:
    """How many held-out examples can be used twice in a tenth of the time of any mode, by the time that a few take.

    If these are few, as many as take three tenths of it, up to `_FEWEST_VALIDATED`.
    """
    few = prepared.validating(_TIMED, model)
    slowest = 0.0
    for phase in prepared.phases:
        value = measure_of(phase, few, model).value
        assert value is not None  # each mode has a loss at least
        began = time.perf_counter()
        value()
        slowest = max(slowest, time.perf_counter() - began)
    seconds = VALIDATING * min(phase.seconds for phase in prepared.phases) / 2
    count = int(seconds / max(slowest, 1e-9) * len(few.data.validated.examples))
    return max(count, min(_FEWEST_VALIDATED, _LONGER * count))


def _inputs_of_an_example(prepared: Preparation) -> float:
    return max(len(prepared.data.rows) / len(prepared.data.split.examples), 1.0)


def _approximated(model: Any, read: trainer.TrainingData) -> tuple[float | None, int | None]:
    """The share of the inputs on which a model approximates, and the tokens of the shortest of them."""
    if not families.is_converted(model):
        return None, None
    positions = [read.task.positions(encoding, model.config) for encoding in read.encodings]
    known = {length: model.approximates(length, length) for length in set(positions)}
    rows = [row for row, length in enumerate(positions) if known[length]]
    return len(rows) / len(positions), min((read.tokens(row) for row in rows), default=None)


def with_adapters(model: Any, phase: Phase, prepared: Preparation, options: FinetuneStage) -> Phase:
    """Add adapters to a model, in place; return the phase that trains them as well."""
    adapters = trainer.add_adapters(model, options.lora, prepared.sample, options.seed)
    return replace(phase, trained=[*adapters, *phase.trained])


def refuse_sharding() -> None:
    """Refuse FSDP, which `accelerate launch` requests in the environment.

    Raises:
        ApproxError: if FSDP is requested.
    """
    # Between the Trainer's steps, every process validates, compares and saves whole weights. On CPUs accelerate only
    # ignores the variable, so FSDP would not happen there either.
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        count = os.environ.get("LOCAL_WORLD_SIZE", "1")
        raise ApproxError(
            "FSDP is requested (ACCELERATE_USE_FSDP=true), but training needs the whole model in each process; it "
            "runs with data parallelism, DDP. Start the same command with torchrun instead of accelerate launch: "
            f"torchrun --nproc-per-node {count} --no-python approx finetune …",
            Exit.UNSUPPORTED,
        )


def _phase(
    model: Any,
    mode: str,
    options: FinetuneStage,
    read: trainer.TrainingData,
    *,
    sample: dict[str, Tensor],
    teacher: Any,
    share: float,
    gently: bool,
    adapted: bool,
) -> Phase:
    batch_size, usual, _ = DEFAULTS[mode]
    batch_size = options.of(mode, "batch_size") or batch_size
    usual *= (_ADAPTERS_FASTER if adapted else 1.0) / (_SLOWER_AFTER_TRANSFER if gently else 1.0)
    rate = options.of(mode, "learning_rate") or usual
    mechanism_rate = options.of(mode, "mechanism_learning_rate") or usual * _MECHANISMS_FASTER
    one_pass = trainer.steps_of_pass(len(read.rows), batch_size)
    if (steps := options.of(mode, "steps")) is None:
        if options.epochs is not None:
            steps = max(1, round(options.epochs * one_pass))
        elif mode == "transfer":
            tokens = sum(map(read.tokens, range(len(read.rows)))) / len(read.rows)
            steps = math.ceil(_TRANSFER_TOKENS / max(batch_size * tokens, 1))
            steps = min(max(steps, _TRANSFER_STEPS), _MOST_TRANSFER_STEPS)
        elif gently and options.seconds is None:
            steps = _STEPS_AFTER_TRANSFER
        else:
            # Enough steps for small data sets, and a bound for large ones.
            steps = min(max(one_pass, _FEWEST_STEPS), MOST_STEPS)
    objective: Objective
    if mode == "transfer":
        projections = _projections(model, sample) if options.projections else []
        of_mechanisms = trainer.mechanism_parameters(model)
        objective = Transfer(model, joint=options.joint, match=options.match, projections=projections)
        trained = [*of_mechanisms, *projections]
        # Projections are pretrained, so they need a lower rate than new parameters.
        mechanism_rate, rate = rate, rate / 100
    else:
        taught = mode == "distill"
        if taught:
            kept = _kept_logits(model, options, read, passes=steps * batch_size / len(read.rows))
            objective = Distill(teacher or teacher_of(model), options.distill, kept)
        else:
            objective = _supervised(read, model, options)
        trained = (
            trainer.mechanism_parameters(model) if adapted else trainer.chosen_parameters(model, options.train, sample)
        )
        if adapted and mode == "task" and model.base_model is not model:
            trained += trainer.head_parameters(model)
    spans = families.is_converted(model) and any(each.penalty() is not None for each in mechanisms(model))
    penalty = options.penalty if options.penalty is not None else _SPAN_PENALTY if spans else 0.0
    if penalty and not families.is_converted(model):
        raise ApproxError("--penalty weighs the spans of a converted model, and this one is exact. Leave it out.")
    return Phase(
        mode=mode,
        objective=objective,
        trained=trained,
        steps=steps,
        batch_size=batch_size,
        accumulate=options.accumulate,
        learning_rate=rate,
        mechanism_learning_rate=mechanism_rate,
        seconds=math.inf if options.seconds is None else options.seconds * share,
        evaluate_every=options.evaluate_every,
        warm_up=_WARM_UP if (warm_up := options.of(mode, "warm_up")) is None else warm_up,
        schedule=options.of(mode, "schedule"),
        weight_decay=_WEIGHT_DECAY if (decay := options.of(mode, "weight_decay")) is None else decay,
        patience=options.patience,
        penalty=penalty,
        recompute=options.recompute,
        bfloat16=_in_bfloat16(model, mode) if options.bfloat16 is None else options.bfloat16,
        report_to=options.report_to,
        seed=options.seed,
    )


def _supervised(read: trainer.TrainingData, model: Any, options: FinetuneStage) -> Objective:
    """The loss of targets; in segments if the task carries something from one to the next.

    Raises:
        ApproxError: if this cannot be carried in training.
    """
    if not isinstance(read.task, LanguageModelling) or read.task.carry is None:
        return Supervised()
    carry = read.task.carry
    if carry not in ("flush", "segments"):
        raise ApproxError(
            f"carry={carry} is a way to evaluate. Train with carry=flush or segments, or leave it out, which suits recompute."
        )
    if options.recompute:
        raise ApproxError(
            f"--recompute computes layers again without the cache that carry={carry} needs. Leave one of them out."
        )
    first = read.encodings[0]
    return Segments(Carried(model, carry, first["window"], first["stride"], first["sinks"]))


# Share of the memory for kept logits.
_KEEPING = 0.25


def _kept_logits(model: Any, options: FinetuneStage, read: trainer.TrainingData, *, passes: float) -> KeptLogits | None:
    """Where the teacher's logits are kept; None if they are not wanted, or would be used once."""
    parts = options.distill
    if parts.cache is None:
        return None
    about = f"--distill cache={parts.cache}"
    if parts.hidden or parts.attention:
        raise ApproxError(
            f"{about} keeps logits, and hidden states and attention outputs would take too much. Leave those out of the "
            "loss (--distill hidden=0 --distill attention=0), or do without the cache."
        )
    if read.task.draws:
        raise ApproxError(
            f"{about} is of no use with {read.task.name}, which hides other tokens in each pass. Leave it out."
        )
    if model.main_input_name != "input_ids" or model.config.is_encoder_decoder:
        raise ApproxError(
            f"{about} is for models that read tokens and write outputs for them, and this is a {type(model).__name__}. "
            "Leave it out.",
            Exit.UNSUPPORTED,
        )
    if passes <= 1:
        return None
    several = kind_of_outputs(model.config) == SEVERAL
    most = _KEEPING * available_bytes(torch.device("cpu"))
    return KeptLogits(parts.cache, parts.temperature, several=several, most=most)


def _in_bfloat16(model: Any, mode: str) -> bool:
    """Whether a mode runs under autocast by default: what compares activations does, where products are faster for it."""
    if mode not in ("transfer", "distill") or model.dtype != torch.float32:
        return False
    if model.device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return findings.multiplies_bfloat16()


def _projections(model: Any, sample: dict[str, Any]) -> list[str]:
    layers = tuple(f"{layer}." for layer in trainer.attention_layers(model, sample)["before"])
    return [name for name, _ in model.named_parameters() if name.startswith(layers)]


def _measure(model: Any, read: trainer.TrainingData) -> Measure:
    """The task's first metric on the held-out examples; no value if the model lacks the head, or they have no labels."""
    try:
        read.task.check(model)
        read.task.labelled(read.held_out)
    except ApproxError:
        return Measure("loss", True, None)
    name = read.task.metrics[0]
    subject = Subject("the model", model, read.processor)
    prepared = prepare([subject], read.task, read.validated, batch_size=None, max_length=read.limit, truncate=True)
    labels = [example.label for example in read.validated.examples]

    def value() -> float:
        predictions = predict(subject, read.task, prepared, device=model.device, halve=True)
        measure.about_labels = label_order(read.task, predictions, labels, model.config)
        return read.task.score(predictions, labels, [name])[name]

    measure = Measure(name, METRICS[name].lower_is_better, value)
    return measure


def measure_of(phase: Phase, prepared: Preparation, model: Any) -> Measure:
    """The measure of a mode: the task's metric, or the mode's own loss for `transfer`, `distill` or without a score.

    A distance from the teacher varies less with few examples than a score does, and base models are often right on nearly all
    of the examples they were trained on, of which some are held out. A budget of score ends a training, so it is measured.
    """
    scored = phase.mode not in ("transfer", "distill") or (
        phase.mode == "distill" and prepared.measure.enough is not None
    )
    if prepared.measure.value is not None and scored:
        return prepared.measure
    return Measure("loss", True, _held_out_loss(phase, prepared.data, model))


def _held_out_loss(phase: Phase, read: trainer.TrainingData, model: Any) -> Callable[[], float]:
    held_out_data = replace(read, split=read.validated, rows=[], encodings=[])
    for number, example in enumerate(read.validated.examples):
        for window, encoding in enumerate(read.task.encode(example, read.processor, read.limit)):
            if read.task.tokens(encoding):
                held_out_data.rows.append((number, window))
                held_out_data.encodings.append(encoding)

    def value() -> float:
        training = model.training
        model.eval()
        terms, counts = [], []
        rank, world = evaluate.place()
        batches = [
            list(range(start, min(start + phase.batch_size, len(held_out_data.rows))))
            for start in range(0, len(held_out_data.rows), phase.batch_size)
        ]
        with torch.no_grad():
            for rows in batches[rank::world]:
                inputs = trainer.tensors_to(model.device, held_out_data.batch(rows, 0), model.dtype)
                terms.append(float(phase.objective.loss(model, model, inputs)) * len(rows))
                counts.append(len(rows))
        model.train(training)
        both = evaluate.gather((sum(terms), sum(counts)))
        return sum(part for part, _ in both) / max(sum(count for _, count in both), 1)

    return value


# AdamW's two averages, in float32; the trial step measures the gradients.
_BYTES_OF_TRAINED = 8
# A rehearsal leaves the memory to what else runs.
_MOST_TRIAL_MB = 2000.0


@dataclass(frozen=True)
class Estimate:
    """What a mode would take.

    Attributes:
        trained, parameters: How many numbers are trained, and how many there are.
        seconds: At most the time budget.
        memory_mb: Megabytes, 1e6 bytes.
    """

    mode: str
    steps: int
    batch_size: int
    learning_rate: float
    trained: int
    parameters: int
    seconds: float
    memory_mb: float


def estimate(model: Any, phase: Phase, prepared: Preparation, options: FinetuneStage) -> Estimate:
    """Estimate time and memory of a mode from trial steps; the model is not changed.

    The first step has one of the longest inputs. A step of a whole batch follows only if it would take at most half of
    the available memory, and at most 2 GB; otherwise the steps have as many inputs as would, and time and memory grow in
    proportion.

    Args:
        model: The model.
        phase: The mode.
        prepared: The prepared training, with its examples.
        options: Options of the training, with the size of adapters.
    """
    rows = sorted(range(len(prepared.data.rows)), key=prepared.data.tokens)
    count = phase.batch_size // phase.accumulate
    count, device = min(count, len(rows)), torch.device(model.device)

    def step(chosen: list[int]) -> None:
        inputs = trainer.tensors_to(model.device, prepared.data.batch(chosen, 0), model.dtype)
        phase.objective.loss(model, model, inputs).backward()
        model.zero_grad(set_to_none=True)

    adapted = phase.mode in prepared.adapted
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    numbers = sum(parameter.numel() for parameter in model.parameters())
    if adapted:
        phase = with_adapters(model, phase, prepared, options)
    named, training = dict(model.named_parameters()), model.training
    trained = sum(named[name].numel() for name in phase.trained)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in named.values())
    try:
        for name, parameter in named.items():
            parameter.requires_grad_(name in set(phase.trained))
        model.train()

        def peak(inputs: int) -> float:
            return peak_mb(lambda: step(rows[-inputs:]), device)

        # Memory is measured on the longest inputs, time on those of median length.
        first, tried, most = peak(1), 1, min(available_bytes(device) / 2e6, _MOST_TRIAL_MB)
        # A step of two takes no more than two steps of one.
        needed = first * count
        if count > 1 and 2 * first <= most:
            # The gradients are in the first already.
            more = max(peak(2) - first, 1e-6)
            tried = min(count, max(int((most - first) / more) + 1, 2))
            needed = peak(tried) if tried == count else first + more * (count - 1)
        middle = max(len(rows) // 2 - tried // 2, 0)
        usual = rows[middle : middle + tried]
        step(usual)
        began = time.perf_counter()
        step(usual)
        each = (time.perf_counter() - began) * count / tried
    finally:
        model.train(training)
        if adapted:
            trainer.remove_adapters(model, merge=False)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(before[name])
    seconds = each * phase.accumulate * phase.steps
    return Estimate(
        mode=phase.mode,
        steps=phase.steps,
        batch_size=phase.batch_size,
        learning_rate=phase.mechanism_learning_rate if phase.mode == "transfer" else phase.learning_rate,
        trained=trained,
        parameters=numbers,
        seconds=min(seconds, phase.seconds),
        memory_mb=round(needed + (weights + _BYTES_OF_TRAINED * trained) / 1e6, 1),
    )


_STATE = "training.json"
# Keys of a config that change no number of a training.
_ELSEWHERE = ("_name_or_path", "transformers_version")
# Settings that approx, the Trainer (which switches the cache off) or a pass with labels changes while a model trains.
_TOUCHED = ("layerdrop", "use_cache", "problem_type")


# Options that change no number of a training.
_UNSTATED = {"time_budget", "report_to"}


class About(BaseModel):
    """What identifies a training: only an equal one continues with its state. Earlier versions stored no config."""

    model_config = ConfigDict(strict=True)

    options: dict[str, Any]
    data: str
    model: str
    weights: str
    config: dict[str, Any] | None = None
    sites: dict[str, Any]


class Begun(BaseModel):
    """The state of an unfinished training, in `training.json`.

    Attributes:
        about: The training.
        scored: Whether the two scores below were measured.
        exact: Score with exact attention; None for an exact model.
        before: Score before the first step; None if the model has no score.
        notes: What these scores show about the order of the model's labels.
        validated: Number of held-out examples in use; None for all.
        fitted: What mechanisms were fitted to again before the first step; None if they were not.
        start: Score of the weights that the first step begins with, in `start.safetensors`; None if the model has no score.
        kept_exact: The layers that were made exact again; None if there are none.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    about: About
    scored: bool = False
    exact: float | None = None
    before: float | None = None
    notes: list[str] = []
    validated: int | None = None
    fitted: str | None = None
    start: float | None = None
    kept_exact: KeptExact | None = None


@dataclass
class Healing:
    """The outcome of a training.

    Attributes:
        recover: Modes, in order.
        phases: Outcome of each mode.
        measure: What was measured on the held-out examples: a metric, or `loss`.
        exact: Its value with exact attention before training; None for an exact model.
        before: Its value before the first step, with the layers exact that stay so; None if the model has no score.
        after: Its value after training.
        held_out: Number of held-out examples.
        examples: Number of training examples.
        data_sha256: Hash of all examples.
        options: The options of the training.
        approximated: Share of the training inputs on which the mechanisms approximate; None for an exact model.
        notes: What a user should know.
        fitted: What mechanisms were fitted to again before the first step, in words; None if they were not.
        helped: Whether the result is better than what training began with; None if nothing was trained.
        kept_exact: The layers that were made exact again; None if there are none.
        output: The folder with the model; None for a model in memory.
        checks: The checks of that folder.
    """

    recover: list[str]
    phases: list[Outcome]
    measure: str
    exact: float | None
    before: float | None
    after: float | None
    held_out: int
    examples: int
    data_sha256: str
    options: dict[str, Any]
    approximated: float | None
    notes: list[str]
    fitted: str | None = None
    helped: bool | None = None
    kept_exact: KeptExact | None = None
    output: str | None = None
    checks: list[Check] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Steps of all modes."""
        return sum(phase.steps for phase in self.phases)

    def to_data(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


class BudgetMetError(ApproxError):
    """The budget is met before training.

    Args:
        message: One line for the user.
        healing: The outcome, without any mode.
    """

    def __init__(self, message: str, healing: Healing) -> None:
        super().__init__(message, Exit.REFUSED)
        self.healing = healing


def finetune(
    model: Any,
    processor: Any,
    options: FinetuneStage,
    *,
    folder: Path,
    teacher: Any = None,
    resume: bool = False,
    restart: bool = False,
    progress: Progress = silent,
) -> Healing:
    """Train a model in place.

    Args:
        model: A transformers model, converted or not.
        processor: Its tokenizer or feature extractor.
        options: Options of the training.
        folder: Folder for checkpoints and finished modes; the caller removes it once the model is saved.
        teacher: The exact model for `distill`; by default a copy of the model with exact attention.
        resume: Whether to continue from the state in the folder.
        restart: Whether to delete an unfinished training in the folder, once everything else is checked.
        progress: Called with the current activity, steps done and total steps.

    Raises:
        ApproxError: if a mode cannot be used, the data do not fit, the budget is met already (exit code 8), the folder
            holds another training, or the loss is not finite.
        Interrupted: after Ctrl-C or SIGTERM; the folder holds the state after the last step.
    """
    progress("read the data", 0, 1)
    kept_exact = _kept_before(folder, model, options.keep_exact) if resume else None
    prepared = prepare_training(model, processor, options, teacher, kept_exact, progress)
    if restart and evaluate.leads():
        claim(folder, *_OURS)
        remove(folder, "training")
    begun = _begun(folder, model, prepared, options, resume=resume)
    with _removed_if_empty(folder) if not resume and evaluate.leads() else nullcontext():
        return _trained(folder, model, prepared, options, begun, resume, progress)


@contextmanager
def _removed_if_empty(folder: Path) -> Iterator[None]:
    """Remove the folder of a new training after an error, if there is no state to continue from."""
    try:
        yield
    except ApproxError:
        if not any(folder.glob("*/checkpoint-*")) and not any(folder.glob("*/finished.json")):
            remove(folder, "training")
        raise


def _trained(
    folder: Path,
    model: Any,
    prepared: Preparation,
    options: FinetuneStage,
    begun: Begun,
    resume: bool,
    progress: Progress,
) -> Healing:
    progress("score before training", 0, 1)
    again = begun.scored
    if not again:
        if options.seconds is not None:
            prepared = prepared.validating(evaluate.agree(_affordable(prepared, model)), model)
        exact, before = _before(model, prepared.measure)
        begun = begun.model_copy(
            update={"exact": exact, "before": before, "notes": prepared.measure.about_labels}
            | {"validated": prepared.data.used}
        )
    elif begun.validated is not None:
        prepared = prepared.validating(begun.validated, model)
    exact, before = begun.exact, begun.before
    if options.budget is not None:
        prepared.measure.enough = _enough(prepared.measure, exact, before, options)
        met = before is not None and prepared.measure.suffices(before)
        if met and not again and prepared.kept_exact is None:
            if evaluate.leads():
                remove(folder, "training")
            reference = "" if exact is None else f", {exact:.4f} with exact attention"
            raise BudgetMetError(
                f"The budget {options.budget} is met before training: {prepared.measure.name} is {before:.4f} on "
                f"{len(prepared.data.validated.examples)} held-out examples{reference}. Nothing was trained.",
                _healing(prepared, options, begun, [], before, None),
            )
    if not again:
        begun = _fitted(model, prepared, begun)
        if (begun.start is not None or begun.fitted) and evaluate.leads():
            _store(folder / _START, model)
        _keep(folder, begun)
    elif begun.start is not None or begun.fitted:
        _restore(folder / _START, model)
    outcomes: list[Outcome] = []
    unused = 0.0
    # The layers that stay exact may be all that it takes.
    enough = begun.start is not None and prepared.measure.suffices(begun.start)
    for number, phase in enumerate([] if enough else prepared.phases):
        phase = replace(phase, seconds=phase.seconds + unused)
        place = folder / f"{number}-{phase.mode}"
        finished = _finished(place, model)
        outcomes.append(
            finished or _carried_out(model, phase, prepared, options, place, resume=resume, progress=progress)
        )
        if outcomes[-1].ended == "budget":
            break
        # The next mode gets the time that this one did not need.
        unused = max(phase.seconds - outcomes[-1].seconds, 0.0)
    progress("score after training", 0, 1)
    model.eval()
    after = None if prepared.measure.value is None else prepared.measure.value()
    helped = any(outcome.best_step for outcome in outcomes) if outcomes else None
    # Spans that a penalty asks for are worth a loss of score.
    penalised = any(phase.penalty for phase in prepared.phases)
    if not penalised and after is not None and begun.start is not None and _worse(prepared, after, begun.start):
        # What lowers the loss of a layer need not raise the score of the model.
        _restore(folder / _START, model)
        after, helped = begun.start, False
    return _healing(prepared, options, begun, outcomes, after, helped)


_START = "start.safetensors"


def _worse(prepared: Preparation, value: float, than: float) -> bool:
    """Whether a score is worse than another by more than chance.

    A share of examples is worse by chance if the difference is within two standard errors where one answer in sixteen changes.
    """
    measure, count = prepared.measure, len(prepared.data.validated.examples)
    known = METRICS.get(measure.name)
    margin = 0.5 / math.sqrt(count) if known is not None and known.fraction else 0.0
    return value > than + margin if measure.lower_is_better else value < than - margin


# Inputs that mechanisms are fitted to, and all their tokens with padding, whose dense weights may be computed.
_MOST_FITTED, _MOST_FITTED_TOKENS = 16, 4096


def _fitted(model: Any, prepared: Preparation, begun: Begun) -> Begun:
    """Fit mechanisms that take calibration again, to training inputs, unless the score falls; return what training begins with."""
    before, data = begun.before, prepared.data
    begun = begun.model_copy(update={"scored": True, "start": before})
    if not (families.is_converted(model) and any(each.takes_calibration for each in mechanisms(model))):
        return begun
    chosen: list[int] = []
    order = torch.randperm(len(data.rows), generator=torch.Generator().manual_seed(prepared.phases[0].seed)).tolist()
    for row in order[:_MOST_FITTED]:
        if not chosen or max(map(data.tokens, [*chosen, row])) * (len(chosen) + 1) <= _MOST_FITTED_TOKENS:
            chosen.append(row)
    words = f"{len(chosen)} training inputs"
    earlier = trainer.changeable(model, trainer.mechanism_parameters(model))
    after, why = None, ""
    try:
        calibrate(model, trainer.without_targets(trainer.tensors_to(model.device, data.batch(chosen, 0), model.dtype)))
        after = None if before is None or prepared.measure.value is None else prepared.measure.value()
    except ApproxError as error:
        why = f"They cannot be fitted to {words}: {error}"
    if before is not None and after is not None and _worse(prepared, after, before):
        why = f"Fitted to {words}, they scored worse before the first step: {after:.4f} after {before:.4f}."
    if why:
        model.load_state_dict(earlier, strict=False)
        return begun.model_copy(update={"notes": [*begun.notes, f"The mechanisms stay as they were converted. {why}"]})
    scored = "" if after is None else f", with {prepared.measure.name} {after:.4f} after {before:.4f}"
    note = f"The mechanisms were fitted to {words} before the first step{scored}."
    return begun.model_copy(update={"start": after, "fitted": words, "notes": [*begun.notes, note]})


def _healing(
    prepared: Preparation,
    options: FinetuneStage,
    begun: Begun,
    outcomes: list[Outcome],
    after: float | None,
    helped: bool | None,
) -> Healing:
    return Healing(
        recover=[phase.mode for phase in prepared.phases] if not prepared.adapted else list(options.recover or []),
        phases=outcomes,
        measure=prepared.measure.name,
        exact=begun.exact,
        before=begun.before,
        after=after,
        held_out=len(prepared.data.validated.examples),
        examples=len(prepared.data.split.examples),
        data_sha256=prepared.data.sha256,
        options=options.model_dump(mode="json", exclude_none=True),
        approximated=prepared.approximated,
        notes=[*prepared.notes, *begun.notes, *_of_logits(prepared), *([_NO_HELP] if helped is False else [])],
        fitted=begun.fitted,
        helped=helped,
        kept_exact=prepared.kept_exact,
    )


def _of_logits(prepared: Preparation) -> list[str]:
    """What was kept of the teacher's logits."""
    kept = [phase.objective.kept for phase in prepared.phases if isinstance(phase.objective, Distill)]
    return [one.note for one in kept if one is not None and one.note is not None]


_NO_HELP = (
    "Training did not help: no step was better on the held-out examples than the weights before the first, which are kept. "
    "Give it more time, other inputs, or a mechanism with more capacity."
)


def _carried_out(
    model: Any,
    phase: Phase,
    prepared: Preparation,
    options: FinetuneStage,
    place: Path,
    *,
    resume: bool,
    progress: Progress,
) -> Outcome:
    # Adapters freeze everything else.
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    adapted = phase.mode in prepared.adapted
    if adapted:
        phase = with_adapters(model, phase, prepared, options)
    settings = {name: getattr(model.config, name) for name in _TOUCHED if hasattr(model.config, name)}
    if settings.get("layerdrop") and phase.mode in ("transfer", "distill"):
        # A skipped layer has no output to compare.
        model.config.layerdrop = 0.0
    finished = False
    try:
        # Outputs that dropout changes at random cannot equal the teacher's: 100 steps on SQuAD left improved-clustered further
        # from exact attention with it (a loss of 0.27 on held-out questions) than without (0.21; 0.17 before training).
        usual = 0.0 if phase.mode == "distill" else None
        with trainer.dropout(model, usual if options.dropout is None else options.dropout):
            outcome = train(
                model, phase, prepared.data, measure_of(phase, prepared, model), place, resume=resume, progress=progress
            )
        finished = True
    finally:
        for name, value in settings.items():
            setattr(model.config, name, value)
        if adapted:
            # After a failure the weights are those from before this mode.
            trainer.remove_adapters(model, merge=finished)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(before[name])
    with disk_errors(place):
        _finish(place, model, outcome)
    return outcome


def _before(model: Any, measure: Measure) -> tuple[float | None, float | None]:
    if measure.value is None:
        return None, None
    before = measure.value()
    if not families.is_converted(model):
        return None, before
    with exactly(model):
        return measure.value(), before


def _enough(measure: Measure, exact: float | None, before: float | None, options: FinetuneStage) -> float:
    points = allowed_loss(options.budget or "")
    if exact is None:
        why = "this model has no score on these examples" if before is None else "this model is exact already"
        raise ApproxError(
            f"The budget {options.budget} is a loss of score against exact attention, and {why}. Leave it out."
        )
    allowed = points / (100 if METRICS[measure.name].fraction else 1)
    return exact + allowed if measure.lower_is_better else exact - allowed


def has_begun(folder: Path) -> bool:
    """Whether a folder holds the state of a training, also of an earlier version, which did not claim its folders."""
    try:
        return isinstance(json.loads((folder / _STATE).read_bytes())["about"]["weights"], str)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


# How the folder of a training is claimed.
_OURS: tuple[Literal["training"], str, Callable[[Path], bool]] = ("training", "a training", has_begun)


def _begun(folder: Path, model: Any, prepared: Preparation, options: FinetuneStage, *, resume: bool) -> Begun:
    """Claim a folder for this training, or check that it holds this training; return the stored state."""
    settings = json.loads(model.config.to_json_string(use_diff=False))
    about = {
        "options": options.model_dump(mode="json", exclude=_UNSTATED),
        "data": prepared.data.sha256,
        "model": type(model).__name__,
        "weights": state_sha256(model),
        "config": {key: value for key, value in settings.items() if key not in _ELSEWHERE},
        "sites": (getattr(model.config, "approx", None) or {}).get("sites", {}),
    }
    about = About.model_validate(json.loads(json.dumps(about)))
    file = folder / _STATE
    # The leading process removes and writes this file, maybe before another one looks for it.
    found = evaluate.agree(file.read_bytes() if evaluate.leads() and file.is_file() else None)
    if found is not None and resume:
        for path in folder.rglob("*"):
            refuse_leaving(folder, path)
        begun = _read(file, found)
        known = begun.about.model_dump(exclude_none=True)
        if "transfer" not in begun.about.options and begun.about.options:
            raise ApproxError(
                f"{folder} holds an unfinished training of an earlier version of approx, with other defaults. Continue it "
                "with that version, or start over with --force.",
                Exit.REFUSED,
            )
        known["options"] = _with_defaults(known["options"])
        if different := [what for what in known if known[what] != getattr(about, what)]:
            words = {
                "options": "options",
                "data": "examples",
                "model": "architecture",
                "weights": "weights",
                "config": "settings in config.json",
                "sites": "mechanisms",
            }
            raise ApproxError(
                f"{folder} holds an unfinished training with other {', '.join(words[what] for what in different)}. "
                "Continue it with the same ones, or start over with --force.",
                Exit.REFUSED,
            )
        if evaluate.leads():
            claim(folder, *_OURS)
        return begun
    if found is not None:
        raise ApproxError(
            f"{folder} holds an unfinished training. Continue it with --resume, or start over with --force.",
            Exit.REFUSED,
        )
    if resume:
        raise ApproxError(f"There is nothing to resume: {folder} holds no training.", Exit.UNAVAILABLE)
    begun = Begun(about=about, kept_exact=prepared.kept_exact)
    _keep(folder, begun)
    return begun


def _kept_before(folder: Path, model: Any, count: int | None) -> KeptExact | None:
    """The layers that an unfinished training of a folder keeps exact, so that it goes on with the same ones."""
    file = folder / _STATE
    found = evaluate.agree(file.read_bytes() if count and evaluate.leads() and file.is_file() else None)
    kept = None if found is None else _read(file, found).kept_exact
    if kept is None or len(kept.numbers) != count or not families.is_converted(model):
        return None
    # Of another model, which is refused later.
    same = {one.layer for one in kept.layers} == {site["layer"] for site in model.config.approx["sites"].values()}
    return kept if same else None


def _with_defaults(options: dict[str, Any]) -> dict[str, Any]:
    """Stored options of a training, and what later versions added to them, as it was before."""
    usual = FinetuneStage().model_dump(mode="json", exclude=_UNSTATED)
    parts = {name: {**value, **options.get(name, {})} for name, value in usual.items() if isinstance(value, dict)}
    return {**usual, **options, **parts}


def _read(file: Path, text: bytes) -> Begun:
    try:
        state = json.loads(text)
        if isinstance(state, dict) and "scored" not in state:
            # An earlier version wrote both scores or neither.
            state["scored"] = "before" in state
        return Begun.model_validate(state)
    except (ValueError, RecursionError) as error:
        raise _damaged(file, error) from None


def _damaged(file: Path, error: Exception) -> ApproxError:
    reason = first_mistake(error) if isinstance(error, ValidationError) else " ".join(str(error).split())[:200]
    return ApproxError(
        f"{file} is damaged: {reason}. The training cannot go on from there; start over with --force instead of "
        "--resume.",
        Exit.UNAVAILABLE,
    )


def _keep(folder: Path, begun: Begun) -> None:
    if evaluate.leads():
        claim(folder, *_OURS)
        write_whole(folder / _STATE, begun.model_dump_json())


def _finish(place: Path, model: Any, outcome: Outcome) -> None:
    """Store the weights after a mode, then remove its checkpoints."""
    # The other processes may still read the best checkpoint.
    evaluate.gather(None)
    if not evaluate.leads():
        return
    _store(place / "finished.safetensors", model)
    write_whole(place / "finished.json", json.dumps(asdict(outcome)))
    for saved in place.glob("checkpoint-*"):
        shutil.rmtree(saved)


def _finished(place: Path, model: Any) -> Outcome | None:
    file = place / "finished.json"
    if not file.is_file():
        return None
    try:
        outcome = TypeAdapter(Outcome).validate_json(file.read_bytes(), strict=True)
    except ValidationError as error:
        raise _damaged(file, error) from None
    _restore(place / "finished.safetensors", model)
    return outcome


def _store(file: Path, model: Any) -> None:
    """Write the weights of a model, whole or not at all."""
    state = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
    part = file.with_name(f"{file.name}.tmp")
    save_file(state, part)
    part.replace(file)


def _restore(file: Path, model: Any) -> None:
    try:
        model.load_state_dict(load_file(file))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise _damaged(file, error) from None


_OUTCOME = "outcome.json"


class Written(BaseModel):
    """What a training came to, in its folder until that is removed, for the case that the process ends in between.

    Attributes:
        weights: Hashes of the weight files of its output.
        result: What `finetune_folder` returns.
    """

    model_config = ConfigDict(strict=True)

    weights: dict[str, str]
    result: Healing


def finetune_folder(
    name: str | Path,
    out: Path,
    options: FinetuneStage,
    *,
    teacher: str | None = None,
    working: Path | None = None,
    resume: bool = False,
    force: bool = False,
    revision: str | None = None,
    offline: bool = False,
    merge_adapter: bool = False,
    device: str = "cpu",
    progress: Progress = silent,
) -> Healing:
    """Train a checkpoint into a new folder, which gets its name only if every check passes.


    Args:
        name: A folder, a model id of the hub, or `quickstart`; converted or not.
        out: The folder to make.
        options: Options of the training.
        teacher: The exact model for `distill`; by default the checkpoint's own weights with exact attention.
        working: Folder for checkpoints during training; by default `out` with the suffix `.training`.
        resume: Whether to continue an unfinished training into `out`.
        force: Whether to replace an existing `out` and to start an unfinished training over.
        revision: Commit of the hub.
        offline: Whether only local files and the hub's cache may be used.
        merge_adapter: Whether a PEFT adapter next to the weights, or one named by its folder, is merged into them.
        device: Device to train on.
        progress: Called with the current activity, steps done and total steps.

    Raises:
        ApproxError: if the checkpoint, an option or the data are refused, the budget is met already, the loss is not
            finite, or a check fails (exit code 6; the result is kept next to `out` with the suffix `.failed`).
    """
    refuse_sharding()
    out = Path(out)
    working = working or out.with_name(f"{out.name}.training")
    refuse_unclaimed(working, *_OURS)
    ended = resume and not force and (working / _OUTCOME).is_file()
    if not ended:
        refuse_existing(out, force=force)
    refuse_unwritable(out)
    # Another process would continue from the same checkpoints.
    with locked_output(working) if evaluate.leads() else nullcontext():
        written = evaluate.agree(_written_before(out, working) if ended and evaluate.leads() else None)
        if written is not None:
            return written.result
        refuse_existing(out, force=force)
        where = {"revision": revision, "offline": offline, "merge_adapter": merge_adapter, "device": device}
        opened, taught = _opened(name, teacher, options, **where)
        refuse_overlap(opened.source.folder, out)
        if taught is not None:
            _same_tokenizer(opened, taught)
        done = finetune(
            opened.model,
            checkpoint.processor(opened.source),
            options,
            folder=working,
            teacher=None if taught is None else taught.model,
            resume=resume,
            restart=force and not resume,
            progress=progress,
        )

        def result(checks: list[Check]) -> Healing:
            return replace(done, output=str(out), checks=checks, notes=[*opened.notes, *done.notes])

        def keep(folder: Path, checks: list[Check]) -> None:
            made = Written(weights=_hashes(folder), result=result(checks))
            write_whole(working / _OUTCOME, made.model_dump_json())

        if not evaluate.leads():
            return result([])
        checks = _written(opened, out, options, done, taught, keep, force=force, progress=progress)
        remove(working, "training", _OUTCOME)
        return result(checks)


def _written_before(out: Path, working: Path) -> Written | None:
    """The outcome of a training that has written its output already, and was killed before it removed its folder."""
    try:
        found = Written.model_validate_json((working / _OUTCOME).read_bytes())
    except (OSError, ValidationError):
        # Most trainings end before they write anything.
        return None
    if not out.is_dir() or found.weights != _hashes(out):
        return None
    remove(working, "training", _OUTCOME)
    return found


def _hashes(folder: Path) -> dict[str, str]:
    return {path.name: sha256(path) for path in weight_files(folder)}


@dataclass(frozen=True)
class Rehearsal:
    """What a training would do; nothing of it was done."""

    name: str
    examples: int
    held_out: int
    measure: str
    phases: list[Estimate]
    approximated: float | None
    notes: list[str]
    kept_exact: KeptExact | None = None


def rehearse(
    name: str | Path,
    options: FinetuneStage,
    *,
    teacher: str | None = None,
    revision: str | None = None,
    offline: bool = False,
    merge_adapter: bool = False,
    device: str = "cpu",
) -> Rehearsal:
    """Report what `finetune_folder` would do, with time and memory from one step of each mode; nothing is written.

    Args and errors: as for `finetune_folder`.
    """
    refuse_sharding()
    where = {"revision": revision, "offline": offline, "merge_adapter": merge_adapter, "device": device}
    opened, taught = _opened(name, teacher, options, **where)
    reader = checkpoint.processor(opened.source)
    prepared = prepare_training(opened.model, reader, options, None if taught is None else taught.model)
    return Rehearsal(
        name=opened.source.name,
        examples=len(prepared.data.split.examples),
        held_out=len(prepared.data.validated.examples),
        measure=prepared.measure.name,
        phases=[estimate(opened.model, phase, prepared, options) for phase in prepared.phases],
        approximated=prepared.approximated,
        notes=[*opened.notes, *prepared.notes],
        kept_exact=prepared.kept_exact,
    )


def _opened(
    name: str | Path,
    teacher: str | None,
    options: FinetuneStage,
    *,
    revision: str | None,
    offline: bool,
    merge_adapter: bool,
    device: str,
) -> tuple[Checkpoint, Checkpoint | None]:
    verify.begin()
    opened = checkpoint.load(name, revision=revision, offline=offline, merge_adapter=merge_adapter, device=device)
    # Before the training, not when its result is written.
    refuse_foreign(opened.source, carried(opened.source.config))
    record = opened.source.raw.get("approx") or {}
    if teacher is None:
        if "distill" in (options.recover or []) and trainer.retrained(record):
            raise ApproxError(
                f"The weights of {name} were trained since they were converted, so with exact attention they are not "
                "the base. Name it with --teacher.",
            )
        return opened, None
    if options.recover is not None and "distill" not in options.recover and options.keep_exact is None:
        raise ApproxError(_IDLE_TEACHER)
    taught = checkpoint.load(teacher, offline=offline, merge_adapter=merge_adapter, device=device)
    if taught.source.converted or taught.source.stock_class is not opened.source.stock_class:
        raise ApproxError(
            f"The teacher {teacher} is a {type(taught.model).__name__}; it has to be an exact "
            f"{opened.source.stock_class.__name__}, such as the checkpoint that {name} was converted from.",
            Exit.UNSUPPORTED,
        )
    return opened, taught


def _same_tokenizer(opened: Checkpoint, taught: Checkpoint) -> None:
    student_reader, teacher_reader = checkpoint.processor(opened.source), checkpoint.processor(taught.source)
    vocabularies = [getattr(each, "get_vocab", dict)() for each in (student_reader, teacher_reader)]
    if vocabularies[0] != vocabularies[1]:
        raise ApproxError(
            f"The tokenizer of {opened.source.name} and that of the teacher {taught.source.name} differ, so the two "
            "read different tokens. Take the checkpoint that was converted as the teacher."
        )


def _written(
    opened: Checkpoint,
    out: Path,
    options: FinetuneStage,
    done: Healing,
    taught: Checkpoint | None,
    keep: Callable[[Path, list[Check]], None],
    *,
    force: bool,
    progress: Progress,
) -> list[Check]:
    model = opened.model.to("cpu")
    state = dict(model.state_dict())
    receipt: Receipt | None = None
    results: list[Check] = []
    written = {"comparing the weights": lambda folder: verify.weights(folder, state, "trained")}

    def say(what: str) -> None:
        progress(what, 0, 1)

    if opened.source.converted:
        receipt = read_receipt(opened.source.folder)
        say("checking padding and causality")
        results = [verify.padding(model), verify.causality(model)]
        _remember(opened, options, done, taught)
        if receipt is not None:
            if done.kept_exact is not None:
                receipt.keep(done.kept_exact.numbers)
            batch = calibration_batch(opened.source, model, calibration_length(model), None)
            receipt.lost(verify.layer_damage(model, batch.inputs), batch.description)
        written["reloading in a fresh process"] = lambda folder: verify.fresh_process(folder, model)
    return convert.write_checked(
        out,
        opened,
        written,
        what=f"The training of {opened.source.name}",
        earlier=results,
        receipt=receipt,
        force=force,
        passed=keep,
        progress=say,
    )


def _remember(opened: Checkpoint, options: FinetuneStage, done: Healing, taught: Checkpoint | None) -> None:
    step = Training(
        approx=__version__,
        base=convert.named_base(opened),
        recover=done.recover,
        task=options.task,
        data_sha256=done.data_sha256,
        examples=done.examples,
        held_out=done.held_out,
        steps=done.steps,
        seconds=sum(phase.seconds for phase in done.phases),
        seed=options.seed,
        teacher=None if taught is None else convert.named_base(taught),
        measure=done.measure,
        exact=done.exact,
        before=done.before,
        after=done.after,
        fitted=done.fitted,
        helped=done.helped,
        kept_exact=done.kept_exact,
        # Paths may be private.
        options={name: value for name, value in done.options.items() if name not in ("data", "text")},
    )
    record = opened.model.config.approx
    record["history"] = [*record.get("history", []), step.model_dump()]
