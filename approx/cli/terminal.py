"""Output of commands: results on stdout, everything else on stderr, progress bars only on a terminal."""

import contextlib
import dataclasses
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

_PIPE_WIDTH = 200
_SECONDS_BETWEEN_LINES = 15.0
_SECONDS_OF_SILENCE = 30.0
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass
class Terminal:
    """Prints results, notes, progress and errors of one command.

    Attributes:
        json_output: Print results as one JSON object.
        quiet: Print no progress and no notes.
        verbose: Show every layer instead of a summary.
        debug: Print tracebacks.
    """

    json_output: bool = False
    quiet: bool = False
    verbose: bool = False
    debug: bool = False
    out: Console = field(default_factory=lambda: _console(stderr=False))
    err: Console = field(default_factory=lambda: _console(stderr=True))

    def result(self, data: Any, *parts: Table | str) -> None:
        """Print `data`, plain or typed, with --json; otherwise the parts."""
        if self.json_output:
            text = visible(json.dumps(data, indent=1, ensure_ascii=False, default=_plain), "\\u00")
        else:
            with self.out.capture() as shown:
                for part in parts:
                    self.out.print(part)
            # Trailing spaces of tables get in the way of copying and comparing them.
            text = "\n".join(line.rstrip() for line in shown.get().splitlines())
        sys.stdout.write(text + "\n")
        # A closed pipe (`… | head`) must raise while the command still runs.
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """Print a note on stderr."""
        if not self.quiet:
            # Do not wrap lines in a file, so that they can be searched.
            self.err.print(Text(text, style="dim"), soft_wrap=not self.err.is_terminal)

    @contextlib.contextmanager
    def noting(self, logger: str) -> Iterator[None]:
        """Print a logger's messages as notes, such as that C is being compiled."""
        source, handler = logging.getLogger(logger), _Notes(self)
        before = source.level
        source.addHandler(handler)
        source.setLevel(logging.INFO)
        try:
            yield
        finally:
            source.removeHandler(handler)
            source.setLevel(before)

    def error(self, message: str) -> None:
        """Print an error; each line of the message is one mistake."""
        for line in message.splitlines():
            self.err.print(Text("error: ", style="bold red").append(Text(line, style="default")))

    @contextlib.contextmanager
    def progress(self) -> Iterator[Callable[[str, int, int], None]]:
        """Draw a bar for each stage on a terminal, elsewhere print a line for each stage and a sign of life in between."""
        if self.quiet:
            yield lambda stage, done, total: None
            return
        if not self.err.is_terminal:
            with _Lines(self.note) as lines:
                yield lines
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn())
        times = (TimeElapsedColumn(), TimeRemainingColumn(compact=True))
        with Progress(*columns, *times, console=self.err, transient=True) as bars:
            tasks: dict[str, Any] = {}

            def advance(stage: str, done: int, total: int) -> None:
                name = stage.split(" ")[0]
                if name not in tasks:
                    for earlier in bars.tasks:
                        # Stages run one after another, and some do not report their end.
                        bars.update(earlier.id, completed=earlier.total)
                    tasks[name] = bars.add_task(stage, total=max(total, 1))
                bars.update(tasks[name], description=stage, completed=done, total=max(total, 1))

            yield advance


class _Lines:
    """Progress in a log: a line for each stage, and after some silence a line with the state and the time left."""

    def __init__(self, note: Callable[[str], None], silence: float = _SECONDS_OF_SILENCE) -> None:
        self._note, self._silence = note, silence
        self._begun = self._printed = self._stage_begun = self._stepped = time.monotonic()
        self._stage, self._done, self._first, self._total = "", 0, 0, 0
        self._lock, self._over = threading.Lock(), threading.Event()
        self._watch = threading.Thread(target=self._break_silence, daemon=True)

    def __enter__(self) -> "_Lines":
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watch.join()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Update the state of a stage."""
        with self._lock:
            now, before = time.monotonic(), self._stage
            # Steps of one kind are counted together.
            if stage.split(" ")[0] != before.split(" ")[0] or done < self._done or not done:
                self._stage_begun, self._first = now, done
            if done != self._done or stage != before:
                self._stepped = now
            self._stage, self._done, self._total = stage, done, total
            # The figures after '|' change at every step; one line now and then is enough.
            again = "|" in stage and stage.partition("|")[0] == before.partition("|")[0]
            if stage != before and done < total and not (again and now - self._printed < _SECONDS_BETWEEN_LINES):
                self._print(stage)

    def _break_silence(self) -> None:
        while not self._over.wait(self._silence / 10):
            with self._lock:
                if time.monotonic() - self._printed >= self._silence:
                    self._print(self._state())

    def _state(self) -> str:
        if not self._stage or self._done >= self._total:
            return "still working"
        made = self._done - self._first
        if self._total == 1:
            return f"{self._stage}, for {_spoken(time.monotonic() - self._stepped)}"
        text = f"{self._stage}: {self._done:,} of {self._total:,}"
        if made <= 0:
            return text
        step, since = (self._stepped - self._stage_begun) / made, time.monotonic() - self._stepped
        # While a step runs, the time left only falls; if it takes longer than those before, nothing is promised.
        left = step * (self._total - self._done) - since
        if since > 2 * max(step, self._silence):
            return f"{text}, this step for {_spoken(since)}"
        return f"{text}, about {_spoken(max(left, step))} left"

    def _print(self, text: str) -> None:
        self._printed = time.monotonic()
        self._note(f"[{self._printed - self._begun:6.1f} s] {text}")


def _spoken(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


class _Notes(logging.Handler):
    def __init__(self, terminal: Terminal) -> None:
        super().__init__()
        self.terminal = terminal
        self.seen: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        # Compiling several sources logs the same message several times.
        if message not in self.seen:
            self.seen.add(message)
            self.terminal.note(message)


class _PlainConsole(Console):
    """A console that escapes control characters in texts, such as names in a model or a recipe."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        """Continue without a reader; rich would end the process in the middle of writing files."""
        silence(self.file)


def silence(stream: Any) -> None:
    """Send what is still printed to a stream to the null device."""
    # In a test or a notebook a stream may not be a file.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def visible(text: str, escape: str = "\\x") -> str:
    """Write control characters as escapes, such as \\x1b; a tab and a line break stay."""
    return _CONTROLS.sub(lambda found: f"{escape}{ord(found[0]):02x}", text)


def open_streams() -> None:
    """Open the null device for each standard stream that the caller has closed.

    Otherwise the next file that is opened, such as a record, takes its number, and what a library prints lands in that
    file.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - it stays open


def _console(*, stderr: bool) -> Console:
    # Files and pipes have no width. Brackets in names and paths are not markup.
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _PIPE_WIDTH
    return _PlainConsole(stderr=stderr, soft_wrap=True, width=width, markup=False, emoji=False, highlight=False)


def _plain(value: Any) -> Any:
    """What JSON has in place of a typed result."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return vars(value) if dataclasses.is_dataclass(value) else str(value)
