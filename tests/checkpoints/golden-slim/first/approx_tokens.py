# Travels with a checkpoint converted by approx (Apache-2.0); it needs torch and transformers, and nothing else.
"""Shapes, padding, shared heads and stretches of tokens: what every op does before and after its own arithmetic."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .approx_runtime import without_autocast

# Grouped keys: heads of keys and values that several query heads share, read where they lie and never repeated.


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


def attend_to_nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The outputs of queries without any key: zeros [B, H, L, E], which have gradients of 0 in q, k and v."""
    nothing = q[..., :0].sum() + k[..., :0].sum() + v[..., :0].sum()
    return nothing.expand(*q.shape[:3], v.shape[3])


# The shapes that every op agrees on.


def check_shapes(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> None:
    """Refuse tensors that do not fit together.

    Args:
        q: Queries, [B, H, L, D].
        k: Keys, [B, G, S, D], where H is a multiple of G.
        v: Values, [B, G, S, E].
        key_mask: [B, S] bool, True at real keys, or None.

    Raises:
        ValueError: naming the tensor, and the shape, dtype or device that was found and that was expected.
    """
    if q.ndim != 4:
        raise ValueError(f"q has shape {list(q.shape)}; expected [batch, heads, queries, head size].")
    batch, heads, _, size = q.shape
    if k.ndim != 4 or k.shape[0] != batch or k.shape[3] != size:
        raise ValueError(f"k has shape {list(k.shape)}; expected [{batch}, heads, keys, {size}] to fit q.")
    if not k.shape[1] or heads % k.shape[1]:
        raise ValueError(
            f"k has {k.shape[1]} heads for the {heads} of q; expected as many, or a number that divides them, each for as "
            "many query heads."
        )
    if v.ndim != 4 or v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v has shape {list(v.shape)}; expected [{batch}, {k.shape[1]}, {k.shape[2]}, value size] to fit k."
        )
    if not (q.numel() and k.numel() and v.numel()):
        raise ValueError(
            f"q, k, v have shapes {list(q.shape)}, {list(k.shape)}, {list(v.shape)}: one is empty; "
            "expected at least one sample, query and key."
        )
    # Under autocast rotary embeddings leave q and k in float32 beside values of 16 bits.
    one_dtype = q.dtype == k.dtype == v.dtype or torch.is_autocast_enabled(q.device.type)
    if not (one_dtype and q.is_floating_point()):
        raise ValueError(f"q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}; expected one floating dtype.")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k, v are on {q.device}, {k.device}, {v.device}; expected one device. Move them to it.")
    if key_mask is None:
        return
    if key_mask.device != q.device:
        raise ValueError(f"key_mask is on {key_mask.device}, q on {q.device}; expected one device. Move it there.")
    if key_mask.dtype != torch.bool or key_mask.shape != (batch, k.shape[2]):
        raise ValueError(
            f"key_mask is {key_mask.dtype} of shape {list(key_mask.shape)}; "
            f"expected torch.bool of shape [{batch}, {k.shape[2]}], True at real keys."
        )


def check_part(name: str, part: Tensor, q: Tensor, *shape: int | str, dtype: torch.dtype | None = None) -> None:
    """Refuse what an op takes beside q, k and v, such as random rows, where it does not fit them.

    Args:
        name: What the op calls it.
        part: The tensor.
        q: Queries, on whose device it must be.
        shape: Its sizes; a word stands for any size from 1 on.
        dtype: Its dtype; None for any floating one.

    Raises:
        ValueError: naming the tensor, and the shape, dtype or device that was found and that was expected.
    """
    sizes = [size if isinstance(size, int) else max(found, 1) for size, found in zip(shape, part.shape, strict=False)]
    if list(part.shape) != sizes or len(sizes) != len(shape):
        expected = ", ".join(map(str, shape))
        raise ValueError(f"{name} has shape {list(part.shape)}; expected [{expected}] to fit q.")
    if part.dtype != dtype if dtype else not part.is_floating_point():
        raise ValueError(f"{name} is {part.dtype}; expected {dtype or 'a floating dtype'}.")
    if part.device != q.device:
        raise ValueError(f"{name} is on {part.device}, q on {q.device}; expected one device. Move it there.")


def check_least(name: str, number: int | None, least: int) -> None:
    """Refuse a whole number below what is allowed.

    Raises:
        ValueError: naming it, what was found and what is allowed.
    """
    if number is not None and number < least:
        raise ValueError(f"{name} is {number}; expected {least} or more.")


def without_padding(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None
) -> Tensor:
    """Attend among the real tokens of each sample, as if there were no others.

    Query i is the token of key S - L + i. Where that key is padding, or where there is none (L > S), the query
    gives 0; so `attend` meets real tokens only, queries last and at most as many as keys. Without a mask the
    whole batch meets it at once.

    Args:
        attend: From q [B, H, L, D], k [B, H, S, D], v [B, H, S, E] with L <= S to [B, H, L, E].
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
        key_mask: [B, S] bool, True at real keys; None when all are real.

    Returns:
        [B, H, L, E] in the dtype of q.
    """
    before = k.shape[2] - q.shape[2]
    k, v = k.to(q.dtype), v.to(q.dtype)

    def sample(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        keys = mask.nonzero().squeeze(1)
        queries = keys[keys >= before] - before
        if not queries.numel():
            return attend_to_nothing(q, k, v)
        out = attend(_at(q, queries), _at(k, keys), _at(v, keys))
        return out.new_zeros(*q.shape[:3], v.shape[3]).index_copy(2, queries, out)

    with without_autocast(q.device.type):
        if key_mask is not None:
            samples = zip(q.split(1), k.split(1), v.split(1), key_mask, strict=True)
            return torch.cat([sample(*each) for each in samples])
        if before < 0:
            return F.pad(attend(q[:, :, -before:], k, v), (0, 0, -before, 0))
        return attend(q, k, v)


def _at(x: Tensor, index: Tensor) -> Tensor:
    """Tokens of a sample: a view where they stand together, as they do under right and left padding."""
    first, count = int(index[0]), index.numel()
    return x[:, :, first : first + count] if int(index[-1]) == first + count - 1 else x.index_select(2, index)
