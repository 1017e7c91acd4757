"""Gradients of the keys and values of LSH attention, summed over the entries of each, as an operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from approx_kernels.gpu.language import jit, tl
from approx_kernels.gpu.launch import cut, launch, sizes, strides
from approx_kernels.ops.lsh.triton_pairs import (
    LENGTHS,
    gathered,
    greatest,
    own_scores,
    products,
    real_tokens,
    scattered,
)
from approx_kernels.runtime.custom_op import custom_op
from approx_kernels.tokens import empty_rows

TOKENS = (cut(4, 1, BT=32),)


@jit(do_not_specialize=LENGTHS)
def lsh_tokens_kernel(
    Q,
    K,
    V,
    KeyMask,
    Listed,
    Begins,
    dOut,
    Lse,
    Delta,
    dKeys,
    dValues,
    dK,
    dV,
    q_b,
    q_h,
    q_n,
    k_b,
    k_h,
    k_n,
    v_b,
    v_h,
    v_n,
    g_b,
    g_h,
    g_n,
    dk_b,
    dk_h,
    dk_n,
    dv_b,
    dv_h,
    dv_n,
    H,
    L,
    S,
    M,
    times,
    scale,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDE_D: tl.constexpr,
    WIDE_E: tl.constexpr,
    ALWAYS: tl.constexpr,
    LAST: tl.constexpr,
    BT: tl.constexpr,
):
    """Gradients of BT keys and values: the sum over the entries of each, plus the part of its own query."""
    tiles = tl.cdiv(S, BT)
    item = tl.cast(tl.program_id(0) // tiles, tl.int64)
    batch, head = item // H, item % H
    token = tl.program_id(0) % tiles * BT + tl.arange(0, BT)
    begin = tl.load(Begins + batch * (S + 1) + token, mask=token < S, other=0)
    count = tl.load(Begins + batch * (S + 1) + token + 1, mask=token < S, other=0) - begin
    dk, dv = tl.zeros([BT, WIDE_D], tl.float32), tl.zeros([BT, WIDE_E], tl.float32)
    for each in range(0, greatest(count)):
        there = each < count
        entry = tl.load(Listed + batch * M + begin + each, mask=there, other=0)
        dk += gathered(dKeys + item * M * D, entry, there, D, D, WIDE_D)
        dv += gathered(dValues + item * M * E, entry, there, E, E, WIDE_E)
    if ALWAYS or LAST:
        query = token - (S - L)
        if KeyMask is not None:
            KeyMask += batch * S
        own = real_tokens(KeyMask, token, (token < S) & (query >= 0))
        grad = gathered(dOut + batch * g_b + head * g_h, query, own, g_n, E, WIDE_E).to(tl.float32)
        lse = tl.load(Lse + item * L + query, mask=own, other=0.0)
        if LAST:
            dv += tl.where((lse == float("-inf"))[:, None], grad, 0.0)
        else:
            q = gathered(Q + batch * q_b + head * q_h, query, own, q_n, D, WIDE_D)
            k = gathered(K + batch * k_b + head * k_h, token, own, k_n, D, WIDE_D)
            v = gathered(V + batch * v_b + head * v_h, token, own, v_n, E, WIDE_E)
            p = tl.exp2(own_scores(q, k, scale * 1.4426950408889634, times) - lse)
            delta = tl.load(Delta + item * L + query, mask=own, other=0.0)
            dv += p[:, None] * grad
            dk += (p * (products(grad, v) - delta))[:, None] * q.to(tl.float32)
    scattered(dK + batch * dk_b + head * dk_h, token, token < S, dk_n, dk * scale, D, WIDE_D)
    scattered(dV + batch * dv_b + head * dv_h, token, token < S, dv_n, dv, E, WIDE_E)


def shared(q: Tensor, k: Tensor, v: Tensor, own: str, scale: float) -> dict[str, Any]:
    """Arguments shared by all kernels."""
    return {
        "H": q.shape[1],
        "L": q.shape[2],
        "S": k.shape[2],
        "scale": scale,
        **sizes(q, v),
        "ALWAYS": own == "always",
        "LAST": own == "last resort",
    }


def _empty_tokens(
    grad: Any, lse: Any, delta: Any, of_keys: Any, of_values: Any, q: Any, k: Tensor, v: Tensor, *others: Any
) -> tuple[Tensor, Tensor]:
    return empty_rows(k, k.shape[3]), empty_rows(v, v.shape[3])


@custom_op(_empty_tokens)
def lsh_tokens(
    grad: Tensor,
    lse: Tensor,
    delta: Tensor,
    of_keys: Tensor,
    of_values: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    keys: Tensor,
    times: int,
    own: str,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Gradients of k and v: the sum over the entries of each token, in a fixed order, plus the part of its own query.

    Args:
        grad: Gradient of the outputs.
        lse: Returned by `lsh_forward`.
        delta: Returned by `lsh_backward`, as are `of_keys` and `of_values`.
        of_keys: See there.
        of_values: See there.
        q: This and all others not named here as for `lsh_forward`.
        keys: The last tensor of the plan.
        times: How often the own key counts, where it is always seen.
    """
    dk, dv = _empty_tokens(grad, lse, delta, of_keys, of_values, q, k, v)
    grad = grad if grad.stride(3) == 1 else grad.contiguous()
    key, entries = keys.sort(dim=-1, stable=True)
    edges = torch.arange(k.shape[2] + 1, dtype=torch.int32, device=k.device).expand(k.shape[0], -1).contiguous()
    begins = torch.searchsorted(key, edges, out_int32=True)
    launch(
        lsh_tokens_kernel,
        lambda tiles: (-(-k.shape[2] // tiles["BT"]) * k.shape[0] * k.shape[1],),
        TOKENS,
        q,
        k,
        v,
        key_mask,
        entries.int(),
        begins,
        grad,
        lse,
        delta,
        of_keys,
        of_values,
        dk,
        dv,
        *strides(q, k, v, grad, dk, dv),
        times=times,
        **shared(q, k, v, own, scale),
        M=keys.shape[1],
    )
    return dk, dv
