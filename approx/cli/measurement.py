"""Commands that measure: evaluate, bench."""

from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from approx.cli import options
from approx.cli.command import command, typed_command
from approx.cli.stages import Stage
from approx.cli.terminal import Terminal
from approx.errors import ApproxError, Exit
from approx.evaluation import tracking

if TYPE_CHECKING:
    from approx.evaluation.options import BenchStage, EvaluateStage
    from approx.evaluation.record import Quality

_PANEL = "Measure"
_EVALUATE = Stage(
    "approx.evaluation.options.EvaluateStage",
    panels={
        "Task": "task data settings split limit min_length streaming truncate max_length",
        "Checkpoint": "",
        "Machine": "batch_size fast_products",
    },
)
_BENCH = Stage(
    "approx.evaluation.options.BenchStage",
    panels={"Checkpoint": "", "Task": "", "Machine": "fast_products"},
    renamed={"batches": "--batch-size"},
    defaults={"lengths": "128,512"},
    # They are those of --task, or random.
    omitted=("inputs",),
)


def add_to(app: typer.Typer) -> None:
    """Add the commands of this file to the app."""
    command(
        app,
        _PANEL,
        "approx evaluate converted --task needle --set length=1024",
        "approx evaluate converted --against base --task glue/sst2 --data SST-2 --margin 0.5 --fail-over -o "
        "record.json",
        "approx evaluate longer --against base --task documents --data texts.jsonl --extend-base",
        "approx evaluate linear-int8 --against exact-onnx --task glue/sst2",
        "approx evaluate converted --against base --task squad --quantize int8",
        "approx evaluate converted --task needle --report-to tensorboard",
        "approx evaluate gpt --task lm --data book.txt --set carry=segments --set window=1024 --set stride=512",
        "torchrun --nproc-per-node 4 --no-python approx evaluate converted --task squad --data squad",
        stage=_EVALUATE,
    )(evaluate)
    command(
        app,
        _PANEL,
        "approx bench converted --lengths 512,2048 --batch-size 1,8",
        "approx bench converted --against base --task glue/sst2 --data SST-2 --max-length 4096 --lengths 1024,4096",
        "approx bench converted --lengths 512,2048 --quantize int8",
        "approx bench converted-gpt2 --mode generate --lengths 128,896",
        "approx bench linear-int8 --against exact-onnx --beside exact-int8 --beside linear-onnx --lengths 128,512",
        stage=_BENCH,
    )(bench)


def evaluate(
    terminal: Terminal,
    model: options.Model,
    stage: "EvaluateStage",
    against: options.Against = None,
    extend_base: Annotated[
        bool,
        typer.Option(
            "--extend-base",
            help="Give the base as many positions as the checkpoint, by repeating its table as convert --max-length does.",
            rich_help_panel="Checkpoint",
        ),
    ] = False,
    fail_over: Annotated[
        bool,
        typer.Option(
            "--fail-over",
            help="Exit with 7 if the loss is beyond the margin, or untested because attention is exact on more than nine "
            "tenths of the inputs.",
        ),
    ] = False,
    allow_untested: Annotated[
        bool, typer.Option("--allow-untested", help="Let --fail-over accept an untested loss.")
    ] = False,
    output: options.Record = None,
    force: options.Force = False,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh",
            help="Ignore stored outputs and store none. By default no batch is computed twice, even after an interruption.",
            rich_help_panel="Machine",
        ),
    ] = False,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    quantize: options.Quantize = None,
    offline: options.Offline = False,
    merge_adapter: options.MergeAdapter = False,
    runtime: options.Runtime = None,
    beside: options.Beside = None,
    report_to: options.ReportTo = None,
) -> None:
    """Score a checkpoint on a task and compare it with its base on the same examples."""
    from approx import api
    from approx.checkpoints.atomic_folder import locked_output
    from approx.cli.figures import quality_tables
    from approx.evaluation import record
    from approx.evaluation.evaluate import leads
    from approx.publishing.summary import recommendation

    if allow_untested and not fail_over:
        raise ApproxError("--allow-untested has an effect only with --fail-over. Give both or neither.")
    tracking.refuse_missing(report_to)
    options.check_output(output, force)
    outputs = None if output is None else output.with_suffix(".parquet")
    if output is not None and output == outputs:
        raise ApproxError(f"{output} is reserved for the outputs of each example. Give the record the ending .json.")
    with nullcontext() if output is None or not leads() else locked_output(output), terminal.progress() as bar:
        # Another process may have written it meanwhile.
        options.check_output(output, force)
        options.check_output(outputs, force)
        if outputs is not None:
            record.refuse_foreign_outputs(outputs)
        made = api.evaluate(
            model,
            stage if stage.max_length is None else stage.model_copy(update={"truncate": True}),
            against=against,
            extend_base=extend_base,
            outputs=outputs,
            fresh=fresh,
            seed=seed,
            device=device,
            dtype=dtype,
            quantize=quantize,
            offline=offline,
            merge_adapter=merge_adapter,
            runtime=runtime,
            beside=beside or (),
            command=typed_command(),
            progress=bar,
        )
        if not leads():
            return
        if output is not None:
            record.save(output, made)
    if output is not None:
        terminal.note(f"Record written to {output}, the outputs of each example to {outputs}")
    terminal.result(
        made.to_data(), *recommendation(made), *(shown for entry in made.quality for shown in quality_tables(entry))
    )
    if report_to is not None:
        terminal.note(tracking.report(made.title, [made], report_to))
    if fail_over:
        _check_losses(made.quality[0], allow_untested)


def _check_losses(task: "Quality", allow_untested: bool) -> None:
    """Raise for a loss that is beyond the margin or untested."""
    from approx.publishing import wording

    if not task.variants:
        raise ApproxError("--fail-over needs a base to compare with. Name it with --against.")
    for variant in task.variants:
        if variant.verdict == "loss beyond margin":
            raise ApproxError(
                f"The loss on {task.task} is beyond the margin of {wording.margin(variant, task)}.", Exit.THRESHOLD
            )
    untested = [variant for variant in task.variants if not wording.tested(variant)]
    if untested and not allow_untested:
        raise ApproxError(
            f"The verdict on {task.task} is '{untested[0].verdict}', and --fail-over accepts only a tested loss. "
            "Evaluate on longer inputs, or on a task that the base does well, or add --allow-untested.",
            Exit.THRESHOLD,
        )


def bench(
    terminal: Terminal,
    model: options.Model,
    stage: "BenchStage",
    against: options.Against = None,
    task: Annotated[
        str | None, options.task_option("Time on the inputs of this task, e.g. glue/sst2. Default: random inputs.")
    ] = None,
    data: options.Data = None,
    columns: options.Columns = None,
    labels: options.Labels = None,
    set_: options.TaskSettings = None,
    output: options.Record = None,
    force: options.Force = False,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    quantize: options.Quantize = None,
    offline: options.Offline = False,
    merge_adapter: options.MergeAdapter = False,
    runtime: options.Runtime = None,
    beside: options.Beside = None,
) -> None:
    """Time a checkpoint side by side with exact attention and with no attention (the ceiling)."""
    from approx import api
    from approx.checkpoints.atomic_folder import locked_output
    from approx.cli.figures import speed_tables
    from approx.evaluation import record
    from approx.publishing.summary import recommendation

    options.check_output(output, force)

    def keep(made: record.Record) -> None:
        lengths = ", ".join(f"{row.length:,}" for row in made.speed)
        if output is None:
            terminal.note(
                f"Interrupted after the lengths {lengths}; with -o FILE their record would have been written."
            )
        else:
            record.save(output, made)
            terminal.note(f"Interrupted: the record in {output} holds the lengths {lengths}.")

    with nullcontext() if output is None else locked_output(output), terminal.progress() as bar:
        # Another process may have written it meanwhile.
        options.check_output(output, force)
        made = api.bench(
            model,
            stage,
            against=against,
            task=task,
            data=data,
            settings=options.task_settings(set_, columns, labels),
            seed=seed,
            device=device,
            dtype=dtype,
            quantize=quantize,
            offline=offline,
            merge_adapter=merge_adapter,
            runtime=runtime,
            beside=beside or (),
            command=typed_command(),
            progress=bar,
            interrupted=keep,
        )
        if output is not None:
            record.save(output, made)
    if output is not None:
        terminal.note(f"Record written to {output}")
    terminal.result(made.to_data(), *recommendation(made), *speed_tables(made.speed))
