"""What PyTorch is doing around our operations: its private names, observers, autocast, and its own fused attention.

Observers are compilers, tracers, counters and derivatives, which cannot see direct calls of C. PyTorch has no public
API for most of this. If a version lacks one of its private names, every call counts as observed, and runs plain
PyTorch.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import flop_counter

T = TypeVar("T")


def _private(path: str) -> Any:
    """A name of PyTorch; None if this version lacks it."""
    value: Any = torch
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


_count_dispatch_modes = _private("_C._len_torch_dispatch_stack")
_count_function_modes = _private("_C._len_torch_function_stack")
_mode = _private("_C._get_dispatch_mode")
_modes_without_numbers = _private("_C._TorchDispatchModeKey.FAKE"), _private("_C._TorchDispatchModeKey.PROXY")
_is_tracing = _private("_C._is_tracing")
_is_profiled = _private("autograd._profiler_enabled")
_transforms = _private("_C._functorch.get_interpreter_stack")
_transform_level = _private("_C._functorch.maybe_current_level")
_forward_level = _private("autograd.forward_ad._current_level")
_excluded = _private("_C._dispatch_tls_local_exclude_set")
_included = _private("_C._dispatch_tls_local_include_set")
_guard = _private("_C._ForceDispatchKeyGuard")
# One key covers autograd on all devices except those with their own key.
_autograd_keys = _private("_C.DispatchKey.AutogradFunctionality"), _private("_C.DispatchKey.AutogradOther")
_int_mm = _private("_int_mm")

_ASKED = (
    *(_count_dispatch_modes, _count_function_modes, _mode, *_modes_without_numbers),
    *(_is_tracing, _is_profiled, _transforms, _transform_level, _forward_level),
)
_sees_all = None not in _ASKED
_can_enable_autograd = None not in (_excluded, _included, _guard, *_autograd_keys)


def changes(x: Tensor) -> int | None:
    """The version counter of a tensor's in-place changes; None if there is none, as in inference mode."""
    return None if x.is_inference() else getattr(x, "_version", None)


def with_autograd(call: Callable[[], T]) -> T:
    """Call a function with autograd enabled, even inside an operator, where its dispatch keys are excluded."""
    if not _can_enable_autograd:
        # Dispatch keys are excluded per thread.
        with ThreadPoolExecutor(1) as another:
            return another.submit(torch.enable_grad()(call)).result()
    excluded = _excluded()
    for key in _autograd_keys:
        excluded = excluded.remove(key)
    with _guard(_included(), excluded), torch.enable_grad():
        return call()


def int8_product(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product of int8 matrices [m, k] and [k, n], int32, [m, n]."""
    if _int_mm is None:
        return (a.double() @ b.double()).to(torch.int32)
    return _int_mm(a, b)


def constant_result(function: Callable[..., T]) -> Callable[..., T]:
    """`torch.compiler.assume_constant_result` without importing the compiler: tracing calls the function once."""
    setattr(function, "_dynamo_marked_constant", True)  # noqa: B010  # pyright reports a plain assignment as an error
    return function


# PyTorch has no FLOP formula for it.
if _int_mm is not None and (packet := torch.ops.aten._int_mm) not in flop_counter.flop_registry:

    @flop_counter.register_flop_formula(packet)
    def _int_mm_flops(rows: Any, columns: Any, *_: Any, **__: Any) -> int:
        return 2 * rows[0] * rows[1] * columns[1]


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
UNREADABLE = (Observer.COMPILER, Observer.TRACE, Observer.TRANSFORM, Observer.NUMBERLESS)
# These accept any registered operator; all others need PyTorch's own operations or a registered rule.
_ONLY_WATCHING = (Observer.FUNCTION_MODE, Observer.PROFILER)


def observed(*tensors: Tensor | None) -> Observer | None:
    """The most demanding observer of operations on these tensors; None if there is none.

    Observed calls go to a registered operator or to plain PyTorch, never directly to C. Ordinary reverse-mode autograd
    does not count as an observer.
    """
    if is_compiling():
        return Observer.COMPILER
    if _sees_all and _is_tracing():
        return Observer.TRACE
    # `torch.func.jvp` also counts as a transform, so check this first; `forward_ad.dual_level` does not.
    if _sees_all and forward_ad._current_level >= 0:
        return Observer.TANGENTS
    if _sees_all and _transform_level() is not None:
        names = {each.key().name for each in _transforms() or ()}
        # All other transforms see PyTorch's operations like a dispatch mode.
        return Observer.TRANSFORM if names & {"Vmap", "Grad"} else Observer.DISPATCH_MODE
    modes = _sees_all and _count_dispatch_modes() > 0
    numberless = modes and any(_mode(each) is not None for each in _modes_without_numbers)
    if numberless or any(x is not None and (x.is_meta or type(x).__name__ == "FakeTensor") for x in tensors):
        return Observer.NUMBERLESS
    if any(x is not None and type(x) not in (Tensor, nn.Parameter) for x in tensors):
        return Observer.SUBCLASS
    if modes:
        return Observer.DISPATCH_MODE
    if not _sees_all:
        return Observer.UNKNOWN
    if _count_function_modes() > 0:
        return Observer.FUNCTION_MODE
    return Observer.PROFILER if _is_profiled() else None


def unreadable(*tensors: Tensor | None) -> bool:
    """Whether no branch and no shape may depend on values: these cannot be read, or will differ when it runs."""
    return observed(*tensors) in UNREADABLE


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
    return observed() in (Observer.TRACE, Observer.TANGENTS, Observer.TRANSFORM, Observer.UNKNOWN)


def without_autocast(device: str) -> AbstractContextManager[object]:
    """A context in which every operation computes in the dtype of its arguments."""
    # Entering and leaving PyTorch's context takes several microseconds even if autocast is off.
    # `is_autocast_enabled` fails for the meta device.
    on = device != "meta" and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else nullcontext()


def in_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors in autocast's dtype, as PyTorch casts for its own attention; unchanged without autocast."""
    if not torch.is_autocast_enabled(q.device.type):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def sdpa(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` with the same arguments.

    Under forward-mode differentiation it uses the math backend, since the fused kernels have no such derivative.
    """
    if observed() is not Observer.TANGENTS:
        return F.scaled_dot_product_attention(q, k, v, **settings)
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, **settings)


def capturing() -> bool:
    """Whether a CUDA graph is being captured; its inputs must stay alive, and synchronising is not allowed."""
    # Builds without CUDA raise an error here.
    return torch.backends.cuda.is_built() and torch.cuda.is_current_stream_capturing()


def drop_keys(values: Tensor, dropout: float) -> Tensor:
    """Values with whole keys dropped at the given probability, and the others scaled up."""
    return values * F.dropout(values.new_ones(values.shape[:-1]), dropout)[..., None] if dropout else values
