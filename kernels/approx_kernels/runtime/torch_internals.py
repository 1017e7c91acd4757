"""The private names of PyTorch that are used here, all of them, each with what stands in where a version lacks it.

`None` from a question means that this version does not answer it; whoever asks then takes the safe side.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import flop_counter

T = TypeVar("T")


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
_excluded = _private("_C._dispatch_tls_local_exclude_set")
_included = _private("_C._dispatch_tls_local_include_set")
_guard = _private("_C._ForceDispatchKeyGuard")
_keys = _private("_C.DispatchKey")
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


def with_autograd(call: Callable[[], T]) -> T:
    """Call something with gradients recorded, also inside an operator, where autograd is left out."""
    if None in (_excluded, _included, _guard, _keys):
        # What is left out is left out of one thread.
        with ThreadPoolExecutor(1) as another:
            return another.submit(torch.enable_grad()(call)).result()
    left_out = _excluded()
    # One key stands for autograd on every device but those that have a key of their own.
    for key in (_keys.AutogradFunctionality, _keys.AutogradOther):
        left_out = left_out.remove(key)
    with _guard(_included(), left_out), torch.enable_grad():
        return call()


def int8_product(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product of int8 matrices [m, k] and [k, n], int32, [m, n]."""
    if _int_mm is None:
        return (a.double() @ b.double()).to(torch.int32)
    return _int_mm(a, b)


def constant_result(function: Callable[..., T]) -> Callable[..., T]:
    """Let a compiler call a function once, while it traces: `torch.compiler.assume_constant_result`, which imports it."""
    setattr(function, "_dynamo_marked_constant", True)  # noqa: B010  # pyright takes a plain assignment for a mistake
    return function


# PyTorch counts no operations of it.
if _int_mm is not None and (packet := torch.ops.aten._int_mm) not in flop_counter.flop_registry:

    @flop_counter.register_flop_formula(packet)
    def _int_mm_flops(rows: Any, columns: Any, *_: Any, **__: Any) -> int:
        return 2 * rows[0] * rows[1] * columns[1]
