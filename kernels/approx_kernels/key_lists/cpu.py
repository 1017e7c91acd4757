"""Softmax attention of blocks of queries to lists of keys, in C: what windows, blocks and chosen tokens have in common."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from approx_kernels.c_language import address, check, library
from approx_kernels.c_language import obstacle as c_obstacle
from approx_kernels.custom_op import custom_op
from approx_kernels.key_lists.backward_c import BACKWARD
from approx_kernels.key_lists.forward_c import FORWARD

# Queries of a block at most: ROWS of forward_c.py.
MOST_ROWS = 96
# No bound on a distance; positions and distances add up to less than 2^31.
FAR = 2**30

# Keys from the first to before the second; the query at i sees key j of them where third <= j - i <= fourth.
Entry = tuple[int, int, int, int]

_WHOLE = ctypes.c_int64
_PLACE = ctypes.c_void_p


class _Rows(ctypes.Structure):
    """`tensor` of c_vectors.py."""

    _fields_ = (("data", _PLACE), ("batch", _WHOLE), ("head", _WHOLE), ("row", _WHOLE))


class _Problem(ctypes.Structure):
    """`problem` of forward_c.py."""

    _fields_ = (
        *((name, _WHOLE) for name in ("batch", "heads", "length", "keys", "size", "values")),
        *((name, _WHOLE) for name in ("before", "blocks", "bf16", "threads")),
        *((name, _Rows) for name in ("q", "k", "v", "out")),
        *((name, _PLACE) for name in ("mask", "starts", "first", "entries", "lse")),
        ("scale", ctypes.c_float),
    )


class _BackwardProblem(ctypes.Structure):
    """`backward_problem` of backward_c.py."""

    _fields_ = (("all", _Problem), *((name, _Rows) for name in ("grad", "dq", "dk", "dv")))


def obstacle(q: Tensor, *, dropout: float) -> str | None:
    """Why attention to lists of keys cannot run in C, with the remedy; None where it can."""
    if dropout:
        return "it drops no weights. Set the dropout of attention to 0, or ask for 'auto'."
    return c_obstacle(FORWARD, q) or c_obstacle(BACKWARD, q)


def cut(begin: int, end: int) -> list[int]:
    """First queries of blocks of about equal size, none above `MOST_ROWS`, from begin to before end."""
    count = -(-(end - begin) // MOST_ROWS)
    return [begin + (end - begin) * block // count for block in range(count)]


def attend_lists(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    *,
    before: int,
    starts: Sequence[int],
    entries: Sequence[Sequence[Entry]],
    scale: float,
) -> Tensor:
    """Softmax attention of each block of queries to the keys on its list, each of which may hold for some queries only.

    Query i stands at position `before` + i, key j at j. A query without any key that it sees gives 0. The backward pass keeps inputs,
    outputs and the logarithm of each normaliser.

    Args:
        q: Queries, [B, H, L, D], float32 or bfloat16.
        k: Keys, [B, H, S, D].
        v: Values, [B, H, S, E].
        key_mask: [B, S] bool, True at real keys; None when all are real.
        before: Position of the first query.
        starts: First query of each block, and L; at most `MOST_ROWS` apart.
        entries: The list of each block; no query may see a key by two of its entries, or it counts twice.
        scale: Factor of the scores.

    Returns:
        [B, H, L, E] in the dtype of q.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k.to(q.dtype), v.to(q.dtype)))
    mask = None if key_mask is None else key_mask.contiguous()
    counts = torch.tensor([0, *(len(own) for own in entries)], dtype=torch.int64).cumsum(0)
    listed = torch.tensor([each for own in entries for each in own], dtype=torch.int32).view(-1, 4)
    with torch.autocast("cpu", enabled=False):
        return _attend(q, k, v, mask, torch.tensor(starts), counts, listed, before, scale)[0]


def _empty(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    # As models want it next: tokens before heads.
    out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


def _empty_gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (q, k, v))
    return dq, dk, dv


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.before, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return *_attend_backward(grad, *ctx.saved_tensors, ctx.before, ctx.scale), *[None] * 6


@custom_op(_empty_gradients)
def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    starts: Tensor,
    first: Tensor,
    entries: Tensor,
    out: Tensor,
    lse: Tensor,
    before: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    made = _empty_gradients(grad, q, k, v)
    problem = _problem(q, k, v, out, key_mask, starts, first, entries, lse, before, scale)
    found = library(BACKWARD)
    assert not isinstance(found, str), f"checked by the op: {found}"
    check(found.backward(ctypes.byref(_BackwardProblem(problem, *map(_rows, (grad, *made))))))
    return made


@custom_op(_empty, backward=_gradients, save=_keep)
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    starts: Tensor,
    first: Tensor,
    entries: Tensor,
    before: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    out, lse = _empty(q, k, v)
    found = library(FORWARD)
    assert not isinstance(found, str), f"checked by the op: {found}"
    check(found.forward(ctypes.byref(_problem(q, k, v, out, key_mask, starts, first, entries, lse, before, scale))))
    return out, lse


def _rows(x: Tensor) -> _Rows:
    return _Rows(x.data_ptr(), *x.stride()[:3])


def _problem(q: Tensor, k: Tensor, v: Tensor, out: Tensor, *lists: Any) -> _Problem:
    key_mask, starts, first, entries, lse, before, scale = lists
    sizes = (*q.shape[:3], k.shape[2], q.shape[3], v.shape[3], before, starts.numel() - 1)
    places = map(address, (key_mask, starts, first, entries, lse))
    rows = map(_rows, (q, k, v, out))
    return _Problem(*sizes, q.dtype == torch.bfloat16, torch.get_num_threads(), *rows, *places, scale)
