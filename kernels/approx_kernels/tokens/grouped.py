"""Grouped keys: heads of keys and values that several query heads share, read where they lie and never repeated.

With H query heads and G key heads, H a multiple of G, query head h reads key head h // (H / G), as in grouped-query
attention (Ainslie et al., 2023, GQA, arXiv 2305.13245).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def sharing(q: Tensor, k: Tensor) -> int:
    """How many query heads share each key head, H / G; q is [B, H, L, D], k [B, G, S, D]."""
    # To jit.trace a size is a tensor, and the number of heads a constant.
    heads, groups = (int(x.shape[1]) if isinstance(x.shape[1], Tensor) else x.shape[1] for x in (q, k))
    return heads // groups


def turns(q: Tensor, k: Tensor) -> list[slice]:
    """The query heads of each of H / G turns: one for each key head, so that q[:, turn] and all of k have as many heads.

    Both are views, where repeating k would copy it for every query head.
    """
    count = sharing(q, k)
    return [slice(first, None, count) for first in range(count)]


def in_order(parts: Sequence[Tensor]) -> Tensor:
    """What the turns gave, each [B, G, ...], with the query heads in their order, [B, H, ...]."""
    return parts[0] if len(parts) == 1 else torch.stack(tuple(parts), 2).flatten(1, 2)


def in_turns(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *own: Tensor | None) -> Tensor:
    """`attend(q, k, v, *own)`, which knows as many query heads as key heads, where the first may be more.

    Args:
        attend: From q [B, G, L, D], k [B, G, S, D], v [B, G, S, E] and what is `own` to [B, G, L, E].
        q: Queries, [B, H, L, D].
        k: Keys, [B, G, S, D].
        v: Values, [B, G, S, E].
        own: What each query head has of its own, [H, ...], or None.

    Returns:
        [B, H, L, E].
    """
    return in_order([attend(q[:, turn], k, v, *(None if x is None else x[turn] for x in own)) for turn in turns(q, k)])


def beside(x: Tensor, k: Tensor) -> Tensor:
    """Few rows of each query head, [B, H, n, D], as rows of its key head, [B, G, (H / G) n, D]."""
    return x.unflatten(1, (k.shape[1], -1)).flatten(2, 3)


def empty_rows(x: Tensor, size: int, *, heads: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Room for as many rows as x has, [B, H, n, size], the heads of a token beside each other as models want to join them."""
    return x.new_empty(x.shape[0], x.shape[2], heads or x.shape[1], size, dtype=dtype).transpose(1, 2)


def empty_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Room for gradients; of k and v for each query head, see `summed`."""
    dq, dk, dv = (empty_rows(x, x.shape[3], heads=q.shape[1]) for x in (q, k, v))
    return dq, dk, dv


def summed(x: Tensor, heads: int) -> Tensor:
    """Gradients of each query head, [B, H, S, D], added up for those of each key head, [B, G, S, D]."""
    return x if x.shape[1] == heads else x.unflatten(1, (heads, -1)).sum(2)


def heads_of(q: Tensor, k: Tensor, own: slice | Sequence[int]) -> Any:
    """Which key heads some query heads read, as an index such that these share them as evenly as all do.

    Where they cannot, as 3 of 4 heads that share 2, a key head stands in it more than once, and indexing copies it.
    """
    count = sharing(q, k)
    needed = [head // count for head in range(q.shape[1])[own]] if isinstance(own, slice) else [h // count for h in own]
    found = list(dict.fromkeys(needed))
    evenly = [head for head in found for _ in range(len(needed) // len(found))]
    return as_index(found if evenly == needed else needed)


def as_index(heads: Sequence[int]) -> Any:
    """Heads at even steps as a slice, which copies nothing; others as a list."""
    step = heads[1] - heads[0] if len(heads) > 1 else 1
    stepwise = step > 0 and list(heads) == list(range(heads[0], heads[-1] + 1, step))
    return slice(heads[0], heads[-1] + 1, step) if stepwise else list(heads)
