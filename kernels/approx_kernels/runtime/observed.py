"""Who else sees the operations of a call: compilers, tracers, counters and derivatives, to which a bare call of C is invisible.

PyTorch has no public way to ask most of this. Its private names are all read here, and one that a version of PyTorch lacks
counts as an observer.
"""

from collections.abc import Iterable
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import is_compiling

_C: Any = torch._C
_dispatch_modes: Any = getattr(_C, "_len_torch_dispatch_stack", None)
_function_modes: Any = getattr(_C, "_len_torch_function_stack", None)
_tracing: Any = getattr(_C, "_is_tracing", None)
_profiling: Any = getattr(torch.autograd, "_profiler_enabled", None)
_transforms: Any = getattr(getattr(_C, "_functorch", None), "get_interpreter_stack", None)
_transform_level: Any = getattr(getattr(_C, "_functorch", None), "maybe_current_level", None)
_mode: Any = getattr(_C, "_get_dispatch_mode", None)
_mode_keys: Any = getattr(_C, "_TorchDispatchModeKey", None)


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
# These see a registered operator and let it run; all others need PyTorch's own operations, or a rule that they know.
_ONLY_WATCHING = (Observer.FUNCTION_MODE, Observer.PROFILER)


def observed(*tensors: Tensor | None) -> Observer | None:
    """Who sees the operations on these tensors, the most demanding first; None if nobody does.

    What is observed goes to a registered operator or to plain PyTorch, never to a bare call of C. Gradients of the usual
    kind, which are recorded on the tensors themselves, are not asked for.
    """
    if is_compiling():
        return Observer.COMPILER
    if _tracing is not None and _tracing():
        return Observer.TRACE
    # Both exist inside `torch.func.jvp`, and the level alone inside `forward_ad.dual_level`.
    if getattr(forward_ad, "_current_level", 0) >= 0:
        return Observer.TANGENTS
    if _transform_level is not None and _transform_level() is not None:
        return _of_transforms()
    modes = _dispatch_modes is not None and _dispatch_modes()
    if (modes and _without_numbers()) or any(x is not None and _has_no_numbers(x) for x in tensors):
        return Observer.NUMBERLESS
    if any(x is not None and type(x) not in (Tensor, nn.Parameter) for x in tensors):
        return Observer.SUBCLASS
    if modes:
        return Observer.DISPATCH_MODE
    asked = _tracing, _transform_level, _transforms, _dispatch_modes, _mode, _mode_keys, _function_modes, _profiling
    if None in asked:
        return Observer.UNKNOWN
    if _function_modes():
        return Observer.FUNCTION_MODE
    return Observer.PROFILER if _profiling() else None


def unreadable(*tensors: Tensor | None) -> bool:
    """Whether no branch and no shape may depend on numbers: they cannot be read, or what runs will run for others too."""
    return observed(*tensors) in _UNREADABLE


def needs_pytorch(*tensors: Tensor | None) -> str | None:
    """Why C cannot run although it computes the right numbers, with the remedy; None where it can."""
    who = observed(*tensors)
    if who is None or who in _ONLY_WATCHING:
        return None
    return f"{who.value} observes the operations, and sees those of PyTorch alone. Ask for 'auto'."


def transformed(*tensors: Tensor | None) -> str | None:
    """Why an operator of ours cannot run, with the remedy; None where it can."""
    who = observed(*tensors)
    if who not in (Observer.TANGENTS, Observer.TRANSFORM, Observer.SUBCLASS, Observer.UNKNOWN):
        return None
    return f"{who.value} needs operations of PyTorch. Ask for 'auto'."


def without_functions() -> bool:
    """Whether an `autograd.Function` of ours would fail, or stay a call of Python in what is traced."""
    return observed() in (Observer.TRACE, Observer.TANGENTS, Observer.TRANSFORM)


def _of_transforms() -> Observer:
    if _transforms is None:
        return Observer.UNKNOWN
    names: Iterable[str] = (each.key().name for each in _transforms() or ())
    # What else there is sees PyTorch's operations as a mode does.
    return Observer.TRANSFORM if {"Vmap", "Grad"} & set(names) else Observer.DISPATCH_MODE


def _without_numbers() -> bool:
    """Whether a mode is one that makes tensors fake, or records operations for others."""
    if _mode is None or _mode_keys is None:
        return False
    return any(_mode(key) is not None for key in (_mode_keys.FAKE, _mode_keys.PROXY))


def _has_no_numbers(x: Tensor) -> bool:
    return x.is_meta or type(x).__name__ == "FakeTensor"
