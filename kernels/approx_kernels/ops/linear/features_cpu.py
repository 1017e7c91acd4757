"""Learned or softmax features on a CPU: computed in C in one pass over the rows; their gradients by PyTorch."""

from typing import Any

import torch
from torch import Tensor

from approx_kernels.cpu.compile import call
from approx_kernels.cpu.structs import LinearMap, address, rows_of
from approx_kernels.ops.linear.reference import FEATURE_MAPS
from approx_kernels.runtime.custom_op import custom_op
from approx_kernels.tokens import empty_rows, sharing, summed


def map_features(x: Tensor, weight: Tensor | None, feature_map: str, scale: float) -> Tensor:
    """`features` of x times a scale in the dtype of x, with products in float32; G heads of keys for H with maps."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return _map(x, None if weight is None else weight.float().contiguous(), feature_map, scale)


def _empty(x: Tensor, weight: Any, feature_map: str, scale: float) -> Tensor:
    features = x.shape[3] * (2 if feature_map == "hedgehog" else 1)
    return empty_rows(x, features, heads=None if weight is None else weight.shape[0])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ctx.feature_map, ctx.scale = inputs
    ctx.save_for_backward(x, weight, output)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, made = ctx.saved_tensors
    grad, made = grad.float(), made.float()
    if ctx.feature_map == "t2r":
        heights = grad * (made > 0)
    else:
        # Softmaxes of both signs are concatenated.
        change = [
            f * (g - (f * g).sum(-1, keepdim=True))
            for f, g in zip(made.split(x.shape[3], 3), grad.split(x.shape[3], 3), strict=True)
        ]
        heights = change[0] if len(change) == 1 else change[0] - change[1]
    if weight is None:
        return (heights * ctx.scale).to(x.dtype), None, None, None
    product, groups = weight[:, : x.shape[3]], x.shape[1]
    # A gradient per map: only training repeats grouped keys.
    x = x.repeat_interleave(sharing(made, x), 1)
    dweight = ((x.float() * ctx.scale).transpose(2, 3) @ heights).sum(0)
    if ctx.feature_map == "t2r":
        dweight = torch.cat([dweight, heights.sum((0, 2)).unsqueeze(1)], 1)
    dx = summed(heights @ product.transpose(1, 2), groups)
    return (dx * ctx.scale).to(x.dtype), dweight, None, None


def _count(x: list[int], weight: list[int] | None, *_: Any, out_shape: Any = None) -> int:
    return 0 if weight is None else 2 * x[0] * weight[0] * x[2] * x[3] * x[3]


@custom_op(_empty, flops=_count, backward=_gradients, save=_keep)
def _map(x: Tensor, weight: Tensor | None, feature_map: str, scale: float) -> Tensor:
    out = _empty(x, weight, feature_map, scale)
    how = FEATURE_MAPS.index(feature_map), x.dtype == torch.bfloat16, torch.get_num_threads()
    size = x.shape[3]
    learned = address(weight, torch.float32, out.shape[1], size + (feature_map == "t2r"), size)
    call("linear/maps.c", "map_rows", LinearMap(*out.shape[:3], size, *how, *rows_of(out, x), learned, scale))
    return out
