"""The kernels of linear attention as operators, and how they are cut for what they are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from approx_kernels.gpu.language import Configuration, first_that_fits
from approx_kernels.ops.linear.triton_scan import linear_scan_kernel, linear_sums_kernel
from approx_kernels.runtime.custom_op import custom_op

# Programs that fill a large card; few heads are cut into as many segments, of no fewer rows than this.
PROGRAMS = 264
SEGMENTS = 16
LEAST = 256


def _sums(rows: int, warps: int, stages: int) -> Configuration:
    return Configuration({"BT": rows}, warps, stages)


def _scan(rows: int, columns: int, warps: int, stages: int) -> Configuration:
    return Configuration({"BT": rows, "BC": columns}, warps, stages)


# By what they are given, see `kind`: the default, and what asks for less where that may be too much. One alone is the
# smallest tile that there is.
SUMS = {
    "bfloat16": (_sums(64, 8, 2), _sums(32, 8, 1)),
    "bfloat16, wide": (_sums(64, 8, 2), _sums(32, 8, 1)),
    "float16": (_sums(32, 8, 2), _sums(16, 8, 1)),
    "float16, wide": (_sums(32, 8, 1), _sums(16, 8, 1)),
    "float32": (_sums(32, 8, 1),),
    "float32, wide": (_sums(16, 8, 1),),
}
# The scan, where it computes pairs and carries a state, and where it reads one state.
CAUSAL = {
    "bfloat16": (_scan(32, 64, 8, 2), _scan(16, 32, 8, 1)),
    "bfloat16, wide": (_scan(16, 32, 8, 1), _scan(16, 16, 8, 1)),
    "float16": (_scan(16, 32, 8, 1), _scan(16, 16, 8, 1)),
    "float16, wide": (_scan(16, 32, 8, 1), _scan(16, 16, 8, 1)),
    "float32": (_scan(16, 16, 8, 1),),
    "float32, wide": (_scan(16, 16, 8, 1),),
}
PARALLEL = {
    "bfloat16": (_scan(64, 64, 8, 2), _scan(32, 32, 8, 1)),
    "bfloat16, wide": (_scan(64, 64, 8, 2), _scan(32, 32, 8, 1)),
    "float16": (_scan(32, 64, 8, 1), _scan(16, 32, 8, 1)),
    "float16, wide": (_scan(32, 32, 8, 1), _scan(16, 16, 8, 1)),
    "float32": (_scan(32, 32, 8, 1), _scan(16, 16, 8, 1)),
    "float32, wide": (_scan(16, 16, 8, 1),),
}
# Features that the widest of these tiles hold.
FEATURES = 128


def kind(q: Tensor, v: Tensor) -> str:
    """Which of the configurations are for these inputs; features that are wider than values count twice."""
    wide = v.shape[3] > 64 or q.shape[3] > most_features(q, v) // 2
    return str(v.dtype).removeprefix("torch.") + (", wide" if wide else "")


def most_features(q: Tensor, v: Tensor) -> int:
    """How many features a kernel holds beside such values."""
    return FEATURES * v.element_size() // q.element_size()


def segments(heads: int, length: int) -> tuple[int, int]:
    """Rows of a segment, and how many segments a sequence has, so that all heads together fill the card."""
    wanted = max(1, min(PROGRAMS // heads, SEGMENTS, -(-length // LEAST)))
    rows = -(-length // (wanted * 64)) * 64
    return rows, -(-length // rows)


def _beside(x: Tensor, values: Tensor) -> Tensor:
    """As many numbers as values have for each row of x, heads of a token beside each other, as models want to join them."""
    batch, heads, length = x.shape[:3]
    return values.new_empty(batch, length, heads, values.shape[3]).transpose(1, 2)


def _fake_sums(q: Tensor, v: Tensor, count: int) -> tuple[Tensor, Tensor]:
    shape = *q.shape[:2], count, q.shape[3]
    return q.new_empty(*shape, v.shape[3], dtype=torch.float32), q.new_empty(shape, dtype=torch.float32)


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Any, causal: bool, whole: bool, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, count = segments(k.shape[0] * k.shape[1], k.shape[2])
    sums, totals = _fake_sums(q, v, 0 if causal and not whole and count == 1 else count)
    return _beside(q, v), q.new_empty(q.shape[:3], dtype=torch.float32), sums, totals


def _flops_forward(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, out_shape: Any = None) -> int:
    return 2 * q[0] * q[1] * q[3] * v[3] * (q[2] + k[2])


def _flops_backward(
    grad: Any, grad_inverse: Any, out: Any, inverse: Any, sums: Any, totals: Any,
    q: Sequence[int], k: Sequence[int], v: Sequence[int], key_mask: Any, causal: bool, *_: Any, out_shape: Any = None,
) -> int:  # fmt: skip
    # The causal form sums keys again, on the way to each query.
    return 2 * q[0] * q[1] * q[3] * v[3] * (2 * q[2] + (3 if causal else 2) * k[2])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, key_mask, ctx.causal, _, ctx.feature_map, ctx.input_scale, _ = inputs
    ctx.save_for_backward(*output, q, k, v, key_mask)
    ctx.mark_non_differentiable(*output[2:])
    # Hardly anybody asks for the normalisers.
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: Tensor | None, grad_inverse: Tensor | None, *_: Any) -> tuple[Any, ...]:
    grad = torch.zeros_like(ctx.saved_tensors[0]) if grad is None else grad
    found = linear_backward(grad, grad_inverse, *ctx.saved_tensors, ctx.causal, ctx.feature_map, ctx.input_scale)
    return *found, *[None] * 6


@custom_op(_fake_forward, flops=_flops_forward, backward=_gradients, save=_save)
def linear_forward(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, causal: bool, whole: bool,
    feature_map: str, input_scale: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch the forward kernels.

    Args:
        q: [B, H, L, D], the last dimension contiguous, as in k and v; with `causal` L <= S.
        k: [B, H, S, D], of the dtype of q.
        v: [B, H, S, E].
        key_mask: [B, S] uint8, 1 at keys that count; None when all do.
        causal: Whether query i sees only the keys up to S - L + i.
        whole: Whether the sums over all keys are wanted, too.
        feature_map: `elu`, `relu`, or `given` when q and k are features.
        input_scale: Factor of q and k before the map.
        eps: Added to the normaliser; where that is 0 then, the output is.

    Returns:
        [B, H, L, E] in the dtype of v; in float32 one over the normalisers, [B, H, L], and of each segment of keys the sums
        of features times values, [B, H, segments, D, E], and of features; of no segment where nobody reads them.
    """
    out, inverse, sums, totals = _fake_forward(q, k, v, key_mask, causal, whole)
    where = kind(q, v)
    what = f"{where}, {q.dtype}, {q.shape[3]}, {v.shape[3]}"
    rows, count = segments(q.shape[0] * q.shape[1], k.shape[2])
    heads, known = q.shape[0] * q.shape[1], sums.shape[2]

    def keys(cut: Configuration) -> None:
        linear_sums_kernel[(heads * count,)](
            k, v, key_mask, None, None, sums, totals, *_strides(k, v), q.shape[1], k.shape[2], 0, rows, count,
            **_shared(q, v, feature_map, input_scale, cut),
        )  # fmt: skip

    if known:
        first_that_fits(keys, SUMS[where], f"linear sums of keys, {what}", q.device)
    given = q, k, v, None, None, key_mask, sums, totals, inverse, None, None
    _launch_scan("out", given, out, causal, feature_map, input_scale, eps)
    return out, inverse, sums, totals


def _fake_backward(
    grad: Tensor, grad_inverse: Any, out: Tensor, inverse: Tensor, sums: Tensor, totals: Tensor,
    q: Tensor, k: Tensor, v: Tensor, *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _beside(q, q), _beside(k, k), _beside(v, v)


@custom_op(_fake_backward, flops=_flops_backward)
def linear_backward(
    grad: Tensor, grad_inverse: Tensor | None, out: Tensor, inverse: Tensor, sums: Tensor, totals: Tensor,
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, causal: bool, feature_map: str, input_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch the backward kernels: gradients of q, k and v; features are computed again.

    Args:
        grad: Gradient of the outputs.
        grad_inverse: That of `inverse`, or None.
        out: What `linear_forward` returned, as `inverse`, `sums` and `totals`.
        q: And all others: as for `linear_forward`.
    """
    dq, dk, dv = _fake_backward(grad, grad_inverse, out, inverse, sums, totals, q, k, v)
    grad = grad if grad.stride(3) == 1 else grad.contiguous()
    grad_inverse = None if grad_inverse is None else grad_inverse.contiguous()
    where = kind(q, v)
    what = f"{where}, {q.dtype}, {q.shape[3]}, {v.shape[3]}"
    heads, shape = q.shape[0] * q.shape[1], _shape(q, k, causal)
    # One causal segment has no later ones that would read its sums.
    read = 0 if causal and shape["segments"] == 1 else shape["segments"]
    query_sums, query_totals = _fake_sums(q, v, read)
    share = torch.empty_like(inverse)

    def queries(cut: Configuration) -> None:
        linear_sums_kernel[(heads * read,)](
            q, grad, None, inverse, share, query_sums, query_totals, *_strides(q, grad),
            q.shape[1], q.shape[2], shape["shift"], shape["rows"], read, **_shared(q, v, feature_map, input_scale, cut),
        )  # fmt: skip

    # The first of them says what the others need to know of each query.
    given = q, k, v, grad, out, key_mask, sums, totals, inverse, grad_inverse, share
    _launch_scan("dq", given, dq, causal, feature_map, input_scale, 0.0)
    if read:
        first_that_fits(queries, SUMS[where], f"linear sums of queries, {what}", q.device)
    given = q, k, v, grad, out, key_mask, query_sums, query_totals, inverse, None, share
    _launch_scan("dk", given, dk, causal, feature_map, input_scale, 0.0)
    _launch_scan("dv", given, dv, causal, feature_map, input_scale, 0.0)
    return dq, dk, dv


def _launch_scan(
    what: str, given: tuple[Any, ...], made: Tensor, causal: bool, feature_map: str, input_scale: float, eps: float
) -> None:
    q, k, v, grad, out, _, sums, *_ = given
    heads, where, shape = q.shape[0] * q.shape[1], kind(q, v), _shape(q, k, causal)
    if what in ("dk", "dv"):
        shape["rows"], shape["segments"] = segments(heads, k.shape[2])

    def run(cut: Configuration) -> None:
        # No wider than what is made.
        columns = min(cut.tiles["BC"], power(made.shape[3]))
        cut = cut._replace(tiles={**cut.tiles, "BC": columns})
        linear_scan_kernel[(heads * shape["segments"], -(-made.shape[3] // columns))](
            *given, made, *_strides(q, k, v, grad, out, made), **shape, sums=sums.shape[2], eps=eps,
            WHAT=what, CAUSAL=causal, **_shared(q, v, feature_map, input_scale, cut),
        )  # fmt: skip

    cuts = (CAUSAL if causal else PARALLEL)[where]
    first_that_fits(run, cuts, f"linear {what}, {causal}, {where}, {q.dtype}, {q.shape[3]}, {v.shape[3]}", q.device)


def _strides(*tensors: Tensor | None) -> list[int]:
    return [stride for x in tensors for stride in ((0, 0, 0) if x is None else x.stride()[:3])]


def _shape(q: Tensor, k: Tensor, causal: bool) -> dict[str, int]:
    """Lengths, and the segments of queries: causal ones are those of the keys at the same positions."""
    rows, count = segments(q.shape[0] * q.shape[1], k.shape[2] if causal else q.shape[2])
    shift = k.shape[2] - q.shape[2] if causal else 0
    return {"H": q.shape[1], "L": q.shape[2], "S": k.shape[2], "shift": shift, "rows": rows, "segments": count}


def _shared(q: Tensor, v: Tensor, feature_map: str, input_scale: float, cut: Configuration) -> dict[str, Any]:
    """What all kernels are told."""
    return {
        "scale": input_scale,
        "D": q.shape[3],
        "E": v.shape[3],
        "WIDE_D": power(q.shape[3]),
        "WIDE_E": power(v.shape[3]),
        "MAP": feature_map,
        "NARROW": v.dtype == torch.bfloat16,
        # float32 is what was asked for, not the tensor cores' 10 bits of it, which are all that a float16 has.
        "PRECISION": "ieee" if v.dtype == torch.float32 else "tf32",
        **cut.options,
    }


def power(size: int) -> int:
    """The width of a tile that holds so many columns."""
    return 1 << (size - 1).bit_length()
