"""Grouped keys: heads of keys and values that several query heads share, read in place and never repeated.

With H query heads and G key heads, H a multiple of G, query head h reads key head h // (H / G), as in grouped-query
attention (Ainslie et al., 2023, GQA, arXiv 2305.13245).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def sharing(q: Tensor, k: Tensor) -> int:
    """Number of query heads per key head, H / G; q is [B, H, L, D], k [B, G, S, D]."""
    # Under jit.trace sizes are tensors; the number of heads must be a constant.
    heads, groups = (int(x.shape[1]) if isinstance(x.shape[1], Tensor) else x.shape[1] for x in (q, k))
    return heads // groups


def turns(q: Tensor, k: Tensor) -> list[slice]:
    """The query heads of each of H / G turns, one per key head, so that q[:, turn] has as many heads as k.

    Both are views, whereas repeating k would copy it for every query head.
    """
    count = sharing(q, k)
    return [slice(first, None, count) for first in range(count)]


def in_order(parts: Sequence[Tensor]) -> Tensor:
    """The results of the turns, each [B, G, ...], with the query heads in order, [B, H, ...]."""
    return parts[0] if len(parts) == 1 else torch.stack(tuple(parts), 2).flatten(1, 2)


def in_turns(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *own: Tensor | None) -> Tensor:
    """Apply `attend(q, k, v, *own)`, which needs as many query heads as key heads, to more query heads.

    Args:
        attend: From q [B, G, L, D], k [B, G, S, D], v [B, G, S, E] and parts of `own` to [B, G, L, E].
        q: Queries, [B, H, L, D].
        k: Keys, [B, G, S, D].
        v: Values, [B, G, S, E].
        own: Tensors with a row per query head, [H, ...], or None.

    Returns:
        [B, H, L, E].
    """
    return in_order([attend(q[:, turn], k, v, *(None if x is None else x[turn] for x in own)) for turn in turns(q, k)])


def beside(x: Tensor, k: Tensor) -> Tensor:
    """Rows of the query heads, [B, H, n, D], as rows of their key heads, [B, G, (H / G) n, D]."""
    return x.unflatten(1, (k.shape[1], -1)).flatten(2, 3)


def empty_rows(x: Tensor, size: int, *, heads: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Room for as many rows as x has, [B, H, n, size], the heads of a token beside each other as models want to join them."""
    return x.new_empty(x.shape[0], x.shape[2], heads or x.shape[1], size, dtype=dtype).transpose(1, 2)


def empty_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Room for gradients; of k and v for each query head, see `summed`."""
    dq, dk, dv = (empty_rows(x, x.shape[3], heads=q.shape[1]) for x in (q, k, v))
    return dq, dk, dv


def summed(x: Tensor, heads: int) -> Tensor:
    """Gradients of query heads, [B, H, S, D], summed into those of key heads, [B, G, S, D]."""
    return x if x.shape[1] == heads else x.unflatten(1, (heads, -1)).sum(2)


def heads_of(q: Tensor, k: Tensor, own: slice | Sequence[int]) -> Any:
    """Index of the key heads that some query heads read, such that these share them evenly.

    Where that is impossible, as for 3 of 4 heads that share 2, the index repeats a key head, and indexing copies it.
    """
    count = sharing(q, k)
    needed = [head // count for head in range(q.shape[1])[own]] if isinstance(own, slice) else [h // count for h in own]
    distinct = list(dict.fromkeys(needed))
    evenly = [head for head in distinct for _ in range(len(needed) // len(distinct))]
    return as_index(distinct if evenly == needed else needed)


def as_index(heads: Sequence[int]) -> Any:
    """Evenly spaced heads as a slice, which copies nothing; others as a list."""
    step = heads[1] - heads[0] if len(heads) > 1 else 1
    stepwise = step > 0 and list(heads) == list(range(heads[0], heads[-1] + 1, step))
    return slice(heads[0], heads[-1] + 1, step) if stepwise else list(heads)
