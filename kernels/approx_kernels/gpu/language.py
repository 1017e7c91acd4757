"""Triton where it is installed; without it the files that hold kernels can still be read, and say what is missing.

A file with kernels begins with `from __future__ import annotations`, takes `jit` and `tl` from here, and asks
`obstacle` whether its kernels can run on what they are given.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from typing import Any, NamedTuple

import torch
from torch import Tensor

from approx_kernels.runtime.pytorch import constant_result, transformed

try:
    import triton
    import triton.language as tl
except ImportError:
    triton: Any = None
    tl: Any = None

__all__ = ["Assembler", "assembler", "assembler_obstacle", "jit", "obstacle", "ranked", "tl", "triton"]

HEAD_SIZES = (16, 32, 64, 80, 96, 128)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CAPABILITY = (8, 0)
# Hopper, and the first assembler whose machine code for it stays within bounds: of the same PTX, 12.8.93 and 13.0.88
# make code that writes past its shared memory, and 13.1.80 does not (triton-lang/triton#10486, #10573, #11366;
# fla-org/flash-linear-attention#1262).
HOPPER = (9, 0)
RIGHT_ON_HOPPER = (13, 1)


def jit(function: Any = None, **options: Any) -> Any:
    """`triton.jit` where there is Triton; otherwise the function itself, which is never called."""
    if function is None:
        return lambda function: jit(function, **options)
    return function if triton is None else triton.jit(function, **options)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on any device."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class Assembler(NamedTuple):
    """The program that turns PTX into machine code: where it is, its version, and the variable that names another."""

    path: str
    version: str
    variable: str


@functools.cache
def assembler(capability: tuple[int, int]) -> Assembler | None:
    """The ptxas that Triton runs for a compute capability; None if it cannot be found or asked."""
    try:
        from triton import knobs
        from triton.backends.nvidia.compiler import get_ptxas

        path = get_ptxas(10 * capability[0] + capability[1]).path
        # Which of its two Triton runs for Hopper depends on its version.
        second = path == knobs.nvidia.ptxas_blackwell.path
    except (ImportError, AttributeError, RuntimeError):
        return None
    version = version_of(path)
    variable = "TRITON_PTXAS_BLACKWELL_PATH" if second else "TRITON_PTXAS_PATH"
    return Assembler(path, version, variable) if version else None


def version_of(path: str) -> str | None:
    """The version that a ptxas reports, such as 13.1.80; None if it cannot be asked."""
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"\bV(\d+(?:\.\d+)+)", said)
    return found[1] if found else None


@constant_result
def assembler_obstacle(major: int, minor: int) -> str | None:
    """Why machine code for a compute capability may be wrong, with the remedy; None if it is right or unknown."""
    used = assembler((major, minor))
    if (major, minor) != HOPPER or used is None:
        return None
    if tuple(int(part) for part in used.version.split(".")[:2]) >= RIGHT_ON_HOPPER:
        return None
    least = ".".join(map(str, RIGHT_ON_HOPPER))
    return (
        f"Triton assembles them with ptxas {used.version}, whose code for compute capability 9.0 writes out of bounds. Install "
        f"{least} or later (pip install 'nvidia-cuda-nvcc>={least}') and set {used.variable} to its file bin/ptxas."
    )


def obstacle(*tensors: Tensor) -> str | None:
    """Why kernels cannot run on [..., D] inputs, with the remedy; None where they can."""
    if triton is None:
        return "Triton is not installed. On Linux with an NVIDIA GPU: pip install triton."
    if why := transformed(*tensors):
        return why
    for x in tensors:
        if x.device.type != "cuda" and not interpreted():
            return f"a tensor is on the {x.device.type}; kernels need CUDA tensors. Move it to a GPU."
        if x.dtype not in DTYPES:
            return f"a tensor is {x.dtype}; allowed are float16, bfloat16 and float32. Convert it."
        if x.shape[-1] not in HEAD_SIZES:
            return f"the head size is {x.shape[-1]}; allowed are {', '.join(map(str, HEAD_SIZES))}. Ask for 'auto'."
        if interpreted():
            if x.dtype == torch.bfloat16:
                return "a tensor is bfloat16, which Triton's interpreter cannot multiply. Take float16 or float32, or a GPU."
            continue
        if torch.version.hip:
            return "this is a build of PyTorch for AMD; the kernels are made for NVIDIA's cards. Ask for 'auto'."
        # A compiler can trace this way to ask, unlike others.
        card = torch.cuda.get_device_properties(x.device)
        if (card.major, card.minor) < CAPABILITY:
            name = torch.cuda.get_device_name(x.device)
            return f"{name} is older than compute capability 8.0 (A100), which the kernels are made for."
        if why := assembler_obstacle(card.major, card.minor):
            return f"{why} Or ask for 'auto'."
    return None


def ranked(x: Tensor, why: str | None, **others: str | None) -> dict[str, str | None]:
    """Obstacles for `choose`: kernels, with `why`, come first on GPUs and last elsewhere, so `auto` interprets none."""
    return {"triton": why, **others} if x.is_cuda else {**others, "triton": why}
