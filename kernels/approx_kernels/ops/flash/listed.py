"""Position patterns through the flash kernels: cached block lists, and joining the parts of a pattern."""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from approx_kernels.ops.flash.api import BlockList, block_list, flash, list_tile
from approx_kernels.runtime.pytorch import capturing

# Lists by pattern, sizes and device; the oldest is dropped first, except for those that a CUDA graph reads.
_LISTS: dict[Hashable, Any] = {}
_CAPTURED: set[Hashable] = set()
_KEPT = 128


def listed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Hashable,
    pairs: Callable[[Tensor, Tensor], Tensor],
    *,
    key_mask: Tensor | None = None,
    scale: float,
    first: int | None = None,
    diagonal: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attend to the pairs of a pattern that is the same for all samples, by kernels.

    Args:
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
        pattern: Name and settings: everything that `pairs` depends on besides the numbers of queries and keys.
        pairs: As for `block_list`.
        key_mask: As for `flash`.
        scale: Factor of the scores.
        first: Position of the first query; None for S - L.
        diagonal: As for `block_list`.

    Returns:
        The result of `flash`: [B, H, L, E] and [B, H, L].
    """
    length, keys, tile = q.shape[2], k.shape[2], list_tile(q, v)

    def make() -> BlockList:
        return block_list(pairs, length, keys, tile=tile, device=q.device, first=first, diagonal=diagonal)

    blocks = kept((pattern, length, keys, tile, first, q.device), make)
    return flash(q, k, v, key_mask, scale=scale, blocks=blocks, impl="triton")


def kept(key: Hashable, make: Callable[[], Any]) -> Any:
    """The cached object of a key, created if missing; its tensors may be saved for a backward pass."""
    entry = _LISTS.get(key)
    if entry is None:
        if len(_LISTS) >= _KEPT + len(_CAPTURED):
            del _LISTS[next(each for each in _LISTS if each not in _CAPTURED)]
        with torch.inference_mode(False), torch.no_grad():
            entry = _LISTS[key] = make()
    if capturing():
        _CAPTURED.add(key)
    return entry


def joined(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    """One softmax over the keys of two parts, each an output and its log-sum-exps; every real query has a
    key in the first.
    """
    lse = torch.logaddexp(one[1], other[1])
    # A padded query has none in either part, and becomes 0.
    lse = lse.masked_fill(lse == float("-inf"), 0.0)
    first, second = ((part[1] - lse).exp()[..., None] * part[0] for part in (one, other))
    return (first + second).to(one[0].dtype)
