"""Turn functions into commands: shared options, one-line errors, exit codes."""

import contextlib
import errno
import inspect
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from approx.cli.stages import Stage, panel_of
from approx.cli.terminal import Terminal, silence
from approx.errors import ApproxError, Exit

_EVERYWHERE = "Every command"
_SHARED = {
    "json_output": Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object on stdout, and nothing else.", rich_help_panel=_EVERYWHERE),
    ],
    "quiet": Annotated[
        bool, typer.Option("--quiet", "-q", help="Hide progress and notes.", rich_help_panel=_EVERYWHERE)
    ],
    "verbose": Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Show every layer instead of a summary.", rich_help_panel=_EVERYWHERE),
    ],
    "debug": Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=_EVERYWHERE)
    ],
}
EXIT_CODES = {
    Exit.OK: "done",
    Exit.INTERNAL: "internal error",
    Exit.USAGE: "wrong usage, plan or recipe",
    Exit.UNSUPPORTED: "unsupported model, mechanism or layer",
    Exit.MISSING: "missing dependency or hardware",
    Exit.UNAVAILABLE: "model or data unavailable or damaged",
    Exit.VERIFICATION: "a check failed",
    Exit.THRESHOLD: "the loss is beyond the margin or was not tested; a search found nothing",
    Exit.REFUSED: "refused: the output exists, another process writes it, or something differs from the earlier run",
    Exit.INTERRUPTED: "interrupted",
}
"""Exit code -> its meaning, in every `--help`."""

_INTERRUPTED = "Interrupted. Nothing was left half-written; run the command again."
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


def command(
    app: typer.Typer, panel: str, *examples: str, interrupted: str = _INTERRUPTED, **stages: Stage
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function a command: pass it the terminal as first argument, add the shared options, report errors.

    Args:
        app: The app to add it to.
        panel: Group in `approx --help`.
        examples: Command lines shown below the command's help.
        interrupted: Message after Ctrl-C.
        stages: Parameter of the function -> the stage that it takes, whose fields become options in its place.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        def wrapper(**arguments: Any) -> None:
            terminal = Terminal(**{name: arguments.pop(name) for name in _SHARED})
            with (
                _reported_errors(terminal, interrupted),
                _usable_place(),
                terminal.noting("approx_kernels"),
                terminal.noting("approx.evaluation"),
                terminal.noting("approx.measuring"),
            ):
                made = {name: stage.read(arguments) for name, stage in stages.items()}
                function(terminal, **arguments, **made)

        class Late(TyperCommand):
            """A command whose options are made when it is called or its help is shown; `approx --help` does not need them."""

            def get_params(self, ctx: Any) -> Any:
                if not self.params:
                    _declare(wrapper, function, stages)
                    alone = typer.Typer(add_completion=False)
                    alone.command()(wrapper)
                    made = get_command(alone)
                    self.params, self.callback = made.params, made.callback
                return super().get_params(ctx)

        # Typer keeps a line break of an epilog only if it is an empty line.
        epilog = "\n\n".join(["Examples:", *(f"  {line}" for line in examples), exit_codes()])
        name, text = function.__name__.replace("_", "-"), inspect.getdoc(function)
        app.command(name, cls=Late, help=text, rich_help_panel=panel, epilog=epilog)(lambda: None)
        return function

    return decorate


def _declare(wrapper: Callable[..., None], function: Callable[..., None], stages: dict[str, Stage]) -> None:
    """Set the wrapper's signature, from which Typer makes options: those of the function, its stages and all commands."""
    _, *rest = inspect.signature(function).parameters.values()
    parameters: list[inspect.Parameter] = []
    for one in rest:
        if one.name in stages:
            parameters += stages[one.name].parameters()
        else:
            # By keyword, so that required options may follow others.
            parameters.append(one.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    order = [None, *(panel for stage in stages.values() for panel in stage.panels)]
    if stages:
        parameters.sort(key=lambda one: order.index(panel) if (panel := panel_of(one)) in order else len(order))
    for name, kind in _SHARED.items():
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind))
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what Typer reads
    wrapper.__annotations__ = {one.name: one.annotation for one in parameters}


class Group(TyperGroup):
    """The group of all commands; usage errors are printed like other errors: in one line, and as JSON with --json."""

    def main(self, args: Any = None, prog_name: str | None = None, *more: Any, **extra: Any) -> Any:
        """Run a command and exit with its exit code."""
        typed = sys.argv[1:] if args is None else list(args)
        standalone = extra.pop("standalone_mode", True)
        try:
            code = super().main(typed, "approx", *more, standalone_mode=False, **extra)
        except (BrokenPipeError, SystemExit):
            # A help text piped into `head`; rich and click end the process then.
            silence(sys.stdout)
            code = Exit.OK
        except Exception as error:
            # Depending on the version, the class is Typer's or click's.
            if not hasattr(error, "format_message"):
                raise
            code = _report(Terminal(json_output="--json" in typed), _usage(error), Exit.USAGE)
        if standalone:
            sys.exit(code)
        return code


def exit_codes() -> str:
    """The exit codes, as the last paragraph of a help."""
    return "Exit codes: " + "; ".join(f"{int(code)} {meaning}" for code, meaning in EXIT_CODES.items()) + "."


def typed_command() -> str:
    """The command as typed, for the record."""
    return scrubbed(shlex.join(["approx", *sys.argv[1:]]))


def scrubbed(text: str) -> str:
    """The text with access tokens replaced by the names of their variables."""
    for name in _TOKENS:
        if os.environ.get(name):
            text = text.replace(os.environ[name], f"${name}")
    return text


@contextlib.contextmanager
def _reported_errors(terminal: Terminal, interrupted: str) -> Iterator[None]:
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except BrokenPipeError:
        # The reader, such as `head`, closed the pipe of the result. Python would fail at exit when it flushes the rest.
        silence(sys.stdout)
        raise typer.Exit(Exit.OK) from None
    except (Exception, KeyboardInterrupt) as error:
        raise typer.Exit(_report(terminal, *_diagnosis(error, interrupted))) from None


@contextlib.contextmanager
def _usable_place() -> Iterator[None]:
    """Check that the current folder exists, and that the command line is valid UTF-8, as libraries and records require.

    Raises:
        ApproxError: saying what to change.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise ApproxError(
            f"The current folder cannot be opened ({error.strerror}); maybe it was deleted. Change to another folder and run the "
            "command again.",
            Exit.UNAVAILABLE,
        ) from None
    for word in sys.argv[1:]:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise ApproxError(
                f"{word!a} is not UTF-8 text, as the names of files and folders have to be. Rename it: mv OLD NEW."
            ) from None
    yield


def _diagnosis(error: BaseException, interrupted: str) -> tuple[str, Exit]:
    """Message and exit code for an error."""
    if isinstance(error, ApproxError):
        return str(error), error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return interrupted, Exit.INTERRUPTED
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if isinstance(error, ImportError):
        return f"{text}. A package is missing or broken; install approx-attention again.", Exit.MISSING
    if isinstance(error, OSError) and error.errno in _FULL:
        # A failed write, unlike a failed open, may not name its file.
        place = "" if error.filename is None else f" ({error.filename})"
        return f"Disk full: {error.strerror}{place}. Free space and run the command again.", Exit.UNAVAILABLE
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}. Check the path, its permissions and the disk.", Exit.UNAVAILABLE
    where = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{os.path.basename(where.filename)}, line {where.lineno}"
    return (
        f"Internal error: {text} ({place}). Run the command again with --debug and report the traceback.",
        Exit.INTERNAL,
    )


def _usage(error: Any) -> str:
    message = " ".join(error.format_message().split())
    if message.startswith("Missing") and (about := getattr(getattr(error, "param", None), "help", None)):
        message = f"{message.removesuffix('.')}. {about}"
    context = getattr(error, "ctx", None)
    return f"{message if message.endswith(('.', '?')) else message + '.'} See `{context.command_path if context else 'approx'} --help`."


def _report(terminal: Terminal, message: str, code: Exit) -> int:
    message = scrubbed(message)
    try:
        if terminal.debug:
            terminal.err.print(scrubbed(traceback.format_exc()))
        terminal.error(message)
        if terminal.json_output:
            terminal.result({"error": message, "exit_code": int(code)})
    except OSError:
        # The pipe is closed or the disk full; the exit code still reports the error.
        silence(sys.stdout)
        silence(sys.stderr)
    return int(code)
