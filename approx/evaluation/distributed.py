"""Evaluation in several processes, started by `torchrun` or `accelerate launch`; a single process needs no setup."""

from __future__ import annotations

import atexit
import os
from typing import Any, TypeVar

import torch

from approx.errors import ApproxError, Exit

T = TypeVar("T")


def place() -> tuple[int, int]:
    """Rank of this process and number of processes; sets up communication on the first call.

    Raises:
        ApproxError: if there are several processes and accelerate is not installed.
    """
    state = _state()
    return (0, 1) if state is None else (state.process_index, state.num_processes)


def leads() -> bool:
    """Whether this process writes files and prints."""
    return place()[0] == 0


def agree(value: T) -> T:
    """Return the first process's value in every process."""
    if _state() is None:
        return value
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([value])[0]


def gather(value: T) -> list[T]:
    """Return the values of all processes in every process."""
    if _state() is None:
        return [value]
    from accelerate.utils import gather_object

    return gather_object([value])


def _state() -> Any:
    """Accelerate's state, shared with a Trainer in this process; None for a single process."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return None
    try:
        from accelerate import PartialState
    except ImportError as error:
        raise ApproxError(
            f"{os.environ['WORLD_SIZE']} processes need the package accelerate, which is not installed ({error}). Install it "
            "(pip install 'approx-attention[train]'), or start one process.",
            Exit.MISSING,
        ) from None
    if not torch.distributed.is_initialized():
        atexit.register(lambda: PartialState().destroy_process_group())
    # NCCL, accelerate's choice on GPUs, does not allow two processes on one GPU.
    return PartialState(cpu=torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
