"""Attention of tiles of queries, each to one stretch of sorted keys, merged over the rounds."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from approx_kernels.lsh.plan import Plan, Round

# Numbers in a working set: 1 MiB of float32, about what a core's own cache holds; a GPU wants all it can get.
_CACHED, _ON_GPU = 2**18, 2**26


def tile_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float, dropout: float, dedup: bool
) -> tuple[Tensor, Tensor]:
    """Softmax attention over what the rounds of the plan show to each query, and the logarithm of its normaliser.

    Scores exist for some tiles at a time, also in the backward pass, which computes them anew: memory is that of the
    inputs and the plan. Gradients pass through both results.

    Args: q [B·H·L, D], k [B·H·S, D], v [B·H·S, E], of one dtype of 32 bits at least.

    Returns:
        [B·H·L, E] and [B·H·L]; 0 and -inf for a query that sees nothing.
    """
    # One draw repeats all masks in the backward pass.
    seed = int(torch.randint(2**31, ())) if dropout else 0
    return _TileAttention.apply(q, k, v, plan, scale, dropout, seed, dedup)  # pyright: ignore[reportReturnType]  # what forward returns


class _TileAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float, dropout: float, seed: int, dedup: bool
    ) -> tuple[Tensor, Tensor]:
        work = _Work(q, k, v, plan, scale, dropout, seed, dedup)
        out, lse = v.new_zeros(q.shape[0], v.shape[1]), q.new_full(q.shape[:1], -torch.inf)
        for number, tiles in enumerate(plan.rounds):
            slots = tiles.queries.numel()
            # One slot more, for the queries that take no part.
            parts, part_lse = v.new_empty(slots + 1, v.shape[1]), q.new_empty(slots + 1)
            parts[slots], part_lse[slots] = 0.0, -torch.inf
            for own, rows, queries, keys, scores, count in work.blocks(number):
                top = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
                weights = scores.sub_(top).exp_()
                weights = weights if count is None else weights.div_(count)
                total = weights.sum(-1, keepdim=True)
                part_lse[own] = (top + total.log()).flatten()
                weights = weights.div_(total.clamp(min=torch.finfo(total.dtype).tiny))
                values = v.index_select(0, rows).view(*keys.shape[:2], -1)
                parts[own] = torch.bmm(work.dropped(weights), values).flatten(0, 1)
            part, new = parts.index_select(0, tiles.slot), part_lse.index_select(0, tiles.slot)
            both = torch.logaddexp(lse, new)
            finite = both.masked_fill(both == -torch.inf, 0.0)
            out = torch.addcmul(out * (lse - finite).exp()[:, None], part, (new - finite).exp()[:, None])
            lse = both
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = plan, scale, dropout, seed, dedup
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]  # named arguments there
        q, k, v, out, lse = ctx.saved_tensors
        plan, scale, dropout, seed, dedup = ctx.rest
        work = _Work(q, k, v, plan, scale, dropout, seed, dedup)
        delta = (grad * out).sum(-1) - grad_lse
        finite = lse.masked_fill(lse == -torch.inf, 0.0)
        grad_q, grad_k, grad_v = (torch.zeros_like(x) for x in (q, k, v))
        for number, tiles in enumerate(plan.rounds):
            parts = q.new_zeros(tiles.queries.numel() + 1, q.shape[1])
            for own, rows, queries, keys, scores, count in work.blocks(number):
                mine = tiles.queries.flatten()[own]
                weights = scores.sub_(finite.index_select(0, mine).view(*scores.shape[:2], 1)).exp_()
                weights = weights if count is None else weights.div_(count)
                outer = grad.index_select(0, mine).view(*scores.shape[:2], -1)
                values = v.index_select(0, rows).view(*keys.shape[:2], -1)
                mask = work.dropped(torch.ones_like(weights)) if dropout else None
                used = weights if mask is None else weights * mask
                grad_v.index_add_(0, rows, torch.bmm(used.transpose(1, 2), outer).flatten(0, 1))
                inner = torch.bmm(outer, values.transpose(1, 2))
                inner = inner if mask is None else inner.mul_(mask)
                inner.sub_(delta.index_select(0, mine).view(*scores.shape[:2], 1)).mul_(weights).mul_(scale)
                parts[own] = torch.bmm(inner, keys).flatten(0, 1)
                grad_k.index_add_(0, rows, torch.bmm(inner.transpose(1, 2), queries).flatten(0, 1))
            grad_q += parts.index_select(0, tiles.slot)
        return grad_q, grad_k, grad_v, None, None, None, None, None


class _Work:
    """The scores of one pass, some tiles at a time, the same in the forward and the backward pass."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float, dropout: float, seed: int, dedup: bool
    ) -> None:
        self.q, self.k, self.plan, self.scale, self.dropout, self.dedup = q, k, plan, scale, dropout, dedup
        self.generator = torch.Generator(q.device).manual_seed(seed) if dropout else None
        tile, width = plan.rounds[0].queries.shape[1], plan.width
        each = tile * width + (tile + width) * (q.shape[1] + v.shape[1])
        self.together = max(1, (_CACHED if q.device.type == "cpu" else _ON_GPU) // each)
        self.steps = torch.arange(width, dtype=torch.int32, device=q.device)

    def blocks(self, number: int) -> Iterator[tuple[slice, Tensor, Tensor, Tensor, Tensor, Tensor | None]]:
        """Slots, rows of the keys, queries [N, T, D], keys [N, U, D], scores [N, T, U], and how often a pair is met."""
        plan, tiles = self.plan, self.plan.rounds[number]
        for begin in range(0, tiles.queries.shape[0], self.together):
            members = tiles.queries[begin : begin + self.together]
            count, tile = members.shape
            low = tiles.low[members[:, 0]]
            room = tiles.room[members].masked_fill(~tiles.filled[begin : begin + self.together], 0).int()
            # Beyond its room a query sees nothing: any key that it does see stands there.
            rank = torch.minimum(low[:, None] + self.steps, (low + room.amax(-1) - 1)[:, None])
            entries = tiles.order[rank]
            rows = plan.keys[entries].flatten()
            queries = self.q.index_select(0, members.flatten()).view(count, tile, -1)
            keys = self.k.index_select(0, rows).view(count, plan.width, -1)
            scores = torch.bmm(queries, keys.transpose(1, 2)).mul_(self.scale)
            scores.masked_fill_(self.steps >= room[..., None], -torch.inf)
            if plan.own is not None:
                self._leave_out_own(scores, tiles.rank[plan.own[members]] - low[:, None])
            met = self._met(number, members, entries) if self.dedup else None
            yield slice(begin * tile, (begin + count) * tile), rows, queries, keys, scores, met

    def _leave_out_own(self, scores: Tensor, at: Tensor) -> None:
        inside = (at >= 0) & (at < scores.shape[-1])
        index = at.clamp(0, scores.shape[-1] - 1)[..., None]
        scores.scatter_(-1, index, scores.gather(-1, index).masked_fill(inside[..., None], -torch.inf))

    def _met(self, number: int, members: Tensor, entries: Tensor) -> Tensor:
        """In how many rounds each query of a tile sees each key of its stretch, [N, T, U], this one included."""
        met = self.q.new_ones(*members.shape, entries.shape[1])
        for other, tiles in enumerate(self.plan.rounds):
            if other != number:
                at = tiles.rank[entries].int()[:, None] - tiles.low[members].int()[..., None]
                met += (at >= 0) & (at < tiles.room[members].int()[..., None])
        return met

    def dropped(self, weights: Tensor) -> Tensor:
        """The weights after dropout; called in the same order in both passes."""
        if self.generator is None:
            return weights
        kept = torch.rand(weights.shape, generator=self.generator, device=weights.device) >= self.dropout
        return weights * kept / (1 - self.dropout)
