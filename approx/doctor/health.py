"""Check what works on this machine and in this environment, and how to fix the rest."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from typing import Literal

import torch
from packaging.specifiers import SpecifierSet

from approx.doctor.probing import status_lines
from approx.tasks.hub import reachable
from approx.version import install
from approx_kernels.cpu.compile import compiler_obstacle, find_compiler
from approx_kernels.dispatch.findings import instructions
from approx_kernels.gpu.language import HOPPER, assembler, assembler_obstacle

_RANGES = {"torch": ">=2.10", "transformers": ">=5.17,<6"}


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        what: What was checked.
        state: `ok`, `missing` (optional) or `broken`.
        found: What was found, and how to fix it.
    """

    what: str
    state: Literal["ok", "missing", "broken"]
    found: str


def examine(*, offline: bool) -> list[Finding]:
    """Check everything that approx depends on.

    Args:
        offline: Whether to skip the hub.
    """
    findings = [
        Finding("python", "ok" if sys.version_info >= (3, 11) else "broken", platform.python_version()),
        *(_package(name, allowed) for name, allowed in _RANGES.items()),
        _gpu(),
        _triton(),
        _compiler(),
        _c_compiler(),
        _processor(),
        *(Finding(what, "ok" if well else "missing", text) for what, well, text in status_lines()),
        _data(),
    ]
    return findings if offline else [*findings, _hub()]


def _package(name: str, allowed: str) -> Finding:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "broken", f"not installed: pip install '{name}{allowed}'")
    fits = SpecifierSet(allowed).contains(version.partition("+")[0], prereleases=True)
    remedy = "" if fits else f"; {allowed} is needed: pip install '{name}{allowed}'"
    return Finding(name, "ok" if fits else "broken", version + remedy)


def _gpu() -> Finding:
    if torch.cuda.is_available():
        return Finding("gpu", "ok", f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}")
    why = "this build of torch is CPU-only" if torch.version.cuda is None else "torch sees no CUDA device"
    return Finding("gpu", "missing", f"none: {why}")


def _triton() -> Finding:
    if importlib.util.find_spec("triton") is None:
        return Finding("triton", "missing", f"not installed: {install('triton')} (Linux with a GPU)")
    version = importlib.metadata.version("triton")
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else HOPPER
    if (used := assembler(capability)) is None:
        return Finding("triton", "broken", f"{version}, whose ptxas cannot be run: install triton again")
    if torch.cuda.is_available() and (why := assembler_obstacle(*capability)):
        return Finding("triton", "broken", f"{version}: {why}")
    return Finding("triton", "ok", f"{version}, ptxas {used.version}")


def _compiler() -> Finding:
    name = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    if name is None:
        return Finding("c++ compiler", "missing", "none: torch.compile on the CPU needs one, e.g. the package g++")
    return Finding("c++ compiler", "ok", str(shutil.which(name)))


def _c_compiler() -> Finding:
    compiler, _ = find_compiler()
    if why := compiler_obstacle():
        # This remedy is for callers of an op that asked for C.
        why = why.replace(", or ask for 'auto'", "")
        return Finding("c compiler", "missing", f"none that works, so mechanisms are slower on the CPU: {why}")
    return Finding("c compiler", "ok", f"{compiler}; APPROX_COMPILE_C=0 turns C off")


def _processor() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    counted = f"{_counted(cores, 'core')}, {_counted(torch.get_num_threads(), 'thread')}"
    return Finding("processor", "ok", f"{counted}, {instructions()}")


def _counted(number: int | None, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _data() -> Finding:
    from huggingface_hub import constants

    cache = constants.HF_HUB_CACHE
    holder = cache
    while not os.path.exists(holder):
        holder = os.path.dirname(holder)
    if not os.access(holder, os.W_OK):
        return Finding("hub cache", "broken", f"{cache} is not writable: set HF_HOME to a writable folder")
    return Finding("hub cache", "ok", f"{cache}, {shutil.disk_usage(holder).free / 1e9:.0f} GB free")


def _hub() -> Finding:
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        return Finding("hub", "missing", "HF_HUB_OFFLINE is set: local files and the cache only")
    if not reachable(constants.ENDPOINT):
        return Finding("hub", "missing", f"{constants.ENDPOINT} cannot be reached: use local folders and --data")
    return Finding(
        "hub", "ok", f"{constants.ENDPOINT}, {'a token is set' if get_token() else 'no token (hf auth login)'}"
    )
