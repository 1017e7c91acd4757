"""Sums over each cluster's queries, and the reverse scatter: each is the gradient of the other. Nothing is atomic."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from approx_kernels.gpu.language import jit, tl
from approx_kernels.gpu.launch import cut, launch, power, strides
from approx_kernels.runtime.custom_op import custom_op

SUM = (cut(2, 2, BM=16),)
SPREAD = (cut(4, 1, BM=64),)
LENGTHS = ("H", "L", "most")


@jit(do_not_specialize=LENGTHS)
def sum_kernel(
    X,
    Order,
    Begins,
    Out,
    x_b,
    x_h,
    x_n,
    H,
    L,
    most,
    D: tl.constexpr,
    WIDE_D: tl.constexpr,
    MEAN: tl.constexpr,
    BM: tl.constexpr,
):
    """Sum, or mean, of the rows of one list; 0 where it is empty."""
    item = tl.cast(tl.program_id(0) // most, tl.int64)
    begin = Begins + item * (most + 1) + tl.program_id(0) % most
    first, last = tl.load(begin), tl.load(begin + 1)
    X += item // H * x_b + item % H * x_h
    size = tl.arange(0, WIDE_D)
    total = tl.zeros([WIDE_D], tl.float32)
    for start in range(first, last, BM):
        slot = start + tl.arange(0, BM)
        row = tl.load(Order + item * L + slot, mask=slot < last, other=0).to(tl.int64)
        x = tl.load(
            X + row[:, None] * x_n + size[None, :], mask=(slot < last)[:, None] & (size < D)[None, :], other=0.0
        )
        total += tl.sum(x.to(tl.float32), 0)
    if MEAN:
        total = total / tl.maximum(last - first, 1).to(tl.float32)
    tl.store(Out + tl.cast(tl.program_id(0), tl.int64) * D + size, total.to(Out.dtype.element_ty), mask=size < D)


@jit(do_not_specialize=LENGTHS)
def spread_kernel(
    X,
    Order,
    Begins,
    Out,
    x_b,
    x_h,
    x_n,
    o_b,
    o_h,
    o_n,
    H,
    L,
    most,
    D: tl.constexpr,
    WIDE_D: tl.constexpr,
    WIDE_C: tl.constexpr,
    MEAN: tl.constexpr,
    BM: tl.constexpr,
):
    """Scatter each cluster's row to its BM queries, divided by the cluster size for means."""
    tiles = tl.cdiv(L, BM)
    item = tl.cast(tl.program_id(0) // tiles, tl.int64)
    Begins += item * (most + 1)
    slot = tl.program_id(0) % tiles * BM + tl.arange(0, BM)
    count = tl.load(Begins + most)
    if tl.program_id(0) % tiles * BM >= count:
        return
    # The cluster of a slot, never an empty one, is the number of clusters that end at or before the slot.
    cluster = tl.zeros([BM], tl.int32)
    for first in range(0, most, WIDE_C):
        c = first + tl.arange(0, WIDE_C)
        end = tl.load(Begins + 1 + c, mask=c < most, other=2**30)
        cluster += tl.sum((end[None, :] <= slot[:, None]).to(tl.int32), 1)
    inside, size = slot < count, tl.arange(0, WIDE_D)
    at = X + item // H * x_b + item % H * x_h + cluster.to(tl.int64)[:, None] * x_n + size[None, :]
    x = tl.load(at, mask=inside[:, None] & (size < D)[None, :], other=0.0)
    if MEAN:
        members = tl.load(Begins + 1 + cluster, mask=inside, other=1) - tl.load(Begins + cluster, mask=inside, other=0)
        x = x.to(tl.float32) / members.to(tl.float32)[:, None]
    row = tl.load(Order + item * L + slot, mask=inside, other=0).to(tl.int64)
    at = Out + item // H * o_b + item % H * o_h + row[:, None] * o_n + size[None, :]
    tl.store(at, x.to(Out.dtype.element_ty), mask=inside[:, None] & (size < D)[None, :])


def _sums(x: Tensor, order: Tensor, begins: Tensor, mean: bool) -> Tensor:
    return x.new_empty(*begins.shape[:2], begins.shape[2] - 1, x.shape[3])


def _save_length(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, order, begins, ctx.mean = inputs
    ctx.save_for_backward(order, begins)
    ctx.length = x.shape[2]


def _sum_gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return spread_rows(grad, *ctx.saved_tensors, ctx.length, ctx.mean), None, None, None


@custom_op(_sums, backward=_sum_gradients, save=_save_length)
def sum_rows(x: Tensor, order: Tensor, begins: Tensor, mean: bool) -> Tensor:
    """Sum, or mean, of the rows of each list; those of an empty one are 0.

    Args:
        x: [B, H, n, D].
        order: Rows of x, list after list, [B, H, m] int32.
        begins: Where each list begins in the order, and where the last one ends, [B, H, C + 1] int32.
        mean: Whether the sum is divided by the number of rows.

    Returns:
        [B, H, C, D] in the dtype of x, added in float32.
    """
    x = x if x.stride(3) == 1 else x.contiguous()
    out, size = _sums(x, order, begins, mean), x.shape[3]
    launch(
        sum_kernel,
        (out.shape[0] * out.shape[1] * out.shape[2],),
        SUM,
        x,
        order,
        begins,
        out,
        *strides(x),
        H=x.shape[1],
        L=order.shape[2],
        most=out.shape[2],
        D=size,
        WIDE_D=power(size),
        MEAN=mean,
    )
    return out


def _spread(x: Tensor, order: Tensor, begins: Tensor, length: int, mean: bool) -> Tensor:
    # Tokens before heads in memory, as models need it next; rows in no list are 0.
    return x.new_zeros(x.shape[0], length, x.shape[1], x.shape[3]).transpose(1, 2)


def _save_lists(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, order, begins, _, ctx.mean = inputs
    ctx.save_for_backward(order, begins)


def _spread_gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    if ctx.mean:
        raise RuntimeError("The gradient of a mean is not differentiated again.")
    return sum_rows(grad, *ctx.saved_tensors, False), None, None, None, None


@custom_op(_spread, backward=_spread_gradients, save=_save_lists)
def spread_rows(x: Tensor, order: Tensor, begins: Tensor, length: int, mean: bool) -> Tensor:
    """Copy the row of x of each list to all rows in the list; rows in no list are 0.

    Args:
        x: [B, H, C, D].
        order: As for `sum_rows`, each row of the result at most once.
        begins: As there.
        length: Rows of the result.
        mean: Whether a row is divided by the length of its list, as the gradient of a mean is.

    Returns:
        [B, H, length, D] in the dtype of x.
    """
    x = x if x.stride(3) == 1 else x.contiguous()
    out, size, most = _spread(x, order, begins, length, mean), x.shape[3], x.shape[2]
    launch(
        spread_kernel,
        lambda tiles: (-(-order.shape[2] // tiles["BM"]) * x.shape[0] * x.shape[1],),
        SPREAD,
        x,
        order,
        begins,
        out,
        *strides(x, out),
        H=x.shape[1],
        L=order.shape[2],
        most=most,
        D=size,
        WIDE_D=power(size),
        WIDE_C=min(128, power(most, 32)),
        MEAN=mean,
    )
    return out
