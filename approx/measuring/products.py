"""PyTorch's own switch for float32 matrix products on a CPU, thrown around a call, and what it gains on this machine.

PyTorch gives these products to MKL, which on processors of other makers keeps to AVX2. Told that float32 may be computed as
if it were bfloat16, it asks oneDNN instead, which uses AVX-512 and, on processors without tiles for bfloat16, still computes
in float32.
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
# Above this relative error a product is no longer called one of float32.
_EXACT = 1e-6
# Rows of the left matrices that are timed, and features of the layer whose weights stand on the right.
_ROWS, _FEATURES = (8, 64, 512), 768
_REPEATS = 4

_lock = Lock()
_inside = 0
_before = "none"


@contextlib.contextmanager
def fast_products() -> Iterator[None]:
    """Let PyTorch multiply float32 matrices on the CPU with the processor's widest instructions, as exactly as before.

    It throws a switch of PyTorch, `torch.backends.mkldnn.matmul.fp32_precision`, for the whole process: models that are
    compared should all run within it. Contexts may be nested and held by several threads; the last one to end restores what
    was set before, also after an error. Enter it around a compiled call, not inside. It changes neither products in 16 bits
    nor those under autocast or on a GPU. Sums are added up in another order, so the last bits of results differ.
    `approx doctor --probe` says what it gains on this machine.

        with approx.fast_products():
            model(**inputs)

    Raises:
        ApproxError: if it would change nothing on this machine, or would round float32 to bfloat16.
    """
    refuse()
    with _switched():
        yield


def obstacle(device: str = "cpu", dtype: str = "float32") -> str | None:
    """Why fast products cannot help a model, with the remedy; None where they can.

    Args:
        device: Where it computes: `cpu` or `cuda`.
        dtype: What it computes in, such as `float32`.
    """
    if device != "cpu":
        return f"the device is {device}; they are for the CPU. Leave them out, or choose the device 'cpu'."
    if dtype != "float32":
        return f"the dtype is {dtype}; they are products of float32. Leave them out, or choose the dtype 'float32'."
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return "PyTorch has no oneDNN here, or it is turned off (torch.backends.mkldnn). Leave them out."
    capability = torch.backends.cpu.get_cpu_capability()
    if platform.machine() in ("x86_64", "AMD64") and not capability.startswith("AVX512"):
        return f"PyTorch uses {capability} on this processor, and they need AVX-512. Leave them out."
    if (error := _error_within()) > _EXACT:
        return f"on this processor they round float32 to bfloat16 (relative error {error:.0e}). Leave them out."
    return None


def products_for(models: Iterable[Any], wanted: bool) -> contextlib.AbstractContextManager[None]:
    """`fast_products` around models that are compared, if it is wanted; otherwise a context that does nothing.

    Raises:
        ApproxError: if it is wanted and cannot help one of the models.
    """
    if not wanted:
        return contextlib.nullcontext()
    for model in models:
        refuse(model.device.type, str(model.dtype).removeprefix("torch."))
    return fast_products()


def refuse(device: str = "cpu", dtype: str = "float32") -> None:
    """Say why fast products cannot help a model.

    Raises:
        ApproxError: if they cannot; see `obstacle`.
    """
    if why := obstacle(device, dtype):
        raise ApproxError(f"Fast products were asked for, but {why}", Exit.UNSUPPORTED)


def measure() -> Finding:
    """Compare the products of a transformer's layer within `fast_products` and without.

    Returns:
        `gains`, how many times faster they are within it, by rows; `error` of a product within it, relative to float64.
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
                with _switched():
                    switched.append(_seconds(inputs, weights, now))
            gains[str(rows)] = round(min(plain) / min(switched), 2)
    return {"gains": gains, "error": _error_within()} | ({"crowded": True} if crowded() else {})


def said(finding: Finding | None) -> str:
    """What `approx doctor` says of them: what they gain here, or why not.

    Args:
        finding: What `measure` returned on this machine; None before a probe.
    """
    if why := obstacle():
        return f"PyTorch's own: approx.fast_products() is refused, because {why.removesuffix(' Leave them out.')}"
    if finding is None:
        return "PyTorch's own; `approx doctor --probe` measures what approx.fast_products() gains here"
    gains = ", ".join(f"{gain}× at {rows} rows" for rows, gain in finding["gains"].items())
    doubt = " *" if finding.get("crowded") else ""
    return f"within approx.fast_products() {gains}, error {finding['error']:.1e}{doubt}"


def _switch(setting: str | None = None) -> str:
    products: Any = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]  # a module made at run time
    before = products.fp32_precision
    if setting is not None:
        products.fp32_precision = setting
    return before


@contextlib.contextmanager
def _switched() -> Iterator[None]:
    global _inside, _before
    with _lock:
        if not _inside:
            _before = _switch("bf16")
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                _switch(_before)


@functools.cache
def _error_within() -> float:
    """Relative error of a product within the switch; a property of the processor."""
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode(), torch.autocast("cpu", enabled=False), _switched():
        x, weight = (torch.randn(256, 256, generator=generator) for _ in range(2))
        exact = x.double() @ weight.double()
        return float(((x @ weight).double() - exact).norm() / exact.norm())


def _seconds(inputs: list[Tensor], weights: list[Tensor], now: Callable[[], float]) -> float:
    begun = now()
    for x, weight in zip(inputs, weights, strict=True):
        torch.mm(x, weight)
    return now() - begun
