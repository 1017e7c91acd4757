"""The command that finds a plan: search."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from approx.cli import options
from approx.cli.command import command, typed_command
from approx.cli.tables import table
from approx.cli.terminal import Terminal
from approx.errors import ApproxError, Exit

if TYPE_CHECKING:
    from rich.table import Table

    from approx.searching.outcome import Searched

_PANEL = "Convert"
_GOAL, _SEARCH = "Goal", "Search"


def add_to(app: typer.Typer) -> None:
    """Add the command of this file to the app."""
    command(
        app,
        _PANEL,
        "approx search quickstart --task needle --set length=1024 --budget 'loss<=2' --length 1024 -o plan.yaml",
        "approx search my-model --task glue/sst2 --data SST-2 --budget 'loss<=0.5' --length 512 --speed 1.1x -o plan.yaml",
        "approx search gpt2 --text corpus.txt --budget 'kl<=0.05' --length 1024 --granularity heads -o plan.yaml",
        interrupted="Interrupted before there was a plan. What was measured is kept; run the same command with --resume to go on.",
    )(search)


def search(
    terminal: Terminal,
    model: options.Model,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="File for the plan; PLAN-search beside it holds the rest.", show_default=False
        ),
    ],
    length: Annotated[
        int, typer.Option(min=1, help="Tokens of the input that is timed.", show_default=False, rich_help_panel=_GOAL)
    ],
    budget: Annotated[
        str | None,
        typer.Option(
            help="What may be lost: 'loss<=0.5', in points of the task (losses in percent of the base's); without a task "
            "'kl<=0.05', nats between the outputs, or 'error<=0.1', of the hidden states of a model without a head.",
            rich_help_panel=_GOAL,
        ),
    ] = None,
    speed: Annotated[
        str | None,
        typer.Option(help="Speed-up over exact attention to reach, e.g. 1.5x.", rich_help_panel=_GOAL),
    ] = None,
    latency: Annotated[
        str | None,
        typer.Option(help="Time of one forward pass to reach instead, e.g. 20ms.", rich_help_panel=_GOAL),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Inputs of the timed forward pass.", rich_help_panel=_GOAL)
    ] = 1,
    task: options.Task = None,
    data: options.Data = None,
    columns: options.Columns = None,
    labels: options.Labels = None,
    split: Annotated[str | None, typer.Option(help="Split to use.", rich_help_panel="Task")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use only the first examples, this many.", rich_help_panel="Task")
    ] = None,
    min_length: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Use only examples of at least this many tokens, so that quality and speed are compared at like lengths.",
            show_default=False,
            rich_help_panel="Task",
        ),
    ] = None,
    set_: options.TaskSettings = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Truncate inputs that are too long.", rich_help_panel="Task")
    ] = False,
    text: Annotated[
        Path | None,
        typer.Option(
            help="A file of plain text, in place of a task. Default: built-in English.", rich_help_panel="Task"
        ),
    ] = None,
    mechanisms: Annotated[
        str | None,
        typer.Option(
            help="Mechanisms to choose from, e.g. local,improved-clustered. Default: those that need no training.",
            rich_help_panel=_SEARCH,
        ),
    ] = None,
    candidates: Annotated[
        Path | None,
        typer.Option(help="A YAML list of mechanisms with settings to choose from instead.", rich_help_panel=_SEARCH),
    ] = None,
    granularity: Annotated[
        Literal["layer", "heads"],
        typer.Option(
            help="One mechanism for each layer, or also layers that keep exact attention in some heads.",
            rich_help_panel=_SEARCH,
        ),
    ] = "layer",
    heal: Annotated[
        Literal["transfer"] | None,
        typer.Option(
            help="First fit mechanisms with parameters, such as linear, to exact attention.", rich_help_panel=_SEARCH
        ),
    ] = None,
    calibration: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Examples that weigh the errors of layers. Default: 64, or all that compare plans.",
            show_default=False,
            rich_help_panel=_SEARCH,
        ),
    ] = None,
    examples: Annotated[
        int, typer.Option(min=1, help="Examples that compare plans, at most half.", rich_help_panel=_SEARCH)
    ] = 300,
    proof: Annotated[
        int, typer.Option(min=1, help="Other examples that prove the plan, at most.", rich_help_panel=_SEARCH)
    ] = 500,
    front: Annotated[
        int, typer.Option(min=0, help="Plans for other budgets to measure beside it.", rich_help_panel=_SEARCH)
    ] = 5,
    time_budget: Annotated[
        str | None,
        typer.Option(help="Try no further plan after this time, e.g. 10m.", rich_help_panel=_SEARCH),
    ] = None,
    sensitivities: Annotated[
        Path | None,
        typer.Option(help="sensitivities.json of an earlier search, for another budget.", rich_help_panel=_SEARCH),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a search that was interrupted.")] = False,
    force: options.Force = False,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    revision: options.Revision = None,
    offline: options.Offline = False,
    merge_adapter: options.MergeAdapter = False,
) -> None:
    """Find the fastest mix of mechanisms within a loss, and prove it on examples that the search did not see."""
    from approx import api
    from approx.planning.plan import Plan

    asked: dict[str, Any] = {
        "length": length, "budget": budget, "speed": speed, "latency": latency, "batch": batch_size, "task": task, "data": data,
        "split": split, "limit": limit, "min_length": min_length, "settings": options.task_settings(set_, columns, labels),
        "truncate": truncate, "text": None if text is None else str(text),
        "mechanisms": None if mechanisms is None else [name.strip() for name in mechanisms.split(",")],
        "candidates": None if candidates is None else Plan.read(candidates).to_data(), "granularity": granularity, "heal": heal,
        "calibration": calibration, "examples": examples, "proof": proof, "front": front, "time_budget": time_budget,
    }  # fmt: skip
    if sensitivities is not None and resume:
        raise ApproxError("--resume reads the sensitivities of the search itself. Leave out --sensitivities.")
    with terminal.progress() as bar:
        found = api.search(
            model, output, sensitivities=sensitivities, resume=resume, force=force, seed=seed, device=device, dtype=dtype,
            revision=revision, offline=offline, merge_adapter=merge_adapter, command=typed_command(), progress=bar, **asked,
        )  # fmt: skip
    terminal.result(found.to_data(), *_shown(found, output))
    for note in found.notes:
        terminal.note(note)
    if found.interrupted:
        raise typer.Exit(Exit.INTERRUPTED)
    if not found.feasible:
        raise typer.Exit(Exit.THRESHOLD)
    terminal.note(f"Next: approx convert {model} --plan {output} -o converted")


def _shown(found: "Searched", output: Path) -> "list[Table | str]":
    from approx.cli.figures import quality_table, speed_tables
    from approx.pipeline.run import BEST, folder_of

    rows = [[str(one.layer), one.choice, one.heads, f"{one.saves:.2f}", f"{one.damage:.0%}"] for one in found.layers]
    shown: list[Table | str] = [found.told]
    if rows:
        shown.append(table(["layer", "mechanism", "heads", "saves ms", "of the damage"], rows))
    if found.quality is not None:
        shown.append(quality_table(found.quality))
    if found.speed is not None:
        shown += speed_tables([found.speed])
    told = f"{found.measured} plans were measured in {found.seconds:.0f} s"
    if found.correlation is not None:
        told += f"; predicted and measured damage of them agree in rank by {found.correlation:.2f}"
    shown.append(f"{told}.")
    if found.plan is not None:
        shown.append(f"Plan: {output if found.feasible or found.interrupted else folder_of(output) / BEST}")
    if found.speed is not None:
        shown.append(f"Report: {folder_of(output) / 'report' / 'index.html'}")
    return shown
