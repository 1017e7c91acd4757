"""Triton where it is installed; without it the files that hold kernels can still be read, and say what is missing.

A file with kernels begins with `from __future__ import annotations`, takes `jit` and `tl` from here, and asks `obstacle`
whether its kernels can run on what they are given.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from approx_kernels.runtime.observed import transformed

try:
    import triton
    import triton.language as tl
except ImportError:
    triton: Any = None
    tl: Any = None

__all__ = ["jit", "obstacle", "ranked", "tl", "triton"]

HEAD_SIZES = (16, 32, 64, 80, 96, 128)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CAPABILITY = (8, 0)


def jit(function: Any = None, **options: Any) -> Any:
    """`triton.jit` where there is Triton; otherwise the function, which nobody calls."""
    if function is None:
        return lambda function: jit(function, **options)
    return function if triton is None else triton.jit(function, **options)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on any device."""
    return os.environ.get("TRITON_INTERPRET") == "1"


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
        # Of the ways to ask for it this is the one that a compiler follows.
        card = torch.cuda.get_device_properties(x.device)
        if (card.major, card.minor) < CAPABILITY:
            name = torch.cuda.get_device_name(x.device)
            return f"{name} is older than compute capability 8.0 (A100), which the kernels are made for."
    return None


def ranked(x: Tensor, why: str | None, **others: str | None) -> dict[str, str | None]:
    """The obstacles of `choose` with `why` for the kernels: on GPUs before the others, elsewhere behind them, so that
    nobody interprets kernels unasked.
    """
    return {"triton": why, **others} if x.is_cuda else {**others, "triton": why}
