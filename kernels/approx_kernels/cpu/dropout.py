"""Dropout in C: a seed and the positions of query and key decide which weights are dropped, in any order."""

import torch

from approx_kernels.cpu.structs import Dropout


def draw_seed(dropout: float) -> int:
    """A seed from PyTorch's generator; without dropout none is drawn."""
    if not 0.0 <= dropout <= 1.0:
        raise ValueError(f"dropout is {dropout}; expected a probability, from 0 to 1.")
    return int(torch.randint(2**63 - 1, (), device="cpu")) if dropout else 0


def dropped(dropout: float, seed: int) -> Dropout:
    """The C structure for a probability and a seed; with a probability of 1 every weight is dropped."""
    return Dropout(seed, round(dropout * 2**24), 1.0 / (1.0 - dropout) if dropout < 1.0 else 0.0)
