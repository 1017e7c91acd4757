"""Linear layers of 16-bit models in float32 on processors that multiply 16-bit numbers in software only.

This file imports nothing of approx: the process without approx that reloads a folder runs it too.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


def widened(model: Any) -> AbstractContextManager[object]:
    """Compute linear layers in float32 inside the context, one weight at a time, where that is several times faster.

    Outputs are rounded to the model's dtype, so they are at least as accurate. For checks, which compare runs of the same model;
    elsewhere the model computes as its users will see it.
    """
    if model.device.type != "cpu" or model.dtype not in (torch.bfloat16, torch.float16):
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
