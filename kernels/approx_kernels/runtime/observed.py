"""Detect observers of PyTorch operations: compilers, tracers, counters and derivatives, which cannot see direct calls of C.

PyTorch has no public API for most of this; if a version cannot answer a question, that counts as an observer.
"""

from enum import Enum

from torch import Tensor, nn
from torch.compiler import is_compiling

from approx_kernels.runtime.torch_internals import (
    answers_all,
    has_dispatch_modes,
    has_function_modes,
    has_mode_without_numbers,
    is_forward_mode,
    is_profiled,
    is_tracing,
    is_transformed,
    transform_names,
)


class Observer(Enum):
    """Kinds of observers, with descriptions for messages."""

    COMPILER = "torch.compile or torch.export"
    TRACE = "torch.jit.trace"
    TANGENTS = "forward-mode differentiation"
    TRANSFORM = "a transform of torch.func, such as vmap or grad"
    NUMBERLESS = "fake or meta tensors, or make_fx"
    SUBCLASS = "a subclass of torch.Tensor"
    DISPATCH_MODE = "a dispatch mode, such as a counter of operations"
    UNKNOWN = "an observer that this version of PyTorch cannot report"
    FUNCTION_MODE = "a function mode, such as `with torch.device(...)`"
    PROFILER = "a profiler"


# Values cannot be read, or the recorded operations will run on others: no branch and no shape may depend on values.
_UNREADABLE = (Observer.COMPILER, Observer.TRACE, Observer.TRANSFORM, Observer.NUMBERLESS)
# These accept any registered operator; all others need PyTorch's own operations or a registered rule.
_ONLY_WATCHING = (Observer.FUNCTION_MODE, Observer.PROFILER)


def observed(*tensors: Tensor | None) -> Observer | None:
    """The most demanding observer of operations on these tensors; None if there is none.

    Observed calls go to a registered operator or to plain PyTorch, never directly to C. Ordinary reverse-mode autograd
    does not count as an observer.
    """
    if is_compiling():
        return Observer.COMPILER
    if is_tracing():
        return Observer.TRACE
    # `torch.func.jvp` also counts as a transform, so check this first; `forward_ad.dual_level` does not.
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
    """Whether no branch and no shape may depend on values: they cannot be read, or the operations will run on others."""
    return observed(*tensors) in _UNREADABLE


def needs_pytorch(*tensors: Tensor | None) -> str | None:
    """Why C cannot run although its results would be correct, with the remedy; None if it can."""
    who = observed(*tensors)
    if who is None or who in _ONLY_WATCHING:
        return None
    return f"{who.value} observes the operations, and only sees those of PyTorch. Ask for 'auto'."


def transformed(*tensors: Tensor | None) -> str | None:
    """Why one of our operators cannot run, with the remedy; None if it can."""
    who = observed(*tensors)
    if who not in (Observer.TANGENTS, Observer.TRANSFORM, Observer.SUBCLASS, Observer.UNKNOWN):
        return None
    return f"{who.value} needs operations of PyTorch. Ask for 'auto'."


def without_functions() -> bool:
    """Whether one of our `autograd.Function`s would fail, or remain a Python call in a trace."""
    return observed() in (Observer.TRACE, Observer.TANGENTS, Observer.TRANSFORM)


def _of_transforms() -> Observer:
    names = transform_names()
    if names is None:
        return Observer.UNKNOWN
    # All other transforms see PyTorch's operations like a dispatch mode.
    return Observer.TRANSFORM if {"Vmap", "Grad"} & set(names) else Observer.DISPATCH_MODE


def _has_no_numbers(x: Tensor) -> bool:
    return x.is_meta or type(x).__name__ == "FakeTensor"
