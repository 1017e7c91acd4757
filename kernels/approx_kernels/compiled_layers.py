"""Layers of float32 in compiled graphs: an operator each, which takes the fastest way of the machine when it runs."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import assume_constant_result
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from approx_kernels.custom_op import custom_op
from approx_kernels.half_products import BY_INPUT, BY_OUTPUT, Least
from approx_kernels.layers import NEVER, NOWHERE
from approx_kernels.products import ROWS, fast_products, worth_rows, worth_switch
from approx_kernels.tiled_layers import found_tiles, tiled_linear, usable, worth_tiles


@contextlib.contextmanager
def compiled_layers(*, switched: bool) -> Iterator[bool]:
    """Put layers into the graph that is compiled within the context as operators, if that is worth it; yields whether it is.

    Holds for `linear` and `addmm` of float32 on the CPU, with gradients, from as many rows on as gain by it. Inside of a graph
    no switch can be thrown and no layer's forward be exchanged; the operator does what a call without a compiler does. It
    cannot be fused with what surrounds it.

    Args:
        switched: Whether the graph runs with the switch of `fast_products` thrown, where that is worth it.
    """
    least = _least_rows(switched)
    if torch.is_autocast_enabled("cpu") or (least[BY_OUTPUT] is None and least[BY_INPUT] is None):
        yield False
        return
    with _AsOperators(least):
        yield True


@assume_constant_result
def _least_rows(switched: bool) -> Least:
    tiles = found_tiles() if usable() else NOWHERE
    thrown = not switched and worth_switch(ROWS[-1], torch.device("cpu"), torch.float32)
    other = worth_rows() if thrown else None
    return {layout: other if limits == NEVER else limits[0] for layout, limits in tiles.items()}


class _AsOperators(TorchFunctionMode):
    def __init__(self, least: Least) -> None:
        super().__init__()
        self.least = least

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _AS_OPERATORS and not torch.is_autocast_enabled("cpu"):
            return _AS_OPERATORS[func](self.least, func, *args, **kwargs)
        return func(*args, **kwargs)


def _as_linear(least: Least, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not _gains(least, input, weight, bias, BY_OUTPUT):
        return func(input, weight, bias)
    return layer(input, weight, bias, BY_OUTPUT)


def _as_addmm(least: Least, func: Any, input: Tensor, mat1: Tensor, mat2: Tensor, **more: Any) -> Tensor:
    # The projections of GPT-2; another use than as a layer is left to PyTorch.
    if more or input.shape != mat2.shape[1:] or not _gains(least, mat1, mat2, input, BY_INPUT):
        return func(input, mat1, mat2, **more)
    return layer(mat1, mat2, input, BY_INPUT)


def _gains(least: Least, x: Tensor, weight: Tensor, bias: Tensor | None, layout: str) -> bool:
    tensors, needed = (x, weight) if bias is None else (x, weight, bias), least[layout]
    plain = all(
        type(each) in (Tensor, nn.Parameter) and each.dtype == torch.float32 and each.device.type == "cpu"
        for each in tensors
    )
    if needed is None or not plain or weight.dim() != 2 or not weight.is_contiguous() or not weight.numel():
        return False
    inside = weight.shape[layout == BY_OUTPUT]
    return x.shape[-1:] == (inside,) and x.numel() // inside >= needed


_AS_OPERATORS: dict[Callable[..., Any], Callable[..., Tensor]] = {F.linear: _as_linear, torch.addmm: _as_addmm}


def _like(x: Tensor, weight: Tensor, bias: Tensor | None, layout: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[layout == BY_INPUT])


def _operations(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    rows = 1
    for size in x[:-1]:
        rows *= size
    return 2 * rows * weight[0] * weight[1]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, ctx.layout = inputs
    ctx.save_for_backward(x, weight)


def _slopes(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    flat, rows = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
    for_x, for_weight, for_bias, _ = ctx.needs_input_grad
    other, (left, right) = (BY_INPUT, (flat, rows)) if ctx.layout == BY_OUTPUT else (BY_OUTPUT, (rows, flat))
    return (
        layer(grad, weight, None, other) if for_x else None,
        layer(left.t(), right, None, BY_INPUT) if for_weight else None,
        flat.sum(0) if for_bias else None,
        None,
    )


@custom_op(_like, flops=_operations, backward=_slopes, save=_keep)
def layer(x: Tensor, weight: Tensor, bias: Tensor | None, layout: str) -> Tensor:
    """`x @ weight + bias`, in the way that is the fastest on this machine for so many rows.

    Args:
        x: Inputs, [..., I], float32, on the CPU.
        weight: [O, I] where the layout is `BY_OUTPUT`, [I, O] where it is `BY_INPUT`, float32.
        bias: [O], float32; None for none.
        layout: How the weights lie.

    Returns:
        [..., O], float32.
    """
    rows = x.numel() // max(x.shape[-1], 1)
    with torch.no_grad():
        least, most = worth_tiles(rows, x.device, x.dtype)[layout]
        if least <= rows <= most:
            return tiled_linear(x, weight.contiguous(), bias, layout)
        with fast_products(rows, x.device, x.dtype):
            return F.linear(x, weight if layout == BY_OUTPUT else weight.t(), bias)
