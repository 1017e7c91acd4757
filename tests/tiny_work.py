"""Work for executors, in a module that their processes can import."""

import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any


def work(item: str, threads: int | None) -> tuple[str, int | None, int]:
    """The result of an item: itself, the number of threads, and the process."""
    if item == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if item == "fails":
        raise ValueError("it fails")
    return item, threads, os.getpid()


def stages(given: dict[str, Any], say: Callable[[str], None], without: Mapping[str, str]) -> dict[str, Any]:
    """Do the work of each name, except those that are left out."""
    done = []
    for name in given["names"]:
        if name not in without:
            say(name)
            if name == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if name == "hangs":
                time.sleep(60)
            if name == "fails":
                raise ValueError("it fails")
            done.append(name)
    return {"done": done, "without": dict(without), "process": os.getpid()}
