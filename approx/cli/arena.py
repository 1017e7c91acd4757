"""The command that trains encoders from scratch: lra."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from approx.cli import options
from approx.cli.command import command, typed_command
from approx.cli.stages import Stage
from approx.cli.tables import table
from approx.cli.terminal import Terminal
from approx.errors import ApproxError, Exit

if TYPE_CHECKING:
    from approx.arena.options import ArenaStage

_STAGE = Stage(
    "approx.arena.options.ArenaStage",
    panels={
        "Size": "length examples test_examples steps batch_size learning_rate time_budget",
        "Encoder": "layers hidden heads pool",
    },
    omitted=("data", "settings"),
)


def add_to(app: typer.Typer) -> None:
    """Add the command of this file to the app."""
    command(
        app,
        "Measure",
        "approx lra --size tiny --mechanisms linear,local -o runs/lra-tiny",
        "approx lra --tasks listops,image,pathfinder --mechanisms linear,performer,clustered,local -o runs/lra --resume",
        "approx lra --tasks text,retrieval --data text=aclImdb --data retrieval=aclImdb --set clustered.clusters=32",
        interrupted="Interrupted. Finished trainings are kept; run the same command with --resume to continue.",
        stage=_STAGE,
    )(lra)


def lra(
    terminal: Terminal,
    stage: "ArenaStage",
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the comparison.")] = Path("runs/lra"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep finished trainings, and continue an interrupted one.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Delete an earlier comparison and start over.")] = False,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="TASK=PATH: of listops its tsv, of text IMDb or a table, of retrieval the pairs of the paper or texts, of image "
            "the binary CIFAR-10. Default: generated, or IMDb from the hub. May be repeated.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="A setting of a mechanism, e.g. local.left=32; `approx mechanisms NAME` lists them; may be repeated. "
            "Default: its own, but windows of at most a sixteenth of the length.",
        ),
    ] = None,
    device: options.Device = "auto",
) -> None:
    """Long Range Arena: train a small encoder from scratch with each mechanism, and compare score, speed and memory.

    This says which mechanism learns long inputs, not what converting a checkpoint costs: `evaluate` and `bench` do.
    """
    from approx import api
    from approx.arena import results

    with terminal.progress() as bar:
        made = api.lra(
            output,
            stage.model_copy(update={"data": _data(data), "settings": _settings(settings)}),
            resume=resume,
            force=force,
            device=device,
            command=typed_command(),
            progress=bar,
        )
    shown = [table(results.COLUMNS, results.rows(task), title=results.heading(task)) for task in made.tasks]
    files = f"Page: {output / 'lra.md'}, figure: {output / 'lra.svg'}, record: {output / 'lra.json'}"
    terminal.result(made.to_data(), made.notice, *shown, *results.notes(made), files)
    if failed := made.failed:
        for text, _ in failed:
            terminal.note(f"Failed: {text}")
        count = len(failed)
        raise ApproxError(
            f"{count} training{'s' if count > 1 else ''} failed: {failed[0][0]} Run the same command with --resume to try again.",
            Exit(min(code for _, code in failed)),
        )


def _data(given: list[str] | None) -> dict[str, str]:
    """Task -> path."""
    read: dict[str, str] = {}
    for text in given or []:
        task, equals, path = text.partition("=")
        if not (equals and task and path) or task in read:
            raise ApproxError(
                f"'--data {text}' was given; the form is --data TASK=PATH, e.g. --data text=aclImdb, once for each task."
            )
        read[task] = path
    return read


def _settings(given: list[str] | None) -> dict[str, dict[str, Any]]:
    """Mechanism -> its settings."""
    read: dict[str, dict[str, Any]] = {}
    for name, value in options.read_settings(given).items():
        mechanism, dot, setting = name.partition(".")
        if not dot:
            raise ApproxError(
                f"'--set {name}=…' names no mechanism; the form is --set MECHANISM.NAME=VALUE, e.g. --set local.left=32."
            )
        read.setdefault(mechanism.replace("_", "-"), {})[setting] = value
    return read
