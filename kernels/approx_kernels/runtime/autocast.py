"""PyTorch's autocast, off for a while."""

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(device: str) -> AbstractContextManager[object]:
    """A context in which every operation computes in the dtype of its arguments."""
    # To enter and leave PyTorch's takes several microseconds, also where there is nothing to turn off.
    # Of a device that never has it, such as that of meta tensors, it must not be asked.
    on = device != "meta" and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else nullcontext()
