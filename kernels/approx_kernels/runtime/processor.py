"""What the system says about the processor."""

import contextlib
import functools
import platform
from pathlib import Path


@functools.cache
def processor_facts() -> dict[str, str]:
    """What Linux says about the first processor, such as its `model name`; empty elsewhere."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            found.setdefault(name.strip(), value.strip())
    return found


def processor_name() -> str:
    """The processor's name, or what is known of it."""
    return processor_facts().get("model name") or platform.processor() or platform.machine()
