"""Attention between whole blocks as lists of blocks for the flash kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from approx_kernels.ops.flash.listed import listed_attention


def block_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    *,
    size: int,
    neighbours: int,
    shift: int,
    causal: bool,
    scale: float,
) -> Tensor:
    """Attention of each block to its own keys and those of its neighbours; real keys come first."""

    def pairs(i: Tensor, j: Tensor) -> Tensor:
        near = ((i + shift) // size - (j + shift) // size).abs() <= neighbours
        return near & (j <= i) if causal else near

    pattern = "block", size, neighbours, shift, causal
    return listed_attention(q, k, v, pattern, pairs, key_mask=key_mask, scale=scale)[0]


def bigbird_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    *,
    size: int,
    lists: Sequence[Sequence[int]],
    scale: float,
) -> Tensor:
    """Attention of each block to the blocks of keys on its list, repeated as listed; an empty list means all keys."""
    rows = tuple(tuple(own) for own in lists)

    def pairs(i: Tensor, j: Tensor) -> Tensor:
        table = torch.stack([torch.tensor(own, dtype=torch.long).bincount(minlength=len(rows)) for own in rows])
        table[[not own for own in rows]] = 1
        return table.to(i.device)[i // size, j // size]

    return listed_attention(q, k, v, ("bigbird", size, rows), pairs, key_mask=key_mask, scale=scale)[0]
