"""Compile C once per machine, cache it, and call it without a build system."""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from approx_kernels.cpu.sources import source
from approx_kernels.cpu.structs import check_sizes
from approx_kernels.runtime.cache_folder import is_private, private_folder
from approx_kernels.runtime.file_lock import locked
from approx_kernels.runtime.processor import processor_facts
from approx_kernels.runtime.pytorch import needs_pytorch

_LOG = logging.getLogger(__name__)
_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC", "-fno-math-errno")
# The longest file takes seven seconds, or thirty on a busy machine; a compiler that takes far longer hangs.
_SECONDS = 180
# OUT_OF_BOUNDS of c/key_lists/tiles.h.
_OUT_OF_BOUNDS = 2
_SWITCH = "APPROX_COMPILE_C"
_TRIAL = "int approx_trial(void) { return 0; }"
DTYPES = (torch.float32, torch.bfloat16)


def obstacle(name: str, *tensors: Tensor) -> str | None:
    """Why functions of a file of c/ cannot run on tensors, with the remedy; None if they can."""
    if why := needs_pytorch(*tensors):
        return why
    for x in tensors:
        if x.device.type != "cpu":
            return f"a tensor is on the {x.device.type}; this runs on CPU tensors. Move it, or ask for 'auto'."
        if x.dtype not in DTYPES:
            return f"a tensor is {x.dtype}; allowed are float32 and bfloat16. Convert it, or ask for 'auto'."
    loaded = library(name)
    return loaded if isinstance(loaded, str) else None


def library(name: str) -> ctypes.CDLL | str:
    """The functions of a file of c/, e.g. `topk/forward.c`, or why they cannot be loaded."""
    return load(source(name))


def call(name: str, function: str, *arguments: Any) -> None:
    """Call a function of a file of c/ for which `obstacle` found no reason against it.

    Args:
        name: The file, as for `library`.
        function: Its name in C.
        arguments: Structures, of which C gets the addresses; addresses; and whole numbers, 64 bits in C.

    Raises:
        MemoryError: if it got no memory.
        ValueError: if it found numbers that reach beyond the tensors.
    """
    functions = library(name)
    assert not isinstance(functions, str), f"checked by the op: {functions}"
    failure = getattr(functions, function)(*map(_passed, arguments))
    if failure == _OUT_OF_BOUNDS:
        raise ValueError(f"{name} got numbers that reach beyond its tensors. Check the sizes and places of the call.")
    if failure:
        raise MemoryError("compiled code got no memory for its working sets. Shorten the inputs or the batch.")


def _passed(argument: Any) -> Any:
    if isinstance(argument, ctypes.Structure):
        return ctypes.byref(argument)
    return ctypes.c_int64(argument) if isinstance(argument, int) else argument


@cache
def load(text: str) -> ctypes.CDLL | str:
    """The functions of a C source, or why they cannot be loaded.

    The first process on a machine compiles it, which takes a few seconds and is logged; later ones load the result from
    $APPROX_CACHE, or `approx` in the user's cache folder, if nobody else can write there and it is undamaged. Nothing
    is compiled or loaded if $APPROX_COMPILE_C is 0. $APPROX_C_FLAGS adds flags for the compiler.
    """
    compiler, why = find_compiler()
    if compiler is None:
        return why if os.environ.get(_SWITCH) == "0" else _missing(why)
    # Try a one-line source first, so that a compiler that hangs or fails costs time and a warning only once.
    if text != _TRIAL and (why := compiler_obstacle()):
        return why
    try:
        folder = private_folder("compiled")
        key = _key(compiler, text)
        library_file = _cached(folder, key)
        if library_file is None:
            # Without file locks, each process compiles its own.
            with locked(folder / f"{key}.lock"):
                # Another process may have compiled it meanwhile.
                library_file = _cached(folder, key) or _compile(compiler, text, folder, key)
        loaded = ctypes.CDLL(str(library_file))
        check_sizes(loaded)
        return loaded
    except subprocess.TimeoutExpired:
        return _missing(f"{compiler} took more than {_SECONDS} seconds. Set $CC to another compiler.")
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or "").strip().splitlines() or [str(error)]
        first = next((line for line in lines if "error" in line), lines[0])
        return _missing(f"{compiler} failed: {first}. Set $CC to another compiler.")
    except OSError as error:
        return _missing(
            f"the output of {compiler} could not be stored or loaded: {error}. Set $APPROX_CACHE to a folder for it."
        )


def compiler_obstacle() -> str | None:
    """Why C cannot be compiled and loaded here, with the remedy; None if it can. Determined once per process."""
    loaded = load(_TRIAL)
    return loaded if isinstance(loaded, str) else None


def find_compiler() -> tuple[str | None, str]:
    """$CC, or else cc, gcc or clang; None if there is no such program or $APPROX_COMPILE_C forbids it.

    Returns:
        Its path, and the reason if there is none, with the remedy.
    """
    wish, asked = os.environ.get(_SWITCH, "1"), os.environ.get("CC")
    if wish == "0":
        return None, f"${_SWITCH} is 0, so no C is compiled. Unset it, or ask for 'auto'."
    if wish != "1":
        return None, f"${_SWITCH} is {wish!r}; expected 1, or 0 for no C at all. Set it to one of them, or unset it."
    compiler = next(filter(None, map(shutil.which, [asked] if asked else ["cc", "gcc", "clang"])), None)
    missing = f"$CC, {asked!r}, is not a program" if asked else "there is no C compiler"
    return compiler, f"{missing}. Install gcc, or set $CC to a compiler."


def _flags() -> list[str]:
    return [*_FLAGS, *shlex.split(os.environ.get("APPROX_C_FLAGS", ""))]


def _key(compiler: str, text: str) -> str:
    # Machines with different processors may share a folder, and a compiler may be updated under the same name.
    known = [processor_facts().get(fact, "") for fact in ("model name", "flags", "Features", "CPU part")]
    machine = [platform.machine(), platform.processor(), *known, torch.backends.cpu.get_cpu_capability()]
    parts = [text, compiler, _version(compiler), *_flags(), *machine]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


@cache
def _version(compiler: str) -> str:
    said = subprocess.run(
        [compiler, "--version"], check=False, capture_output=True, encoding="utf-8", errors="replace", timeout=_SECONDS
    )
    return said.stdout + said.stderr


def _cached(folder: Path, key: str) -> Path | None:
    """The library of that key, if undamaged; its name ends with the hash of its contents."""
    for path in sorted(folder.glob(f"{key}-*.so")):
        if is_private(path) and path.name == _name(key, path):
            return path
        # A library truncated by a full disk, for example, must not be loaded.
        path.unlink()
    return None


def _name(key: str, made: Path) -> str:
    return f"{key}-{hashlib.sha256(made.read_bytes()).hexdigest()[:24]}.so"


def _compile(compiler: str, text: str, folder: Path, key: str) -> Path:
    _LOG.info("Compiling C for this processor with %s, once on this machine; it takes a few seconds.", compiler)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        file, made = Path(scratch) / "source.c", Path(scratch) / "made.so"
        file.write_text(text, encoding="utf-8")
        command = [compiler, *_flags(), str(file), "-o", str(made), "-lm"]
        run = {"capture_output": True, "encoding": "utf-8", "errors": "replace", "timeout": _SECONDS}
        # Not every compiler has OpenMP; without it the code runs in one thread, with the same results.
        if subprocess.run([*command, "-fopenmp"], check=False, **run).returncode:
            subprocess.run(command, check=True, **run)
        made.chmod(0o700)
        kept = folder / _name(key, made)
        os.replace(made, kept)
    _LOG.debug("Compiled %s in %.1f seconds.", kept.name, time.perf_counter() - began)
    return kept


def _missing(why: str) -> str:
    _LOG.warning("Slower code replaces compiled code: %s", why)
    return why
