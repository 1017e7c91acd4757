"""A model without its attention: the upper bound on any mechanism's speed."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from approx.seam.dispatch import OWN_KEYWORDS
from approx.seam.internals import under_implementation
from approx.seam.windows import attention, key_mask

_FREE = "approx_attention_free"


def values_only(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """No attention: each position gets its own value (the mean value if the numbers of keys and queries differ).

    Returns:
        [B, L, H, E], and None for the weights.
    """
    groups = query.shape[1] // value.shape[1]
    if groups > 1:
        value = value.repeat_interleave(groups, dim=1)
    if value.shape[-2] != query.shape[-2]:
        value = value.mean(-2, keepdim=True).expand(*query.shape[:-1], value.shape[-1])
    # Some families take a view of it, which has to be contiguous.
    return value.transpose(1, 2).contiguous(), None


def _unless_kept(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    if attention_mask is None and all(kwargs.get(name) is None for name in OWN_KEYWORDS):
        return values_only(module, query, key, value)
    return attention(module, query, key, value, attention_mask, **kwargs)


def _own_masks(*args: Any, mask_function: Any = causal_mask_function, **kwargs: Any) -> Tensor | None:
    plain = mask_function in (causal_mask_function, bidirectional_mask_function)
    return None if plain else key_mask(*args, mask_function=mask_function, **kwargs)


AttentionInterface.register(_FREE, _unless_kept)
AttentionMaskInterface.register(_FREE, _own_masks)


@contextlib.contextmanager
def attention_free(model: Any) -> Iterator[None]:
    """Run `model` with its attention replaced by its values: the upper bound on the speed-up from faster attention.

    Layers that cannot be converted, because they have windows of their own, attend as they do.
    """
    with under_implementation(model.config, _FREE):
        yield
