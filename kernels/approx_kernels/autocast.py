"""PyTorch's autocast, off for a while."""

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(device: str) -> AbstractContextManager[object]:
    """A context in which every operation computes in the dtype of its arguments."""
    # To enter and leave PyTorch's takes several microseconds, also where there is nothing to turn off.
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
