"""Clustered attention of a batch on a CPU, both ways in C: padding is skipped, and samples run in parallel."""

from typing import Any

import torch
from torch import Tensor

from approx_kernels.cpu.compile import call
from approx_kernels.cpu.compile import obstacle as c_obstacle
from approx_kernels.cpu.dropout import draw_seed, dropped
from approx_kernels.cpu.structs import Clustered, ClusteredBackward, address, rows_of
from approx_kernels.ops.clustered.reference import MOST_DEFAULT_CLUSTERS, Clusters, wanted_clusters
from approx_kernels.ops.clustering.cpu import cluster_samples, nearest_of_heads
from approx_kernels.ops.clustering.cpu import obstacle as clustering_obstacle
from approx_kernels.runtime.custom_op import custom_op
from approx_kernels.runtime.pytorch import without_autocast
from approx_kernels.tokens import empty_gradients, summed


def obstacle(q: Tensor) -> str | None:
    """Why clustered attention cannot run in C, with the remedy; None if it can."""
    reasons = (clustering_obstacle(q), c_obstacle("clustered/forward.c", q), c_obstacle("clustered/backward.c", q))
    return next(filter(None, reasons), None)


def clustered_batch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    *,
    planes: Tensor | None,
    draws: Tensor | None,
    selectors: Tensor | None,
    clusters: Clusters,
    iterations: int,
    topk: int | None,
    scale: float,
    dropout: float,
) -> Tensor:
    """Attend; in a sample of at most C real queries each of them is its own cluster."""
    batch, _, length, _ = q.shape
    k, v = k.to(q.dtype), v.to(q.dtype)
    query_tokens = key_tokens = None
    queries, keys = (torch.full((batch,), n, dtype=torch.int64) for n in (length, k.shape[2]))
    if key_mask is not None:
        keys = key_mask.sum(1)
        key_tokens = key_mask.logical_not().byte().argsort(stable=True, dim=1).int()
        if length == k.shape[2]:
            queries, query_tokens = keys, key_tokens
    own = torch.minimum(queries, wanted_clusters(queries, clusters)) * (keys > 0)
    with without_autocast("cpu"):
        if selectors is None:
            assert planes is not None, "checked by the op"
            assert draws is not None, "checked by the op"
            groups = cluster_samples(q.detach(), query_tokens, queries, own, planes, draws, iterations)
        else:
            groups = nearest_of_heads(q.detach(), selectors)
            if query_tokens is not None:
                groups = groups.gather(2, query_tokens[:, None].expand_as(groups).long())
            apart = torch.arange(length, dtype=torch.int32)
            groups = torch.where((own == queries)[:, None, None], apart, groups).contiguous()
        most = min(clusters if isinstance(clusters, int) else MOST_DEFAULT_CLUSTERS, length)
        kept = min(topk or 0, k.shape[2])
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        state = groups, query_tokens, key_tokens, queries, keys, own
        return _attend(q, k, v, *state, most, kept, scale, dropout, draw_seed(dropout))[0]


def _empty(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: Tensor,
    query_tokens: Tensor | None,
    key_tokens: Tensor | None,
    queries: Tensor,
    keys: Tensor,
    clusters: Tensor,
    most: int,
    kept: int,
    *numbers: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, heads, length, _ = q.shape
    # Tokens before heads, as models expect; padding is not written.
    make = q.new_empty if key_tokens is None else q.new_zeros
    out = make(batch, length, heads, v.shape[3]).transpose(1, 2)
    rest = q.new_empty(batch, heads, most, v.shape[3], dtype=torch.float32)
    top = q.new_empty(batch, heads, most, kept, dtype=torch.int32)
    sums, mass = (q.new_empty(batch, heads, most, dtype=torch.float32) for _ in range(2))
    return out, rest, sums, mass, top


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:9], *output[1:])
    ctx.rest = inputs[9:]
    ctx.mark_non_differentiable(*output[1:])


def _gradients(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    # Read once: with activation recomputation a second read fails.
    saved = ctx.saved_tensors
    dq, dk, dv = _attend_backward(grad, *saved, *ctx.rest)
    groups = saved[1].shape[1]
    return dq, summed(dk, groups), summed(dv, groups), *[None] * 11


def _empty_gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    # Padding is not written.
    dq, dk, dv = (x.zero_() for x in empty_gradients(q, k, v))
    return dq, dk, dv


@custom_op(_empty_gradients)
def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: Tensor,
    query_tokens: Tensor | None,
    key_tokens: Tensor | None,
    queries: Tensor,
    keys: Tensor,
    clusters: Tensor,
    rest: Tensor,
    sums: Tensor,
    mass: Tensor,
    top: Tensor,
    most: int,
    kept: int,
    scale: float,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor]:
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    made = _empty_gradients(grad, q, k, v)
    state = (groups, query_tokens, key_tokens, queries, keys, clusters, rest, sums, mass, top)
    problem = _problem(q, k, v, grad, *state, most, kept, scale, dropped(dropout, seed))
    call("clustered/backward.c", "backward", ClusteredBackward(problem, *rows_of(grad, *made)))
    return made


@custom_op(_empty, backward=_gradients, save=_keep)
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: Tensor,
    query_tokens: Tensor | None,
    key_tokens: Tensor | None,
    queries: Tensor,
    keys: Tensor,
    clusters: Tensor,
    most: int,
    kept: int,
    scale: float,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    state = (groups, query_tokens, key_tokens, queries, keys, clusters)
    made = _empty(q, k, v, *state, most, kept)
    problem = _problem(q, k, v, made[0], *state, *made[1:], most, kept, scale, dropped(dropout, seed))
    call("clustered/forward.c", "forward", problem)
    return made


def _problem(q: Tensor, k: Tensor, v: Tensor, out: Tensor, *state: Any) -> Clustered:
    groups, query_tokens, key_tokens, queries, keys, clusters, rest, sums, mass, top, most, kept, *numbers = state
    batch, heads, length, _ = q.shape
    whole, short, number = torch.int64, torch.int32, torch.float32
    places = (
        address(query_tokens, short, batch, length),
        address(key_tokens, short, batch, k.shape[2]),
        *(address(counts, whole, batch) for counts in (queries, keys, clusters)),
        address(groups, short, batch, heads, length),
        address(rest, number, batch, heads, most, v.shape[3]),
        *(address(each, number, batch, heads, most) for each in (sums, mass)),
        address(top, short, batch, heads, most, kept),
    )
    sizes = (batch, heads, length, k.shape[2], q.shape[3], v.shape[3], most, kept)
    how = q.dtype == torch.bfloat16, torch.get_num_threads()
    return Clustered(*sizes, *how, *rows_of(q, k, v, out), *places, *numbers)
