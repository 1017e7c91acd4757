"""The command that trains: finetune."""

from pathlib import Path
from typing import Annotated, Any

import typer

from approx.cli import options
from approx.cli.command import command
from approx.cli.tables import table
from approx.cli.terminal import Terminal
from approx.errors import ApproxError

_PANEL = "Convert"
_HOW, _MODE = "Training", "Modes"


def add_to(app: typer.Typer) -> None:
    """Add the command of this file to the app."""
    command(
        app,
        _PANEL,
        "approx finetune converted --task glue/sst2 --data SST-2 --time-budget 30m -o healed",
        "approx finetune converted --recover transfer,lora,task --task squad --data squad -o healed",
        "approx finetune longer --text corpus.txt --recover mlm --length 2048 -o healed",
        interrupted="Interrupted. The state after the last step is kept; run the same command with --resume to continue.",
    )(finetune)


def finetune(
    terminal: Terminal,
    model: options.Model,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder to write.", show_default=False)] = None,
    recover: Annotated[
        str | None,
        typer.Option(
            help="Modes in their order: transfer (fit the mechanisms to exact attention), distill (fit the model to its base), "
            "task (train on labels), clm or mlm (continue pre-training on text), lora (from there on, adapters instead of "
            "weights). Default: transfer where mechanisms have parameters, then task, clm or mlm.",
            show_default=False,
        ),
    ] = None,
    task: options.Task = None,
    data: options.Data = None,
    columns: options.Columns = None,
    labels: options.Labels = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="A file of plain text, in place of a task; may be repeated.", rich_help_panel="Task"),
    ] = None,
    split: Annotated[str, typer.Option(help="Split to train on.", rich_help_panel="Task")] = "train",
    limit: Annotated[
        int | None, typer.Option(min=2, help="Use only this many examples, the first ones.", rich_help_panel="Task")
    ] = None,
    set_: options.TaskSettings = None,
    length: Annotated[
        int | None,
        typer.Option(
            min=8, help="Tokens of an input at most. Default: the positions of the model.", rich_help_panel="Task"
        ),
    ] = None,
    min_length: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of an input at least; short inputs may be exact and teach nothing.",
            show_default=False,
            rich_help_panel="Task",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Stop as soon as no more is lost on held-out examples, in points: loss<=0.5.", rich_help_panel=_HOW
        ),
    ] = None,
    time_budget: Annotated[
        str | None, typer.Option(help="Time for training, e.g. 90s, 30m or 2h.", rich_help_panel=_HOW)
    ] = None,
    max_steps: Annotated[
        int | None, typer.Option(min=0, help="Steps of each mode.", show_default=False, rich_help_panel=_HOW)
    ] = None,
    epochs: Annotated[
        float | None, typer.Option(min=0, help="Passes over the examples.", show_default=False, rich_help_panel=_HOW)
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Inputs of a step, over all processes.", show_default=False, rich_help_panel=_HOW),
    ] = None,
    accumulate: Annotated[int, typer.Option(min=1, help="Forward passes of a step.", rich_help_panel=_HOW)] = 1,
    learning_rate: Annotated[
        float | None,
        typer.Option(help="The highest rate. Default: one for each mode.", show_default=False, rich_help_panel=_HOW),
    ] = None,
    validation: Annotated[
        int,
        typer.Option(
            min=1, help="Training examples held out to choose the best step, at most a tenth.", rich_help_panel=_HOW
        ),
    ] = 500,
    evaluate_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between validations.", show_default=False, rich_help_panel=_HOW)
    ] = None,
    patience: Annotated[
        int | None,
        typer.Option(
            min=1, help="End after this many validations without progress.", show_default=False, rich_help_panel=_HOW
        ),
    ] = None,
    train: Annotated[
        str,
        typer.Option(
            help="Weights that distill, task, clm and mlm train: all, attention or head.", rich_help_panel=_MODE
        ),
    ] = "all",
    projections: Annotated[
        bool,
        typer.Option("--projections", help="Let transfer train the q, k and v projections too.", rich_help_panel=_MODE),
    ] = False,
    joint: Annotated[
        bool,
        typer.Option(
            "--joint",
            help="In transfer, feed each layer what the converted layers before it compute, not exact attention.",
            rich_help_panel=_MODE,
        ),
    ] = False,
    match: Annotated[
        str, typer.Option(help="What transfer compares: outputs or weights.", rich_help_panel=_MODE)
    ] = "outputs",
    teacher: Annotated[
        str | None,
        typer.Option(
            help="The exact model for distill. Default: the checkpoint's own weights with exact attention.",
            rich_help_panel=_MODE,
        ),
    ] = None,
    distill: Annotated[
        list[str] | None,
        typer.Option(
            "--distill",
            help="Weight of a part of its loss: logits, hidden, attention or labels; or the temperature. May be repeated: "
            "--distill hidden=0.",
            rich_help_panel=_MODE,
        ),
    ] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(
            "--lora",
            help="rank, alpha, dropout or targets of the adapters. May be repeated: --lora rank=16 --lora targets=query,value.",
            rich_help_panel=_MODE,
        ),
    ] = None,
    penalty: Annotated[
        float | None,
        typer.Option(min=0, help="Weight of the spans of adaptive-span.", show_default=False, rich_help_panel=_MODE),
    ] = None,
    recompute: Annotated[
        bool,
        typer.Option(
            "--recompute",
            help="Compute layers again in the backward pass: less memory, more time.",
            rich_help_panel="Machine",
        ),
    ] = False,
    bfloat16: Annotated[
        bool,
        typer.Option("--bfloat16", help="Run the forward pass under bfloat16 autocast.", rich_help_panel="Machine"),
    ] = False,
    report_to: Annotated[
        str | None, typer.Option(help="Also report to tensorboard, trackio or wandb.", rich_help_panel="Machine")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Show what would be trained, and the time and memory it would take; write nothing."
        ),
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a training that was interrupted.")] = False,
    force: options.Force = False,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    revision: options.Revision = None,
    offline: options.Offline = False,
    merge_adapter: options.MergeAdapter = False,
) -> None:
    """Train a converted checkpoint until it is as good as before, or an exact one for comparison."""
    from approx import api
    from approx.evaluation import evaluate

    if max_steps == 0 or epochs == 0:
        raise ApproxError("No steps were asked for, so nothing would be trained. Give --max-steps or --epochs above 0.")
    if output is None and not dry_run:
        raise ApproxError("No output folder was given. Name it with -o, or see what would be done with --dry-run.")
    asked: dict[str, Any] = {
        "recover": None if recover is None else [mode.strip() for mode in recover.split(",")],
        "task": task, "data": data, "text": None if not text else [str(path) for path in text], "split": split,
        "limit": limit, "settings": options.task_settings(set_, columns, labels), "length": length, "min_length": min_length,
        "budget": budget,
        "time_budget": time_budget, "steps": max_steps, "epochs": epochs, "batch_size": batch_size,
        "accumulate": accumulate, "learning_rate": learning_rate, "validation": validation,
        "evaluate_every": evaluate_every, "patience": patience, "train": train, "projections": projections, "joint": joint,
        "match": match, "distill": _numbers(options.read_settings(distill, "--distill")),
        "lora": _adapters(options.read_settings(lora, "--lora")), "penalty": penalty, "recompute": recompute,
        "bfloat16": bfloat16, "report_to": report_to, "seed": seed,
    }  # fmt: skip
    about: dict[str, Any] = {
        "teacher": teacher,
        "revision": revision,
        "offline": offline,
        "merge_adapter": merge_adapter,
        "device": device,
    }
    if dry_run:
        planned = api.rehearse_finetuning(model, **about, **asked)
        terminal.result(planned, *_planned(planned))
        for note in planned["notes"]:
            terminal.note(note)
        return
    with terminal.progress() as bar:
        done = api.finetune(
            model, output, **about, resume=resume, force=force, progress=lambda what, n, total: bar(f"finetune {what}", n, total),
            **asked,
        )  # fmt: skip
    if evaluate.leads():
        terminal.result(done, *_outcome(done))
        for note in done["notes"]:
            terminal.note(note)


def _numbers(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: float(value) if type(value) is int else value for name, value in settings.items()}


def _adapters(settings: dict[str, Any]) -> dict[str, Any]:
    if isinstance(targets := settings.get("targets"), str):
        settings["targets"] = [name.strip() for name in targets.split(",")]
    return {
        name: float(value) if name in ("alpha", "dropout") and type(value) is int else value
        for name, value in settings.items()
    }


def _planned(planned: dict[str, Any]) -> list[Any]:
    from approx.publishing import wording

    rows = [
        [
            phase["mode"], f"{phase['steps']:,}", str(phase["batch_size"]), f"{phase['learning_rate']:.1e}",
            f"{phase['trained']:,} of {phase['parameters']:,}", wording.duration(phase["seconds"]), f"{phase['memory_mb']:,.0f}",
        ]
        for phase in planned["phases"]
    ]  # fmt: skip
    return [
        table(["mode", "steps", "batch", "rate", "trained", "time", "MB"], rows),
        f"{planned['examples']:,} training examples; {planned['held_out']:,} more choose the best step by {planned['measure']}.",
        "Time and memory from one step of each mode. Nothing was written.",
    ]


def _outcome(done: dict[str, Any]) -> list[Any]:
    from approx.cli.figures import checks_table
    from approx.publishing import wording

    rows = [
        [
            phase["mode"], f"{phase['steps']:,}", f"{phase['best_step']:,}", f"{phase['parameters']:,}", f"{phase['tokens']:,}",
            wording.duration(phase["seconds"]), wording.ENDED[phase["ended"]],
        ]
        for phase in done["phases"]
    ]  # fmt: skip
    scores = [("exact attention, before training", done["exact"]), ("before", done["before"]), ("after", done["after"])]
    lines = [
        table(["mode", "steps", "best step", "trained", "tokens", "time", "ended by"], rows),
        *(
            [
                table(
                    [f"{done['measure']} on {done['held_out']:,} held-out training examples", "value"],
                    [[name, f"{value:.4f}"] for name, value in scores if value is not None],
                )
            ]
            if done["after"] is not None
            else []
        ),
    ]
    if done["checks"]:
        lines.append(checks_table(done["checks"]))
    return [
        *lines,
        f"Written to {done['output']}. Score it on the task's own split: approx evaluate {done['output']} --task …",
    ]
