"""Attention of tiles of queries, each to one stretch of sorted keys, merged over the rounds."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from approx_kernels.ops.lsh.plan import Plan

# Numbers in a working set: 1 MiB of float32, about the size of a core's own cache; a GPU benefits from more.
_ON_CPU, _ON_GPU = 2**18, 2**26


def tile_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, dropout: float, dedup: bool
) -> tuple[Tensor, Tensor]:
    """Softmax attention over the keys that the rounds of the plan show to each query, and the log of its normaliser.

    Scores exist for only some tiles at a time, also in the backward pass, which recomputes them: memory is that of the
    inputs and the plan. Gradients pass through both results.

    Args: q [B·H·L, D], already scaled, k [B·H·S, D], v [B·H·S, E], of one dtype of at least 32 bits.

    Returns:
        [B·H·L, E] and [B·H·L]; 0 and -inf for a query that sees nothing.
    """
    # One seed reproduces all masks in the backward pass.
    seed = int(torch.randint(2**31, ())) if dropout else 0
    return _TileAttention.apply(q, k, v, plan, dropout, seed, dedup)  # pyright: ignore[reportReturnType]  # what forward returns


class _TileAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float, seed: int, dedup: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.rest = plan, dropout, seed, dedup
        work = _Work(q, k, v, *ctx.rest)
        out, lse = v.new_zeros(q.shape[0], v.shape[1]), q.new_full(q.shape[:1], -torch.inf)
        for number, tiles in enumerate(plan.rounds):
            # An extra slot, for queries that take no part.
            sums = v.new_empty(tiles.queries.numel() + 1, v.shape[1])
            sums[-1] = 0.0
            top = q.new_full(sums.shape[:1], -torch.inf)
            total = q.new_zeros(sums.shape[:1])
            for block in work.blocks(number):
                shape = block.scores.shape
                most = torch.amax(block.scores, -1, out=top[block.slots].view(shape[:2]))
                most = most.clamp(min=torch.finfo(most.dtype).min)
                weights = block.scores.sub_(most[..., None]).exp_()
                weights = weights if block.met is None else weights.div_(block.met)
                torch.sum(weights, -1, out=total[block.slots].view(shape[:2]))
                torch.bmm(work.dropped(weights), block.values, out=sums[block.slots].view(*shape[:2], -1))
            # Sums of weights relative to their maximum, merged as in an online softmax.
            top, total = top.index_select(0, tiles.slot), total.index_select(0, tiles.slot)
            both = torch.logaddexp(lse, top + total.log())
            finite = both.masked_fill(both == -torch.inf, 0.0)
            out.mul_((lse - finite).exp_()[:, None])
            out.addcmul_(sums.index_select(0, tiles.slot), (top - finite).exp_()[:, None])
            lse = both
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]  # named arguments there
        q, k, v, out, lse = ctx.saved_tensors
        plan, dropout, seed, dedup = ctx.rest
        work = _Work(q, k, v, plan, dropout, seed, dedup)
        delta = (grad * out).sum(-1) - grad_lse
        lse = lse.masked_fill(lse == -torch.inf, 0.0)
        grad_q, grad_k, grad_v = (torch.zeros_like(x) for x in (q, k, v))
        for number, tiles in enumerate(plan.rounds):
            parts = q.new_empty(tiles.queries.numel() + 1, q.shape[1])
            parts[-1] = 0.0
            members = tiles.queries.flatten()
            for block in work.blocks(number):
                shape, mine = block.scores.shape, members[block.slots]
                weights = block.scores.sub_(lse.index_select(0, mine).view(*shape[:2], 1)).exp_()
                weights = weights if block.met is None else weights / block.met
                outer = grad.index_select(0, mine).view(*shape[:2], -1)
                kept = work.dropped(torch.ones_like(weights)) if dropout else None
                used = weights if kept is None else weights * kept
                grad_v.index_add_(0, block.rows, torch.bmm(used.transpose(1, 2), outer).flatten(0, 1))
                inner = torch.bmm(outer, block.values.transpose(1, 2))
                inner = inner if kept is None else inner.mul_(kept)
                inner.sub_(delta.index_select(0, mine).view(*shape[:2], 1)).mul_(weights)
                parts[block.slots] = torch.bmm(inner, block.keys).flatten(0, 1)
                grad_k.index_add_(0, block.rows, torch.bmm(inner.transpose(1, 2), block.queries).flatten(0, 1))
            grad_q += parts.index_select(0, tiles.slot)
        return grad_q, grad_k, grad_v, None, None, None, None


class _Block(NamedTuple):
    """Some tiles of a round."""

    slots: slice
    rows: Tensor  # [N·U] rows of the keys
    queries: Tensor  # [N, T, D]
    keys: Tensor  # [N, U, D]
    values: Tensor  # [N, U, E]
    scores: Tensor  # [N, T, U], -inf where a query does not see a key
    met: Tensor | None  # [N, T, U] in how many rounds it does, where that matters


class _Work:
    """The blocks of one pass, the same in the forward and the backward pass."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float, seed: int, dedup: bool) -> None:
        self.q, self.k, self.v, self.plan, self.dropout, self.dedup = q, k, v, plan, dropout, dedup
        self.generator = torch.Generator(q.device).manual_seed(seed) if dropout else None
        tile, width = plan.rounds[0].queries.shape[1], plan.width
        each = tile * width + (tile + width) * q.shape[1] + width * v.shape[1]
        self.together = max(1, (_ON_CPU if q.device.type == "cpu" else _ON_GPU) // each)
        self.stretches = [tuple(x.int() for x in (each.rank, each.low, each.room)) for each in plan.rounds if dedup]
        self.steps = torch.arange(width, dtype=torch.int32, device=q.device)

    def blocks(self, number: int) -> Iterator[_Block]:
        """Gather the queries, keys and values of some tiles into reused memory, and score them."""
        plan, tiles, width = self.plan, self.plan.rounds[number], self.plan.width
        low = tiles.low[tiles.queries[:, 0]]
        room = tiles.room[tiles.queries].masked_fill(~tiles.filled, 0)
        # Beyond its room a query sees nothing, so any key that the tile sees can fill in.
        rank = torch.minimum(low[:, None] + self.steps, (low + room.amax(-1) - 1)[:, None])
        entries = tiles.order[rank]
        rows, members = plan.keys[entries], tiles.queries
        own = None if plan.own is None else tiles.rank[plan.own[members]] - low[:, None]
        all_seen = bool((room == width).all())
        room = room.int()
        tile = members.shape[1]
        memory, score_memory = [None] * 3, None
        # A graph for second derivatives keeps everything.
        if not torch.is_grad_enabled():
            sizes = (tile * self.q.shape[1], width * self.k.shape[1], width * self.v.shape[1], tile * width)
            *memory, score_memory = (self.q.new_empty(self.together * size) for size in sizes)
        for begin in range(0, members.shape[0], self.together):
            count = min(self.together, members.shape[0] - begin)
            now = slice(begin, begin + count)
            own_rows = rows[now].flatten()
            sources = zip((self.q, self.k, self.v), (members[now].flatten(), own_rows, own_rows), memory, strict=True)
            queries, keys, values = (_taken(x, index, place).view(count, -1, x.shape[1]) for x, index, place in sources)
            place = None if score_memory is None else score_memory[: count * tile * width].view(count, tile, width)
            scores = torch.bmm(queries, keys.transpose(1, 2), out=place)
            if not all_seen:
                scores.masked_fill_(self.steps >= room[now][..., None], -torch.inf)
            if own is not None:
                _leave_out(scores, own[now])
            met = self._met(number, members[now], entries[now]) if self.dedup else None
            yield _Block(
                slice(begin * tile, (begin + count) * tile), rows[now].flatten(), queries, keys, values, scores, met
            )

    def _met(self, number: int, members: Tensor, entries: Tensor) -> Tensor:
        counts = torch.uint8 if len(self.stretches) < 256 else torch.int32
        met = torch.ones(*members.shape, entries.shape[1], dtype=counts, device=members.device)
        for other, (rank, low, room) in enumerate(self.stretches):
            if other != number:
                at = rank[entries][:, None] - low[members][..., None]
                met += ((at >= 0) & (at < room[members][..., None])).view(torch.uint8)
        return met.to(self.q.dtype)

    def dropped(self, weights: Tensor) -> Tensor:
        """The weights after dropout; called in the same order in both passes."""
        if self.generator is None:
            return weights
        kept = torch.rand(weights.shape, generator=self.generator, device=weights.device) >= self.dropout
        return weights * kept / (1 - self.dropout)


def _taken(x: Tensor, index: Tensor, place: Tensor | None) -> Tensor:
    """Rows of x [n, D], in `place` where there is one."""
    out = None if place is None else place[: index.numel() * x.shape[1]].view(-1, x.shape[1])
    return torch.index_select(x, 0, index, out=out)


def _leave_out(scores: Tensor, at: Tensor) -> None:
    """Hide the key `at` [N, T] steps into the stretch from all queries."""
    inside = (at >= 0) & (at < scores.shape[-1])
    index = at.clamp(0, scores.shape[-1] - 1)[..., None]
    scores.masked_fill_(torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, index, inside[..., None]), -torch.inf)
