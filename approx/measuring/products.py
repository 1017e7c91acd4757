"""Faster float32 matrix products on the CPU by a setting of PyTorch, and their gain on this machine.

By default, PyTorch computes these products with MKL, which uses only AVX2 on processors not made by Intel. If bfloat16
is allowed for float32 products, PyTorch uses oneDNN, which uses AVX-512 and still computes in float32 on processors
without bfloat16 tiles.
"""

import contextlib
import functools
import platform
from collections.abc import Callable, Iterable, Iterator
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from approx.errors import ApproxError, Exit
from approx_kernels.dispatch.findings import Finding
from approx_kernels.ops.fastest.probe import clock, crowded

ASKED = "float32 products"
# Maximum relative error of a float32 product.
_EXACT = 1e-6
# Rows of the timed left matrices, and features of the layer whose weights are the right matrices.
_ROWS, _FEATURES = (8, 64, 512), 768
_REPEATS = 4


@contextlib.contextmanager
def fast_products() -> Iterator[None]:
    """Multiply float32 matrices on the CPU with the processor's widest instructions, in full float32 precision.

    This sets PyTorch's `torch.backends.mkldnn.matmul.fp32_precision` for the whole process, so run all compared models
    within it. Contexts may be nested and used by several threads; the last one to end restores the setting, even after
    an error. Enter it around a compiled call, not inside. Products in 16 bits, under autocast or on a GPU do not
    change. Sums are in another order, so the last bits of results differ. `approx doctor --probe` measures the gain on
    this machine.

        with approx.fast_products():
            model(**inputs)

    Raises:
        ApproxError: if the setting has no effect on this machine, or rounds float32 to bfloat16.
    """
    refuse()
    with _SWITCHED:
        yield


def obstacle(device: str = "cpu", dtype: str = "float32") -> str | None:
    """Why fast products cannot help a model, with the remedy; None if they can.

    Args:
        device: Device of the model, `cpu` or `cuda`.
        dtype: Dtype of the model, such as `float32`.
    """
    if device != "cpu":
        return f"the device is {device}; they work on the CPU only. Leave them out, or use the device 'cpu'."
    if dtype != "float32":
        return f"the dtype is {dtype}; they work in float32 only. Leave them out, or use the dtype 'float32'."
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return "oneDNN is missing or turned off in PyTorch (torch.backends.mkldnn). Leave them out."
    capability = torch.backends.cpu.get_cpu_capability()
    if platform.machine() in ("x86_64", "AMD64") and not capability.startswith("AVX512"):
        return f"PyTorch uses {capability} on this processor, and they need AVX-512. Leave them out."
    if (error := _error_within()) > _EXACT:
        return f"on this processor they round float32 to bfloat16 (relative error {error:.0e}). Leave them out."
    return None


def products_for(models: Iterable[Any], wanted: bool) -> contextlib.AbstractContextManager[None]:
    """Return `fast_products()` if wanted, otherwise a context that does nothing.

    Raises:
        ApproxError: if fast products are wanted and cannot help one of the models.
    """
    if not wanted:
        return contextlib.nullcontext()
    for model in models:
        refuse(model.device.type, str(model.dtype).removeprefix("torch."))
    return fast_products()


def refuse(device: str = "cpu", dtype: str = "float32") -> None:
    """Raise if fast products cannot help a model.

    Raises:
        ApproxError: with the reason; see `obstacle`.
    """
    if why := obstacle(device, dtype):
        raise ApproxError(f"Fast products cannot be used: {why}", Exit.UNSUPPORTED)


def measure() -> Finding:
    """Time the matrix products of a transformer layer with and without `fast_products`.

    Returns:
        `gains`: speed-up by number of rows; `error`: relative error of a fast product against float64.
    """
    generator = torch.Generator().manual_seed(0)
    # Projections of queries, keys, values and outputs, and two of the feed-forward part.
    shapes = [*[(_FEATURES, _FEATURES)] * 4, (4 * _FEATURES, _FEATURES), (_FEATURES, 4 * _FEATURES)]
    weights = [torch.randn(shape, generator=generator).t() for shape in shapes]
    gains = {}
    with clock() as now, torch.inference_mode():
        for rows in _ROWS:
            inputs = [torch.randn(rows, weight.shape[0], generator=generator) for weight in weights]
            plain, switched = [], []
            for _ in range(_REPEATS):
                plain.append(_seconds(inputs, weights, now))
                with _SWITCHED:
                    switched.append(_seconds(inputs, weights, now))
            gains[str(rows)] = round(min(plain) / min(switched), 2)
    return {"gains": gains, "error": _error_within()} | ({"crowded": True} if crowded() else {})


def description(finding: Finding | None) -> str:
    """The line of `approx doctor` on fast products: their gain, or why they cannot be used.

    Args:
        finding: Result of `measure` on this machine; None before a probe.
    """
    if why := obstacle():
        return f"PyTorch's default: approx.fast_products() cannot be used: {why.removesuffix(' Leave them out.')}"
    if finding is None:
        return "PyTorch's default; `approx doctor --probe` measures the gain of approx.fast_products()"
    gains = ", ".join(f"{gain}× at {rows} rows" for rows, gain in finding["gains"].items())
    doubt = " *" if finding.get("crowded") else ""
    return f"with approx.fast_products() {gains}, error {finding['error']:.1e}{doubt}"


def _switch(setting: str | None = None) -> str:
    products: Any = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]  # a module made at run time
    before = products.fp32_precision
    if setting is not None:
        products.fp32_precision = setting
    return before


class _Switched:
    """The setting while anyone is inside, in any thread; the last one out restores what was set before."""

    def __init__(self) -> None:
        self._lock, self._inside, self._before = Lock(), 0, "none"

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = _switch("bf16")
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                _switch(self._before)


# The setting is PyTorch's, for the whole process.
_SWITCHED = _Switched()


@functools.cache
def _error_within() -> float:
    """Relative error of a fast product; a property of the processor."""
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode(), torch.autocast("cpu", enabled=False), _SWITCHED:
        x, weight = (torch.randn(256, 256, generator=generator) for _ in range(2))
        exact = x.double() @ weight.double()
        return float(((x @ weight).double() - exact).norm() / exact.norm())


def _seconds(inputs: list[Tensor], weights: list[Tensor], now: Callable[[], float]) -> float:
    begun = now()
    for x, weight in zip(inputs, weights, strict=True):
        torch.mm(x, weight)
    return now() - begun
