"""Who else sees the operations of a call: compilers, tracers, counters and derivatives, to which a bare call of C is invisible.

PyTorch has no public way to ask most of this; a question that a version of it does not answer counts as an observer.
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
    names = transform_names()
    if names is None:
        return Observer.UNKNOWN
    # What else there is sees PyTorch's operations as a mode does.
    return Observer.TRANSFORM if {"Vmap", "Grad"} & set(names) else Observer.DISPATCH_MODE


def _has_no_numbers(x: Tensor) -> bool:
    return x.is_meta or type(x).__name__ == "FakeTensor"
