"""How a command prints: results on stdout, everything else on stderr, progress bars only on a terminal."""

import contextlib
import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

_PIPE_WIDTH = 200
_SECONDS_BETWEEN_LINES = 15.0


@dataclass
class Terminal:
    """Where results, notes, progress and errors of one command go.

    Attributes:
        json_output: Results as one JSON object.
        quiet: No progress, no notes.
        verbose: Every layer instead of a summary.
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
            text = json.dumps(data, indent=1, ensure_ascii=False, default=str)
        else:
            with self.out.capture() as shown:
                for part in parts:
                    self.out.print(part)
            # Tables are padded to a rectangle, which gets in the way of copying and comparing them.
            text = "\n".join(line.rstrip() for line in shown.get().splitlines())
        sys.stdout.write(text + "\n")
        # Flushed here, so that a closed pipe (`… | head`) is noticed while the command still runs.
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """Print a note on stderr."""
        if not self.quiet:
            # On a terminal words stay whole; in a file lines do, so that they can be searched.
            self.err.print(Text(text, style="dim"), soft_wrap=not self.err.is_terminal)

    @contextlib.contextmanager
    def noting(self, logger: str) -> Iterator[None]:
        """Print what a logger reports as notes, such as a wait of seconds for a compiler."""
        said, handler = logging.getLogger(logger), _Notes(self)
        before = said.level
        said.addHandler(handler)
        said.setLevel(logging.INFO)
        try:
            yield
        finally:
            said.removeHandler(handler)
            said.setLevel(before)

    def error(self, message: str) -> None:
        """Print what went wrong, a line for each mistake."""
        for line in message.splitlines():
            self.err.print(Text("error: ", style="bold red").append(Text(line, style="default")))

    @contextlib.contextmanager
    def progress(self) -> Iterator[Callable[[str, int, int], None]]:
        """Draw a bar for each stage on a terminal; elsewhere a line for each stage."""
        if self.quiet or not self.err.is_terminal:
            yield self._lines()
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20))
        with Progress(*columns, MofNCompleteColumn(), TimeElapsedColumn(), console=self.err, transient=True) as bars:
            tasks: dict[str, Any] = {}

            def advance(stage: str, done: int, total: int) -> None:
                name = stage.split(" ")[0]
                if name not in tasks:
                    tasks[name] = bars.add_task(stage, total=max(total, 1))
                bars.update(tasks[name], description=stage, completed=done, total=max(total, 1))

            yield advance

    def _lines(self) -> Callable[[str, int, int], None]:
        last, start, said = "", time.monotonic(), 0.0

        def say(stage: str, done: int, total: int) -> None:
            nonlocal last, said
            # Of a stage with figures behind its name, which change all the time, a line now and then will do.
            again = "|" in stage and stage.partition("|")[0] == last.partition("|")[0]
            if stage != last and done < total and not (again and time.monotonic() - said < _SECONDS_BETWEEN_LINES):
                said = time.monotonic()
                self.note(f"[{said - start:6.1f} s] {stage}")
                last = stage

        return say


class _Notes(logging.Handler):
    def __init__(self, terminal: Terminal) -> None:
        super().__init__()
        self.terminal = terminal
        self.told: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        # Several sources may be compiled one after another.
        if message not in self.told:
            self.told.add(message)
            self.terminal.note(message)


def _console(*, stderr: bool) -> Console:
    # A file or a pipe has no width, so a table there is as wide as its content. Names and paths are not markup.
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _PIPE_WIDTH
    return Console(stderr=stderr, soft_wrap=True, width=width, markup=False, emoji=False, highlight=False)


def table(columns: Sequence[str], rows: Iterable[Sequence[str] | None], title: str | None = None) -> Table:
    """A table whose cells wrap instead of being cut; columns that are empty in all rows are left out.

    Names, in a column without a heading, are not wrapped.

    Args:
        columns: Headings.
        rows: Cells; None draws a line.
        title: Above the headings.
    """
    rows = list(rows)
    kept = [index for index in range(len(columns)) if any(row and row[index] for row in rows)]
    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index in kept:
        made.add_column(columns[index], overflow="fold", no_wrap=not columns[index])
    for row in rows:
        if row is None:
            made.add_section()
        else:
            made.add_row(*(row[index] for index in kept))
    return made
