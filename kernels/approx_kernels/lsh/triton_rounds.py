"""LSH attention as two operators: round after round over sorted tokens, and how the kernels are cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from approx_kernels.custom_op import custom_op
from approx_kernels.lsh.triton_backward import lsh_keys_kernel, lsh_queries_kernel, lsh_tokens_kernel
from approx_kernels.lsh.triton_forward import lsh_forward_kernel
from approx_kernels.triton_language import Configuration, first_that_fits


def _cut(rows: int, columns: int, warps: int, stages: int) -> Configuration:
    return Configuration({"BM": rows, "BN": columns}, warps, stages)


# By what they are given, see `_kind`: the default, and what asks for less where that may be too much.
FORWARD = {
    "narrow": (_cut(64, 64, 4, 2), _cut(32, 32, 4, 1)),
    "wide": (_cut(64, 32, 4, 2), _cut(32, 32, 4, 1)),
    "float32": (_cut(32, 32, 4, 1),),
}
QUERIES = {
    "narrow": (_cut(64, 64, 4, 2), _cut(32, 32, 4, 1)),
    "wide": (_cut(64, 32, 4, 2), _cut(32, 32, 4, 1)),
    "float32": (_cut(32, 32, 4, 1),),
}
KEYS = {
    "narrow": (_cut(64, 64, 8, 2), _cut(32, 32, 4, 1)),
    "wide": (_cut(32, 32, 4, 2), _cut(32, 32, 4, 1)),
    "float32": (_cut(32, 32, 4, 1),),
}
TOKENS = (Configuration({"BT": 32}, 4, 1),)


def _kind(q: Tensor, v: Tensor) -> str:
    wide = max(q.shape[3], v.shape[3]) > 64
    return "float32" if q.dtype == torch.float32 else "wide" if wide else "narrow"


def _beside(x: Tensor, size: int) -> Tensor:
    """[B, H, n, size] with the heads of a token beside each other, as models want to join them."""
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], size).transpose(1, 2)


def _running(x: Tensor, rows: int, size: int) -> Tensor:
    """What rounds add to, [B, H, rows, size]."""
    return x.new_empty(*x.shape[:2], rows, size, dtype=torch.float32)


def _shared(q: Tensor, k: Tensor, v: Tensor, tokens: Tensor, own: str, scale: float) -> dict[str, Any]:
    """What all kernels are told."""
    return {
        "H": q.shape[1],
        "L": q.shape[2],
        "S": k.shape[2],
        "M": tokens.shape[3],
        "rounds": tokens.shape[0],
        "scale": scale,
        "D": q.shape[3],
        "E": v.shape[3],
        "WIDE_D": 1 << (q.shape[3] - 1).bit_length(),
        "WIDE_E": 1 << (v.shape[3] - 1).bit_length(),
        "ALWAYS": own == "always",
        "LAST": own == "last resort",
    }


def _precision(q: Tensor) -> str:
    # float32 is what was asked for, not the tensor cores' 10 bits of it.
    return "ieee" if q.dtype == torch.float32 else "tf32"


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


def _empty(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Any,
    plan: Sequence[Tensor],
    ranks: Any,
    own: str,
    width: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    return _beside(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


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
    grad: Any, out: Any, lse: Any, q: Any, k: Any, v: Any, key_mask: Any, plan: Any, ranks: Any, own: str, width: int,
    scale: float, out_shape: Any = None,
) -> int:  # fmt: skip
    # Scores and the gradients of weights twice, then one product for each of dq, dk and dv.
    return 2 * _pairs(plan, width) * (4 * q[3] + 3 * v[3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, key_mask, plan, ranks, *ctx.rest = inputs
    ctx.save_for_backward(*output, q, k, v, key_mask, ranks, *plan)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    out, lse, q, k, v, key_mask, ranks, *plan = ctx.saved_tensors
    found = lsh_backward(grad, out, lse, q, k, v, key_mask, plan, ranks, *ctx.rest)
    return *found, None, [None] * len(plan), *[None] * 4


@custom_op(_empty, flops=_flops, backward=_gradients, save=_save)
def lsh_forward(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, plan: Sequence[Tensor], ranks: Tensor | None, own: str,
    width: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend, in each round, to the keys between two ranks; rounds are parts of one softmax, so no sums are kept of each.

    Args:
        q: Queries, [B, H, L, D], the last dimension contiguous, as in k and v.
        k: Keys, [B, H, S, D].
        v: Values, [B, H, S, E].
        key_mask: [B, S] uint8, 1 at real keys, or None; read for own keys alone.
        plan: The tensors of `SortedRounds` but the last.
        ranks: The last one, where a pair counts once; None where it does in every round that shows it.
        own: `always` adds the key of the own token to every round, `last resort` where no round shows a key; both leave it
            out of the stretches. `as any other` does neither.
        width: Ranks that a query sees in a round, at most; for counting operations.
        scale: Factor of the scores.

    Returns:
        [B, H, L, E] in the dtype of q, 0 for a query without keys, and the log-sum-exp of its scores to the base 2,
        [B, H, L] float32, -inf where no round shows a key.
    """
    out, lse = _empty(q, k, v, key_mask, plan, ranks, own, width, scale)
    tokens, entries, queries, low, end, _ = plan
    where, items = _kind(q, v), q.shape[0] * q.shape[1]
    running = _running(q, q.shape[2] if len(tokens) > 1 else 0, v.shape[3])

    def run(cut: Configuration) -> None:
        for number in range(len(tokens)):
            lsh_forward_kernel[(-(-q.shape[2] // cut.tiles["BM"]) * items,)](
                q, k, v, key_mask, tokens, entries, queries, low, end, ranks, running, out, lse, *_strides(q, k, v, out),
                items=items, round=number, PRECISION=_precision(q), **_shared(q, k, v, tokens, own, scale), **cut.options,
            )  # fmt: skip

    first_that_fits(run, FORWARD[where], f"lsh forward, {where}, {q.dtype}, {q.shape[3]}, {v.shape[3]}", q.device)
    return out, lse


def _empty_gradients(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _beside(q, q.shape[3]), _beside(k, k.shape[3]), _beside(v, v.shape[3])


@custom_op(_empty_gradients, flops=_flops_backward)
def lsh_backward(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None,
    plan: Sequence[Tensor], ranks: Tensor | None, own: str, width: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v, each sum in one order always.

    Args:
        grad: Gradient of the outputs.
        out: What `lsh_forward` returned, as `lse`.
        lse: See there.
        q: And all others: as for `lsh_forward`.
    """
    dq, dk, dv = _empty_gradients(grad, out, lse, q, k, v)
    grad = grad if grad.stride(3) == 1 else grad.contiguous()
    tokens, entries, queries, low, end, keys = plan
    where, items, most = _kind(q, v), q.shape[0] * q.shape[1], tokens.shape[3]
    shared, delta = _shared(q, k, v, tokens, own, scale), torch.empty_like(lse)
    running = _running(q, q.shape[2] if len(tokens) > 1 else 0, q.shape[3])
    of_keys, of_values = (_running(x, most, x.shape[3]) for x in (k, v))
    told = {"items": items, "PRECISION": _precision(q), **shared}

    def by_query(cut: Configuration) -> None:
        for number in range(len(tokens)):
            lsh_queries_kernel[(-(-q.shape[2] // cut.tiles["BM"]) * items,)](
                q, k, v, key_mask, tokens, entries, queries, low, end, ranks, out, grad, lse, delta, running, dq,
                *_strides(q, k, v, out, grad, dq), round=number, **told, **cut.options,
            )  # fmt: skip

    def by_rank(cut: Configuration) -> None:
        first, past = _observers(queries, low, end, most, cut.tiles["BN"])
        for number in range(len(tokens)):
            lsh_keys_kernel[(first.shape[3] * items,)](
                q, k, v, tokens, entries, queries, low, end, ranks, first, past, grad, lse, delta, of_keys, of_values,
                *_strides(q, k, v, grad), round=number, **told, **cut.options,
            )  # fmt: skip

    def by_token(cut: Configuration) -> None:
        token, listed = keys.sort(dim=-1, stable=True)
        edges = torch.arange(k.shape[2] + 1, dtype=torch.int32, device=k.device).expand(k.shape[0], -1).contiguous()
        begins = torch.searchsorted(token, edges, out_int32=True)
        lsh_tokens_kernel[(-(-k.shape[2] // cut.tiles["BT"]) * items,)](
            q, k, v, key_mask, ranks, listed.int(), begins, grad, lse, delta, of_keys, of_values, dk, dv,
            *_strides(q, k, v, grad, dk, dv), **shared, **cut.options,
        )  # fmt: skip

    what = f"{where}, {q.dtype}, {q.shape[3]}, {v.shape[3]}"
    # The first of them says what the others need to know of each query, the second what the third adds up.
    first_that_fits(by_query, QUERIES[where], f"lsh queries, {what}", q.device)
    first_that_fits(by_rank, KEYS[where], f"lsh keys, {what}", q.device)
    first_that_fits(by_token, TOKENS, f"lsh tokens, {what}", q.device)
    return dq, dk, dv


def _observers(queries: Tensor, low: Tensor, end: Tensor, ranks: int, tile: int) -> tuple[Tensor, Tensor]:
    """The queries that see something of each tile of ranks, from and to, [R, B, H, tiles] int32."""
    low, end = (x.gather(-1, queries.long()) for x in (low, end))
    begins = torch.arange(0, ranks, tile, dtype=torch.int32, device=low.device).expand(*low.shape[:3], -1)
    ends = (begins + tile).clamp(max=ranks)
    return (
        torch.searchsorted(end, begins.contiguous(), right=True, out_int32=True),
        torch.searchsorted(low, ends.contiguous(), out_int32=True),
    )
