"""The command that runs a grid: sweep."""

from pathlib import Path
from typing import Annotated, Any

import typer

from approx.cli import names, options
from approx.cli.command import command, typed_command
from approx.cli.tables import table
from approx.cli.terminal import Terminal
from approx.errors import ApproxError, Exit
from approx.evaluation import tracking


def add_to(app: typer.Typer) -> None:
    """Add the commands of this file to the app."""
    command(
        app,
        "Measure",
        "approx sweep needle-grid --dry-run",
        "approx sweep grid.yaml --jobs 4 -o runs/grid --report-to trackio",
        "approx sweep grid.yaml --executor submitit --set-executor slurm_partition=cpu --set-executor cpus_per_task=8",
        interrupted="Interrupted. Finished cells are kept; run the same command to compute the missing ones.",
    )(sweep)


def sweep(
    terminal: Terminal,
    grid: Annotated[
        str,
        typer.Argument(
            help="A YAML file, or the name of a grid that comes with the package, e.g. needle-grid.",
            show_default=False,
            autocompletion=names.completed(names.grids),
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of the sweep. Default: runs/NAME.")
    ] = None,
    executor: Annotated[
        str, typer.Option(help="local (processes on this machine) or submitit (SLURM).", rich_help_panel="Machine")
    ] = "local",
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Cells computed in parallel, sharing the cores; timed cells run alone.",
            rich_help_panel="Machine",
        ),
    ] = None,
    set_executor: Annotated[
        list[str] | None,
        typer.Option(
            help="An option for the cluster, e.g. timeout_min=60; may be repeated.", rich_help_panel="Machine"
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the cells and their states; compute nothing.")
    ] = False,
    report_to: options.ReportTo = None,
    offline: options.Offline = False,
) -> None:
    """Compare the plans of a grid on its tasks, over several seeds; no cell is computed twice.

    A grid is a recipe whose variants list values:

    variants: {clustered: {mechanism: improved-clustered, settings: {topk: 32}, grid: {clusters: [25, 100]}}}
    """
    from approx import grid as grids
    from approx import recipe as recipes
    from approx.evaluation import record
    from approx.pipeline import sweep as stage
    from approx.pipeline.store import Store, choose

    tracking.refuse_missing(report_to)
    path = recipes.find(grid, "grid")
    read = grids.read(path)
    folder = output or Path("runs") / path.stem
    chosen = choose(
        executor,
        jobs=jobs,
        options=options.read_settings(set_executor, "--set-executor"),
        folder=folder.resolve() / "jobs",
    )
    with terminal.progress() as bar:
        cells = stage.cells(read, folder, offline=offline, command=typed_command(), progress=bar)
        if not dry_run:
            made = stage.sweep(read, folder, cells, chosen, progress=bar)
    if dry_run:
        _list(terminal, cells, [Store(folder).state(cell) for cell in cells])
        return
    failed = made.results.failed
    for one in failed:
        terminal.note(f"Failed: {one.title}: {one.error}")
    shown = [table(one.columns, one.rows, title=one.title) for one in made.tables]
    files = [f"Tables: {folder / 'sweep.md'}, sweep.csv and sweep.json", f"Records: {folder / 'records'}"]
    terminal.result(
        made.data,
        *([read.notice] if read.notice else []),
        *shown,
        f"{made.computed} of {len({cell.key for cell in cells})} cells were computed; the others existed already.",
        *files,
    )
    if report_to is not None:
        records = [record.load(file) for file in sorted((folder / "records").glob("*.json"))]
        terminal.note(tracking.report(read.title, records, report_to))
    if failed:
        count, codes = len(failed), [one.exit_code for one in failed]
        raise ApproxError(
            f"{count} cell{'s' if count > 1 else ''} failed: {failed[0].error} Run the same command to try again.",
            Exit(min(codes)),
        )


def _list(terminal: Terminal, cells: list[Any], states: list[str]) -> None:
    rows = [[state, cell.name, cell.key[:16]] for cell, state in zip(cells, states, strict=True)]
    counted = ", ".join(f"{states.count(state)} {state}" for state in ("done", "failed", "missing") if state in states)
    listed = [{"state": state, "cell": cell.name, "key": cell.key} for cell, state in zip(cells, states, strict=True)]
    terminal.result({"cells": listed}, table(["state", "cell", "key"], rows), f"{len(cells)} cells: {counted}")
