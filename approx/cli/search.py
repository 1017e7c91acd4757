"""The command that finds a plan: search."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from approx.cli import options
from approx.cli.command import command, typed_command
from approx.cli.stages import Stage
from approx.cli.tables import table
from approx.cli.terminal import Terminal
from approx.errors import ApproxError, Exit

if TYPE_CHECKING:
    from rich.table import Table

    from approx.evaluation.record import Speed
    from approx.searching.options import SearchStage
    from approx.searching.outcome import Searched

_STAGE = Stage(
    "approx.searching.options.SearchStage",
    panels={
        "Goal": "length budget speed latency batch",
        "Task": "task data settings split limit min_length truncate text",
        "Search": "mechanisms candidates granularity stock heal calibration examples proof front time_budget",
    },
    renamed={"batch": "--batch-size"},
)


def add_to(app: typer.Typer) -> None:
    """Add the command of this file to the app."""
    command(
        app,
        "Convert",
        "approx search quickstart --task needle --set length=1024 --budget 'loss<=2' --length 1024 -o plan.yaml",
        "approx search my-model --task glue/sst2 --data SST-2 --budget 'loss<=0.5' --length 512 --speed 1.1x -o "
        "plan.yaml",
        "approx search gpt2 --text corpus.txt --budget 'kl<=0.05' --length 1024 --granularity heads -o plan.yaml",
        "approx search my-llama --text corpus.txt --budget 'kl<=0.05' --length 4096 --stock -o plan.yaml",
        interrupted="Interrupted before there was a plan. Measurements are stored; run the same command with --resume to go on.",
        stage=_STAGE,
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
    stage: "SearchStage",
    sensitivities: Annotated[
        Path | None,
        typer.Option(help="sensitivities.json of an earlier search, for another budget.", rich_help_panel="Search"),
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

    if sensitivities is not None and resume:
        raise ApproxError("--resume reads the sensitivities of the search itself. Leave out --sensitivities.")
    with terminal.progress() as bar:
        found = api.search(
            model,
            output,
            stage,
            sensitivities=sensitivities,
            resume=resume,
            force=force,
            seed=seed,
            device=device,
            dtype=dtype,
            revision=revision,
            offline=offline,
            merge_adapter=merge_adapter,
            command=typed_command(),
            progress=bar,
        )
    terminal.result(found.to_data(), *_shown(found, output, verbose=terminal.verbose))
    for note in found.notes:
        terminal.note(note)
    if found.interrupted:
        raise typer.Exit(Exit.INTERRUPTED)
    if not found.feasible:
        raise typer.Exit(Exit.THRESHOLD)
    terminal.note(f"Next: {shlex.join(['approx', 'convert', model, '--plan', str(output), '-o', 'converted'])}")
    if stage.stock:
        terminal.note("Then: approx export converted --format stock -o stock")


def _shown(found: "Searched", output: Path, *, verbose: bool) -> "list[Table | str]":
    from approx.cli.figures import quality_tables, speed_tables
    from approx.pipeline.run import BEST, folder_of

    rows = [
        [
            str(one.layer),
            one.choice,
            one.heads,
            f"{one.saves:.2f}",
            f"{one.damage:.0%}",
            "" if one.divergence is None else f"{one.divergence:.2g}",
        ]
        for one in found.layers
    ]
    shown: list[Table | str] = [found.summary]
    if rows:
        shown.append(
            table(["layer", "mechanism", "heads", "saves ms", "of the damage", "alone moves the outputs by"], rows)
        )
    if found.speed is not None:
        shown += _frontier(found.speed, folder_of(output) / "record.json")
    if found.quality is not None and verbose:
        shown += quality_tables(found.quality)
    if found.speed is not None and verbose:
        shown += speed_tables([found.speed])
    summary = f"{found.measured} plans were measured in {found.seconds:.0f} s"
    if found.correlation is not None:
        summary += f"; predicted and measured damage of them agree in rank by {found.correlation:.2f}"
    shown.append(f"{summary}.")
    if found.plan is not None:
        shown.append(f"Plan: {output if found.feasible or found.interrupted else folder_of(output) / BEST}")
    if found.speed is not None:
        shown.append(f"Report: {folder_of(output) / 'report' / 'index.html'}")
    return shown


def _frontier(speed: "Speed", file: Path) -> "list[Table | str]":
    """What the report of the search advises, and the plans that were proven beside each other."""
    from approx.evaluation import record
    from approx.publishing import wording
    from approx.publishing.summary import conclude, overview, recommendation, variant_of
    from approx.publishing.tables import plan_lines

    made = record.load(file)
    concluded = conclude(made)
    chosen = None if concluded is None else concluded.chosen
    plans = {
        one.name: "; ".join(f"{line['layers']}: {line['mechanism']}" for line in plan_lines(one))
        for one in made.variants
    }
    rows = []
    for row in overview(made):
        timed = variant_of(speed.variants, row.name)
        ends = None if timed is None else speed.believed(timed).interval
        rows.append(
            [
                "→" if row.name == chosen else "",
                row.name,
                plans[row.name],
                f"{row.change[0]} ({row.interval})" if row.interval else row.change[0],
                f"{row.ratio[0]} ({wording.between(ends)})" if ends else row.ratio[0],
                row.decision,
            ]
        )
    title = f"Plans on examples that the search did not see, and their speed at {wording.count(speed.length)} tokens"
    columns = ["", "plan", "layers", "change in quality", "speed", "advice"]
    return [*recommendation(made)[:1], table(columns, rows, title=title)]
