"""Checks of the arguments of a clustering."""

import torch
from torch import Tensor

from approx_kernels.tokens import check_least, check_part

# Bits of the words that store hashes.
MOST_BITS = 64
# Below this, draws and their increments over iterations fit into an int64.
DRAWS_END = 2**62


def check_clustering(q: Tensor, planes: Tensor, draws: Tensor, clusters: int, iterations: int) -> None:
    """Refuse planes [bits, D + 1], draws and numbers that do not fit queries q [..., n, D]; see `check_draws`."""
    check_part("planes", planes, q, "bits", q.shape[-1] + 1)
    if len(planes) > MOST_BITS:
        raise ValueError(f"planes has {len(planes)} rows; expected {MOST_BITS} at most.")
    check_least("clusters", clusters, 1)
    check_least("iterations", iterations, 1)
    check_part("draws", draws, q, "numbers", dtype=torch.int64)
    if len(draws) < clusters:
        raise ValueError(f"draws has shape {list(draws.shape)}; expected at least {clusters} numbers.")


def check_draws(draws: Tensor) -> None:
    """Refuse draws out of range; this reads them."""
    least, most = (int(end) for end in draws.aminmax())
    if least < 0 or most >= DRAWS_END:
        raise ValueError(f"draws run from {least} to {most}; expected numbers from 0 to 2^62 - 1. Draw them again.")
