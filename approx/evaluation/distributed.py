"""Several processes at one evaluation, as `torchrun` and `accelerate launch` start them; one alone needs nothing."""

from __future__ import annotations

import atexit
import os
from typing import Any, TypeVar

from torch import distributed

T = TypeVar("T")


def place() -> tuple[int, int]:
    """The number of this process, from 0, and how many there are; joins them if that was not done."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return 0, 1
    if not distributed.is_initialized():
        # What is exchanged are predictions, which are no tensors: gloo serves processes on CPUs and GPUs alike.
        distributed.init_process_group("gloo")
        atexit.register(distributed.destroy_process_group)
    return distributed.get_rank(), distributed.get_world_size()


def leads() -> bool:
    """Whether this process is the one that writes and speaks."""
    return place()[0] == 0


def agree(value: T) -> T:
    """The first process's value, in all of them."""
    if place()[1] == 1:
        return value
    shared: list[Any] = [value]
    distributed.broadcast_object_list(shared)
    return shared[0]


def gather(value: T) -> list[T]:
    """The values of all processes, in all of them."""
    world = place()[1]
    if world == 1:
        return [value]
    shared: list[Any] = [None] * world
    distributed.all_gather_object(shared, value)
    return shared
