"""Triton where it is installed; without it the files that hold kernels can still be read, and say what is missing.

A file with kernels begins with `from __future__ import annotations`, takes `jit` and `tl` from here, and asks `obstacle`
whether its kernels can run on what they are given.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from approx_kernels.runtime.observed import transformed

try:
    import triton
    import triton.language as tl
except ImportError:
    triton: Any = None
    tl: Any = None

__all__ = ["Configuration", "first_that_fits", "jit", "obstacle", "ranked", "tl", "triton"]

HEAD_SIZES = (16, 32, 64, 80, 96, 128)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CAPABILITY = (8, 0)


class Configuration(NamedTuple):
    """How a kernel is cut: tile sizes by the names of its constants, warps of a program, stages of its loops."""

    tiles: Mapping[str, int]
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        """The keywords of a launch."""
        return {**self.tiles, "num_warps": self.warps, "num_stages": self.stages}


# The configuration that fitted last, by what was launched and where.
_fitting: dict[tuple[Any, ...], int] = {}
_wanted: list[int | None] = []


@contextmanager
def configuration(number: int | None) -> Iterator[None]:
    """Launch kernels with that one of their configurations, -1 the one for the smallest cards; with None with each in turn.

    For those who test them, time them, or read them off the compiler.
    """
    _wanted.append(number)
    try:
        yield
    finally:
        _wanted.pop()


def first_that_fits(
    run: Callable[[Configuration], Any], configurations: Sequence[Configuration], what: str, device: torch.device
) -> Any:
    """Run with the first configuration that the card has registers and shared memory for.

    It is found once for `what` and a device and taken again, so results repeat; nothing is timed.

    Args:
        run: Launches with one configuration, and gives back what becomes the result.
        configurations: At most four, the default first, the one that asks for the least last.
        what: What is launched, with all that its needs depend on, such as dtype and head size.
        device: Where.

    Raises:
        ValueError: if not even the last one fits.
    """
    key, lack = (what, device), ""
    # Triton launches on the current device, whatever the tensors are on.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        if _wanted:
            chosen = configurations if _wanted[-1] is None else [configurations[_wanted[-1]]]
            return [run(each) for each in chosen][-1]
        if interpreted():
            return run(configurations[0])
        for number in range(_fitting.get(key, 0), len(configurations)):
            try:
                out = run(configurations[number])
            except triton.OutOfResources as error:
                lack = str(error)
                continue
            _fitting[key] = number
            return out
    name = torch.cuda.get_device_name(device)
    raise ValueError(f"{name} cannot hold the smallest tile of {what}: {lack} Ask for impl='reference'.")


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
