"""Layers of float32 on a processor with tiles for bfloat16 (AMX), as exact as float32 and faster than its own vectors.

A probe decides from how many rows on, by the layout of the weights, and whether the error is one of float32.
"""

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.c_language import address, check, library
from approx_kernels.c_language import obstacle as c_obstacle
from approx_kernels.findings import Finding, clock, crowded, find
from approx_kernels.half_products import BY_INPUT, BY_OUTPUT
from approx_kernels.layers import NEVER, NOWHERE, Worth
from approx_kernels.products import LABEL, worth
from approx_kernels.tiled_layers_c import SOURCE

ASKED = "float32 layers on tiles"
# The rows that are tried, with weights of so many features in and out.
ROWS, _FEATURES = (64, 128, 512), (768, 3072)
_MOST_ROWS = 2**31
_REPEATS = 4


class _Layer(ctypes.Structure):
    """`layer` of tiled_layers_c.py."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "in", "out", "threads")),
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "y")),
    )


@cache
def usable() -> bool:
    """Whether there are tiles here, and a compiler for them."""
    found = library(SOURCE)
    return not isinstance(found, str) and bool(found.usable())


def obstacle() -> str | None:
    """Why layers cannot be computed on tiles now, with the remedy; None where they can."""
    if why := c_obstacle(SOURCE):
        return why
    return None if usable() else "this processor has no tiles for bfloat16 (AMX). Leave the layers to PyTorch."


def tiled_linear(x: Tensor, weight: Tensor, bias: Tensor | None, layout: str) -> Tensor:
    """`x @ weight + bias` with an error of float32, on tiles that multiply bfloat16; without a gradient.

    Each number is the sum of three of 8 bits; six of the nine products are computed, sums are float32. What is not finite
    makes NaN.

    Args:
        x: Inputs, [..., I], float32.
        weight: [O, I] where the layout is `BY_OUTPUT`, [I, O] where it is `BY_INPUT`, in one piece, float32.
        bias: [O], float32; None for none.
        layout: How the weights lie.

    Returns:
        [..., O], float32.
    """
    x = x if x.is_contiguous() else x.contiguous()
    out = weight.shape[1 if layout == BY_INPUT else 0]
    y = x.new_empty(*x.shape[:-1], out)
    rows = x.numel() // max(x.shape[-1], 1)
    made = _Layer(rows, x.shape[-1], out, torch.get_num_threads(), *map(address, (x, weight, bias, y)))
    found = library(SOURCE)
    assert not isinstance(found, str), f"checked by the context: {found}"
    check((found.by_input if layout == BY_INPUT else found.by_output)(ctypes.byref(made)))
    return y


def worth_tiles(rows: int, device: torch.device | str, dtype: torch.dtype) -> Worth:
    """From how many rows on tiles are faster on this machine, by layout.

    Args:
        rows: Rows of the products, such as the tokens of a call; nothing is asked of the machine where there are few.
        device: Where they are computed.
        dtype: What in.
    """
    able = rows >= ROWS[0] and torch.device(device).type == "cpu" and dtype == torch.float32
    if not able or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or obstacle():
        return NOWHERE
    return found_tiles()


def found_tiles() -> Worth:
    """As `worth_tiles`, on a processor that has tiles, of whatever call."""
    return find("cpu", ASKED, measure, otherwise={"rows": NOWHERE})["rows"]


def measure() -> Finding:
    """Compare layers on tiles with PyTorch's.

    Returns:
        By layout `rows`, the least and the most with which it is worth it, and `gains`, how many times faster, by rows;
        `error` on tiles and `plain_error` without, both relative to float64.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(_FEATURES[1], _FEATURES[0], generator=generator)
    found: Finding = {"rows": {}, "gains": {}, "error": 0.0, "plain_error": 0.0}
    with clock() as now, torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        for layout, lies in ((BY_OUTPUT, weight), (BY_INPUT, weight.t().contiguous())):
            gains = {}
            for rows in ROWS:
                x = torch.randn(rows, _FEATURES[0], generator=generator)
                calls: tuple[Callable[[], Tensor], ...] = (
                    lambda x=x, lies=lies, layout=layout: F.linear(x, lies if layout == BY_OUTPUT else lies.t()),
                    lambda x=x, lies=lies, layout=layout: tiled_linear(x, lies, None, layout),
                )
                exact = x.double() @ weight.t().double()
                for name, call in zip(("plain_error", "error"), calls, strict=True):
                    found[name] = max(found[name], float((call().double() - exact).norm() / exact.norm()))
                took = [[_seconds(call, now) for call in calls] for _ in range(_REPEATS)]
                plain, tiled = (min(each) for each in zip(*took, strict=True))
                gains[rows] = plain / tiled
            least = worth(gains) if found["error"] <= LABEL else None
            found["rows"][layout] = NEVER if least is None else [least, _MOST_ROWS]
            found["gains"][layout] = {str(rows): round(gain, 2) for rows, gain in gains.items()}
    return found | ({"crowded": True} if crowded() else {})


def _seconds(call: Callable[[], Tensor], now: Callable[[], float]) -> float:
    begun = now()
    call()
    return now() - begun
