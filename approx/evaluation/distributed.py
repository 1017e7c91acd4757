"""Several processes at one evaluation, as `torchrun` and `accelerate launch` start them; one alone needs nothing."""

from __future__ import annotations

import atexit
import os
from typing import Any, TypeVar

import torch

from approx.errors import ApproxError, Exit

T = TypeVar("T")


def place() -> tuple[int, int]:
    """The number of this process, from 0, and how many there are; joins them if that was not done.

    Raises:
        ApproxError: if there are several and accelerate is not installed.
    """
    state = _state()
    return (0, 1) if state is None else (state.process_index, state.num_processes)


def leads() -> bool:
    """Whether this process is the one that writes and speaks."""
    return place()[0] == 0


def agree(value: T) -> T:
    """The first process's value, in all of them."""
    if _state() is None:
        return value
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([value])[0]


def gather(value: T) -> list[T]:
    """The values of all processes, in all of them."""
    if _state() is None:
        return [value]
    from accelerate.utils import gather_object

    return gather_object([value])


def _state() -> Any:
    """What accelerate knows of the processes, which a Trainer in this one shares; None where this is the only one."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return None
    try:
        from accelerate import PartialState
    except ImportError as error:
        raise ApproxError(
            f"{os.environ['WORLD_SIZE']} processes were started, and the package accelerate, which joins them, is not "
            f"installed ({error}). Install it (pip install 'approx-attention[train]'), or start one process.",
            Exit.MISSING,
        ) from None
    if not torch.distributed.is_initialized():
        atexit.register(lambda: PartialState().destroy_process_group())
    # NCCL, which accelerate takes on GPUs, refuses two processes on one of them.
    return PartialState(cpu=torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
