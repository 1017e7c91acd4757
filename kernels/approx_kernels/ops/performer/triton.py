"""The kernels of Performer attention as operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from approx_kernels.ops.performer.triton_launches import CHUNK, Launches, chunks_of, empty
from approx_kernels.runtime.custom_op import custom_op
from approx_kernels.tokens import empty_gradients, empty_rows


def _fake_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    offsets: Any,
    key_mask: Any,
    causal: bool,
    whole: bool,
    kernel: str,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    length, softmax, kept = q.shape[2], kernel == "softmax", rows.shape[-2] if whole else 0
    chunks = chunks_of(q, k)[1] if softmax and causal else 0
    mu, inverse = empty(q, length if softmax else 0), empty(q, length)
    rises = q.new_empty(*q.shape[:2], chunks, dtype=torch.int64)
    return (
        empty_rows(q, v.shape[3]),
        mu,
        inverse,
        rises,
        empty(q, kept, v.shape[3] + 1),
        empty(q, 1, kept if softmax else 0),
    )


def _flops_forward(
    q: Sequence[int],
    k: Sequence[int],
    v: Sequence[int],
    rows: Sequence[int],
    offsets: Any,
    key_mask: Any,
    causal: bool,
    *_: Any,
    out_shape: Any = None,
) -> int:
    (length, size), keys, values, features = q[2:], k[2], v[3], rows[-2]
    count = features * (size + values) * (length + keys)
    if causal:
        # Features of the keys of a chunk are computed again, and pairs.
        count += length * (features * size + min(keys, CHUNK[torch.bfloat16]) * (features + values))
    return 2 * q[0] * q[1] * count


def _flops_backward(
    grad: Any,
    out: Any,
    mu: Any,
    inverse: Any,
    rises: Any,
    q: Sequence[int],
    k: Sequence[int],
    v: Sequence[int],
    rows: Sequence[int],
    offsets: Any,
    key_mask: Any,
    causal: bool,
    *_: Any,
    out_shape: Any = None,
) -> int:
    (length, size), keys, values, features = q[2:], k[2], v[3], rows[-2]
    # Features are computed again for each sum and each gradient.
    count = features * (length * (3 * size + 2 * values) + keys * (3 * size + 3 * values))
    if causal:
        count += length * (2 * features * size + 3 * min(keys, CHUNK[torch.bfloat16]) * (features + values))
    return 2 * q[0] * q[1] * count


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, rows, offsets, key_mask, ctx.causal, _, ctx.kernel, ctx.scale = inputs
    ctx.save_for_backward(*output[:4], q, k, v, rows, offsets, key_mask)
    ctx.mark_non_differentiable(*output[1:])


def _gradients(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    return *performer_backward(grad, *ctx.saved_tensors, ctx.causal, ctx.kernel, ctx.scale), *[None] * 7


@custom_op(_fake_forward, flops=_flops_forward, backward=_gradients, save=_save)
def performer_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    offsets: Tensor | None,
    key_mask: Tensor | None,
    causal: bool,
    whole: bool,
    kernel: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Launch the forward kernels.

    Args:
        q: [B, H, L, D], the last dimension contiguous, as in k and v; with `causal` L <= S.
        k: [B, H, S, D], of the dtype of q.
        v: [B, H, S, E], of the dtype of q.
        rows: [M, D], the projection in any floating dtype; or [H, M, D], per head.
        offsets: Logarithms of the weights of rows per head, [H, M]; None for no weights.
        key_mask: [B, S] uint8, 1 at keys that count; None when all do.
        causal: Whether query i sees only the keys up to S - L + i.
        whole: Whether to return the sums over all keys too.
        kernel: `softmax` or `relu`.
        scale: Factor of the scores.

    Returns:
        [B, H, L, E] in the dtype of q. For the backward pass: the logarithms that features of queries are relative to,
        [B, H, L], empty for `relu`; one over the normalisers, [B, H, L]; and bits of the keys of a chunk that rise far
        above all earlier ones, [B, H, chunks] int64, empty where unused. Then the state of `performer_decode`, both
        parts, empty unless `whole`.
    """
    out, *kept, state, top = _fake_forward(q, k, v, rows, offsets, key_mask, causal, whole, kernel)
    launches = Launches(q, k, v, rows, offsets, key_mask, causal, kernel, scale)
    sums, totals, tops = launches.key_sums()
    launches.outputs((sums, totals, tops), out, kept)
    if whole:
        state = torch.cat([sums[:, :, -1], totals[:, :, -1, :, None]], -1)
        top = top if tops is None else tops[:, :, -1:].clone()
    mu, inverse, rises = kept
    return out, mu, inverse, rises, state, top


def _fake_backward(
    grad: Any, out: Any, mu: Any, inverse: Any, rises: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_gradients(q, k, v)


@custom_op(_fake_backward, flops=_flops_backward)
def performer_backward(
    grad: Tensor,
    out: Tensor,
    mu: Tensor,
    inverse: Tensor,
    rises: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    offsets: Tensor | None,
    key_mask: Tensor | None,
    causal: bool,
    kernel: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the backward kernels: gradients of q, k and v; features and sums are computed again.

    Args:
        grad: Gradient of the outputs.
        out: Returned by `performer_forward`, as are `mu`, `inverse` and `rises`.
        q: This and all others as for `performer_forward`.
    """
    dq, dk, dv = _fake_backward(grad, out, mu, inverse, rises, q, k, v)
    grad = grad if grad.stride(3) == 1 else grad.contiguous()
    launches, kept = Launches(q, k, v, rows, offsets, key_mask, causal, kernel, scale), (mu, inverse, rises)
    c, share = launches.shares(grad, out, inverse)
    sums = launches.key_sums()
    launches.query_gradients(sums, c, share, kept, dq)
    # The sums before chunks take more memory than the tokens; only their tops are still needed.
    tops, sums = sums[2], None
    launches.key_gradients(launches.query_sums(tops, c, mu, share), tops, c, kept, share, dk, dv)
    return dq, dk, dv
