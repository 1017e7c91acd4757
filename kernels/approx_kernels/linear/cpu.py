"""Linear attention on a CPU, forward and backward in C: one pass over queries, keys and values, with sums in float32."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from approx_kernels.c_language import address, check, library
from approx_kernels.c_language import obstacle as c_obstacle
from approx_kernels.custom_op import custom_op
from approx_kernels.linear.backward_c import BACKWARD
from approx_kernels.linear.forward_c import FORWARD

_MAPS = ("elu", "relu")
_WHOLE = ctypes.c_int64
_PLACE = ctypes.c_void_p


class _Rows(ctypes.Structure):
    """`tensor` of c_vectors.py."""

    _fields_ = (("data", _PLACE), ("batch", _WHOLE), ("head", _WHOLE), ("row", _WHOLE))


class _Problem(ctypes.Structure):
    """`problem` of forward_c.py."""

    _fields_ = (
        *((name, _WHOLE) for name in ("batch", "heads", "length", "keys", "size", "values")),
        *((name, _WHOLE) for name in ("causal", "relu", "bf16", "threads")),
        *((name, _Rows) for name in ("q", "k", "v", "out")),
        *((name, _PLACE) for name in ("mask", "sums")),
        *((name, ctypes.c_float) for name in ("input_scale", "eps")),
    )


class _BackwardProblem(ctypes.Structure):
    """`backward_problem` of backward_c.py."""

    _fields_ = (("all", _Problem), *((name, _Rows) for name in ("grad", "dq", "dk", "dv")))


def obstacle(q: Tensor, *, feature_map: str, window: int, dropout: float) -> str | None:
    """Why linear attention cannot run in C, with the remedy; None where it can."""
    if feature_map not in _MAPS:
        return f"feature_map is {feature_map!r}; it has {' and '.join(_MAPS)}. Ask for 'auto'."
    if window:
        return f"window is {window}; it has none. Ask for 'auto'."
    if dropout:
        return "it drops no keys. Set the dropout of attention to 0, or ask for 'auto'."
    return c_obstacle(FORWARD, q) or c_obstacle(BACKWARD, q)


def linear_batch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    *,
    causal: bool,
    feature_map: str,
    input_scale: float,
    eps: float,
) -> Tensor:
    """Attend; the backward pass keeps the inputs alone and computes their features again."""
    q, k, v = _laid_out(q, k, v)
    key_mask = None if key_mask is None else key_mask.contiguous()
    # Bottom-right: with L > S the first L - S queries stand before all keys, and see none.
    blind = max(q.shape[2] - k.shape[2], 0) if causal else 0
    with torch.autocast("cpu", enabled=False):
        out = _attend(q[:, :, blind:], k, v, key_mask, causal, feature_map == "relu", input_scale, eps)
    return torch.nn.functional.pad(out, (0, 0, blind, 0)) if blind else out


def linear_continue(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    sums: Tensor,
    *,
    feature_map: str,
    input_scale: float,
    eps: float,
) -> Tensor:
    """Causal attention after keys whose sums are [B, H, D, E + 1], float32; these get the new keys too, in place."""
    q, k, v = _laid_out(q, k, v)
    blind = max(q.shape[2] - k.shape[2], 0)
    out = _empty(q, k, v)
    out[:, :, :blind] = 0.0
    relu, mask = feature_map == "relu", None if key_mask is None else key_mask.contiguous()
    problem = _problem(q[:, :, blind:], k, v, out[:, :, blind:], mask, sums, True, relu, input_scale, eps)
    _run(FORWARD, problem)
    return out


def _laid_out(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k.to(q.dtype), v.to(q.dtype)))
    return q, k, v


def _empty(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    # As models want it next: tokens before heads.
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)


def _empty_gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (q, k, v))
    return dq, dk, dv


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.causal, ctx.relu, ctx.input_scale, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    found = _attend_backward(grad, *ctx.saved_tensors, ctx.causal, ctx.relu, ctx.input_scale, ctx.eps)
    return *found, *[None] * 5


def _count(q: list[int], k: list[int], v: list[int], *_: Any, out_shape: Any = None) -> int:
    return 2 * q[0] * q[1] * q[3] * v[3] * (q[2] + k[2])


def _count_backward(grad: list[int], q: list[int], k: list[int], v: list[int], *_: Any, out_shape: Any = None) -> int:
    return 2 * q[0] * q[1] * q[3] * v[3] * (2 * q[2] + 3 * k[2])


@custom_op(_empty_gradients, flops=_count_backward)
def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    causal: bool,
    relu: bool,
    input_scale: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    made = _empty_gradients(grad, q, k, v)
    problem = _problem(q, k, v, grad, key_mask, None, causal, relu, input_scale, eps)
    _run(BACKWARD, _BackwardProblem(problem, *map(_rows, (grad, *made))))
    return made


@custom_op(_empty, flops=_count, backward=_gradients, save=_keep)
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    causal: bool,
    relu: bool,
    input_scale: float,
    eps: float,
) -> Tensor:
    out = _empty(q, k, v)
    sums = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3] + 1, dtype=torch.float32)
    problem = _problem(q, k, v, out, key_mask, sums, causal, relu, input_scale, eps)
    _run(FORWARD, problem)
    return out


def _run(source: str, problem: _Problem | _BackwardProblem) -> None:
    found = library(source)
    assert not isinstance(found, str), f"checked by the op: {found}"
    check((found.forward if source is FORWARD else found.backward)(ctypes.byref(problem)))


def _rows(x: Tensor) -> _Rows:
    return _Rows(x.data_ptr(), *x.stride()[:3])


def _problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    key_mask: Tensor | None,
    sums: Tensor | None,
    causal: bool,
    relu: bool,
    input_scale: float,
    eps: float,
) -> _Problem:
    sizes = (*q.shape[:3], k.shape[2], q.shape[3], v.shape[3])
    how = causal, relu, q.dtype == torch.bfloat16, torch.get_num_threads()
    return _Problem(*sizes, *how, *map(_rows, (q, k, v, out)), address(key_mask), address(sums), input_scale, eps)
