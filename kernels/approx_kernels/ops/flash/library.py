"""FlashAttention-4 and -3, where they are installed: they beat our kernels on the inputs that they take."""

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from approx_kernels.runtime.pytorch import needs_pytorch

# In which the hub's kernels are published; `version` is the one whose interface is called here.
HUB_KERNEL, HUB_VERSION = "kernels-community/flash-attn3", 1
MOST_HEAD_SIZE = 256
INSTALL = "pip install --pre flash-attn-4, for compute capability 9.0 or 10.0, or FlashAttention-3, for 9.0"


class Library(NamedTuple):
    """An installed FlashAttention: its name, and its `flash_attn_func` on [B, N, H, D]."""

    name: str
    attend: Callable[..., Any]


@functools.cache
def library(capability: tuple[int, int]) -> Library | None:
    """The best FlashAttention that is installed for a compute capability; None if there is none.

    Kernels of the hub are used if Hugging Face's `kernels` is installed and they have been downloaded before.
    """
    if capability in ((9, 0), (10, 0)) and (found := _imported("flash_attn.cute")):
        return Library("FlashAttention-4", found)
    if capability == (9, 0) and (found := _imported("flash_attn_interface") or _of_the_hub()):
        return Library("FlashAttention-3", found)
    return None


def library_obstacle(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, dropout: float) -> str | None:
    """Why no installed FlashAttention can run, with the remedy; None if one can."""
    if not q.is_cuda:
        return f"a tensor is on the {q.device.type}; FlashAttention needs CUDA tensors. Move it to a GPU."
    if key_mask is not None or dropout:
        return "FlashAttention-3 and -4 skip no padding and have no dropout. Leave them out, or ask for 'auto'."
    if q.dtype not in (torch.float16, torch.bfloat16) or {k.dtype, v.dtype} != {q.dtype}:
        return f"a tensor is {q.dtype}; FlashAttention takes float16 and bfloat16, the same for all. Convert it."
    if q.shape[3] != v.shape[3] or q.shape[3] % 8 or q.shape[3] > MOST_HEAD_SIZE:
        return (
            f"the head sizes are {q.shape[3]} and {v.shape[3]}; FlashAttention takes equal ones, multiples of 8 to 256."
        )
    if why := needs_pytorch(q, k, v):
        return why
    if library(torch.cuda.get_device_capability(q.device)) is None:
        return f"no FlashAttention for this GPU is installed. {INSTALL}."
    return None


def library_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Softmax attention by the installed FlashAttention; the last query sees all keys.

    Args: as for `flash_attention`, without an obstacle of `library_obstacle`.

    Returns:
        [B, H, L, D], differentiable; bit by bit the same each time if PyTorch's deterministic algorithms are on.
    """
    found = library(torch.cuda.get_device_capability(q.device))
    assert found is not None, "library_obstacle says so before"
    return call(found.attend, q, k, v, causal=causal, scale=scale)


def call(attend: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Call a `flash_attn_func`, which has tokens before heads, on [B, H, N, D]."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    rows = (x.transpose(1, 2) if x.stride(3) == 1 else x.transpose(1, 2).contiguous() for x in (q, k, v))
    out = attend(*rows, softmax_scale=scale, causal=causal, deterministic=deterministic)
    # Older versions return the log-sum-exps too.
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


def _imported(module: str) -> Callable[..., Any] | None:
    try:
        return importlib.import_module(module).flash_attn_func
    except Exception:  # a package that is missing, broken, or made for another torch cannot be called
        return None


def _of_the_hub() -> Callable[..., Any] | None:
    try:
        get_kernel = importlib.import_module("kernels").get_kernel
        cache = importlib.import_module("huggingface_hub.constants").HF_HUB_CACHE
        # Nothing is downloaded by an attention layer.
        folder = HUB_KERNEL.replace("/", "--")
        if not any(Path(cache, f"{kind}--{folder}").is_dir() for kind in ("kernels", "models")):
            return None
        return get_kernel(HUB_KERNEL, version=HUB_VERSION).flash_attn_func
    except Exception:  # as for packages
        return None
