"""Work for executors, in a module that their processes can import."""

import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

# The process that read this module.
IMPORTED_BY = os.getpid()


def work(item: str, threads: int | None) -> tuple[str, int | None, int]:
    """The result of an item: itself, the number of threads, and the process."""
    if item == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if item == "fails":
        raise ValueError("it fails")
    return item, threads, os.getpid()


def rows(arguments: dict[str, Any], say: Callable[[dict[str, Any]], None], before: Mapping[str, Any]) -> dict[str, Any]:
    """A row for each name that has none yet; some names kill the process, never end, or fail as a whole."""
    for name in arguments["names"]:
        if name not in before:
            say({"name": name, "role": "variant"})
            if name.startswith("dies"):
                os.kill(os.getpid(), signal.SIGKILL)
            if name.startswith("hangs"):
                time.sleep(60)
            if name == "fails":
                raise ValueError("it fails")
            say({"name": name, "role": "variant", "status": "ok", "process": os.getpid()})
    return {"process": os.getpid()}


def importer(arguments, say, before):
    """Whether this process imported this module itself."""
    return {"imported here": os.getpid() == IMPORTED_BY}
