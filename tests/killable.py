"""Run the command line in a separate process, to interrupt or kill it."""

import importlib
import os
import signal
import sys
from collections.abc import Mapping
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from approx.pipeline.store import processes

PRELOADED = (
    "transformers.models.bert.modeling_bert",
    "approx.cli",
    "approx.finetuning.finetune",
    "approx.pipeline.run",
    "approx.pipeline.sweep",
    "approx.pushing.push",
)


def start(*words: object, errors: Path, environment: Mapping[str, str] | None = None) -> BaseProcess:
    """Start `approx`; its messages go to a file, and variables may be added to the environment."""
    context: BaseContext = processes()
    # Every command would import its rooms anew; a server that runs already keeps what it has.
    context.set_forkserver_preload([*PRELOADED])
    every = {**os.environ, **(environment or {})}
    process = context.Process(target=_run, args=([str(word) for word in words], str(errors), every))  # pyright: ignore[reportAttributeAccessIssue]  # every context has it
    process.start()
    return process


def ended(process: BaseProcess, how: signal.Signals) -> int | None:
    """Send a signal, wait for the end, and return the exit code."""
    assert process.pid
    os.kill(process.pid, how)
    process.join(300)
    return process.exitcode


def _run(words: list[str], errors: str, environment: dict[str, str]) -> None:
    from huggingface_hub import constants

    from approx.cli import main

    # The fork server has the environment of its own start, and the hub's client has read that one.
    os.environ.clear()
    os.environ.update(environment)
    importlib.reload(constants)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    sys.argv = ["approx", *words]
    main()
