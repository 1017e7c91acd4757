"""Sliding windows of a family's own layers, computed alone: the seam's attention and masks where the tool is installed.

transformers masks all pairs of tokens in such layers, and so do converted checkpoints on their own, which have no copy of this
file. The results are the same.
"""

from types import FunctionType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    causal_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from approx.seam.decode_cache import wants_weights
from approx.seam.dispatch import IMPLEMENTATION, OWN_KEYWORDS
from approx.seam.dispatch import attention as attention_to_all
from approx.seam.dispatch import key_mask as mask_of_all
from approx_kernels.ops.key_lists.cpu import obstacle
from approx_kernels.ops.near_keys.reference import reach
from approx_kernels.ops.patterns.api import local_attention
from approx_kernels.runtime.pytorch import changes, needs_pytorch, unreadable

WINDOW_FROM = 256
"""Tokens of an input from which a window is computed alone: compiled C then takes less than half the time from 512 on."""


class _Window(NamedTuple):
    """What a mask says: the keys seen on either side, and which are real, [B, S] or None for all."""

    version: int | None
    left: int
    right: int
    real: Tensor | None


# SDPA's masks of sliding windows -> the windows that they stand for.
_WINDOWS = WeakTensorKeyDictionary()


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
    """The mask of `dispatch.key_mask`; of a sliding window over a whole input it is noted what it stands for."""
    mask = mask_of_all(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **kwargs)
    size = kwargs.get("local_size")
    if mask is None or size is None or mask.device.type != "cpu" or unreadable(mask):
        return mask
    whole = q_length == kv_length and type(q_offset) is type(kv_offset) is int and q_offset == kv_offset == 0
    if not whole or (attention_mask is not None and attention_mask.shape[1] != kv_length):
        return mask
    if _alike(mask_function, sliding_window_causal_mask_function(size)):
        left, right = reach(size, True)
    elif _alike(mask_function, sliding_window_bidirectional_mask_function(size)):
        left, right = reach(size, False)
    else:
        return mask
    if kv_length >= WINDOW_FROM and left + right + 1 < kv_length:
        real = None if attention_mask is None or attention_mask.all() else attention_mask.bool().to(mask.device)
        _WINDOWS[mask] = _Window(changes(mask), left, right, real)
    return mask


def _alike(one: Any, other: Any) -> bool:
    """Whether two mask functions are the same code over the same values; packed or other masks are combined with more."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        cells = [tuple(cell.cell_contents for cell in each.__closure__ or ()) for each in (one, other)]
        return one is other or (one.__code__ is other.__code__ and _alike(*cells))
    return type(one) is type(other) is int and one == other


def _window(mask: Tensor | None) -> _Window | None:
    if mask is None or mask.dim() != 4 or unreadable(mask):
        return None
    # A mask that was changed stands for itself, as does a part of one.
    window = _WINDOWS.get(mask)
    return window if window is not None and window.version == changes(mask) else None


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention of `dispatch.attention`; a layer without a mechanism, under the mask of a window, computes that alone."""
    window = _window(attention_mask)
    own = wants_weights(kwargs) or any(kwargs.get(name) is not None for name in OWN_KEYWORDS)
    if (
        window is None
        or own
        or hasattr(module, "mechanism")
        or obstacle(query) is not None
        or needs_pytorch(query, key, value)
    ):
        return attention_to_all(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    how: dict[str, Any] = {"left": window.left, "right": window.right, "dropout": dropout}
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = local_attention(query, key, value, window.real, scale=scale, **how)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(IMPLEMENTATION, attention)
AttentionMaskInterface.register(IMPLEMENTATION, key_mask)
