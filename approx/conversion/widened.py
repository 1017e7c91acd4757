"""Models of 16 bits in float32: whole for comparisons, and their linear layers on processors that multiply 16 bits in software only.

This file imports nothing of approx: the process without approx that reloads a folder runs it too.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

_HALVES = (torch.float16, torch.bfloat16)


def widened(model: Any) -> AbstractContextManager[object]:
    """Compute linear layers in float32 inside the context, one weight at a time, where that is several times faster.

    Outputs are rounded to the model's dtype, so they are at least as accurate. For runs that have to be bit-equal, in the
    model's own dtype; elsewhere the model computes as its users will see it.
    """
    if model.device.type != "cpu" or model.dtype not in _HALVES:
        return nullcontext()
    kind = "bf16" if model.dtype == torch.bfloat16 else "fp16"
    return nullcontext() if getattr(torch.ops.mkldnn, f"_is_mkldnn_{kind}_supported")() else _Widened()


class _Widened(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.linear or args[0].dtype == torch.float32:
            return func(*args, **kwargs)
        wide = [None if x is None else x.float() for x in args]
        return func(*wide, **{name: None if x is None else x.float() for name, x in kwargs.items()}).to(args[0].dtype)


def in_float32(model: Any) -> AbstractContextManager[object]:
    """Compute a model of 16 bits as if it had been loaded in float32, one weight at a time; a model of 32 bits is left alone.

    Rounding to 16 bits after every operation would hide small mistakes, so whatever compares outputs runs in here. No second
    copy of the weights is made.
    """
    halved = any(tensor.dtype in _HALVES for tensor in (*model.parameters(), *model.buffers()))
    return _InFloat32() if halved else nullcontext()


class _InFloat32(TorchFunctionMode):
    """Every operation gets and gives float32 in place of 16 bits, and dtypes are told accordingly."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return tree_map(_wide, func(*tree_map(_wide, args), **tree_map(_wide, kwargs or {})))


def _wide(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in _HALVES else value
    return torch.float32 if isinstance(value, torch.dtype) and value in _HALVES else value
