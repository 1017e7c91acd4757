"""The command line: one short function per command, grouped as in `approx --help`."""

import logging
import os
import signal

import typer

from approx.cli import (
    arena,
    comparison,
    conversion,
    environment,
    explanation,
    finetuning,
    folders,
    looking,
    measurement,
    pattern,
    push,
    recommendation,
    reporting,
    search,
    study,
    sweep,
)
from approx.cli.command import Group, exit_codes
from approx.cli.terminal import Terminal, open_streams

# Commands print what matters of these messages.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

app = typer.Typer(
    name="approx",
    cls=Group,
    help="Replace the attention of a pretrained transformer and measure the change in quality and speed.",
    epilog="Start with: approx run quickstart\n\nThen: approx inspect MODEL, approx plan MODEL --mechanism NAME\n\n"
    + exit_codes(),
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["--help", "-h"]},
)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
    verbose: bool = typer.Option(
        False, "--verbose", "-v", help="With --version: also show which parts work on this machine."
    ),
    json_output: bool = typer.Option(False, "--json", help="With --version: print one JSON object."),
) -> None:
    if version:
        environment.print_versions(Terminal(json_output=json_output, verbose=verbose))
        raise typer.Exit
    if (verbose or json_output) and context.invoked_subcommand is not None:
        raise typer.BadParameter("--verbose and --json belong behind the command, or to --version.")
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


explanation.add_to(app)
conversion.add_to(app)
folders.add_to(app)
recommendation.add_to(app)
search.add_to(app)
finetuning.add_to(app)
pattern.add_to(app)
measurement.add_to(app)
reporting.add_to(app)
comparison.add_to(app)
looking.add_to(app)
study.add_to(app)
sweep.add_to(app)
arena.add_to(app)
push.add_to(app)
environment.add_to(app)


def main() -> None:
    """Entry point of the `approx` command; SIGTERM, as of a scheduler, ends it as Ctrl-C does."""
    open_streams()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # transformers imports torchao wherever it is installed, which then warns of its own parts for GPUs and of PyTorch's changes.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    app()
