"""Matrix products of float32 on a CPU at the speed of its widest instructions.

PyTorch gives them to MKL, which on processors of other makers keeps to AVX2. Told that float32 may be computed as if it were
bfloat16, it asks oneDNN instead, which uses AVX-512 and, unless the processor has tiles for bfloat16, still computes in
float32. So the switch is thrown only where a probe finds it both faster and as exact.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from approx_kernels.findings import Finding, clock, crowded, find

ASKED = "float32 products"
# Above this relative error a product is no longer called one of float32.
LABEL = 1e-6
GAIN = 1.1
# The rows of the left matrices that are tried, and the features of the models whose layers stand on the right.
ROWS = (8, 64, 512)
FEATURES = (64, 128, 256, 384, 512, 768)
_REPEATS = 4

_lock = Lock()
_inside = 0


@contextlib.contextmanager
def fast_products(
    rows: int, device: torch.device | str, dtype: torch.dtype, features: int = FEATURES[-1]
) -> Iterator[bool]:
    """Throw the switch for as long as the context lasts, if it is worth it; yields whether it is thrown.

    The switch belongs to the process, so contexts may be nested or held by several threads: the last one to end puts it
    back, also after an error. Whoever has set the precision of these products keeps what was set. Inside of compiled
    graphs nothing is done: see `compiled_layers`, or enter the context around them.

    Args:
        rows: Rows of the products, such as the tokens of a call; few of them lose by the switch.
        device: Where they are computed.
        dtype: What in.
        features: Of a token, in the model whose products they are; narrow ones lose by the switch.
    """
    if is_compiling() or not worth_switch(rows, torch.device(device), dtype, features):
        # A context around this one may have thrown it.
        yield _inside > 0 and dtype == torch.float32
        return
    with _switched():
        yield True


def worth_rows(features: int = FEATURES[-1]) -> int | None:
    """From how many rows on the switch is worth it on this machine; None if never. Measured once a machine.

    Args:
        features: Of a token; the widest of `FEATURES` that is not above them counts, or the narrowest.
    """
    width = max([FEATURES[0], *(each for each in FEATURES if each <= features)])
    asked = ASKED if width == FEATURES[-1] else f"{ASKED}, {width} features"
    return find("cpu", asked, partial(measure, width), otherwise={"rows": None})["rows"]


def measure(features: int = FEATURES[-1]) -> Finding:
    """Compare the products of a transformer's layer with the switch and without.

    Args:
        features: Of a token; four times as many within the feed-forward part.

    Returns:
        `rows`, from which on it is worth it, or None; `gains`, how many times faster it is, by rows; `error` with it and
        `plain_error` without, both relative to float64.
    """
    generator = torch.Generator().manual_seed(0)
    # Projections of queries, keys, values and outputs, and two of the feed-forward part.
    shapes = [*[(features, features)] * 4, (4 * features, features), (features, 4 * features)]
    weights = [torch.randn(shape, generator=generator).t() for shape in shapes]
    gains, error, plain_error = {}, 0.0, 0.0
    with clock() as now, torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        for rows in ROWS:
            inputs = [torch.randn(rows, inside, generator=generator) for _, inside in shapes]
            widest = inputs[4], weights[4]
            plain, plain_error = [], max(plain_error, _error(*widest))
            with _switched():
                switched, error = [], max(error, _error(*widest))
            for _ in range(_REPEATS):
                plain.append(_seconds(inputs, weights, now))
                with _switched():
                    switched.append(_seconds(inputs, weights, now))
            gains[rows] = min(plain) / min(switched)
    return {
        "rows": worth(gains) if error <= LABEL else None,
        "gains": {str(rows): round(gain, 2) for rows, gain in gains.items()},
        "error": error,
        "plain_error": plain_error,
    } | ({"crowded": True} if crowded() else {})


def worth(gains: dict[int, float]) -> int | None:
    """The least of these numbers of rows from which on every one is `GAIN` times faster; None if the last is not."""
    found = None
    for rows in sorted(gains, reverse=True):
        if gains[rows] < GAIN:
            break
        found = rows
    return found


def worth_switch(rows: int, device: torch.device, dtype: torch.dtype, features: int = FEATURES[-1]) -> bool:
    """Whether `fast_products` throws the switch now."""
    if device.type != "cpu" or dtype != torch.float32 or rows < ROWS[0] or not torch.backends.mkldnn.is_available():
        return False
    if torch.is_autocast_enabled("cpu") or (not _inside and _switch() != "none"):
        return False
    least = worth_rows(features)
    return least is not None and rows >= least


def _switch(setting: str | None = None) -> str:
    products: Any = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]  # a module made at run time
    before = products.fp32_precision
    if setting is not None:
        products.fp32_precision = setting
    return before


@contextlib.contextmanager
def _switched() -> Iterator[None]:
    global _inside
    with _lock:
        if not _inside:
            _switch("bf16")
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                _switch("none")


def _seconds(inputs: list[Tensor], weights: list[Tensor], now: Callable[[], float]) -> float:
    begun = now()
    for x, weight in zip(inputs, weights, strict=True):
        torch.mm(x, weight)
    return now() - begun


def _error(x: Tensor, weight: Tensor) -> float:
    exact = x.double() @ weight.double()
    return float(((x @ weight).double() - exact).norm() / exact.norm())
