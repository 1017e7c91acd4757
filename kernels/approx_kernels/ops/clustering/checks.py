"""What a clustering takes beside the queries, checked before anything reads it."""

import torch
from torch import Tensor

from approx_kernels.tokens.shapes import check_least, check_part

# Bits of the words that hashes are kept in.
MOST_BITS = 64
# Below it draws and what iterations add to them stay within an int64.
DRAWS_END = 2**62


def check_clustering(q: Tensor, planes: Tensor, draws: Tensor, clusters: int, iterations: int) -> None:
    """Refuse planes and draws that do not fit the queries and the number of clusters.

    Args:
        q: Queries, [..., n, D].
        planes: Hash planes, [bits, D + 1].
        draws: Random int64 numbers, at least C. Their range is checked where they are read: see `check_draws`.
        clusters: C.
        iterations: Assignments.

    Raises:
        ValueError: naming what was found and what is expected.
    """
    check_part("planes", planes, q, "bits", q.shape[-1] + 1)
    if len(planes) > MOST_BITS:
        raise ValueError(f"planes has {len(planes)} rows; expected {MOST_BITS} at most.")
    check_least("clusters", clusters, 1)
    check_least("iterations", iterations, 1)
    check_part("draws", draws, q, "numbers", dtype=torch.int64)
    if len(draws) < clusters:
        raise ValueError(f"draws has shape {list(draws.shape)}; expected at least {clusters} numbers.")


def check_draws(draws: Tensor) -> None:
    """Refuse draws that are no places in a sequence, however they are divided; reads them.

    Raises:
        ValueError: naming the smallest and the largest of them.
    """
    least, most = (int(end) for end in draws.aminmax())
    if least < 0 or most >= DRAWS_END:
        raise ValueError(f"draws run from {least} to {most}; expected numbers from 0 to 2^62 - 1. Draw them again.")
