"""Layers whose products are computed in C for as long as a model is called."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from approx_kernels.half_products import BY_INPUT, BY_OUTPUT

NEVER = [1, 0]
Worth = Mapping[str, Sequence[int]]
"""The least and the most rows with which it is worth it, by layout; `NEVER` if with none."""
NOWHERE: Worth = {BY_OUTPUT: NEVER, BY_INPUT: NEVER}

# From inputs [..., I], weights, bias and layout to [..., O].
Product = Callable[[Tensor, Tensor, Tensor | None, str], Tensor]


@contextlib.contextmanager
def layers_by(product: Product, layers: Iterable[tuple[nn.Module, str]], worth: Worth) -> Iterator[bool]:
    """Let layers compute by a product for as long as the context lasts, where their rows are worth it; yields whether any may.

    Args:
        product: Has no gradient, and takes weights that lie in one piece.
        layers: Layers `weight` and `bias`, and how their weights lie. One whose forward was exchanged is left alone.
        worth: From and up to how many rows, by layout.
    """
    held = [(layer, how) for layer, how in layers if worth[how] != NEVER and "forward" not in vars(layer)]
    for layer, how in held:
        vars(layer)["forward"] = partial(_forward, product, layer, layer.forward, how, worth[how])
    try:
        yield bool(held)
    finally:
        for layer, _ in held:
            # Another thread that calls the model may have ended before.
            vars(layer).pop("forward", None)


def _forward(
    product: Product, layer: Any, before: Callable[[Tensor], Tensor], layout: str, limits: Sequence[int], x: Tensor
) -> Tensor:
    weight, bias = layer.weight, layer.bias
    tensors = (x, weight) if bias is None else (x, weight, bias)
    plain = all(
        type(each) in (Tensor, nn.Parameter) and each.dtype == x.dtype and each.device.type == "cpu" for each in tensors
    )
    inside = weight.shape[1 if layout == BY_OUTPUT else 0]
    fits = plain and x.shape[-1:] == (inside,) and inside and limits[0] <= x.numel() // inside <= limits[1]
    if not fits or not weight.is_contiguous() or torch.is_grad_enabled():
        return before(x)
    return product(x, weight, bias, layout)
