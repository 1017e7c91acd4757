"""A model without its attention: the upper bound on any mechanism's speed."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from approx.seam.internals import under_implementation

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


AttentionInterface.register(_FREE, values_only)
AttentionMaskInterface.register(_FREE, lambda *args, **kwargs: None)


@contextlib.contextmanager
def attention_free(model: Any) -> Iterator[None]:
    """Run `model` with its attention replaced by its values: the upper bound on the speed-up from faster attention."""
    with under_implementation(model.config, _FREE):
        yield
