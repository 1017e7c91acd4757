"""Triton where it is installed; without it the files that hold kernels can still be read, and say what is missing.

A file with kernels begins with `from __future__ import annotations`, takes `jit` and `tl` from here, and asks `obstacle`
whether its kernels can run on what they are given.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton: Any = None
    tl: Any = None

__all__ = ["jit", "obstacle", "tl", "triton"]

HEAD_SIZES = (16, 32, 64, 80, 96, 128)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CAPABILITY = (8, 0)


def jit(function: Any) -> Any:
    """`triton.jit` where there is Triton; otherwise the function, which nobody calls."""
    return function if triton is None else triton.jit(function)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on any device."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def obstacle(*tensors: Tensor) -> str | None:
    """Why kernels cannot run on [..., D] inputs, with the remedy; None where they can."""
    if triton is None:
        return "Triton is not installed. On Linux with an NVIDIA GPU: pip install triton."
    for x in tensors:
        if x.dtype not in DTYPES:
            return f"a tensor is {x.dtype}; allowed are float16, bfloat16 and float32. Convert it."
        if x.shape[-1] not in HEAD_SIZES:
            return f"the head size is {x.shape[-1]}; allowed are {', '.join(map(str, HEAD_SIZES))}."
        if interpreted():
            continue
        if x.device.type != "cuda":
            return f"a tensor is on the {x.device.type}; kernels need CUDA tensors. Move it to a GPU."
        if torch.cuda.get_device_capability(x.device) < CAPABILITY:
            name = torch.cuda.get_device_name(x.device)
            return f"{name} is older than compute capability 8.0 (A100), which the kernels are made for."
    return None
