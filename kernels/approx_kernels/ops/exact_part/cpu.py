"""Estimates for the keys that are not exact, without gradients, in one pass in C."""

import torch
from torch import Tensor

from approx_kernels.cpu.compile import call
from approx_kernels.cpu.compile import obstacle as c_obstacle
from approx_kernels.cpu.structs import Far, address, rows_of
from approx_kernels.ops.exact_part.reference import LinearFar, PerformerFar, left_sums, logs_of
from approx_kernels.ops.linear.reference import scaled
from approx_kernels.ops.near_keys.cpu import near_lists
from approx_kernels.ops.near_keys.reference import Exactly, far_mask, lowest, per_query_head, reach
from approx_kernels.ops.performer.reference import FLOOR
from approx_kernels.runtime.custom_op import custom_op
from approx_kernels.runtime.pytorch import drop_keys, without_autocast
from approx_kernels.tokens import State, blank_padding, empty_rows


def runs_in_one_pass(q: Tensor, *others: Tensor | None) -> bool:
    """Whether estimates for far keys can be joined in C: nothing needs a gradient."""
    return not has_gradients(q, *others) and c_obstacle("linear/far.c", q) is None


def has_gradients(*tensors: Tensor | None) -> bool:
    """Whether any of the tensors needs a gradient."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def linear_in_one_pass(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    exactly: Exactly,
    far: LinearFar,
    dropout: float = 0.0,
    state: State | None = None,
    keep: bool = False,
) -> tuple[Tensor, State]:
    """`attend_linear` without gradients and without a state."""
    assert state is None, "checked by the op"
    q, k, v = blank_padding(q, k, v, key_mask)
    v = drop_keys(v, dropout)
    with without_autocast("cpu"):
        near = near_lists(q, k, v, key_mask, exactly)
        mask = far_mask(key_mask, exactly.chosen)
        near_logs, how = logs_of(near.total), (exactly.window, exactly.causal, far.input_scale)
        if far.feature_map == "hedgehog" and far.maps is not None:
            assert far.key_gate is not None, "only the delta rule has none"
            maps = [x.float().contiguous() for x in (*far.maps, far.query_gate, far.key_gate)]
            out = join_far(q, k.to(q.dtype), v.to(q.dtype), mask, near.out, near_logs, None, maps, None, *how)
        else:
            inputs = far.queries(q), far.keys(per_query_head(q, k)), v.float()
            out = join_far(*inputs, mask, near.out, near_logs, far.gates(q).contiguous(), [], None, *how).to(q.dtype)
        if not keep:
            return out, {}
        keys, values = far.keys(per_query_head(q, k)), per_query_head(q, v).float()
        return out, {"sums": left_sums(keys, values, mask, exactly.window)}


def performer_in_one_pass(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    mapped: tuple[Tensor, Tensor],
    exactly: Exactly,
    far: PerformerFar,
    dropout: float = 0.0,
) -> Tensor:
    """`attend_performer` without gradients, where every query sees every key."""
    q, k, v = blank_padding(q, k, v, key_mask)
    v = drop_keys(v, dropout)
    with without_autocast("cpu"):
        near = near_lists(q, k, v, key_mask, exactly)
        mask = far_mask(key_mask, exactly.chosen)
        queries, keys = (scaled(x.float(), far.scale**0.5) for x in mapped)
        rows = far.projection.float().mT
        gates = far.factors().float()
        if far.kernel == "relu":
            queries, keys = ((x @ rows).relu_().add_(FLOOR) for x in (queries, keys))
        else:
            keys = (keys @ rows).sub_(keys.square().sum(-1, keepdim=True) / 2)
            if mask is not None:
                keys.masked_fill_(~mask[:, None, :, None], lowest(keys.dtype))
            top = keys.amax(2, keepdim=True)
            keys = keys.sub_(top).exp_()
            queries = (queries @ rows).add_(top if far.offsets is None else top + far.offsets.float()[:, None])
            most = queries.amax(-1, keepdim=True)
            queries, gates = queries.sub_(most).exp_(), gates + most[..., 0]
        share = None if far.share is None else far.share.float().contiguous()
        near_logs = near.log.float().contiguous()
        how = exactly.window, exactly.causal, 1.0
        return join_far(queries, keys, v.float(), mask, near.out, near_logs, gates.contiguous(), [], share, *how).to(
            q.dtype
        )


@custom_op(lambda q, k, v, *_: empty_rows(q, v.shape[3]))
def join_far(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    near: Tensor,
    near_logs: Tensor,
    gates: Tensor | None,
    maps: list[Tensor],
    share: Tensor | None,
    window: int,
    causal: bool,
    input_scale: float,
) -> Tensor:
    """The softmax over near keys, joined with attention by features to those outside the window, in C.

    Args:
        q: Features of queries, [B, H, L, F], or, with maps, queries [B, H, L, D].
        k: Features of keys, [B, G, S, F], or keys.
        v: Values, [B, G, S, E].
        mask: [B, S] bool, True at keys that are neither padding nor chosen; None for all.
        near: The softmax over the near keys, [B, H, L, E] float32.
        near_logs: Logarithms of its normalisers, [B, H, L] float32.
        gates: Logarithms of factors of the far keys' weights, [B, H, L] float32; None with maps.
        maps: For `hedgehog` those of queries and of keys, [H, D, F / 2], and the gates of queries, [H, D + 1], and of keys, [H, D],
            in float32; else empty.
        share: Share of uniform attention over the far keys, [H] float32; None for none.
        window: Width of the window, see `reach`.
        causal: Whether a query sees only keys at or before its own position.
        input_scale: Factor of queries and keys before the maps.

    Returns:
        [B, H, L, E] in the dtype of q.
    """
    q, k, v, near = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, near))
    mask = None if mask is None else mask.contiguous()
    out = empty_rows(q, v.shape[3])
    batch, heads, length, size = q.shape
    number, half = torch.float32, maps[0].shape[2] if maps else 0
    query_map, key_map, query_gate, key_gate = maps or [None] * 4
    left, right = reach(window, causal) if window else (-1, 0)
    left, right = (min(side, length + k.shape[2]) for side in (left, right))
    form = left, right, causal, q.dtype == torch.bfloat16, torch.get_num_threads()
    sizes = batch, heads, length, k.shape[2], size, 2 * half if maps else size, v.shape[3]
    first, *others = rows_of(q, k, v, out)
    places = (
        address(mask, torch.bool, batch, k.shape[2]),
        address(query_map, number, heads, size, half),
        address(key_map, number, heads, size, half),
        address(query_gate, number, heads, size + 1),
        address(key_gate, number, heads, size),
        address(gates, number, batch, heads, length),
        address(near_logs, number, batch, heads, length),
        address(share, number, heads),
    )
    tensors = first, *others[:2], *rows_of(near), others[2]
    call("linear/far.c", "attend_far", Far(*sizes, *form, *tensors, *places, input_scale))
    return out
