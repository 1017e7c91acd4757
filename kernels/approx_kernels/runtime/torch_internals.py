"""All private names of PyTorch in use, each with a fallback for versions that lack it.

`None` means that this version cannot answer; callers then take the safe side.
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
    value: Any = torch
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


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
    """Whether this version answers every question about observers."""
    asked = _tracing, _transform_level, _transforms, _dispatch_modes, _mode, _mode_keys, _function_modes, _profiling
    return None not in asked


def is_tracing() -> bool:
    """Whether `torch.jit.trace` is recording; False if unknown."""
    return _tracing is not None and _tracing()


def is_forward_mode() -> bool:
    """Whether a level of forward-mode differentiation is open."""
    return getattr(forward_ad, "_current_level", -1) >= 0


def is_transformed() -> bool:
    """Whether a transform of torch.func is active; False if unknown."""
    return _transform_level is not None and _transform_level() is not None


def transform_names() -> Sequence[str] | None:
    """The active transforms of torch.func, such as `Vmap`."""
    return None if _transforms is None else [each.key().name for each in _transforms() or ()]


def has_dispatch_modes() -> bool:
    """Whether a dispatch mode is active; False if unknown."""
    return _dispatch_modes is not None and _dispatch_modes() > 0


def has_mode_without_numbers() -> bool:
    """Whether a dispatch mode uses fake or proxy tensors; False if unknown."""
    if _mode is None or _mode_keys is None:
        return False
    return any(_mode(getattr(_mode_keys, name, None)) is not None for name in ("FAKE", "PROXY"))


def has_function_modes() -> bool:
    """Whether a function mode is active; False if unknown."""
    return _function_modes is not None and _function_modes() > 0


def is_profiled() -> bool:
    """Whether a profiler is active; False if unknown."""
    return _profiling is not None and _profiling()


def changes(x: Tensor) -> int | None:
    """The version counter of a tensor's in-place changes; None if there is none, as in inference mode."""
    return None if x.is_inference() else getattr(x, "_version", None)


def with_autograd(call: Callable[[], T]) -> T:
    """Call a function with autograd enabled, even inside an operator, where its dispatch keys are excluded."""
    if None in (_excluded, _included, _guard, _keys):
        # Dispatch keys are excluded per thread.
        with ThreadPoolExecutor(1) as another:
            return another.submit(torch.enable_grad()(call)).result()
    left_out = _excluded()
    # One key covers autograd on all devices except those with their own key.
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
    """`torch.compiler.assume_constant_result` without importing the compiler: it calls the function once, when tracing."""
    setattr(function, "_dynamo_marked_constant", True)  # noqa: B010  # pyright reports a plain assignment as an error
    return function


# PyTorch has no FLOP formula for it.
if _int_mm is not None and (packet := torch.ops.aten._int_mm) not in flop_counter.flop_registry:

    @flop_counter.register_flop_formula(packet)
    def _int_mm_flops(rows: Any, columns: Any, *_: Any, **__: Any) -> int:
        return 2 * rows[0] * rows[1] * columns[1]
