"""The Python API of `approx`: the stages, as in the commands of the same names."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

from approx.checkpoints.checkpoint import load
from approx.conversion.surgery import convert, revert
from approx.conversion.verify import verify
from approx.errors import ApproxError, shown
from approx.evaluation.options import BASE, BenchStage, EvaluateStage
from approx.evaluation.record import Record, Speed
from approx.inspection import inspect, plan
from approx.measuring.measure import (
    choose_device,
    generate,
    in_memory,
    label_of,
    make_record,
    measure_quality,
    measure_speed,
    open_all,
    open_pair,
    predict,
    task_of,
    with_extended_base,
)
from approx.measuring.products import fast_products
from approx.planning.plan import Plan
from approx.progress import Progress, silent
from approx.publishing.report import write_report as report
from approx.tasks import open_task
from approx.validation import build

if TYPE_CHECKING:
    from approx.arena.options import ArenaStage
    from approx.arena.results import ArenaRecord
    from approx.conversion.export import export
    from approx.finetuning.finetune import Healing, Rehearsal
    from approx.finetuning.options import FinetuneStage
    from approx.looking.look import look
    from approx.pipeline.recommend import Recommended
    from approx.pushing.push import push
    from approx.searching.options import RecommendStage, SearchStage
    from approx.searching.outcome import Searched

S = TypeVar("S")

__all__ = [
    "Plan",
    "bench",
    "convert",
    "evaluate",
    "export",
    "fast_products",
    "finetune",
    "generate",
    "inspect",
    "load",
    "look",
    "lra",
    "plan",
    "predict",
    "push",
    "recommend",
    "report",
    "revert",
    "search",
    "verify",
]


def __getattr__(name: str) -> Any:
    # Measuring needs neither these rooms nor those of training and searching, which are imported where they are used.
    if name == "push":
        from approx.pushing.push import push

        return push
    if name == "export":
        from approx.conversion.export import export

        return export
    if name == "look":
        from approx.looking.look import look

        return look
    raise AttributeError(f"module 'approx.api' has no attribute '{name}'")


def _stage(kind: type[S], what: str, stage: S | None, options: dict[str, Any]) -> S:
    """The stage that was passed, or one made of keywords.

    Raises:
        ApproxError: if it is something else, if there are keywords besides, or with all mistakes in them.
    """
    if stage is None:
        return build(kind, what, **options)
    if not isinstance(stage, kind):
        raise ApproxError(f"{what}: a {kind.__name__} or its options by name are needed, found {shown(stage)}.")
    if options:
        raise ApproxError(
            f"{what}: a {kind.__name__} was passed, and {', '.join(options)} besides. Put all options into the stage."
        )
    return stage


def finetune(
    model: str | Path | Any,
    output: str | Path | None = None,
    stage: "FinetuneStage | None" = None,
    *,
    processor: Any = None,
    teacher: str | Any | None = None,
    resume: bool = False,
    force: bool = False,
    revision: str | None = None,
    offline: bool = False,
    merge_adapter: bool = False,
    device: str = "auto",
    progress: Progress = silent,
    **options: Any,
) -> "Healing":
    """Train a converted model until it is as good as before, or an exact one for comparison.

    Args:
        model: A folder, a model id of the hub, or `quickstart`, which is trained into `output`; or a loaded model,
            which is trained in place and on its device.
        output: The folder to make; for a loaded model the folder of its checkpoints, a temporary one without it.
        stage: The training, instead of options by name.
        processor: The tokenizer or processor of a loaded model, or the folder that holds it.
        teacher: The exact model for `distill`; the weights of the model itself, with exact attention, without it.
        resume: Whether to go on with an unfinished training into `output`.
        force: Whether an existing `output` is replaced, and an unfinished training into it is started over.
        revision: Commit of the hub.
        offline: Whether only local files and the hub's cache may be used.
        merge_adapter: Whether a PEFT adapter next to the weights, or one named by its folder, is merged into them.
        device: `auto`, `cpu` or `cuda`.
        progress: Called with what happens, steps done and steps in all.
        options: As of `approx.finetuning.options.FinetuneStage`: recover, task, data, text, steps, time_budget, …

    Returns:
        The modes with their curves, and the held-out score with exact attention, before training and after it.

    Raises:
        ApproxError: if an option is unknown or out of range, a mode cannot be used, model and data do not fit together,
            the budget is met already, or the loss is not finite.
    """
    from approx.finetuning.finetune import finetune as train
    from approx.finetuning.finetune import finetune_folder
    from approx.finetuning.options import FinetuneStage

    stage = _stage(FinetuneStage, "finetune", stage, options)
    if isinstance(model, str | Path):
        if output is None:
            raise ApproxError("The training of a checkpoint needs a folder to write. Name it with 'output'.")
        return finetune_folder(
            model,
            Path(output),
            stage,
            teacher=None if teacher is None else str(teacher),
            resume=resume,
            force=force,
            revision=revision,
            offline=offline,
            merge_adapter=merge_adapter,
            device=choose_device(device),
            progress=progress,
        )
    processor = in_memory(model, processor, offline=offline).source.reader
    taught = (
        open_all({"teacher": teacher}, "cpu", "auto", offline=offline, merge_adapter=merge_adapter)["teacher"].model
        if isinstance(teacher, str)
        else teacher
    )
    with TemporaryDirectory() if output is None else nullcontext(output) as folder:
        return train(model, processor, stage, folder=Path(folder), teacher=taught, resume=resume, progress=progress)


def rehearse_finetuning(
    model: str,
    stage: "FinetuneStage | None" = None,
    *,
    teacher: str | None = None,
    revision: str | None = None,
    offline: bool = False,
    merge_adapter: bool = False,
    device: str = "auto",
    **options: Any,
) -> "Rehearsal":
    """What `finetune` would do to a folder: modes, trained parameters, steps, and time and memory from a step of each.

    Args and errors: as for `finetune`; nothing is written.
    """
    from approx.finetuning.finetune import rehearse
    from approx.finetuning.options import FinetuneStage

    return rehearse(
        model,
        _stage(FinetuneStage, "finetune", stage, options),
        teacher=teacher,
        revision=revision,
        offline=offline,
        merge_adapter=merge_adapter,
        device=choose_device(device),
    )


def evaluate(
    model: str | Any,
    task: str | EvaluateStage,
    *,
    against: str | Any | None = None,
    extend_base: bool = False,
    processor: Any = None,
    outputs: Path | None = None,
    fresh: bool = False,
    seed: int = 0,
    device: str = "auto",
    dtype: str = "auto",
    quantize: str | None = None,
    offline: bool = False,
    merge_adapter: bool = False,
    runtime: str | None = None,
    beside: Sequence[str] = (),
    command: str = "",
    progress: Progress = silent,
    **options: Any,
) -> Record:
    """Score a model on a task and compare it with its exact base on the same examples.

    Args:
        model: A folder, converted, exported or not, a hub model id, or `quickstart`; or a loaded model, which keeps its device and dtype, and whose
            outputs are not stored.
        task: Name of the task, e.g. `glue/sst2`; or the whole stage, instead of options by name.
        against: The base to compare with. By default a converted checkpoint is compared with its own weights under
            exact attention, and a stock one with nothing.
        extend_base: Whether to give the base as many positions as the model, by repeating its table as a conversion
            with a longer `max_length` does.
        processor: The tokenizer or processor of a loaded model, or the folder that holds it.
        outputs: Parquet file for the outputs of each example.
        fresh: Whether to ignore stored outputs and store none.
        seed: Seed of the bootstrap.
        device: `auto`, `cpu` or `cuda`.
        dtype: `auto` or the name of a torch dtype.
        quantize: `int8` for weights in 8 bits in all models, by torchao on the CPU; loaded models are copied for it.
        offline: Whether to use only local files and the hub's cache.
        merge_adapter: Whether a PEFT adapter next to the weights, or one named by its folder, is merged into them.
        runtime: What runs exported programs, `onnxruntime` or `openvino`; None for the usual one of their formats.
        beside: Further checkpoints or exported programs to compare with the base.
        command: The command as typed, for the record.
        progress: Called with stage, done and total.
        options: Options of `approx.evaluation.options.EvaluateStage`: data, split, limit, margin, settings, …

    Returns:
        The record; `to_data()` gives it as plain data.

    Raises:
        ApproxError: if an option is unknown or out of range, or checkpoint, task and data do not fit.
    """
    whole = task if isinstance(task, EvaluateStage) else None
    stage = _stage(EvaluateStage, "evaluate", whole, options if whole else {"task": task, **options})
    # Mistakes in the task must show before weights are loaded.
    task_of(stage)
    opened = open_pair(
        model,
        against,
        device,
        dtype,
        offline,
        processor,
        quantize=quantize,
        merge_adapter=merge_adapter,
        runtime=runtime,
        beside=beside,
    )
    label = label_of(model)
    if stage.seeds > 1 and len(opened) == 1:
        raise ApproxError(
            f"Several seeds need a converted checkpoint, but {opened[BASE].source.name} is not converted. Leave out "
            "--seeds."
        )
    if stage.ablate and len(opened) == 1:
        raise ApproxError(
            f"Only a converted checkpoint has estimates to switch off, but {opened[BASE].source.name} is not converted. "
            "Leave out --ablate."
        )
    opened, extended = with_extended_base(opened) if extend_base else (opened, None)
    # A loaded model may differ in more than its weights and config, so its outputs have no key.
    fresh = fresh or not isinstance(model, str) or not isinstance(against, str | None)
    quality = measure_quality(opened, stage, seed=seed, outputs=outputs, fresh=fresh, progress=progress)
    if extended:
        quality = quality.model_copy(update={"notes": [*quality.notes, extended]})
    return make_record(opened, title=f"{label} on {stage.task}", seed=seed, command=command, quality=[quality])


def bench(
    model: str | Any,
    lengths: list[int] | BenchStage,
    *,
    against: str | Any | None = None,
    processor: Any = None,
    task: str | None = None,
    data: str | None = None,
    settings: dict[str, Any] | None = None,
    seed: int = 0,
    device: str = "auto",
    dtype: str = "auto",
    quantize: str | None = None,
    offline: bool = False,
    merge_adapter: bool = False,
    runtime: str | None = None,
    beside: Sequence[str] = (),
    command: str = "",
    progress: Progress = silent,
    interrupted: Callable[[Record], None] | None = None,
    **options: Any,
) -> Record:
    """Time a checkpoint side by side with exact attention and with no attention.

    Args:
        model: A folder, converted, exported or not, a hub model id, or `quickstart`; or a loaded model, which keeps its device and dtype.
        lengths: Tokens per sequence; or the whole stage, instead of options by name.
        against: The exact base of a converted model; by default its own weights under exact attention.
        processor: The tokenizer or processor of a loaded model, or the folder that holds it; needed with a task.
        task: Task whose examples are the inputs; by default random inputs.
        data: The task's files in their official layout.
        settings: Settings of the task.
        seed: Seed of the inputs and the bootstrap.
        device: `auto`, `cpu` or `cuda`.
        dtype: `auto` or the name of a torch dtype.
        quantize: `int8` for weights in 8 bits in all models, by torchao on the CPU; loaded models are copied for it.
        offline: Whether to use only local files and the hub's cache.
        merge_adapter: Whether a PEFT adapter next to the weights, or one named by its folder, is merged into them.
        runtime: What runs exported programs, `onnxruntime` or `openvino`; None for the usual one of their formats.
        beside: Further checkpoints or exported programs to compare with the base.
        command: The command as typed, for the record.
        progress: Called with stage, done and total.
        interrupted: Called on Ctrl-C with the record of the sizes that were measured until then, if there are any.
        options: Options of `approx.evaluation.options.BenchStage`: batches, max_length, rounds, seconds, time_budget,
            mode, …

    Returns:
        The record; `to_data()` gives it as plain data.

    Raises:
        ApproxError: if an option is unknown or out of range, the lengths do not fit the positions, or the base is not
            exact.
    """
    texts = None if task is None else build(EvaluateStage, "bench", task=task, data=data, settings=settings or {})
    whole = lengths if isinstance(lengths, BenchStage) else None
    stage = _stage(BenchStage, "bench", whole, options if whole else {"lengths": lengths, **options})
    if texts is None:
        stage = stage.model_copy(update={"inputs": "synthetic"})
    else:
        open_task(texts.task, **texts.settings)
    opened = open_pair(
        model,
        against,
        device,
        dtype,
        offline,
        processor,
        reads=texts is not None,
        quantize=quantize,
        merge_adapter=merge_adapter,
        runtime=runtime,
        beside=beside,
    )
    speed: list[Speed] = []

    def made() -> Record:
        return make_record(opened, title=f"Speed of {label_of(model)}", seed=seed, command=command, speed=speed)

    try:
        speed.extend(measure_speed(opened, stage, texts, seed=seed, progress=progress))
    except KeyboardInterrupt:
        if speed and interrupted is not None:
            interrupted(made())
        raise
    return made()


def search(
    model: str | Any,
    output: str | Path | None = None,
    stage: "SearchStage | None" = None,
    *,
    processor: Any = None,
    sensitivities: str | Path | None = None,
    resume: bool = False,
    force: bool = False,
    seed: int = 0,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    offline: bool = False,
    merge_adapter: bool = False,
    command: str = "",
    progress: Progress = silent,
    **options: Any,
) -> "Searched":
    """Find the fastest mix of mechanisms within a loss, or the least loss at a speed, and prove it on other examples.

    Args:
        model: A folder, a hub model id, or `quickstart`; or a loaded model, which is not changed.
        output: File for the plan; everything measured goes into a folder next to it. Without it nothing is stored.
        stage: What to search for, instead of options by name.
        processor: The tokenizer or processor of a loaded model, or the folder that holds it.
        sensitivities: `sensitivities.json` of an earlier search of the same model, candidates and examples.
        resume: Whether to go on with an earlier search into `output`.
        force: Whether to replace an earlier search.
        seed, device, dtype, offline, merge_adapter, command, progress: As for `evaluate`.
        revision: Commit of the hub.
        options: As of `approx.searching.options.SearchStage`: length, budget, speed, task, data, mechanisms, …

    Returns:
        The outcome, whose `plan` is for `approx.convert`, and whose `feasible` says whether the
        proof meets what was asked for.

    Raises:
        ApproxError: if an option is unknown, out of range or contradicts another, the model does not fit, an output
            exists, or nothing could be as fast as asked (exit code 7).
    """
    from approx.pipeline.run import folder_of
    from approx.pipeline.run import search as run_search
    from approx.searching.options import SearchStage

    stage = _stage(SearchStage, "search", stage, options)
    if isinstance(model, str):
        where: dict[str, Any] = {"revision": revision, "offline": offline, "merge_adapter": merge_adapter}
        base = open_all({BASE: model}, device, dtype, **where)[BASE]
    else:
        base = in_memory(model, processor, offline=offline)
    about: dict[str, Any] = {"resume": resume, "force": force, "seed": seed, "command": command, "progress": progress}
    about["sensitivities"] = None if sensitivities is None else Path(sensitivities)
    if output is not None:
        return run_search(base, stage, Path(output), folder=folder_of(Path(output)), **about)
    with TemporaryDirectory() as folder:
        return run_search(base, stage, None, folder=Path(folder) / "search", **about)


def recommend(
    model: str | Any,
    stage: "RecommendStage | None" = None,
    *,
    processor: Any = None,
    seed: int = 0,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    offline: bool = False,
    merge_adapter: bool = False,
    command: str = "",
    progress: Progress = silent,
    announce: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> "Recommended":
    """Find out which mechanisms are worth it for a model at the lengths of your data, as far as a time budget goes.

    Args:
        model: A folder, a hub model id, or `quickstart`; or a loaded model, which is not changed.
        stage: What to recommend for, instead of options by name.
        processor: The tokenizer or processor of a loaded model, or the folder that holds it.
        seed, device, dtype, offline, merge_adapter, command, progress: As for `evaluate`.
        revision: Commit on the hub.
        announce: Called with how long it will take, as soon as that is known.
        options: As of `approx.searching.options.RecommendStage`: task, data, lengths, mechanisms, time_budget, …

    Returns:
        The answer in one sentence, what it rests on, the next command, and the record, as of `evaluate` and `bench`.

    Raises:
        ApproxError: if an option is unknown or out of range, task, data and lengths do not fit the model, or the time budget is
            too small to time anything, with what the smallest would be.
    """
    from approx.pipeline.recommend import recommend as run_recommend
    from approx.searching.options import RecommendStage

    stage = _stage(RecommendStage, "recommend", stage, options)
    if stage.task is not None:
        # Mistakes in the task must show before weights are loaded.
        open_task(stage.task, **stage.settings)
    if isinstance(model, str):
        where: dict[str, Any] = {"revision": revision, "offline": offline, "merge_adapter": merge_adapter}
        base = open_all({BASE: model}, device, dtype, **where)[BASE]
    else:
        base = in_memory(model, processor, offline=offline, reads=stage.task is not None or stage.data is not None)
    name = model if isinstance(model, str) else "MODEL"
    about: dict[str, Any] = {"seed": seed, "command": command, "progress": progress, "announce": announce}
    return run_recommend(base, stage, model=name, **about)


def lra(
    out: str | Path,
    stage: "ArenaStage | None" = None,
    *,
    resume: bool = False,
    force: bool = False,
    device: str = "auto",
    command: str = "",
    progress: Progress = silent,
    **options: Any,
) -> "ArenaRecord":
    """Long Range Arena: train a small encoder from scratch for each task, mechanism and seed, and compare them.

    These scores never stand beside those of conversions, and `report` refuses their record.

    Args:
        out: Folder for `lra.json`, `lra.md`, `lra.svg` and each finished training.
        stage: What is compared, instead of options by name.
        resume: Keep what an earlier call finished in the folder, and continue a training that was interrupted.
        force: Delete an earlier comparison in the folder.
        device, command, progress: As for `evaluate`.
        options: As of `approx.arena.options.ArenaStage`: tasks, mechanisms, seeds, size, data, settings, …

    Returns:
        The record.

    Raises:
        ApproxError: if an option is unknown, out of range or does not fit, data are missing or damaged, or the folder holds
            an earlier comparison.
    """
    from approx.arena.arena import arena
    from approx.arena.options import ArenaStage

    stage = _stage(ArenaStage, "lra", stage, options)
    chosen = choose_device(device)
    return arena(stage, Path(out), resume=resume, force=force, device=chosen, command=command, progress=progress)
