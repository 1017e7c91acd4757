"""The call of a model with float32 products on the CPU at full speed; travels with converted checkpoints."""

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from approx_kernels.products import fast_products

# Samples of sound that the families turn into one row.
_FRAME = 320


def fast_products_for(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[bool]:
    """A context around `model(*args, **kwargs)` in which its products are fast, if it has rows enough to gain by it.

    It is put back when the call ends, also by an error; calls may be nested and run in several threads.
    """
    names = (model.main_input_name, "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds")
    given = (*args[:1], *(kwargs.get(name) for name in names))
    rows = max((_rows(each) for each in given if isinstance(each, Tensor)), default=0)
    return fast_products(rows, model.device, model.dtype)


def _rows(x: Tensor) -> int:
    """About how many rows the products of a layer have for an input: token ids, embeddings, features, pixels or sound."""
    if not x.is_floating_point():
        return x.numel()
    return x.numel() // (x.shape[-1] if x.dim() > 2 else _FRAME)
