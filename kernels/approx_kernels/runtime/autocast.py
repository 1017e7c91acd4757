"""Temporarily disable PyTorch's autocast."""

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(device: str) -> AbstractContextManager[object]:
    """A context in which every operation computes in the dtype of its arguments."""
    # Entering and leaving PyTorch's context takes several microseconds even if autocast is off.
    # `is_autocast_enabled` fails for the meta device.
    on = device != "meta" and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else nullcontext()
