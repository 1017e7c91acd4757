"""The process that reloads a converted folder where approx cannot be imported, and 16-bit models in float32.

It is run as a file, which imports nothing of approx. Both processes have to multiply alike, so the other imports
`widened` from here.
"""

import inspect
import json
import os
import shutil
import sys
import traceback
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

    Outputs are rounded to the model's dtype, so they are at least as accurate. For runs that have to be bit-equal, in
    the dtype of the model; elsewhere the model computes as its users will see it.
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
    """Compute a model of 16 bits as if it were loaded in float32, one weight at a time; does nothing for 32 bits.

    Rounding to 16 bits after every operation would hide small mistakes, so whatever compares outputs runs in here. No
    second copy of the weights is made.
    """
    halved = any(tensor.dtype in _HALVES for tensor in (*model.parameters(), *model.buffers()))
    return _InFloat32() if halved else nullcontext()


class _InFloat32(TorchFunctionMode):
    """Every operation takes, returns and reports float32 in place of 16 bits."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return tree_map(_wide, func(*tree_map(_wide, args), **tree_map(_wide, kwargs or {})))


def _wide(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in _HALVES else value
    return torch.float32 if isinstance(value, torch.dtype) and value in _HALVES else value


class _Absent:
    """A finder of modules that refuses approx, its kernels and Triton."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.split(".")[0] in ("approx", "approx_kernels", "triton"):
            raise ModuleNotFoundError(f"{name} is blocked in this check", name=name)


def _reload(folder: str, auto: str, scratch: str, calls: int, threads: int, cache: str, stock: bool) -> None:
    """Load a folder and write the first output of each call; see `verify.first_outputs`."""
    import transformers
    from safetensors.torch import load_file, save_file

    torch.set_num_threads(threads)
    os.environ["APPROX_CACHE"] = cache
    options: dict[str, Any] = {"dtype": "float32"} if stock else {"trust_remote_code": True}
    model = getattr(transformers, auto).from_pretrained(folder, **options).eval()
    for module in model.modules():
        if hasattr(module, "exact_below"):
            module.exact_below = 0
    outputs = {}
    with widened(model), torch.inference_mode():
        for number in range(calls):
            part = model.base_model if number and not stock else model
            inputs: dict[str, Any] = {**load_file(f"{scratch}/{number}.safetensors")}
            if (number or stock) and "use_cache" in inspect.signature(part.forward).parameters:
                inputs["use_cache"] = False
            outputs[str(number)] = part(**inputs)[0].contiguous()
    save_file(outputs, f"{scratch}/outputs.safetensors")


def _status(line: str) -> int:
    try:
        _reload(**json.loads(line))
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _serve(forks: bool) -> None:
    """Answer each line of the input, the arguments of `_reload`, by a status: 0 if it worked."""
    sys.meta_path.insert(0, _Absent())
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    # transformers may prompt for trusting code, or print; neither must read from or write to the pipes.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    # The modules of all families import mostly the same; importing one family now saves time later.
    from transformers import BertModel  # noqa: F401

    for line in requests:
        os.truncate("log", 0)
        shutil.rmtree("modules", ignore_errors=True)
        child = os.fork() if forks else None
        if child == 0:
            os._exit(_status(line))
        print(os.waitpid(child, 0)[1] if child else _status(line), file=answers, flush=True)


if __name__ == "__main__":
    _serve("forks" in sys.argv)
