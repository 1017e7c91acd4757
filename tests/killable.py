"""Run the command line in a separate process, to interrupt or kill it."""

import os
import signal
import sys
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from approx.pipeline.executors import processes


def start(*words: object, errors: Path) -> BaseProcess:
    """Start `approx`; its messages go to a file."""
    context: BaseContext = processes()
    process = context.Process(target=_run, args=([str(word) for word in words], str(errors), dict(os.environ)))  # pyright: ignore[reportAttributeAccessIssue]  # every context has it
    process.start()
    return process


def ended(process: BaseProcess, how: signal.Signals) -> int | None:
    """Send a signal, wait for the end, and return the exit code."""
    assert process.pid
    os.kill(process.pid, how)
    process.join(300)
    return process.exitcode


def _run(words: list[str], errors: str, environment: dict[str, str]) -> None:
    from approx.cli import main

    # The fork server has the environment of its own start.
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    sys.argv = ["approx", *words]
    main()
