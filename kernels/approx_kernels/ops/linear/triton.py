"""The kernels of linear attention as operators, and their configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from approx_kernels.gpu.launch import cut, launch, power, precision, sizes, strides
from approx_kernels.ops.linear.triton_scan import linear_scan_kernel, linear_sums_kernel
from approx_kernels.runtime.custom_op import custom_op
from approx_kernels.tokens import empty_gradients, empty_rows

# Programs that fill a large card; few heads are split into segments to get this many, each of at least this many rows.
PROGRAMS = 264
SEGMENTS = 16
LEAST = 256


# By kind of input, see `kind`: the default, then configurations that need less. A single one is the smallest possible
# tile.
SUMS = {
    "bfloat16": (cut(8, 2, BT=64), cut(8, 1, BT=32)),
    "bfloat16, wide": (cut(8, 2, BT=64), cut(8, 1, BT=32)),
    "float16": (cut(8, 2, BT=32), cut(8, 1, BT=16)),
    "float16, wide": (cut(8, 1, BT=32), cut(8, 1, BT=16)),
    "float32": (cut(8, 1, BT=32),),
    "float32, wide": (cut(8, 1, BT=16),),
}
# The scan, where it computes pairs and carries a state, and where it reads one state.
CAUSAL = {
    "bfloat16": (cut(8, 2, BT=32, BC=64), cut(8, 1, BT=16, BC=32)),
    "bfloat16, wide": (cut(8, 1, BT=16, BC=32), cut(8, 1, BT=16, BC=16)),
    "float16": (cut(8, 1, BT=16, BC=32), cut(8, 1, BT=16, BC=16)),
    "float16, wide": (cut(8, 1, BT=16, BC=32), cut(8, 1, BT=16, BC=16)),
    "float32": (cut(8, 1, BT=16, BC=16),),
    "float32, wide": (cut(8, 1, BT=16, BC=16),),
}
PARALLEL = {
    "bfloat16": (cut(8, 2, BT=64, BC=64), cut(8, 1, BT=32, BC=32)),
    "bfloat16, wide": (cut(8, 2, BT=64, BC=64), cut(8, 1, BT=32, BC=32)),
    "float16": (cut(8, 1, BT=32, BC=64), cut(8, 1, BT=16, BC=32)),
    "float16, wide": (cut(8, 1, BT=32, BC=32), cut(8, 1, BT=16, BC=16)),
    "float32": (cut(8, 1, BT=32, BC=32), cut(8, 1, BT=16, BC=16)),
    "float32, wide": (cut(8, 1, BT=16, BC=16),),
}
# Features that the widest of these tiles hold.
FEATURES = 128


def kind(q: Tensor, v: Tensor) -> str:
    """Key of the configurations for these inputs; features that are wider than values count twice."""
    wide = v.shape[3] > 64 or q.shape[3] > most_features(q, v) // 2
    return str(v.dtype).removeprefix("torch.") + (", wide" if wide else "")


def most_features(q: Tensor, v: Tensor) -> int:
    """The number of features that a kernel holds together with such values."""
    return FEATURES * v.element_size() // q.element_size()


def segments(heads: int, length: int) -> tuple[int, int]:
    """Rows of a segment, and how many segments a sequence has, so that all heads together fill the card."""
    wanted = max(1, min(PROGRAMS // heads, SEGMENTS, -(-length // LEAST)))
    rows = -(-length // (wanted * 64)) * 64
    return rows, -(-length // rows)


def _fake_sums(q: Tensor, v: Tensor, count: int) -> tuple[Tensor, Tensor]:
    shape = *q.shape[:2], count, q.shape[3]
    return q.new_empty(*shape, v.shape[3], dtype=torch.float32), q.new_empty(shape, dtype=torch.float32)


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Any, causal: bool, whole: bool, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, count = segments(k.shape[0] * k.shape[1], k.shape[2])
    sums, totals = _fake_sums(q, v, 0 if causal and not whole and count == 1 else count)
    return empty_rows(q, v.shape[3], dtype=v.dtype), q.new_empty(q.shape[:3], dtype=torch.float32), sums, totals


def _flops_forward(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, out_shape: Any = None) -> int:
    return 2 * q[0] * q[1] * q[3] * v[3] * (q[2] + k[2])


def _flops_backward(
    grad: Any,
    grad_inverse: Any,
    out: Any,
    inverse: Any,
    sums: Any,
    totals: Any,
    q: Sequence[int],
    k: Sequence[int],
    v: Sequence[int],
    key_mask: Any,
    causal: bool,
    *_: Any,
    out_shape: Any = None,
) -> int:
    # The causal form sums keys again, on the way to each query.
    return 2 * q[0] * q[1] * q[3] * v[3] * (2 * q[2] + (3 if causal else 2) * k[2])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, key_mask, ctx.causal, _, ctx.feature_map, ctx.input_scale, _ = inputs
    ctx.save_for_backward(*output, q, k, v, key_mask)
    ctx.mark_non_differentiable(*output[2:])
    # Normalisers rarely have gradients.
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: Tensor | None, grad_inverse: Tensor | None, *_: Any) -> tuple[Any, ...]:
    grad = torch.zeros_like(ctx.saved_tensors[0]) if grad is None else grad
    gradients = linear_backward(grad, grad_inverse, *ctx.saved_tensors, ctx.causal, ctx.feature_map, ctx.input_scale)
    return *gradients, *[None] * 6


@custom_op(_fake_forward, flops=_flops_forward, backward=_gradients, save=_save)
def linear_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    causal: bool,
    whole: bool,
    feature_map: str,
    input_scale: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the forward kernels.

    Args:
        q: [B, H, L, D], the last dimension contiguous, as in k and v; with `causal` L <= S.
        k: [B, H, S, D], of the dtype of q.
        v: [B, H, S, E].
        key_mask: [B, S] uint8, 1 at keys that count; None when all do.
        causal: Whether query i sees only the keys up to S - L + i.
        whole: Whether to return the sums over all keys too.
        feature_map: `elu`, `relu`, or `given` when q and k are features.
        input_scale: Factor of q and k before the map.
        eps: Added to the normaliser; where the sum is 0, so is the output.

    Returns:
        [B, H, L, E] in the dtype of v; in float32 one over the normalisers, [B, H, L], and of each segment of keys the
        sums of features times values, [B, H, segments, D, E], and of features; with no segments if unused.
    """
    out, inverse, sums, totals = _fake_forward(q, k, v, key_mask, causal, whole)
    heads = q.shape[0] * q.shape[1]
    rows, count = segments(heads, k.shape[2])
    if sums.shape[2]:
        launch(
            linear_sums_kernel,
            (heads * count,),
            SUMS[kind(q, v)],
            k,
            v,
            key_mask,
            None,
            None,
            sums,
            totals,
            *strides(k, v),
            q.shape[1],
            k.shape[2],
            0,
            rows,
            count,
            **_shared(q, v, feature_map, input_scale),
        )
    given = q, k, v, None, None, key_mask, sums, totals, inverse, None, None
    _launch_scan("out", given, out, causal, feature_map, input_scale, eps)
    return out, inverse, sums, totals


def _fake_backward(
    grad: Tensor,
    grad_inverse: Any,
    out: Tensor,
    inverse: Tensor,
    sums: Tensor,
    totals: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_gradients(q, k, v)


@custom_op(_fake_backward, flops=_flops_backward)
def linear_backward(
    grad: Tensor,
    grad_inverse: Tensor | None,
    out: Tensor,
    inverse: Tensor,
    sums: Tensor,
    totals: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    causal: bool,
    feature_map: str,
    input_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the backward kernels: gradients of q, k and v; features are computed again.

    Args:
        grad: Gradient of the outputs.
        grad_inverse: That of `inverse`, or None.
        out: Returned by `linear_forward`, as are `inverse`, `sums` and `totals`.
        q: This and all others as for `linear_forward`.
    """
    dq, dk, dv = _fake_backward(grad, grad_inverse, out, inverse, sums, totals, q, k, v)
    grad = grad if grad.stride(3) == 1 else grad.contiguous()
    grad_inverse = None if grad_inverse is None else grad_inverse.contiguous()
    heads, shape = q.shape[0] * q.shape[1], _shape(q, k, causal)
    # One causal segment has no later ones that would read its sums.
    read = 0 if causal and shape["segments"] == 1 else shape["segments"]
    query_sums, query_totals = _fake_sums(q, v, read)
    share = torch.empty_like(inverse)
    # The first kernel stores for each query what the others read.
    given = q, k, v, grad, out, key_mask, sums, totals, inverse, grad_inverse, share
    _launch_scan("dq", given, dq, causal, feature_map, input_scale, 0.0)
    if read:
        launch(
            linear_sums_kernel,
            (heads * read,),
            SUMS[kind(q, v)],
            q,
            grad,
            None,
            inverse,
            share,
            query_sums,
            query_totals,
            *strides(q, grad),
            q.shape[1],
            q.shape[2],
            shape["shift"],
            shape["rows"],
            read,
            **_shared(q, v, feature_map, input_scale),
        )
    given = q, k, v, grad, out, key_mask, query_sums, query_totals, inverse, None, share
    _launch_scan("dk", given, dk, causal, feature_map, input_scale, 0.0)
    _launch_scan("dv", given, dv, causal, feature_map, input_scale, 0.0)
    return dq, dk, dv


def _launch_scan(
    what: str, given: tuple[Any, ...], made: Tensor, causal: bool, feature_map: str, input_scale: float, eps: float
) -> None:
    q, k, v, grad, out, _, sums, *_ = given
    heads, shape = q.shape[0] * q.shape[1], _shape(q, k, causal)
    if what in ("dk", "dv"):
        shape["rows"], shape["segments"] = segments(heads, k.shape[2])

    def columns(tiles: Mapping[str, int]) -> int:
        # No wider than the result.
        return min(tiles["BC"], power(made.shape[3]))

    launch(
        linear_scan_kernel,
        lambda tiles: (heads * shape["segments"], -(-made.shape[3] // columns(tiles))),
        (CAUSAL if causal else PARALLEL)[kind(q, v)],
        *given,
        made,
        *strides(q, k, v, grad, out, made),
        **shape,
        sums=sums.shape[2],
        eps=eps,
        WHAT=what,
        CAUSAL=causal,
        tiled=lambda tiles: {"BC": columns(tiles)},
        **_shared(q, v, feature_map, input_scale),
    )


def _shape(q: Tensor, k: Tensor, causal: bool) -> dict[str, Any]:
    """Lengths, and the segments of queries: causal ones are those of the keys at the same positions."""
    rows, count = segments(q.shape[0] * q.shape[1], k.shape[2] if causal else q.shape[2])
    shift = k.shape[2] - q.shape[2] if causal else 0
    return {"H": q.shape[1], "L": q.shape[2], "S": k.shape[2], "shift": shift, "rows": rows, "segments": count}


def _shared(q: Tensor, v: Tensor, feature_map: str, input_scale: float) -> dict[str, Any]:
    """Arguments shared by all kernels."""
    products = {"NARROW": v.dtype == torch.bfloat16, "PRECISION": precision(v)}
    return {"scale": input_scale, **sizes(q, v), "MAP": feature_map, **products}
