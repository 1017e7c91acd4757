"""Layers of a few rows on a CPU, such as those of a decoding step: what they take is the time to read their weights.

PyTorch's products of a few rows run hardly faster on several threads than on one, and read weights of 16 bits slower than
those of 32. A probe decides up to how many rows C is faster, by the layout of the weights.
"""

import ctypes
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.c_language import DTYPES, address, check, library, obstacle
from approx_kernels.few_rows_c import SOURCE
from approx_kernels.findings import Finding, clock, crowded, find
from approx_kernels.half_products import BY_INPUT, BY_OUTPUT, half_products
from approx_kernels.layers import NEVER, NOWHERE, Worth
from approx_kernels.products import GAIN, fast_products

# The rows that are tried, with this many layers of that many features in and out: more than caches hold.
ROWS = (1, 2, 4, 8, 16, 32)
_LAYERS, _FEATURES = 8, (768, 3072)
_REPEATS = 3


class _Layer(ctypes.Structure):
    """`layer` of few_rows_c.py."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "in", "out", "bf16", "threads")),
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "y")),
    )


def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None, layout: str) -> Tensor:
    """`x @ weight + bias` in float32, rounded once to the dtype of x; without a gradient.

    Args:
        x: Inputs, [..., I], float32 or bfloat16.
        weight: [O, I] where the layout is `BY_OUTPUT`, [I, O] where it is `BY_INPUT`, in one piece, in the dtype of x.
        bias: [O], in the same dtype; None for none.
        layout: How the weights lie.

    Returns:
        [..., O] in the dtype of x.
    """
    x = x if x.is_contiguous() else x.contiguous()
    out = weight.shape[1 if layout == BY_INPUT else 0]
    y = x.new_empty(*x.shape[:-1], out)
    rows = x.numel() // max(x.shape[-1], 1)
    places = map(address, (x, weight, bias, y))
    made = _Layer(rows, x.shape[-1], out, x.dtype == torch.bfloat16, torch.get_num_threads(), *places)
    found = library(SOURCE)
    assert not isinstance(found, str), f"checked by the context: {found}"
    check((found.by_input if layout == BY_INPUT else found.by_output)(ctypes.byref(made)))
    return y


def worth_rows(rows: int, device: torch.device | str, dtype: torch.dtype) -> Worth:
    """From and up to how many rows C is faster on this machine, by layout.

    Args:
        rows: Rows of the products, such as the tokens of a call; nothing is asked of the machine where there are many.
        device: Where they are computed.
        dtype: What in.
    """
    few = 0 < rows <= ROWS[-1] and torch.device(device).type == "cpu" and dtype in DTYPES
    if not few or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or obstacle(SOURCE):
        return NOWHERE
    return find("cpu", asked(dtype), partial(measure, dtype), otherwise={"rows": NOWHERE})["rows"]


def asked(dtype: torch.dtype) -> str:
    """What the finding is about."""
    return f"{str(dtype).removeprefix('torch.')} layers of few rows"


def measure(dtype: torch.dtype) -> Finding:
    """Compare layers in C with PyTorch's, in the fastest way that it has otherwise.

    Returns:
        By layout `rows`, the least and the most with which it is worth it, and `gains`, how many times faster, by rows.
    """
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(_FEATURES, generator=generator).to(dtype) for _ in range(_LAYERS)]
    found: Finding = {"rows": {}, "gains": {}}
    with clock() as now, torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        for layout in (BY_OUTPUT, BY_INPUT):
            plain = F.linear if layout == BY_OUTPUT else torch.mm
            made, gains = partial(few_rows_linear, bias=None, layout=layout), {}
            for rows in ROWS:
                x = torch.randn(rows, _FEATURES[layout == BY_OUTPUT], generator=generator).to(dtype)
                took = []
                for _ in range(_REPEATS):
                    with fast_products(rows, "cpu", dtype), half_products(rows, "cpu", dtype, layouts=(layout,)):
                        before = _seconds(plain, x, weights, now)
                    took.append((before, _seconds(made, x, weights, now)))
                before, after = (min(each) for each in zip(*took, strict=True))
                gains[str(rows)] = round(before / after, 2)
            found["rows"][layout], found["gains"][layout] = _limits(gains), gains
    return found | ({"crowded": True} if crowded() else {})


def _limits(gains: Mapping[str, float]) -> list[int]:
    """The least and the most rows that gain, none between them losing: noise hides a gain more easily than a loss."""
    found = NEVER
    for rows, gain in gains.items():
        if found != NEVER and gain < 1:
            break
        if gain >= GAIN:
            found = [int(rows) if found == NEVER else found[0], int(rows)]
    return found


def _seconds(
    product: Callable[[Tensor, Tensor], Tensor], x: Tensor, weights: list[Tensor], now: Callable[[], float]
) -> float:
    begun = now()
    for weight in weights:
        product(x, weight)
    return now() - begun
