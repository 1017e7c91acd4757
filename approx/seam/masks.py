"""Masks that the seam passes to mechanisms: which keys are real, and which slots of a static cache are in use.

A static cache has a fixed number of slots, most of them free for later tokens. Mechanisms align the last query with the
last key, so free slots are cut off first. This file is copied into converted checkpoints.
"""

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from approx.errors import ApproxError
from approx_kernels.runtime.observed import unreadable
from approx_kernels.runtime.torch_internals import changes

# Read once per decoding step from the mask that all layers share: slots in use, and whether all of these are real.
_READ = WeakTensorKeyDictionary()


def key_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Mask function of the seam: which keys are real tokens, never an L×S grid for plain masks.

    Returns:
        [B, S] bool, True = real token; None when every key is real. For a static cache with free slots, the columns in use,
        or for a single query SDPA's row [B, 1, 1, slots], whose shape is the same at every step; see `in_use`. SDPA's 4-D
        mask for anything that is neither plainly causal nor plainly bidirectional.

    Raises:
        ApproxError: if the mask has fewer columns than there are tokens.
    """
    plain = mask_function in (causal_mask_function, bidirectional_mask_function)
    seen = kv_length
    if plain and mask_function is causal_mask_function:
        # Compiled code cannot read how many slots are in use: in a static cache it is a tensor.
        followed = isinstance(q_offset, Tensor) and is_dynamo_compiling()
        seen = -1 if followed else int(q_offset) + q_length - int(kv_offset)
    if plain and attention_mask is not None and attention_mask.shape[1] < seen:
        raise ApproxError(
            f"The attention mask has {attention_mask.shape[1]} columns for {seen} tokens, including those in the cache. "
            f"Pass the mask of all tokens at every step, here {seen} columns."
        )
    if not plain or seen > kv_length or (seen < kv_length and (q_length == 1 or seen < 0)):
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **{**kwargs, "q_offset": q_offset, "allow_is_causal_skip": False},
        )
    if seen < kv_length:
        real = (
            torch.ones(batch_size, seen, dtype=torch.bool)
            if attention_mask is None
            else attention_mask[:, :seen].bool()
        )
        return real.to(kwargs.get("device"))
    if attention_mask is None:
        return None
    real = attention_mask[:, -kv_length:].bool()
    # Reading the mask synchronises a GPU once per forward, impossible inside a CUDA graph; every layer then runs unmasked.
    captured = real.is_cuda and torch.cuda.is_current_stream_capturing()
    if not unreadable(real) and not captured and bool(real.all()):
        return None
    return real


def is_causal(module: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call of an attention module is causal, by the family's keyword or else by the module."""
    passed = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", False) if passed is None else passed)


def in_use(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Views of the keys and values without the free slots of a static cache, and their mask, [B, S] or None.

    Other masks are returned unchanged, with their keys.

    Args:
        query: [B, H, L, D].
        key: [B, G, S, D].
        value: [B, G, S, E].
        mask: The result of `key_mask`, or a mask passed to the model in its place.
        causal: Whether a query sees only keys at or before its own position.
    """
    row = mask is not None and mask.dim() == 4 and mask.shape[1:3] == (1, 1) and mask.dtype == torch.bool
    if mask is None or not causal or not ((row and query.shape[2] == 1) or mask.dim() == 2):
        return key, value, mask
    if row:
        mask, (seen, whole) = mask[:, 0, 0], _read(mask)
    elif mask.shape[1] < key.shape[2]:
        seen, whole = mask.shape[1], not unreadable(mask) and _read(mask)[1]
    else:
        return key, value, mask
    return key[:, :, :seen], value[:, :, :seen], None if whole else mask[:, :seen]


def _read(mask: Tensor) -> tuple[int, bool]:
    """Columns up to the last that is real in any sample, and whether all of them are real. Synchronises a GPU once a step."""
    version = changes(mask)
    known = None if unreadable(mask) else _READ.get(mask)
    if known is not None and version is not None and known[0] == version:
        return known[1]
    rows = mask.flatten(1)
    last = int((rows.any(0) * torch.arange(1, rows.shape[1] + 1, device=mask.device)).max())
    extent = (last, bool(rows[:, :last].all()))
    if not unreadable(mask):
        _READ[mask] = version, extent
    return extent


def dense_mask(mask: Tensor | None, causal: bool, queries: int, keys: int, device: torch.device) -> Tensor | None:
    """Mask for SDPA, or None if it needs none. SDPA's own `is_causal` aligns top-left, so L != S needs a mask."""
    if mask is not None and mask.dim() == 2:
        mask = mask[:, None, None, :]
        if causal and queries > 1:
            mask = mask & torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    elif mask is None and causal and 1 < queries != keys:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)[None, None]
    return mask
