"""Linear attention of one token after others, whose sums it updates in place."""

# Triton's type stubs mistake tensors for constants, and branches on constants for branches at run time.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from approx_kernels.gpu.language import jit, tl
from approx_kernels.gpu.launch import cut, launch, sizes
from approx_kernels.ops.linear.reference import joined_sums, own_parts
from approx_kernels.ops.linear.triton_heads import as_features, attend
from approx_kernels.ops.linear.triton_tiles import features, read_rows, real
from approx_kernels.runtime.custom_op import custom_op
from approx_kernels.runtime.pytorch import without_autocast
from approx_kernels.tokens import State, in_order, sharing

STEP = (cut(4, 1),)
WIDE_STEP = (cut(8, 1),)


def step_obstacle(q: Tensor, k: Tensor, state: State | None, window: int) -> str | None:
    """Why kernels cannot continue from a state, with the remedy; None where they can."""
    if window:
        return f"window is {window}; they keep no keys of a window. Ask for 'auto'."
    if state is not None and k.shape[2] != 1:
        return f"{k.shape[2]} keys follow those of a state; the kernel adds one at a time. Ask for 'auto'."
    if q.shape[2] > k.shape[2]:
        return f"there are {q.shape[2]} queries and {k.shape[2]} keys; the kernel has a key for each query. Ask for 'auto'."
    return None


def continue_by_kernels(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    state: State | None,
    *,
    feature_map: str,
    maps: tuple[Tensor, Tensor] | None,
    input_scale: float,
    eps: float,
) -> tuple[Tensor, State]:
    """As `continue_heads` without a window: a whole prompt, or one token, which overwrites the sums of the state."""
    with without_autocast(q.device.type):
        if state is None:
            parts = []
            for turn, _, learned in own_parts(q, k, None, maps, None):
                one, keys, values, how = as_features(q[:, turn], k, v, feature_map, learned["maps"], input_scale)
                out, _, sums, totals = attend(one, keys, values, key_mask, True, *how, eps, whole=True)
                parts.append((out, torch.cat([sums.sum(2), totals.sum(2)[..., None]], -1)))
            outs, sums = zip(*parts, strict=True)
            return in_order(outs), {"sums": joined_sums(sums, maps)}
        if maps is not None:
            # Each query head has its own learned map of keys, so the few numbers of one token are repeated.
            k, v = (x.repeat_interleave(sharing(q, x), 1) for x in (k, v))
        q, k, v, how = as_features(q, k, v, feature_map, maps, input_scale)
        q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
        mask = None if key_mask is None else key_mask.contiguous().view(torch.uint8)
        sums = state["sums"].contiguous()
        return linear_step(q, k, v, mask, sums, *how, eps), {"sums": sums}


def _fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return v.new_empty(*q.shape[:3], v.shape[3])


def _flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, out_shape: Any = None) -> int:
    return 4 * q[0] * q[1] * q[3] * v[3]


@custom_op(_fake, flops=_flops, mutates=("sums",))
def linear_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    sums: Tensor,
    feature_map: str,
    input_scale: float,
    eps: float,
) -> Tensor:
    """Launch the kernel of one token.

    Args:
        q: [B, H, 1, D], the last dimension contiguous, as in k and v.
        k: [B, G, 1, D], where H is a multiple of G.
        v: [B, G, 1, E].
        key_mask: [B, 1] uint8, 1 where the key counts; None when all do.
        sums: Sums of features times values and a one, [B, G, D, E + 1], float32 and contiguous; updated in place.
        feature_map: And the others: as for `linear_forward`.

    Returns:
        [B, H, 1, E] in the dtype of v.
    """
    out = _fake(q, k, v)
    told = sizes(q, v)
    launch(
        linear_step_kernel,
        (k.shape[0] * k.shape[1],),
        WIDE_STEP if told["WIDE_D"] * told["WIDE_E"] > 64 * 64 else STEP,
        q,
        k,
        v,
        key_mask,
        sums,
        out,
        *(stride for x in (q, k, v, out) for stride in x.stride()[:2]),
        k.shape[1],
        sharing(q, k),
        input_scale,
        eps,
        MAP=feature_map,
        **told,
    )
    return out


@jit(do_not_specialize=("G",))
def linear_step_kernel(
    Q,
    K,
    V,
    KeyMask,
    Sums,
    Out,
    q_b,
    q_h,
    k_b,
    k_h,
    v_b,
    v_h,
    o_b,
    o_h,
    G,
    shared,
    scale,
    eps,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDE_D: tl.constexpr,
    WIDE_E: tl.constexpr,
    MAP: tl.constexpr,
):
    """One more token: its key and value are added to the sums of a key head, [D, E + 1], which its queries read."""
    line = tl.program_id(0)
    sample, head = tl.cast(line // G, tl.int64), tl.cast(line % G, tl.int64)
    row, column = tl.arange(0, WIDE_D), tl.arange(0, WIDE_E)
    own = tl.arange(0, 1) == 0
    one = real(KeyMask if KeyMask is None else KeyMask + sample, 0, 1, 1)
    g = features(
        read_rows(K + sample * k_b + head * k_h, 0, 0, one, 0, D, WIDE_D, 1), one, scale, 0, MAP, D, WIDE_D, False
    )
    g = tl.sum(g, 0)
    v = tl.sum(read_rows(V + sample * v_b + head * v_h, 0, 0, one, 0, E, WIDE_E, 1).to(tl.float32), 0)
    at = Sums + tl.cast(line, tl.int64) * D * (E + 1) + row * (E + 1)
    places, inside = at[:, None] + column[None, :], (row < D)[:, None] & (column < E)[None, :]
    state = tl.load(places, mask=inside, other=0.0) + g[:, None] * v[None, :]
    total = tl.load(at + E, mask=row < D, other=0.0) + g
    tl.store(places, state, mask=inside)
    tl.store(at + E, total, mask=row < D)
    for each in range(shared):
        query = head * shared + each
        f = read_rows(Q + sample * q_b + query * q_h, 0, 0, own, 0, D, WIDE_D, 1)
        f = tl.sum(features(f, own, scale, 0, MAP, D, WIDE_D, False), 0)
        norm = tl.sum(f * total, 0) + eps
        out = tl.sum(f[:, None] * state, 0) * tl.where(norm != 0, 1.0 / tl.where(norm != 0, norm, 1.0), 0.0)
        tl.store(Out + sample * o_b + query * o_h + column, out.to(Out.dtype.element_ty), mask=column < E)
