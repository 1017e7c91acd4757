"""What probes found out about this machine, kept in memory and, for the next process, on disk."""

import contextlib
import functools
import json
import logging
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from approx_kernels.c_language import compiler_obstacle
from approx_kernels.cache_folder import cache_folder

_LOG = logging.getLogger(__name__)
# Another number after a change that makes what was found before mean something else.
FORMAT = 7

Finding = dict[str, Any]

# Running programs per core from which on they are in each other's way; this one may use all cores itself.
CROWDED = 1.5

_known: dict[str, dict[str, Finding]] = {}
_lock = RLock()


def file() -> Path:
    """Where findings are kept: in $APPROX_CACHE, or in `approx` in the user's cache folder."""
    return cache_folder() / f"machine-{FORMAT}.json"


def machine(device: str) -> str:
    """What a finding depends on besides what was measured: hardware, threads, the build of torch, and whether C compiles."""
    if device == "cuda":
        at = torch.cuda.current_device()
        return f"{torch.cuda.get_device_name(at)}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"
    level = torch.backends.cpu.get_cpu_capability()
    # C that has gone cannot be taken, and C that has come has not been raced.
    compiled = "no C" if compiler_obstacle() else "C"
    return f"{_processor()}, {level}, {torch.get_num_threads()} threads, torch {torch.__version__}, {compiled}"


def found(device: str) -> dict[str, Finding]:
    """Everything that was found on this machine: what was asked -> the finding."""
    with _lock:
        here = machine(device)
        if here not in _known:
            _known[here] = _believed(here)
        return dict(_known[here])


def find(device: str, asked: str, measure: Callable[[], Finding], otherwise: Finding | None = None) -> Finding:
    """The finding about something; measured once a machine, which takes a second or a few and is logged.

    Counters and other modes that follow operations see nothing of it. Of fake tensors nothing can be measured: among them
    `otherwise` holds, and is not kept.

    Args:
        device: `cpu` or `cuda`.
        asked: What it is about, in words that tell it from everything else.
        measure: Finds it out.
        otherwise: What holds where it cannot be measured, for lack of memory or support: kept with the reason as `failed`,
            after a warning. None lets errors pass through, and keeps nothing.
    """
    with _lock:
        here, known = machine(device), found(device)
        if asked not in known:
            # Another process may have found it since; of two answers to a close question it takes the same one.
            known = _known[here] = _believed(here) | known
        if asked in known:
            return known[asked]
        # Unlike what a compiler keeps for itself, this mode makes tensors of the probe's own fake.
        if otherwise is not None and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return otherwise
        _LOG.info("Measuring %s, once on this machine.", asked)
        with _disable_current_modes():
            made = _measured(asked, measure, otherwise)
        _known[here][asked] = made
        # Where nothing can be written, it is measured once a process; `approx doctor` says so.
        with contextlib.suppress(OSError):
            _write(here, asked, made)
        return made


def crowded() -> bool:
    """Whether other programs use so much of the cores that nothing measured now should be believed for long."""
    # Systems without this figure are taken to be quiet.
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return load > CROWDED * (os.cpu_count() or 1)


@contextlib.contextmanager
def clock() -> Iterator[Callable[[], float]]:
    """A clock, in seconds, for work on the CPU within the context.

    It is the wall's, or where others would disturb it that of one thread's own time, to which this process then keeps.
    """
    threads = torch.get_num_threads()
    if threads > 1 and crowded():
        torch.set_num_threads(1)
    try:
        yield time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    finally:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def hand_over(folder: Path) -> None:
    """Write what this process goes by into a folder: whoever has that as $APPROX_CACHE believes it, however it was found."""
    with _lock:
        known = {
            here: {asked: {name: x for name, x in one.items() if name != "crowded"} for asked, one in each.items()}
            for here, each in _known.items()
        }
    (folder / file().name).write_text(json.dumps(known), encoding="utf-8")


def forget() -> None:
    """Forget everything about this machine, in memory and on disk.

    Raises:
        OSError: if the file is there and cannot be removed.
    """
    with _lock:
        _known.clear()
        file().unlink(missing_ok=True)


def _measured(asked: str, measure: Callable[[], Finding], otherwise: Finding | None) -> Finding:
    try:
        return measure()
    except Exception as error:  # whatever fails in a probe, the default still runs
        if otherwise is None:
            raise
        why = str(error).partition("\n")[0] or type(error).__name__
        warnings.warn(
            f"What is the fastest here could not be measured for {asked}: {why}. PyTorch's way is taken. Mend that, then "
            "measure anew with `approx doctor --probe`.",
            stacklevel=2,
        )
        return otherwise | {"failed": why}


def _believed(here: str) -> dict[str, Finding]:
    # What was found while others used the cores holds until they are gone.
    busy = crowded()
    return {asked: one for asked, one in _read().get(here, {}).items() if busy or not one.get("crowded")}


def _read() -> dict[str, dict[str, Finding]]:
    # What is damaged is measured anew and replaced.
    try:
        kept = json.loads(file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    whole = isinstance(kept, dict) and all(
        isinstance(one, dict) and all(isinstance(each, dict) for each in one.values()) for one in kept.values()
    )
    return kept if whole else {}


def _write(here: str, asked: str, made: Finding) -> None:
    kept = _read()
    kept.setdefault(here, {})[asked] = made
    folder = file().parent
    folder.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(kept, stream, indent=1)
        os.replace(temporary, file())
    except BaseException:
        os.unlink(temporary)
        raise


@functools.cache
def instructions() -> str:
    """The widest instructions of this processor, as PyTorch names them, and what it multiplies bfloat16 with."""
    flags = _processor_facts().get("flags", "").split()
    halves = {"amx_bf16": " and AMX", "avx512_bf16": " and BF16"}
    return torch.backends.cpu.get_cpu_capability() + next((name for flag, name in halves.items() if flag in flags), "")


@functools.cache
def generation() -> dict[str, str]:
    """Numbers of this processor's family and model, where it has them: virtual machines of several share one name."""
    facts = _processor_facts()
    return {name: facts[key] for name, key in (("family", "cpu family"), ("model", "model")) if key in facts}


@functools.cache
def _processor() -> str:
    facts = _processor_facts()
    features = sorted({"avx2", "avx512f", "avx512_bf16", "amx_bf16"} & set(facts.get("flags", "").split()))
    numbers = [f"{name} {number}" for name, number in generation().items()]
    name = facts.get("model name") or platform.processor() or platform.machine()
    return " ".join([name, *numbers, *features])


def _processor_facts() -> dict[str, str]:
    facts: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            facts.setdefault(name.strip(), value.strip())
    return facts
