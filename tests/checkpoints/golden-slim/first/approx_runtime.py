# Travels with a checkpoint converted by approx (Apache-2.0); it needs torch and transformers, and nothing else.
"""Operators of PyTorch, who observes them, and where things are kept."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


def without_autocast(device: str) -> AbstractContextManager[object]:
    """A context in which every operation computes in the dtype of its arguments."""
    # To enter and leave PyTorch's takes several microseconds, also where there is nothing to turn off.
    # Of a device that never has it, such as that of meta tensors, it must not be asked.
    on = device != "meta" and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else nullcontext()


def capturing() -> bool:
    """Whether launches go into a CUDA graph; what they read must stay, and nobody may wait for the device."""
    # Without CUDA PyTorch has no answer.
    return torch.backends.cuda.is_built() and torch.cuda.is_current_stream_capturing()


# The private names of PyTorch that are used here, all of them, each with what stands in where a version lacks it.


def _private(path: str) -> Any:
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


_dispatch_modes = _private("_C._len_torch_dispatch_stack")
_function_modes = _private("_C._len_torch_function_stack")
_mode = _private("_C._get_dispatch_mode")
_mode_keys = _private("_C._TorchDispatchModeKey")
_tracing = _private("_C._is_tracing")
_profiling = _private("autograd._profiler_enabled")
_transforms = _private("_C._functorch.get_interpreter_stack")
_transform_level = _private("_C._functorch.maybe_current_level")
_int_mm = _private("_int_mm")


def answers_all() -> bool:
    """Whether this version answers every question about who observes operations."""
    asked = _tracing, _transform_level, _transforms, _dispatch_modes, _mode, _mode_keys, _function_modes, _profiling
    return None not in asked


def is_tracing() -> bool:
    """Whether `torch.jit.trace` records; False where nobody can tell."""
    return _tracing is not None and _tracing()


def is_forward_mode() -> bool:
    """Whether a level of forward-mode differentiation is open."""
    return getattr(forward_ad, "_current_level", -1) >= 0


def is_transformed() -> bool:
    """Whether a transform of torch.func is at work; False where nobody can tell."""
    return _transform_level is not None and _transform_level() is not None


def transform_names() -> Sequence[str] | None:
    """Which transforms of torch.func are at work, such as `Vmap`."""
    return None if _transforms is None else [each.key().name for each in _transforms() or ()]


def has_dispatch_modes() -> bool:
    """Whether a dispatch mode is open; False where nobody can tell."""
    return _dispatch_modes is not None and _dispatch_modes() > 0


def has_mode_without_numbers() -> bool:
    """Whether a dispatch mode makes tensors fake, or records operations for others; False where nobody can tell."""
    if _mode is None or _mode_keys is None:
        return False
    return any(_mode(getattr(_mode_keys, name, None)) is not None for name in ("FAKE", "PROXY"))


def has_function_modes() -> bool:
    """Whether a function mode is open; False where nobody can tell."""
    return _function_modes is not None and _function_modes() > 0


def is_profiled() -> bool:
    """Whether a profiler watches; False where nobody can tell."""
    return _profiling is not None and _profiling()


def changes(x: Tensor) -> int | None:
    """How often a tensor was changed in place; None where nobody counts, as in inference mode."""
    return None if x.is_inference() else getattr(x, "_version", None)


def int8_product(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product of int8 matrices [m, k] and [k, n], int32, [m, n]."""
    if _int_mm is None:
        return (a.double() @ b.double()).to(torch.int32)
    return _int_mm(a, b)


# Who else sees the operations of a call: compilers, tracers, counters and derivatives, to which a bare call of C is invisible.


class Observer(Enum):
    """Who sees the operations, in words for messages."""

    COMPILER = "torch.compile or torch.export"
    TRACE = "torch.jit.trace"
    TANGENTS = "forward-mode differentiation"
    TRANSFORM = "a transform of torch.func, such as vmap or grad"
    NUMBERLESS = "fake or meta tensors, or make_fx"
    SUBCLASS = "a subclass of torch.Tensor"
    DISPATCH_MODE = "a dispatch mode, such as a counter of operations"
    UNKNOWN = "an observer that this version of PyTorch does not let us ask for"
    FUNCTION_MODE = "a function mode, such as `with torch.device(...)`"
    PROFILER = "a profiler"


# What runs is run again for other numbers, or the numbers cannot be read: no branch and no shape may depend on them.
_UNREADABLE = (Observer.COMPILER, Observer.TRACE, Observer.TRANSFORM, Observer.NUMBERLESS)


def observed(*tensors: Tensor | None) -> Observer | None:
    """Who sees the operations on these tensors, the most demanding first; None if nobody does.

    What is observed goes to a registered operator or to plain PyTorch, never to a bare call of C. Gradients of the usual
    kind, which are recorded on the tensors themselves, are not asked for.
    """
    if is_compiling():
        return Observer.COMPILER
    if is_tracing():
        return Observer.TRACE
    # Both exist inside `torch.func.jvp`, and the level alone inside `forward_ad.dual_level`.
    if is_forward_mode():
        return Observer.TANGENTS
    if is_transformed():
        return _of_transforms()
    modes = has_dispatch_modes()
    numberless = modes and has_mode_without_numbers()
    if numberless or any(x is not None and _has_no_numbers(x) for x in tensors):
        return Observer.NUMBERLESS
    if any(x is not None and type(x) not in (Tensor, nn.Parameter) for x in tensors):
        return Observer.SUBCLASS
    if modes:
        return Observer.DISPATCH_MODE
    if not answers_all():
        return Observer.UNKNOWN
    if has_function_modes():
        return Observer.FUNCTION_MODE
    return Observer.PROFILER if is_profiled() else None


def unreadable(*tensors: Tensor | None) -> bool:
    """Whether no branch and no shape may depend on numbers: they cannot be read, or what runs will run for others too."""
    return observed(*tensors) in _UNREADABLE


def without_functions() -> bool:
    """Whether an `autograd.Function` of ours would fail, or stay a call of Python in what is traced."""
    return observed() in (Observer.TRACE, Observer.TANGENTS, Observer.TRANSFORM)


def _of_transforms() -> Observer:
    names = transform_names()
    if names is None:
        return Observer.UNKNOWN
    # What else there is sees PyTorch's operations as a mode does.
    return Observer.TRANSFORM if {"Vmap", "Grad"} & set(names) else Observer.DISPATCH_MODE


def _has_no_numbers(x: Tensor) -> bool:
    return x.is_meta or type(x).__name__ == "FakeTensor"


def sdpa(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, whose arguments it takes.

    Under forward-mode differentiation it is that of the plain steps, as PyTorch's kernels have no such derivative.
    """
    if observed() is not Observer.TANGENTS:
        return F.scaled_dot_product_attention(q, k, v, **settings)
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, **settings)
