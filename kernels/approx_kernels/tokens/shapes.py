"""Checks of the shapes common to all ops."""

import torch
from torch import Tensor


def check_shapes(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> None:
    """Check that tensors match.

    Args:
        q: Queries, [B, H, L, D].
        k: Keys, [B, G, S, D], where H is a multiple of G.
        v: Values, [B, G, S, E].
        key_mask: [B, S] bool, True at real keys, or None.

    Raises:
        ValueError: naming the tensor, and its actual and expected shape, dtype or device.
    """
    if q.ndim != 4:
        raise ValueError(f"q has shape {list(q.shape)}; expected [batch, heads, queries, head size].")
    batch, heads, _, size = q.shape
    if k.ndim != 4 or k.shape[0] != batch or k.shape[3] != size:
        raise ValueError(f"k has shape {list(k.shape)}; expected [{batch}, heads, keys, {size}] to fit q.")
    if not k.shape[1] or heads % k.shape[1]:
        raise ValueError(f"k has {k.shape[1]} heads for the {heads} of q; expected a number that divides them.")
    if v.ndim != 4 or v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v has shape {list(v.shape)}; expected [{batch}, {k.shape[1]}, {k.shape[2]}, value size] to fit k."
        )
    if not (q.numel() and k.numel() and v.numel()):
        raise ValueError(
            f"q, k, v have shapes {list(q.shape)}, {list(k.shape)}, {list(v.shape)}: one is empty; "
            "expected at least one sample, query and key."
        )
    # Under autocast, rotary embeddings leave q and k in float32 but v in 16 bits.
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
    """Check a further tensor of an op, such as random rows, against q.

    Args:
        name: Its name in the op.
        part: The tensor.
        q: Queries, on whose device it must be.
        shape: Its sizes; a word stands for any size of at least 1.
        dtype: Its dtype; None for any floating one.

    Raises:
        ValueError: naming the tensor, and its actual and expected shape, dtype or device.
    """
    sizes = [size if isinstance(size, int) else max(actual, 1) for size, actual in zip(shape, part.shape, strict=False)]
    if list(part.shape) != sizes or len(sizes) != len(shape):
        expected = ", ".join(map(str, shape))
        raise ValueError(f"{name} has shape {list(part.shape)}; expected [{expected}] to fit q.")
    if part.dtype != dtype if dtype else not part.is_floating_point():
        raise ValueError(f"{name} is {part.dtype}; expected {dtype or 'a floating dtype'}.")
    if part.device != q.device:
        raise ValueError(f"{name} is on {part.device}, q on {q.device}; expected one device. Move it there.")


def check_least(name: str, number: int | None, least: int) -> None:
    """Check that a whole number is at least `least`.

    Raises:
        ValueError: naming it, its value and the limit.
    """
    if number is not None and number < least:
        raise ValueError(f"{name} is {number}; expected {least} or more.")
