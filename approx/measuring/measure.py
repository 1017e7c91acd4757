"""Open checkpoints and their variants, measure quality and speed side by side, and make a record."""

import ast
import copy
import dataclasses
import functools
import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from approx.checkpoints import checkpoint, exported, families
from approx.checkpoints.checkpoint import Checkpoint, Source, processor_of, state_sha256
from approx.checkpoints.exported import ExportedModel
from approx.checkpoints.history import conversion, read_receipt
from approx.conversion import surgery
from approx.conversion.calibration import calibrate, calibration_batch, mechanisms
from approx.errors import ApproxError, Exit
from approx.evaluation import record
from approx.evaluation.bench import Contender, bench, crossover
from approx.evaluation.evaluate import Subject, default_folder, evaluate, fingerprint
from approx.evaluation.inputs import Ablation
from approx.evaluation.options import BASE, CEILING, CHOICES, BenchStage, EvaluateStage
from approx.evaluation.quality import over_tasks
from approx.evaluation.record import Layer, Quality, RecipeText, Record, Speed, Trained, Variant
from approx.evaluation.timing import image_inputs, sound_inputs, text_inputs, written_inputs
from approx.measuring.prediction import Continued, Predicted, compare, continued, decoders
from approx.measuring.products import products_for
from approx.measuring.quantised import quantise, refuse_quantising
from approx.planning import anatomy, positions
from approx.planning.plan import described
from approx.planning.positions import example_inputs, samples
from approx.progress import Progress
from approx.seam.attention_free import attention_free
from approx.seam.dispatch import fastest_exact
from approx.tasks import open_task
from approx.tasks.table import is_hub
from approx.tasks.task import Split, Task
from approx_kernels.cpu.compile import compiler_obstacle
from approx_kernels.dispatch.findings import found, instructions, multiplies_bfloat16
from approx_kernels.dispatch.implementation import chosen_in

_LOG = logging.getLogger(__name__)


def in_memory(model: Any, processor: Any, *, offline: bool = False, reads: bool = True) -> Checkpoint:
    """Describe a model, stock or converted, as a checkpoint; the model is not copied.

    Args:
        model: A transformers model.
        processor: Its tokenizer, feature extractor or processor, or the name of a folder or hub model that has one.
        offline: Whether to use only local files and the hub's cache.
        reads: Whether the model will read texts, sounds or images, which takes a processor.

    Raises:
        ApproxError: if it is not a transformers model, or the processor is missing, or something else.
    """
    if not isinstance(model, PreTrainedModel):
        raise ApproxError(
            f"A {type(model).__name__} cannot be measured. Pass the name of a checkpoint, or a model from "
            "from_pretrained, without a wrapper."
        )
    if processor is None and reads:
        raise ApproxError(
            f"A {type(model).__name__} needs its tokenizer or processor. Pass it as 'processor', e.g. "
            "AutoTokenizer.from_pretrained(…), or the folder that holds it."
        )
    if isinstance(processor, str | os.PathLike):
        processor = processor_of(os.fspath(processor), type(model), offline=offline)
    elif processor is not None and not callable(processor):
        raise ApproxError(
            f"'processor' is of type {type(processor).__name__}; a tokenizer, a processor or the name of a folder is "
            "needed. Pass e.g. AutoTokenizer.from_pretrained(…)."
        )
    source = Source(
        name=type(model).__name__,
        # A path that contains no files.
        folder=Path(os.devnull),
        revision=None,
        raw=model.config.to_dict(),
        config=model.config,
        stock_class=families.stock_class(type(model)),
        converted=families.is_converted(model),
        reader=processor,
    )
    weights = state_sha256(model)
    if (adapters := getattr(model, "peft_config", None)) is not None:
        # How strongly an adapter acts is in its config alone, and which one acts in the model.
        about = {name: one.to_dict() for name, one in adapters.items()}
        weights = fingerprint(weights, about, model.active_adapters())
    return Checkpoint(source, model, weights)


# Tokens of an input for models without a limit.
_NO_LIMIT = 1024


def variant_of(label: str, one: Checkpoint) -> Variant:
    """Describe a model compared with the base: its layers, what they learned, and the receipt of its conversion."""
    sites = (one.source.raw.get("approx") or {}).get("sites", {})
    receipt = read_receipt(one.source.folder)
    return Variant(
        name=label,
        layers=[
            Layer(
                layer=part.layer,
                mechanism=part.mechanism,
                settings=part.settings,
                **({"heads": part.heads} if "groups" in site else {}),
                **_spans(mechanism, one.model.config),
            )
            for path, site in sorted(sites.items(), key=lambda item: item[1]["layer"])
            for part, mechanism in zip(described(site), _members(one, path), strict=True)
        ],
        # An unconverted model has nothing to verify; an export was compared with its model.
        verified=_runs_exported(one) or not one.source.converted or (receipt is not None and receipt.verified),
        receipt=None if receipt is None else receipt.model_dump(mode="json"),
        weights_sha256=one.weights_sha256,
        runtime=one.runtime,
    )


def _runs_exported(one: Checkpoint) -> bool:
    return isinstance(one.model, ExportedModel)


def _is_quantised(one: Checkpoint) -> bool:
    return one.runtime is not None and not _runs_exported(one)


def _members(one: Checkpoint, path: str) -> list[Any]:
    """The mechanism of a layer, or those of the groups of its heads; None for each in a program, which has no modules."""
    if _runs_exported(one):
        return [None] * len(described(one.source.raw["approx"]["sites"][path]))
    mechanism = one.model.base_model.get_submodule(path).mechanism
    return list(getattr(mechanism, "groups", [mechanism]))


def _spans(mechanism: Any, config: Any) -> dict[str, Any]:
    spans = getattr(mechanism, "spans", None)
    if spans is None:
        return {}
    length = positions.limit(config) or _NO_LIMIT
    exact = type(mechanism)(
        mechanism.heads,
        mechanism.head_dim,
        causal=mechanism.causal,
        scale=mechanism.scale,
        **mechanism.exact_settings(length),
    )
    return {"spans": spans.tolist(), "operations": mechanism.flops(length) / exact.flops(length)}


def reseeding(opened: Checkpoint, subject: Subject) -> Callable[[int], AbstractContextManager[Subject]] | None:
    """A context manager that raises all seeds of a converted checkpoint; None if nothing in it is random.

    Mechanisms that are fitted to a calibration batch start from random state, so they are fitted again. Afterwards all
    tensors and seeds are restored.

    Args:
        opened: The checkpoint.
        subject: The checkpoint as a subject of an evaluation.

    Raises:
        ApproxError: if mechanisms were fitted to a text of the user, which a checkpoint does not store.
    """
    if not opened.source.converted:
        return None
    model = opened.model
    # Only mechanisms with random state have a seed.
    drawing: list[Any] = [mechanism for mechanism in mechanisms(model) if hasattr(mechanism, "redraw")]
    if not drawing:
        return None
    fitted = any(mechanism.needs_calibration for mechanism in drawing)
    step = conversion(model.config.approx)
    if fitted and (step is None or step.calibration is not None):
        text = step.calibration if step else None
        raise ApproxError(
            f"The mechanisms of {subject.name} were fitted to {text.name if text else 'inputs'}, which the checkpoint "
            "does not store, so they cannot be fitted with other seeds. Leave out --seeds, or convert without "
            "--calibrate.",
            Exit.UNSUPPORTED,
        )

    @contextmanager
    def reseeded(raised: int) -> Iterator[Subject]:
        seeds = [mechanism.seed for mechanism in drawing]
        states = [{name: value.clone() for name, value in mechanism.state_dict().items()} for mechanism in drawing]
        try:
            with torch.no_grad():
                for mechanism, seed in zip(drawing, seeds, strict=True):
                    mechanism.redraw(seed + raised)
            if fitted and step is not None:
                calibrate(model, calibration_batch(opened.source, model, step.calibration_length).inputs, drawing)
            identity = None if subject.identity is None else fingerprint(subject.identity, "seed", raised)
            yield replace(subject, name=f"{subject.name}, seed + {raised}", identity=identity, reseeded=None)
        finally:
            for mechanism, seed, state in zip(drawing, seeds, states, strict=True):
                mechanism.seed = seed
                mechanism.load_state_dict(state)

    return reseeded


def ablation(opened: Checkpoint, subject: Subject) -> Ablation:
    """What can be switched off in a checkpoint: the estimates beside exact keys, see `surgery.estimates`.

    Args:
        opened: The checkpoint.
        subject: The checkpoint as a subject of an evaluation.
    """
    found = surgery.estimates(opened.model)

    @contextmanager
    def off() -> Iterator[Subject]:
        known = None if subject.identity is None else fingerprint(subject.identity, "without estimates")
        with surgery.without_estimates(opened.model):
            yield replace(subject, name=f"{subject.name} without its {found.part}", identity=known, ablation=None)

    return Ablation(found.part, found.layers, off, found.why)


_COMPANIONS = (".json", ".txt", ".model")
_COMPUTES = ("checkpoints", "conversion", "evaluation", "measuring", "mechanisms", "planning", "seam", "tasks")


def identity(opened: Checkpoint) -> str:
    """Hash everything that the outputs of an opened checkpoint depend on.

    The config includes the plan: every mechanism with its settings and seed. Random and calibrated state is among the
    weights. The generation config decides what a model of speech or text writes.
    """
    model: Any = opened.model
    config = {key: value for key, value in model.config.to_dict().items() if key != "_name_or_path"}
    generation = getattr(model, "generation_config", None)
    ways = None if generation is None else generation.to_dict()
    versions = (opened.runtime or torch.__version__, transformers.__version__, code())
    return fingerprint(type(model).__name__, opened.weights_sha256, config, ways, str(model.dtype), versions)


def computed_by(device: torch.device, *, fast_products: bool = False) -> str:
    """The code that computes on a device: instruction set, C or PyTorch, and the implementations that a probe chose.

    These round differently. They are not part of the identity, which is the same on every machine.
    """
    if device.type == "cuda":
        computes = torch.cuda.get_device_name(device)
    else:
        computes = f"{instructions()}, {'PyTorch alone' if compiler_obstacle() else 'C'}"
    ways = {subject: one.get("way") for subject, one in found(device.type).items()}
    return computes + (f", {fingerprint(ways)}" if ways else "") + ", fast products" * fast_products


def companions_sha256(folder: Path) -> str:
    """Hash the files of a checkpoint's folder other than weights: config and tokenizer."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in _COMPANIONS:
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def examples_read(task: Task, split: Split) -> str:
    """Hash a task's settings and its loaded examples, regardless of their location."""
    rows = [(one.id, one.brief, one.label, one.group) for one in split.examples]
    return fingerprint(task.name, vars(task), split.name, split.subset, rows)


@functools.cache
def code(rooms: tuple[str, ...] = _COMPUTES) -> str:
    """Hash the code that results depend on, so that results of other code are not reused.

    Commands, pipeline and publishing do not compute results and are left out, as are docstrings and comments.

    Args:
        rooms: Packages of approx to include, besides the kernels. Training is left out by default: no measurement of a
            finished model depends on it.
    """
    hashed = hashlib.sha256()
    for package, parts in (("approx", rooms), ("approx_kernels", ("",))):
        spec = find_spec(package)
        for place in map(Path, (spec.submodule_search_locations if spec else None) or ()):
            for path in sorted(path for room in parts for path in (place / room).rglob("*") if path.is_file()):
                if path.suffix in (".py", ".c", ".h"):
                    source = path.read_bytes()
                    computes = what_computes(source) if path.suffix == ".py" else source
                    hashed.update(path.relative_to(place).as_posix().encode() + b"\0" + computes)
    return hashed.hexdigest()


def what_computes(source: bytes) -> bytes:
    """The syntax tree of a Python source without docstrings; it has no comments and no line breaks."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            node.body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    return ast.dump(tree).encode()


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
    quantize: str | None = None,
    revision: str | None = None,
    offline: bool = False,
    merge_adapter: bool = False,
) -> dict[str, checkpoint.Checkpoint]:
    """Load several checkpoints onto one device; `quantize` rounds their weights, see `quantised.quantise`.

    Raises:
        ApproxError: if the device or dtype is not available, or a checkpoint cannot be loaded or rounded.
    """
    if quantize is not None:
        refuse_quantising(quantize, device)
        device = "cpu"
    device = choose_device(device)
    _check_choice("dtype", dtype)
    opened = {
        label: checkpoint.load(
            name, dtype=dtype, device=device, revision=revision, offline=offline, merge_adapter=merge_adapter
        )
        for label, name in names.items()
    }
    halves = {str(one.model.dtype).removeprefix("torch.") for one in opened.values()} & {"bfloat16", "float16"}
    if halves and device == "cpu" and dtype == "auto" and not multiplies_bfloat16():
        _LOG.info(
            "The checkpoint is stored in %s, for which this processor has no instructions: --dtype float32 is faster.",
            " and ".join(sorted(halves)),
        )
    return opened if quantize is None else {label: quantise(one, quantize) for label, one in opened.items()}


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
    """A checkpoint for evaluations: identified by its hash and, if converted, with the inputs that it approximates."""
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
    seeds, ablate = {"--seeds": stage.seeds > 1}, {"--ablate": stage.ablate}
    _refuse_exported(opened, seeds | ablate | {"--fast-products": stage.fast_products})
    subjects = {}
    for label, one in opened.items():
        subject = subject_of(label, one, checkpoint.processor(one.source), fast_products=stage.fast_products)
        reseeded = reseeding(one, subject) if stage.seeds > 1 and label != BASE else None
        cut = ablation(one, subject) if stage.ablate and label != BASE else None
        subjects[label] = dataclasses.replace(subject, reseeded=reseeded, ablation=cut)
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
            ledgers=None if fresh else default_folder(),
            progress=lambda done, total: progress(f"evaluate {stage.task}", done, total),
        )
    notes = [*entry.notes, *(["fast float32 products"] if stage.fast_products else [])]
    notes += [f"runs in {opened[BASE].runtime}"] if _is_quantised(opened[BASE]) else []
    return entry.model_copy(update={"notes": notes, "settings": stage.settings, "fast_products": stage.fast_products})


def measure_speed(
    opened: Mapping[str, checkpoint.Checkpoint],
    stage: BenchStage,
    texts: EvaluateStage | None,
    *,
    seed: int,
    progress: Progress,
) -> Iterator[Speed]:
    """The `speed` entries of a record, each as soon as it is measured; the first checkpoint is the exact base of all others."""
    longer, generates = {"--max-length": stage.max_length is not None}, {"--mode generate": stage.mode == "generate"}
    _refuse_exported(opened, longer | generates | {"--fast-products": stage.fast_products})
    models = {label: _long_enough(one.model, stage.max_length) for label, one in opened.items()}
    base, source = models[BASE], opened[BASE].source
    facts = anatomy.anatomy(families.stock_config(source.config), source.stock_class)
    if facts.fixed_length is not None:
        # All lengths would time the same inputs.
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
    contenders = decoders(models, stage.new_tokens) if stage.mode == "generate" else forwards(models)
    with products_for(models.values(), stage.fast_products):
        for row in bench(
            contenders,
            stage,
            make_inputs=input_maker(base, source, texts, seed),
            device=base.device,
            dtype=_computes_in(opened[BASE]),
            seed=seed,
            chosen_in=chosen_in,
            progress=lambda done, total, what: progress(f"bench {what}".strip(), done, total),
        ):
            duration = None if facts.seconds is None else facts.seconds * row.length
            yield row.model_copy(update={"fast_products": stage.fast_products, "seconds": duration})


def _refuse_exported(opened: Mapping[str, Checkpoint], options: Mapping[str, bool]) -> None:
    """Refuse options that change a model, if one of those opened is a program, which nothing can change."""
    named = [one.source.name for one in opened.values() if _runs_exported(one)]
    used = [option for option, given in options.items() if given]
    if named and used:
        raise ApproxError(
            f"{used[0]} changes a model or its cache, but {named[0]} is an exported program, which is fixed and makes forward "
            "passes alone. Leave it out, or use the checkpoint that was exported.",
            Exit.UNSUPPORTED,
        )


def _computes_in(one: Checkpoint) -> str:
    dtype = str(one.model.dtype).removeprefix("torch.")
    return f"{dtype} with int8 weights" if _is_quantised(one) else dtype


def forwards(models: Mapping[str, Any]) -> list[Contender]:
    """Contenders that make one forward pass; the first model is the base, which also runs without attention."""
    base = models[BASE]

    def without_attention(inputs: Any) -> Any:
        with attention_free(base):
            return base(**inputs)

    def fastest(inputs: Any) -> Any:
        with fastest_exact(base):
            return base(**inputs)

    def forward(model: Any) -> Callable[[Any], Any]:
        return lambda inputs: model(**inputs)

    variants = [Contender(label, forward(model)) for label, model in models.items() if label != BASE]
    if isinstance(base, ExportedModel):
        # Its attention was chosen by the export.
        return [Contender(BASE, forward(base), "base", fixed=base.runtime), *variants]
    return [
        Contender(BASE, forward(base), "base"),
        Contender("fastest way", fastest, "exact"),
        Contender(CEILING, without_attention, "ceiling"),
        *variants,
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
        checkpoint=record.Checkpoint(
            name=source.name,
            revision=source.revision,
            weights_sha256=base[1].weights_sha256,
            family=facts.family,
            parameters=facts.parameters,
            layers=len(facts.sites),
            positions=facts.positions,
            runtime=base[1].runtime,
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


def input_maker(
    base: Any, source: checkpoint.Source, texts: EvaluateStage | None, seed: int
) -> Callable[[int, int], dict[str, torch.Tensor]]:
    """Makes inputs of a batch size and a length to time a model on: of a task's examples, or random ones.

    Raises:
        ApproxError: if the task makes another kind of input than the model takes, or its data cannot be read.
    """

    def random(batch: int, length: int) -> dict[str, torch.Tensor]:
        return example_inputs(base, length, batch=batch, seed=seed, device=base.device)

    if texts is None:
        return random
    task = open_task(texts.task, **texts.settings)
    if task.input_name != base.main_input_name and not task.writes(base):
        raise ApproxError(
            f"{task.name} makes {task.input_name}, but {source.name} takes {base.main_input_name}. Use a task with its "
            "kind of input, or none.",
            Exit.UNSUPPORTED,
        )
    examples = task.examples(_path(texts.data), texts.split, texts.limit, streaming=texts.streaming)
    if task.writes(base):
        return written_inputs(task, examples, checkpoint.processor(source), base, random)
    if task.input_name == "input_values":
        size = partial(samples, base)
        return sound_inputs(task, examples, checkpoint.processor(source), size, base.device, base.dtype)
    if task.input_name == "pixel_values":
        return image_inputs(task, examples, checkpoint.processor(source), base.device, base.dtype)
    return text_inputs(task, examples, checkpoint.processor(source), base.device)


def _path(data: str | None) -> Path | None:
    return None if data is None else Path(data)


def _check_choice(what: str, name: str) -> None:
    if name not in CHOICES[what]:
        raise ApproxError(f"The {what} '{name}' is unknown; allowed are {', '.join(CHOICES[what])}.")


def open_pair(
    model: str | Any,
    against: str | Any | None,
    device: str,
    dtype: str,
    offline: bool,
    processor: Any = None,
    *,
    reads: bool = True,
    quantize: str | None = None,
    merge_adapter: bool = False,
    runtime: str | None = None,
    beside: Sequence[str] = (),
) -> dict[str, checkpoint.Checkpoint]:
    """Open a model and the base to compare it with.

    Args:
        model: A folder, a hub model id, or `quickstart`; or a loaded model.
        against: The base; by default the model's own weights under exact attention. None for a stock model opens it
            alone.
        device: `auto`, `cpu` or `cuda`.
        dtype: `auto` or the name of a torch dtype.
        offline: Whether to use only local files and the hub's cache.
        processor: The tokenizer or processor of a loaded model, or the folder that holds it.
        reads: Whether loaded models will read inputs, which takes a processor.
        quantize: `int8` rounds the weights of all models; loaded ones are copied before.
        merge_adapter: Whether a PEFT adapter next to the weights, or one named by its folder, is merged into them.
        runtime: What runs exported programs; None for the usual runtime of their formats.
        beside: Further models to compare with the base.

    Returns:
        `exact` -> the base, then the label of the model -> the model, and the same of those beside it.

    Raises:
        ApproxError: if one cannot be loaded or rounded, the base is converted, or two have one label.
    """
    names = [name for name in (model, against, *beside) if isinstance(name, str)]
    programs = [name for name in names if exported.is_exported(name)]
    if runtime is not None and not programs:
        raise ApproxError(
            f"--runtime {runtime} runs exported programs, but {' and '.join(names) or 'the model'} "
            f"{'are' if len(names) > 1 else 'is'} none. Export it first, or leave --runtime out."
        )
    if quantize is not None and programs:
        raise ApproxError(
            f"--quantize rounds models in PyTorch, but {programs[0]} is an exported program, whose precision its export chose. "
            f"Leave it out, or export the checkpoint with --quantize {quantize}."
        )
    if quantize is not None:
        refuse_quantising(quantize, device)
    if beside and against is None:
        raise ApproxError("--beside needs a base for all models. Name it with --against.")
    if twice := {
        label for label in map(label_of, [model, *beside]) if [*map(label_of, [model, *beside])].count(label) > 1
    }:
        raise ApproxError(
            f"Two of the models are called {min(twice)}. Rename a folder: tables tell models by these names."
        )

    def opened(label: str, one: str | Any) -> checkpoint.Checkpoint:
        if not isinstance(one, str):
            loaded = in_memory(one, processor, offline=offline, reads=reads)
            return loaded if quantize is None else quantise(_on_cpu(loaded), quantize)
        if exported.is_exported(one):
            return exported.load(one, runtime=runtime, dtype=dtype, device=device)
        return open_all({label: one}, on, dtype, quantize=quantize, offline=offline, merge_adapter=merge_adapter)[label]

    # Compared with a program, every model runs on the CPU.
    on = "cpu" if device == "auto" and programs else device
    base, label = opened(BASE, model if against is None else against), label_of(model)
    if base.source.converted:
        if against is not None:
            raise ApproxError(
                f"--against {base.source.name} is converted itself. Name the exact checkpoint it was made from."
            )
        if _runs_exported(base):
            raise ApproxError(
                f"{base.source.name} is an exported program, from which exact attention cannot be restored. Name its base with "
                "--against: the export of the exact checkpoint."
            )
        copied = base if isinstance(model, str) else replace(base, model=copy.deepcopy(base.model))
        base = under_exact_attention(copied)
    elif against is None:
        return {BASE: base}
    return {BASE: base, label: opened(label, model), **{label_of(one): opened(label_of(one), one) for one in beside}}


def _on_cpu(loaded: Checkpoint) -> Checkpoint:
    """A copy of a model of the user's on the CPU, which may be changed."""
    return replace(loaded, model=copy.deepcopy(loaded.model).cpu())


def with_extended_base(opened: Mapping[str, checkpoint.Checkpoint]) -> tuple[dict[str, checkpoint.Checkpoint], str]:
    """Extend the position table of the base to that of what is compared with it, as `convert --max-length` does.

    Returns:
        The models, and a note for the record.

    Raises:
        ApproxError: if the base takes as long inputs already, or has no table that can be extended.
    """
    _refuse_exported(opened, {"--extend-base": True})
    base = opened[BASE]
    limits = [positions.limit(one.model.config) for one in opened.values()]
    before, longest = limits[0], max((one for one in limits if one is not None), default=None)
    if before is None or longest is None or longest <= before:
        takes = "any length" if before is None else f"{before:,} positions"
        raise ApproxError(
            f"{base.source.name} takes {takes}, and nothing that is compared with it takes more. Leave out "
            "--extend-base."
        )
    positions.extendable(base.model.config, base.source.name, longest)
    model = copy.deepcopy(base.model)
    positions.resize(model, longest)
    note = f"positions of {BASE} extended from {before:,} to {longest:,}"
    return {**opened, BASE: replace(base, model=model)}, note


def label_of(model: str | Any) -> str:
    """Name of a model in tables and records: its path without the parent folders."""
    label = Path(model).resolve().name if isinstance(model, str) else type(model).__name__
    return label if label not in (BASE, CEILING) else f"{label} (converted)"


@dataclass(frozen=True)
class Generated:
    """Prompts as a model, by its label, and its base continue them."""

    model: str
    prompts: list[Continued]


@dataclass(frozen=True)
class Predictions:
    """Inputs, and what a model, by its label, and its base predict from them."""

    model: str
    inputs: list[Predicted]


def generate(
    model: str | Any,
    prompts: list[str],
    *,
    against: str | Any | None = None,
    processor: Any = None,
    device: str = "auto",
    dtype: str = "auto",
    offline: bool = False,
    merge_adapter: bool = False,
    **options: Any,
) -> Generated:
    """Continue prompts with a decoder and with its exact base.

    Args:
        model: A folder, a hub model id, or a loaded model, which keeps its device and dtype.
        prompts: The texts to continue.
        against: The base, as for `evaluate`.
        processor: The tokenizer of a loaded model, or the folder that holds it.
        device: `auto`, `cpu` or `cuda`.
        dtype: `auto` or the name of a torch dtype.
        offline: Whether to use only local files and the hub's cache.
        merge_adapter: Whether a PEFT adapter next to the weights, or one named by its folder, is merged into them.
        options: Options of `approx.measuring.prediction.continued`: max_new_tokens, sample, temperature, seed.

    Raises:
        ApproxError: if a model does not continue a text, or a prompt does not fit it.
    """
    opened = open_pair(model, against, device, dtype, offline, processor, merge_adapter=merge_adapter)
    return Generated(label_of(model), continued(opened, prompts, **options))


def predict(
    model: str | Any,
    inputs: list[str],
    *,
    against: str | Any | None = None,
    processor: Any = None,
    device: str = "auto",
    dtype: str = "auto",
    offline: bool = False,
    merge_adapter: bool = False,
    **options: Any,
) -> Predictions:
    """Predict from single inputs with a model and with its exact base.

    Args: as for `generate`, and
        inputs: Texts, or paths of .txt files, recordings or images.
        options: Options of `approx.measuring.prediction.compare`: question, top.

    Raises:
        ApproxError: if the head predicts nothing, or an input does not fit the model.
    """
    opened = open_pair(model, against, device, dtype, offline, processor, merge_adapter=merge_adapter)
    return Predictions(label_of(model), [compare(opened, one, **options) for one in inputs])
