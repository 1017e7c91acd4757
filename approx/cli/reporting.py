"""Commands that read records: report, compare."""

from pathlib import Path
from typing import Annotated

import typer

from approx.cli import options
from approx.cli.command import command
from approx.cli.terminal import Terminal

_PANEL = "Measure"


def add_to(app: typer.Typer) -> None:
    """Add the commands of this file to the app."""
    paper = "approx report runs/study --format latex --format svg"
    command(app, _PANEL, "approx report quality.json speed.json -o report", "approx report runs/study", paper)(report)
    command(app, _PANEL, "approx compare before.json after.json", "approx compare runs/first runs/second")(compare)


def report(
    terminal: Terminal,
    records: options.Records,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder to write. Default: the folder 'report' beside the first record."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace files of the same names that are not of a report.")
    ] = False,
    formats: Annotated[
        list[str] | None,
        typer.Option("--format", help="Write also: latex (tables.tex), svg (each plot, in plots). Repeatable."),
    ] = None,
) -> None:
    """Make a report from records: JSON, Markdown, CSV and one offline HTML page.

    Records of the same weights and plan become one answer, with quality against speed.
    """
    from approx.evaluation import record
    from approx.evaluation.quality import over_records
    from approx.publishing.report import write_report

    files = [file for given in records for file in options.record_files(given)]
    folder = output or (records[0] if records[0].is_dir() else records[0].parent) / "report"
    written = write_report(
        over_records([record.load(file) for file in files]), folder, force=force, formats=formats or ()
    )
    terminal.result({"files": [str(path) for path in written]}, *map(str, written))


def compare(
    terminal: Terminal,
    first: Annotated[Path, typer.Argument(help="A record, or the folder of a run.", show_default=False)],
    second: Annotated[Path, typer.Argument(help="The record to compare with it.", show_default=False)],
) -> None:
    """Compare two records: what differs between them, and their quality, speed and verdicts side by side."""
    from approx.cli.figures import comparison_tables
    from approx.evaluation import record
    from approx.publishing.report import compare as compare_records

    read = [record.load(options.record_file(path)) for path in (first, second)]
    compared = compare_records(*read)
    terminal.result(compared.to_data(), *comparison_tables(compared))
