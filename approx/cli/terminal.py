"""What every command shares: --json, --quiet, --verbose and --debug, progress, and errors in one line."""

import contextlib
import functools
import inspect
import json
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from approx.errors import ApproxError, Exit

_SHARED = {
    "json_output": Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else there.")
    ],
    "quiet": Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes.")],
    "verbose": Annotated[bool, typer.Option("--verbose", "-v", help="More detail.")],
    "debug": Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")],
}


_PIPE_WIDTH = 200


@dataclass
class Terminal:
    """How a command speaks: results on stdout, everything else on stderr.

    Attributes:
        json_output: Results as one JSON object.
        quiet: No progress, no notes.
        verbose: More detail.
        debug: Tracebacks.
    """

    json_output: bool = False
    quiet: bool = False
    verbose: bool = False
    debug: bool = False
    out: Console = field(default_factory=lambda: _console(stderr=False))
    err: Console = field(default_factory=lambda: _console(stderr=True))

    def result(self, data: Any, *parts: Table | str) -> None:
        """Print a result: `data` with --json, the parts for people otherwise."""
        if self.json_output:
            sys.stdout.write(json.dumps(data, indent=1, ensure_ascii=False, default=str) + "\n")
            return
        for part in parts:
            self.out.print(part, markup=False) if isinstance(part, str) else self.out.print(part)

    def note(self, text: str) -> None:
        """Say something beside the result."""
        if not self.quiet:
            self.err.print(Text(text, style="dim"))

    @contextlib.contextmanager
    def progress(self) -> Iterator[Callable[[str, int, int], None]]:
        """Draw a bar for each stage on a terminal; elsewhere a line for each stage."""
        if self.quiet or not self.err.is_terminal:
            yield self._lines()
            return
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.err, transient=True) as bars:
            tasks: dict[str, Any] = {}

            def advance(stage: str, done: int, total: int) -> None:
                name = stage.split(" ")[0]
                if name not in tasks:
                    tasks[name] = bars.add_task(stage, total=max(total, 1))
                bars.update(tasks[name], description=stage, completed=done, total=max(total, 1))

            yield advance

    def _lines(self) -> Callable[[str, int, int], None]:
        last, start = "", time.monotonic()

        def say(stage: str, done: int, total: int) -> None:
            nonlocal last
            if stage != last and not self.quiet:
                self.err.print(Text(f"[{time.monotonic() - start:6.1f} s] {stage}", style="dim"))
            last = stage

        return say


def _console(*, stderr: bool) -> Console:
    # Nobody resizes a file or a pipe, so a table there is as wide as its content.
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, soft_wrap=True, width=None if stream.isatty() else _PIPE_WIDTH)


def table(*columns: str, title: str | None = None) -> Table:
    """An empty table whose cells break instead of losing their end."""
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
    for name in columns:
        made.add_column(name, overflow="fold")
    return made


def command(app: typer.Typer, panel: str, examples: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function a command: its first argument is the terminal, the shared options are added, errors are told.

    Args:
        app: Where it goes.
        panel: Group in `approx --help`.
        examples: Shown below the command's own help.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function)
        _, *own = signature.parameters.values()
        shared = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
            for name, kind in _SHARED.items()
        ]

        @functools.wraps(function)
        def wrapper(**given: Any) -> None:
            terminal = Terminal(**{name: given.pop(name) for name in _SHARED})
            with _errors_told(terminal):
                function(terminal, **given)

        wrapper.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]  # what Typer reads
        wrapper.__annotations__ = {p.name: p.annotation for p in [*own, *shared]}
        app.command(rich_help_panel=panel, epilog=f"Examples: {examples}")(wrapper)
        return function

    return decorate


def typed_command() -> str:
    """The command as it was typed, to be kept in a record."""
    return scrubbed(shlex.join(["approx", *sys.argv[1:]]))


def scrubbed(text: str) -> str:
    """The text without the tokens of this environment."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if os.environ.get(name):
            text = text.replace(os.environ[name], f"${name}")
    return text


@contextlib.contextmanager
def _errors_told(terminal: Terminal) -> Iterator[None]:
    try:
        yield
    except ApproxError as error:
        _tell(terminal, str(error), error.exit_code)
    except KeyboardInterrupt:
        _tell(terminal, "Interrupted. What was finished is kept; `approx run … --resume` goes on.", Exit.INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(Exit.OK) from None
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        _tell(
            terminal,
            f"Internal error: {type(error).__name__}: {error} ({os.path.basename(where.filename)}, line {where.lineno}). "
            "Run it again with --debug and report the traceback.",
            Exit.INTERNAL,
        )


def _tell(terminal: Terminal, message: str, code: Exit) -> None:
    message = scrubbed(message)
    if terminal.debug:
        terminal.err.print(scrubbed(traceback.format_exc()), markup=False, highlight=False)
    terminal.err.print(Text("error: ", style="bold red").append(Text(message, style="default")))
    if terminal.json_output:
        terminal.result({"error": message, "exit_code": int(code)})
    raise typer.Exit(int(code))
