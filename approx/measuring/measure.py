"""Open checkpoints, measure their quality and speed, and make a record."""

import copy
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from approx.checkpoints import checkpoint, families
from approx.conversion import surgery
from approx.errors import ApproxError, Exit
from approx.evaluation import record, record_model
from approx.evaluation.bench import Contender, bench, crossover
from approx.evaluation.evaluate import Subject, evaluate
from approx.evaluation.options import BenchStage, EvaluateStage
from approx.evaluation.prediction_cache import default_folder, fingerprint
from approx.evaluation.quality import over_tasks
from approx.evaluation.record_model import Quality, RecipeText, Record
from approx.evaluation.record_speed import Speed
from approx.evaluation.record_training import Trained
from approx.evaluation.timing_inputs import image_inputs, sound_inputs, text_inputs
from approx.measuring.decoding import decoders
from approx.measuring.identity import computed_by, identity
from approx.measuring.products import products_for
from approx.measuring.reseeding import reseeding
from approx.measuring.variants import variant_of
from approx.planning import anatomy, positions
from approx.planning.example_inputs import example_inputs, samples
from approx.recipe import BASE, CEILING, CHOICES
from approx.seam.attention_free import attention_free
from approx.seam.dispatch import fastest_exact
from approx.tasks import Task, open_task
from approx.tasks.table import is_hub
from approx_kernels.dispatch.implementation import chosen_in

Progress = Callable[[str, int, int], None]


def silent(stage: str, done: int, total: int) -> None:
    """Ignore progress."""


def choose_device(device: str) -> str:
    """The device that `auto`, `cpu` or `cuda` means on this machine; `auto` prefers a GPU.

    Raises:
        ApproxError: if the name is none of these, or there is no GPU.
    """
    _check_choice("device", device)
    if device == "cuda" and not torch.cuda.is_available():
        raise ApproxError("The device is 'cuda', but torch sees no GPU. Use the device 'cpu'.", Exit.MISSING)
    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    # Each process on a machine has its own GPU.
    rank = os.environ.get("LOCAL_RANK")
    return f"cuda:{rank}" if chosen == "cuda" and rank is not None else chosen


def open_all(
    names: Mapping[str, str],
    device: str,
    dtype: str,
    *,
    revision: str | None = None,
    offline: bool = False,
    merge_adapter: bool = False,
) -> dict[str, checkpoint.Checkpoint]:
    """Load several checkpoints onto one device.

    Raises:
        ApproxError: if the device or dtype is not available, or a checkpoint cannot be loaded.
    """
    device = choose_device(device)
    _check_choice("dtype", dtype)
    return {
        label: checkpoint.load(
            name, dtype=dtype, device=device, revision=revision, offline=offline, merge_adapter=merge_adapter
        )
        for label, name in names.items()
    }


def under_exact_attention(converted: checkpoint.Checkpoint) -> checkpoint.Checkpoint:
    """Convert a checkpoint to its own base, in place: the same weights and positions, with exact attention."""
    source, model = converted.source, converted.model
    surgery.use_exact_attention(model)
    stock = dataclasses.replace(
        source, name=f"{source.name} with exact attention", config=model.config, converted=False
    )
    return dataclasses.replace(converted, source=stock)


def task_of(stage: EvaluateStage) -> Task:
    """The task of a stage.

    Raises:
        ApproxError: if the task or a setting is unknown, or its examples cannot be streamed.
    """
    task = open_task(stage.task, **stage.settings)
    if stage.streaming and not is_hub(stage.data) and (stage.data is not None or task.dataset is None):
        source = f"come from {stage.data}" if stage.data else "are generated, or come from files"
        raise ApproxError(
            f"Only hub datasets can be streamed, but the examples of {task.name} {source}. Leave out streaming."
        )
    return task


def subject_of(label: str, one: checkpoint.Checkpoint, processor: Any, *, fast_products: bool = False) -> Subject:
    """A checkpoint as evaluations read it: identified by its hash, and if it is converted, with what it approximates."""
    known = fingerprint(identity(one), computed_by(one.model.device, fast_products=fast_products))
    if not one.source.converted:
        return Subject(label, one.model, processor, known)
    model: Any = one.model
    return Subject(
        label, model, processor, known, approximates=model.approximates, approximated_pairs=model.approximated_pairs
    )


def measure_quality(
    opened: Mapping[str, checkpoint.Checkpoint],
    stage: EvaluateStage,
    *,
    seed: int,
    outputs: Path | None,
    fresh: bool,
    progress: Progress,
) -> Quality:
    """The `quality` entry of a record; the first checkpoint is the base of all others.

    With `fresh`, stored outputs are ignored and none are stored.
    """
    subjects = {}
    for label, one in opened.items():
        subject = subject_of(label, one, checkpoint.processor(one.source), fast_products=stage.fast_products)
        reseeded = reseeding(one, subject) if stage.seeds > 1 and label != BASE else None
        subjects[label] = dataclasses.replace(subject, reseeded=reseeded)
    task = task_of(stage)
    with products_for([one.model for one in opened.values()], stage.fast_products):
        entry = evaluate(
            subjects,
            task,
            stage,
            data=_path(stage.data),
            seed=seed,
            device=opened[BASE].model.device,
            outputs=outputs,
            kept=None if fresh else default_folder(),
            progress=lambda done, total: progress(f"evaluate {stage.task}", done, total),
        )
    notes = [*entry.notes, *(["fast float32 products"] if stage.fast_products else [])]
    return entry.model_copy(update={"notes": notes, "settings": stage.settings, "fast_products": stage.fast_products})


def measure_speed(
    opened: Mapping[str, checkpoint.Checkpoint],
    stage: BenchStage,
    texts: EvaluateStage | None,
    *,
    seed: int,
    progress: Progress,
) -> list[Speed]:
    """The `speed` entries of a record; the first checkpoint is the exact base of all others."""
    models = {label: _long_enough(one.model, stage.max_length) for label, one in opened.items()}
    base, source = models[BASE], opened[BASE].source
    facts = anatomy.anatomy(families.stock_config(source.config), source.stock_class)
    if facts.fixed_length is not None:
        # Other lengths would be the same inputs under a wrong name.
        stage = stage.model_copy(update={"lengths": [facts.fixed_length]})
    longest, also = max(stage.lengths), ""
    if stage.mode == "generate":
        longest, also = longest + stage.new_tokens, f", with {stage.new_tokens} new tokens,"
    # Reversed, so that the error names the variant rather than its base, which may be the same checkpoint.
    for label, model in reversed(models.items()):
        limit = positions.limit(model.config)
        if limit is not None and longest > limit:
            raise ApproxError(
                f"Length {max(stage.lengths)}{also} is too long: {opened[label].source.name} takes {limit} positions. "
                f"Use shorter lengths, or extend the positions for timing with --max-length {longest}."
            )
    contenders = decoders(models, stage.new_tokens) if stage.mode == "generate" else _forwards(models)
    with products_for(models.values(), stage.fast_products):
        speed = bench(
            contenders,
            stage,
            make_inputs=_input_maker(base, source, texts, seed),
            device=base.device,
            dtype=base.dtype,
            seed=seed,
            chosen_in=chosen_in,
            progress=lambda done, total, what: progress(f"bench {what}".strip(), done, total),
        )
    return [
        row.model_copy(
            update={
                "fast_products": stage.fast_products,
                "seconds": None if facts.seconds is None else facts.seconds * row.length,
            }
        )
        for row in speed
    ]


def _forwards(models: Mapping[str, Any]) -> list[Contender]:
    """Contenders that make one forward pass: the first model is the base, in its own ways and without attention."""
    base = models[BASE]

    def without_attention(inputs: Any) -> Any:
        with attention_free(base):
            return base(**inputs)

    def fastest(inputs: Any) -> Any:
        with fastest_exact(base):
            return base(**inputs)

    def forward(model: Any) -> Callable[[Any], Any]:
        return lambda inputs: model(**inputs)

    return [
        Contender(BASE, forward(base), "base"),
        Contender("fastest way", fastest, "exact"),
        Contender(CEILING, without_attention, "ceiling"),
        *(Contender(label, forward(model)) for label, model in models.items() if label != BASE),
    ]


def make_record(
    opened: Mapping[str, checkpoint.Checkpoint],
    *,
    title: str,
    seed: int,
    command: str,
    quality: Sequence[Quality] = (),
    speed: Sequence[Speed] = (),
    trainings: Sequence[Trained] = (),
    notice: str | None = None,
    recipe: RecipeText | None = None,
) -> Record:
    """Make a record; the first checkpoint is the base, the others are its variants."""
    base, *variants = opened.items()
    source, model = base[1].source, base[1].model
    facts = anatomy.anatomy(families.stock_config(source.config), source.stock_class)
    return Record(
        schema=record.SCHEMA,
        title=title,
        notice=notice,
        command=command,
        seed=seed,
        recipe=recipe,
        checkpoint=record_model.Checkpoint(
            name=source.name,
            revision=source.revision,
            weights_sha256=base[1].weights_sha256,
            family=facts.family,
            parameters=facts.parameters,
            layers=len(facts.sites),
            positions=facts.positions,
        ),
        variants=[variant_of(label, one) for label, one in variants],
        quality=over_tasks(quality),
        speed=list(speed),
        crossover=crossover(speed),
        trainings=list(trainings),
        environment=record.environment(
            threads=torch.get_num_threads(),
            gpu=torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else None,
        ),
    )


def _long_enough(model: Any, length: int | None) -> Any:
    """The model, or a copy with longer positions, so that the evaluated model does not change."""
    limit = positions.limit(model.config)
    if length is None or limit is None or length <= limit:
        return model
    copied = copy.deepcopy(model)
    positions.resize(copied, length)
    return copied


def _input_maker(
    base: Any, source: checkpoint.Source, texts: EvaluateStage | None, seed: int
) -> Callable[[int, int], dict[str, torch.Tensor]]:
    if texts is None:
        return lambda batch, length: example_inputs(base, length, batch=batch, seed=seed, device=base.device)
    task = open_task(texts.task, **texts.settings)
    if task.input_name != base.main_input_name:
        raise ApproxError(
            f"{task.name} makes {task.input_name}, but {source.name} takes {base.main_input_name}. Use a task with its kind of "
            "input, or none.",
            Exit.UNSUPPORTED,
        )
    examples = task.examples(_path(texts.data), texts.split, texts.limit, streaming=texts.streaming)
    if task.input_name == "input_values":
        size = partial(samples, base.config)
        return sound_inputs(task, examples, checkpoint.processor(source), size, base.device, base.dtype)
    if task.input_name == "pixel_values":
        return image_inputs(task, examples, checkpoint.processor(source), base.device, base.dtype)
    return text_inputs(task, examples, checkpoint.processor(source), base.device)


def _path(data: str | None) -> Path | None:
    return None if data is None else Path(data)


def _check_choice(what: str, given: str) -> None:
    if given not in CHOICES[what]:
        raise ApproxError(f"The {what} '{given}' is unknown; allowed are {', '.join(CHOICES[what])}.")
