"""Findings of `approx doctor --probe` and `bench/gpu.py` about this machine, stored on disk for later processes."""

import functools
import json
from pathlib import Path
from threading import RLock
from typing import Any

import torch

from approx_kernels.cpu.compile import compiler_obstacle
from approx_kernels.runtime.atomic_file import write_whole
from approx_kernels.runtime.cache_folder import cache_folder
from approx_kernels.runtime.file_lock import locked
from approx_kernels.runtime.processor import processor_facts, processor_name

# Increase it when a change alters the meaning of stored findings.
FORMAT = 7

Finding = dict[str, Any]

_known: dict[str, dict[str, Finding]] = {}
_lock = RLock()


def file() -> Path:
    """The file of the findings, in $APPROX_CACHE or in `approx` in the user's cache folder."""
    return cache_folder() / f"machine-{FORMAT}.json"


def machine(device: str) -> str:
    """The conditions a finding depends on: hardware, threads, the build of torch, and whether C compiles.

    Args:
        device: `cpu`, `cuda` for the current one, or `cuda:1`.
    """
    asked = torch.device(device)
    if asked.type == "cuda":
        at = torch.cuda.current_device() if asked.index is None else asked.index
        return f"{torch.cuda.get_device_name(at)}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"
    level = torch.backends.cpu.get_cpu_capability()
    # Findings with C do not apply without it, and vice versa.
    compiled = "no C" if compiler_obstacle() else "C"
    return f"{_processor()}, {level}, {torch.get_num_threads()} threads, torch {torch.__version__}, {compiled}"


def found(device: str) -> dict[str, Finding]:
    """All findings about this machine, by subject. Read once per process, and never measured here."""
    here = machine(device)
    with _lock:
        if here not in _known:
            _known[here] = _read().get(here, {})
        return dict(_known[here])


def keep(device: str, asked: str, finding: Finding) -> None:
    """Store a finding about this machine, for this process and later ones.

    Args:
        device: `cpu`, `cuda` or `cuda:1`.
        asked: Its subject, as a unique text.
        finding: The finding, as plain data.

    Raises:
        OSError: if it cannot be written.
    """
    here = machine(device)
    file().parent.mkdir(parents=True, exist_ok=True)
    # Another process may add a finding at the same time.
    with _lock, locked(file().with_suffix(".lock")):
        found(device)
        kept = _read()
        kept.setdefault(here, {})[asked] = finding
        write_whole(file(), json.dumps(kept, indent=1))
        _known[here][asked] = finding


def forget(but: str | None = None) -> None:
    """Forget all findings, in memory and on disk.

    Args:
        but: Keep the findings whose subject starts with this text.

    Raises:
        OSError: if the file exists and cannot be removed or replaced.
    """
    with _lock:
        _known.clear()
        left = {} if but is None else _beginning(but, _read())
        if left:
            write_whole(file(), json.dumps(left, indent=1))
        else:
            file().unlink(missing_ok=True)


def _beginning(words: str, kept: dict[str, dict[str, Finding]]) -> dict[str, dict[str, Finding]]:
    chosen = {
        here: {asked: finding for asked, finding in one.items() if asked.startswith(words)}
        for here, one in kept.items()
    }
    return {here: one for here, one in chosen.items() if one}


def _read() -> dict[str, dict[str, Finding]]:
    # Ignore a damaged file; the next probe replaces it.
    try:
        kept = json.loads(file().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    whole = isinstance(kept, dict) and all(
        isinstance(one, dict) and all(isinstance(each, dict) for each in one.values()) for one in kept.values()
    )
    return kept if whole else {}


@functools.cache
def instructions() -> str:
    """The widest instruction set of this processor, as PyTorch names it, and its bfloat16 extension."""
    flags = processor_facts().get("flags", "").split()
    halves = {"amx_bf16": " and AMX", "avx512_bf16": " and BF16"}
    return torch.backends.cpu.get_cpu_capability() + next((name for flag, name in halves.items() if flag in flags), "")


def multiplies_bfloat16() -> bool:
    """Whether this processor has instructions for products in bfloat16; others convert to float32 and back, which is slow."""
    return instructions().endswith((" and AMX", " and BF16"))


def generation() -> dict[str, str]:
    """This processor's family and model numbers, if known: virtual machines may share a name across models."""
    facts = processor_facts()
    return {name: facts[key] for name, key in (("family", "cpu family"), ("model", "model")) if key in facts}


def _processor() -> str:
    facts = processor_facts()
    features = sorted({"avx2", "avx512f", "avx512_bf16", "amx_bf16"} & set(facts.get("flags", "").split()))
    numbers = [f"{name} {number}" for name, number in generation().items()]
    return " ".join([processor_name(), *numbers, *features])
