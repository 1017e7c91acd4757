"""Softmax attention of blocks of queries to lists of keys, in C: all windows, blocks and chosen tokens use it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from approx_kernels.cpu.compile import call
from approx_kernels.cpu.compile import obstacle as c_obstacle
from approx_kernels.cpu.dropout import draw_seed, dropped
from approx_kernels.cpu.structs import KeyLists, KeyListsBackward, address, rows_of
from approx_kernels.runtime.custom_op import custom_op
from approx_kernels.runtime.pytorch import without_autocast
from approx_kernels.tokens import empty_gradients, empty_rows, summed

# Most queries per block: ROWS of tiles.h. With windows, smaller blocks mask fewer keys.
MOST_ROWS, WINDOW_ROWS = 192, 96
# Queries computed together: SPAN of strips.h.
_STRIP = 32
# An unlimited distance; positions plus distances stay below 2^31.
FAR = 2**30

# Keys from the first to before the second; the query at i sees key j of them if third <= j - i <= fourth.
Entry = tuple[int, int, int, int]


def obstacle(*tensors: Tensor) -> str | None:
    """Why attention to lists of keys cannot run in C on tensors, with the remedy; None if it can."""
    return c_obstacle("key_lists/forward.c", *tensors) or c_obstacle("key_lists/backward.c", *tensors)


def cut(begin: int, end: int, most: int = WINDOW_ROWS) -> list[int]:
    """First queries of blocks of similar size from begin to end, at most `most`, whole strips except the last."""
    count = -(-(end - begin) // most)
    return [*range(begin, end, -(-(end - begin) // (count * _STRIP)) * _STRIP)] if count else []


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
    orders: tuple[Tensor, Tensor] | None = None,
    stretches: Tensor | None = None,
    places: Tensor | None = None,
    itself: bool = True,
    spans: Tensor | None = None,
    ramp: int = 1,
    dropout: float = 0.0,
) -> Tensor:
    """Softmax attention of each block of queries to its list of keys; an entry may apply to only some of its queries.

    Query i is at position `before` + i, key j at j. A query that sees no key gives 0. The backward pass stores inputs,
    outputs and the logarithm of each normaliser.

    With `orders`, queries and keys are numbered by their ranks in an order, and the softmax may have several parts,
    each with its own order: queries of part p are numbered from p L on, and every part has all of them.

    Args:
        q: Queries, [B, H, L, D], float32 or bfloat16.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
        key_mask: [B, S] bool, True at real keys; None when all are real.
        before: Position of the first query.
        starts: First query of each block, and L (times the parts); at most `MOST_ROWS` apart.
        entries: The list of each block; a key that a query sees in two entries counts twice.
        scale: Factor of the scores.
        orders: Queries and keys by rank, whole numbers [P, L] and [P, S] for all heads, or [P, B, H, L] and [P, B, H,
            S].
        stretches: With orders per head, the ranks that each query token sees in each part, first and end,
            [2, P, B, H, L] int32: a key then counts only in the first part that shows it. None to count it in each
            part.
        places: Needed with `stretches`: entries by rank, which are the same in all parts, and ranks by entry,
            [2, P, B, H, S] int32.
        itself: Whether a query may see the key of its own rank.
        spans: z [H], float32: a weight at distance x is multiplied by clip((R + z - x) / R, 0, 1). Differentiable.
        ramp: R.
        dropout: Probability of dropping a weight, separately in each part; a key that counts twice in a part is
            dropped once.

    Returns:
        [B, H, L, E] in the dtype of q.
    """
    counts = torch.tensor([0, *(len(own) for own in entries)], dtype=torch.int64).cumsum(0)
    listed = torch.tensor([each for own in entries for each in own], dtype=torch.int32).view(-1, 4)
    by_rank = [None, None] if orders is None else [x.int().contiguous() for x in orders]
    mask = None if key_mask is None else key_mask.contiguous()
    lists = mask, None, torch.tensor(starts), counts, listed, *by_rank, stretches, places, spans
    return attend(q, k, v, *lists, before, scale, ramp, 0.0 if itself else -1.0, dropout)[0]


def attend(q: Tensor, k: Tensor, v: Tensor, *problem: Any, totals: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, logarithms of their normalisers, [B, H, L] in float32, and optionally these normalisers relative to the largest
    weight of each query.

    If several keys have the largest weight, only one of them gets its gradient.
    """
    dropout = problem[-1]
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k.to(q.dtype), v.to(q.dtype)))
    with without_autocast("cpu"):
        out, lse, relative = _attend(q, k, v, *problem, draw_seed(dropout), totals)
    return out.to(q.dtype), lse, relative


def _parts(query_order: Tensor | None) -> int:
    return 1 if query_order is None else query_order.shape[0]


def _empty(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    own: Any,
    starts: Any,
    first: Any,
    entries: Any,
    query_order: Any,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    # What several parts add to is float32.
    out = empty_rows(q, v.shape[3], dtype=q.dtype if _parts(query_order) == 1 else torch.float32)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    return out, lse, torch.empty_like(lse) if rest[-1] else lse.new_empty(0)


def _empty_gradients(
    grad: Tensor,
    grad_totals: Any,
    grad_lse: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    own: Any,
    starts: Any,
    first: Any,
    entries: Any,
    query_order: Any,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = empty_gradients(q, k, v)
    dq = dq if _parts(query_order) == 1 else dq.float()
    return dq, dk, dv, q.new_empty(q.shape[:2], dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.rest = inputs[-7:-1]
    ctx.save_for_backward(*inputs[:-7], *output)


def _gradients(
    ctx: Any, grad: Tensor, grad_lse: Tensor | None, grad_totals: Tensor | None
) -> tuple[Tensor | None, ...]:
    *tensors, out, lse, totals = ctx.saved_tensors
    q, spans = tensors[0], tensors[-1]
    grad_totals = grad_totals.contiguous() if totals.numel() and grad_totals is not None else None
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    made = _attend_backward(grad.to(q.dtype), grad_totals, grad_lse, *tensors, out.to(q.dtype), lse, totals, *ctx.rest)
    dq, dk, dv, dspans = made
    dk, dv = summed(dk, tensors[1].shape[1]), summed(dv, tensors[2].shape[1])
    return dq.to(q.dtype), dk, dv, *[None] * 9, None if spans is None else dspans.sum(0), *[None] * 7


@custom_op(_empty_gradients)
def _attend_backward(
    grad: Tensor,
    grad_totals: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    own: Tensor | None,
    starts: Tensor,
    first: Tensor,
    entries: Tensor,
    query_order: Tensor | None,
    key_order: Tensor | None,
    stretches: Tensor | None,
    places: Tensor | None,
    spans: Tensor | None,
    out: Tensor,
    lse: Tensor,
    totals: Tensor,
    before: int,
    scale: float,
    ramp: int,
    itself: float,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    lists = key_mask, own, starts, first, entries, query_order, key_order, stretches, places
    made = _empty_gradients(grad, grad_totals, grad_lse, q, k, v, *lists)
    problem = _problem(q, k, v, out, *lists, lse, totals, spans, before, scale, ramp, itself, dropped(dropout, seed))
    dq, dk, dv, dspans = made
    rows = *rows_of(grad), *rows_of(dq), *rows_of(dk, dv)
    asked = (address(each, torch.float32, *q.shape[:3]) for each in (grad_totals, grad_lse))
    written = address(dspans, torch.float32, *q.shape[:2]), *asked
    call("key_lists/backward.c", "backward", KeyListsBackward(problem, *rows, *written))
    return made


@custom_op(_empty, backward=_gradients, save=_keep)
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    own: Tensor | None,
    starts: Tensor,
    first: Tensor,
    entries: Tensor,
    query_order: Tensor | None,
    key_order: Tensor | None,
    stretches: Tensor | None,
    places: Tensor | None,
    spans: Tensor | None,
    before: int,
    scale: float,
    ramp: int,
    itself: float,
    dropout: float,
    seed: int,
    relative: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    lists = key_mask, own, starts, first, entries, query_order, key_order, stretches, places
    out, lse, totals = _empty(q, k, v, *lists, relative)
    problem = _problem(q, k, v, out, *lists, lse, totals, spans, before, scale, ramp, itself, dropped(dropout, seed))
    call("key_lists/forward.c", "forward", problem)
    return out, lse, totals


def _problem(q: Tensor, k: Tensor, v: Tensor, out: Tensor, *lists: Any) -> KeyLists:
    key_mask, own, starts, first, entries, query_order, key_order, shown, places, lse, totals, spans, *rest = lists
    before, *numbers = rest
    batch, heads, length, _ = q.shape
    keys = k.shape[2]
    ranks = keys if key_order is None else key_order.shape[-1]
    parts, orders = _parts(query_order), query_order is not None and query_order.ndim == 4
    ordered = (parts, batch, heads) if orders else (parts,)
    blocks = starts.numel() - 1
    counts = before, blocks, parts, orders, q.dtype == torch.bfloat16, torch.get_num_threads()
    sizes = batch, heads, length, keys, ranks, q.shape[3], v.shape[3], *counts
    whole, short, number = torch.int64, torch.int32, torch.float32
    places_of = (
        address(key_mask, torch.bool, batch, keys),
        address(own, whole, batch * heads + 1),
        address(starts, whole, blocks + 1),
        address(first, whole, blocks + 1),
        address(entries, short, len(entries), 4),
        address(query_order, short, *ordered, length),
        address(key_order, short, *ordered, ranks),
        address(shown, short, 2, parts, batch, heads, length),
        address(places, short, 2, parts, batch, heads, ranks),
        address(lse, number, batch, heads, length),
        address(totals if totals.numel() else None, number, batch, heads, length),
        address(spans, number, heads),
    )
    return KeyLists(*sizes, *rows_of(q, k, v), *rows_of(out), *places_of, *numbers)
