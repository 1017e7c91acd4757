"""LSH attention as two operators, round after round over sorted tokens, and the kernels' configurations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from approx_kernels.gpu.launch import cut, kind, launch, precision, strides
from approx_kernels.ops.lsh.triton_backward import lsh_keys_kernel, lsh_queries_kernel
from approx_kernels.ops.lsh.triton_forward import lsh_forward_kernel
from approx_kernels.ops.lsh.triton_tokens import lsh_tokens, shared
from approx_kernels.runtime.custom_op import custom_op
from approx_kernels.tokens import empty_rows

# By kind of input, see `kind`; all of them fit the smallest card.
FORWARD = {
    "narrow": (cut(4, 2, BM=64, BN=64),),
    "wide": (cut(8, 2, BM=64, BN=32),),
    # Under Triton 3.6 more columns spill.
    "float32": (cut(8, 2, BM=32, BN=16),),
    "float32 wide": (cut(8, 2, BM=16, BN=16),),
}
QUERIES = {
    "narrow": (cut(8, 2, BM=64, BN=64),),
    "wide": (cut(8, 2, BM=64, BN=32),),
    "float32": (cut(8, 2, BM=32, BN=16),),
    "float32 wide": (cut(8, 2, BM=16, BN=16),),
}
KEYS = {
    "narrow": (cut(4, 2, BM=32, BN=64),),
    "wide": (cut(8, 2, BM=32, BN=64),),
    "float32": (cut(4, 2, BM=16, BN=32),),
    "float32 wide": (cut(8, 2, BM=16, BN=16),),
}


def _times(tokens: Tensor, ranks: Tensor | None) -> int:
    """How often the own key counts, where it is always seen."""
    return len(tokens) if ranks is None else 1


def _running(x: Tensor, rows: int, size: int) -> Tensor:
    """The buffer that rounds add to, [B, H, rows, size]."""
    return x.new_empty(*x.shape[:2], rows, size, dtype=torch.float32)


def _walk(
    q: Tensor, k: Tensor, v: Tensor, tokens: Tensor, ranks: Tensor | None, own: str, scale: float
) -> dict[str, Any]:
    """Arguments of the kernels that iterate over ranks."""
    return {
        **shared(q, k, v, own, scale),
        "M": tokens.shape[3],
        "items": q.shape[0] * q.shape[1],
        "rounds": tokens.shape[0],
        "times": _times(tokens, ranks),
        "PRECISION": precision(q),
    }


def _empty(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Any, plan: Any, ranks: Any, own: str, width: int, scale: float
) -> tuple[Tensor, Tensor]:
    return empty_rows(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


def _pairs(plan: Any, width: int) -> int:
    rounds, batch, heads, queries = plan[2]
    return rounds * batch * heads * queries * width


def _flops(
    q: Any,
    k: Any,
    v: Any,
    key_mask: Any,
    plan: Any,
    ranks: Any,
    own: str,
    width: int,
    scale: float,
    out_shape: Any = None,
) -> int:
    return 2 * _pairs(plan, width) * (q[3] + v[3])


def _flops_backward(
    grad: Any,
    out: Any,
    lse: Any,
    q: Any,
    k: Any,
    v: Any,
    key_mask: Any,
    plan: Any,
    ranks: Any,
    own: str,
    width: int,
    scale: float,
    out_shape: Any = None,
) -> int:
    # Two products each for scores and gradients of weights, and one each for dq, dk and dv.
    return 2 * _pairs(plan, width) * (4 * q[3] + 3 * v[3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, key_mask, plan, ranks, *ctx.rest = inputs
    ctx.save_for_backward(*output, q, k, v, key_mask, ranks, *plan)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    out, lse, q, k, v, key_mask, ranks, *plan = ctx.saved_tensors
    (own, _, scale), times, keys = ctx.rest, _times(plan[0], ranks), plan[-1]
    dq, delta, *by_entry = lsh_backward(grad, out, lse, q, k, v, key_mask, plan, ranks, *ctx.rest)
    dk, dv = lsh_tokens(grad, lse, delta, *by_entry, q, k, v, key_mask, keys, times, own, scale)
    return dq, dk, dv, None, [None] * len(plan), *[None] * 4


@custom_op(_empty, flops=_flops, backward=_gradients, save=_save)
def lsh_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    plan: Sequence[Tensor],
    ranks: Tensor | None,
    own: str,
    width: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attend, in each round, to the keys between two ranks; all rounds share one softmax.

    Args:
        q: Queries, [B, H, L, D], the last dimension contiguous, as in k and v.
        k: Keys, [B, H, S, D].
        v: Values, [B, H, S, E].
        key_mask: [B, S] uint8, 1 at real keys, or None; read for own keys alone.
        plan: The tensors of `SortedRounds` except the last.
        ranks: The last one, if a pair counts once; None if it counts in every round that shows it.
        own: `always` adds the key of the own token to every round, `last resort` where no round shows a key; both leave
            it out of the stretches. `as any other` does neither.
        width: Ranks that a query sees in a round, at most; for counting operations.
        scale: Factor of the scores.

    Returns:
        [B, H, L, E] in the dtype of q, 0 for a query without keys, and the log-sum-exp of its scores to the base 2,
        [B, H, L] float32, -inf where no round shows a key.
    """
    out, lse = _empty(q, k, v, key_mask, plan, ranks, own, width, scale)
    tokens, entries, queries, low, end, _ = plan
    told = _walk(q, k, v, tokens, ranks, own, scale)
    running = _running(q, q.shape[2] if len(tokens) > 1 else 0, v.shape[3])
    for number in range(len(tokens)):
        launch(
            lsh_forward_kernel,
            lambda tiles: (-(-q.shape[2] // tiles["BM"]) * told["items"],),
            FORWARD[kind(q, v)],
            q,
            k,
            v,
            key_mask,
            tokens,
            entries,
            queries,
            low,
            end,
            ranks,
            running,
            out,
            lse,
            *strides(q, k, v, out),
            round=number,
            **told,
        )
    return out, lse


def _empty_gradients(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Any,
    plan: Sequence[Tensor],
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_keys, of_values = (_running(x, plan[0].shape[3], x.shape[3]) for x in (k, v))
    return empty_rows(q, q.shape[3]), torch.empty_like(lse), of_keys, of_values


@custom_op(_empty_gradients, flops=_flops_backward)
def lsh_backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    plan: Sequence[Tensor],
    ranks: Tensor | None,
    own: str,
    width: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, and of the keys and values of entries, from all queries except their own.

    Args:
        grad: Gradient of the outputs.
        out: Returned by `lsh_forward`, as is `lse`.
        lse: See there.
        q: This and all others as for `lsh_forward`.

    Returns:
        [B, H, L, D] in the dtype of q; of each query the sum of outputs times their gradients, [B, H, L]; and without
        the scale, [B, H, M, D] and [B, H, M, E], float32 as well.
    """
    dq, delta, of_keys, of_values = _empty_gradients(grad, out, lse, q, k, v, key_mask, plan)
    grad = grad if grad.stride(3) == 1 else grad.contiguous()
    tokens, entries, queries, low, end, _ = plan
    where, told = kind(q, v), _walk(q, k, v, tokens, ranks, own, scale)
    running = _running(q, q.shape[2] if len(tokens) > 1 else 0, q.shape[3])
    # The first kernel stores for each query what the second one reads.
    for number in range(len(tokens)):
        launch(
            lsh_queries_kernel,
            lambda tiles: (-(-q.shape[2] // tiles["BM"]) * told["items"],),
            QUERIES[where],
            q,
            k,
            v,
            key_mask,
            tokens,
            entries,
            queries,
            low,
            end,
            ranks,
            out,
            grad,
            lse,
            delta,
            running,
            dq,
            *strides(q, k, v, out, grad, dq),
            round=number,
            **told,
        )
    # The queries that see part of a tile of ranks are found for tiles of one size.
    (one,) = KEYS[where]
    first, past = _observers(queries, low, end, tokens.shape[3], one.tiles["BN"])
    for number in range(len(tokens)):
        launch(
            lsh_keys_kernel,
            (first.shape[3] * told["items"],),
            (one,),
            q,
            k,
            v,
            tokens,
            entries,
            queries,
            low,
            end,
            ranks,
            first,
            past,
            grad,
            lse,
            delta,
            of_keys,
            of_values,
            *strides(q, k, v, grad),
            round=number,
            **told,
        )
    return dq, delta, of_keys, of_values


def _observers(queries: Tensor, low: Tensor, end: Tensor, ranks: int, tile: int) -> tuple[Tensor, Tensor]:
    """The range of queries that see part of each tile of ranks, [R, B, H, tiles] int32."""
    low, end = (x.gather(-1, queries.long()) for x in (low, end))
    begins = torch.arange(0, ranks, tile, dtype=torch.int32, device=low.device).expand(*low.shape[:3], -1)
    ends = (begins + tile).clamp(max=ranks)
    return (
        torch.searchsorted(end, begins.contiguous(), right=True, out_int32=True),
        torch.searchsorted(low, ends.contiguous(), out_int32=True),
    )
