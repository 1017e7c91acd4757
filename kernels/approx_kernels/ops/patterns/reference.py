"""The sparse patterns, and softmax attention under them in plain PyTorch. Each pattern says once which query sees which key.

`Pattern.steps` is the definition of a pattern, a function of positions. Drawings and counts evaluate it; plain PyTorch,
the lists of keys in C and the lists of blocks in Triton are made from it. `Pattern.parts` only says where to look: how
queries are cut into blocks, and which stretches of keys may hold a key that a block sees.
"""

import functools
import math
import operator
import reprlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from approx_kernels.runtime.pytorch import changes, sdpa, without_functions
from approx_kernels.tokens import (
    blank_padding,
    by_step,
    check_draw,
    check_form,
    check_least,
    check_tensor,
    check_word,
    in_turns,
    stretches,
    without_padding,
)

Stretches = list[tuple[int, int]]

# Query blocks with their own draws; later blocks reuse them.
_DRAWN_BLOCKS = 1024
# Cached lists by draws, for a limited number of block counts each.
_LISTS = WeakTensorKeyDictionary()
_KEPT = 64
# Queries of a window that share their keys: a balance between computing outside the window and copying.
_BLOCK = 64
# Plans, by pattern and numbers of tokens.
_PLANS = 256

# An unnormalised softmax: the weighted sum of values, the sum of weights, and the largest score, to which both are relative.
Sums = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Part:
    """Where to look for the pairs of a pattern; every pair is in exactly one part.

    Attributes:
        pairs: From positions of queries and of keys to the pairs of this part.
        edges: Ranks of queries at which blocks begin, and their number at the end.
        stretches: From the ranks of a block's first query and of the one behind its last to ascending stretches of ranks of
            keys. Inside a stretch, whether a query of the block sees a key depends on their distance alone.
        queries: Positions of the queries by rank.
        keys: Positions of the keys by rank; a key may have several ranks.
        lead: Number of ranks at the front that are consecutive positions.
        moves: Whether the keys in reach move with the query, so that smaller blocks look at fewer keys in vain.
    """

    pairs: Callable[[Tensor, Tensor], Tensor]
    edges: Sequence[int]
    stretches: Callable[[int, int], Stretches]
    queries: Tensor
    keys: Tensor
    lead: int
    moves: bool = False


@dataclass(frozen=True)
class Pattern:
    """Which of n tokens see which. Settings that are wrong are refused with a `ValueError`.

    Attributes:
        causal: Whether a query sees only keys at or before its own position.
        op: The name under which implementations are chosen and GPU kernels checked.
    """

    op: ClassVar[str]
    causal: bool = False

    @property
    def count(self) -> int:
        """Number of steps."""
        return 1

    @property
    def ends(self) -> bool:
        """Whether what a query sees depends on where the sequence ends."""
        return False

    def steps(self, i: Tensor, j: Tensor, n: int) -> Sequence[Tensor]:
        """Whether, or how often, the queries at i see the keys at j in each step; `causal` restricts them further."""
        raise NotImplementedError

    def parts(self, first: int, n: int, step: int | None) -> list[Part]:
        """Where to look for the pairs of one step, or of all, if the queries are the tokens from `first` on."""
        raise NotImplementedError

    def allowed(self, i: Tensor, j: Tensor, n: int, step: int | None = None) -> Tensor:
        """Whether, or how often, queries see keys in one step, counted from 1, or in any of them."""
        steps = self.steps(i, j, n)
        pairs = functools.reduce(operator.or_, steps) if step is None else steps[step - 1]
        return pairs & (j <= i) if self.causal else pairs

    def part(
        self,
        first: int,
        n: int,
        step: int | None,
        edges: Iterable[int],
        stretches: Callable[[int, int], Stretches],
        *,
        gone: int = 0,
        gathered: Tensor | None = None,
        moves: bool = False,
    ) -> Part:
        """All pairs of a step, or of all, for queries in their order and the keys from `gone` on with others gathered behind them.

        Blocks of queries begin at the positions `edges`.
        """
        pairs = functools.partial(self.allowed, n=n, step=step)
        cut = sorted({0, *(edge - first for edge in edges if first < edge < n), n - first})
        place = torch.arange(n, device="cpu")
        keys = place[gone:] if gathered is None else torch.cat([place[gone:], gathered])
        return Part(pairs, cut, stretches, torch.arange(first, n, device="cpu"), keys, n - gone, moves)


@dataclass(frozen=True)
class Window(Pattern):
    """`local`, `longformer` and `sinks`: the keys around each query, and chosen tokens.

    Attributes:
        left: Keys seen before the query.
        right: Keys seen after it.
        tokens: Positions of the chosen tokens, ascending; those beyond the last token do not count.
        see_all: Whether the chosen tokens see every key.
        once: Whether these tokens are those of one input, for which lists of blocks on a GPU take longer than they save.
    """

    op: ClassVar[str] = "global_token_attention"
    left: int = 0
    right: int = 0
    tokens: Sequence[int] = ()
    see_all: bool = False
    once: bool = False

    def __post_init__(self) -> None:
        # A window may be said to be as wide as any input.
        check_least("left", self.left, 0, 2**48)
        check_least("right", self.right, 0, 2**48)
        check_form(causal=self.causal, see_all=self.see_all)
        if not isinstance(self.tokens, range | tuple):
            raise ValueError(
                f"tokens is of type {type(self.tokens).__name__}; expected a tuple of positions, or a range."
            )
        if isinstance(self.tokens, range):
            return
        for token in self.tokens:
            check_least("a chosen token", token, 0)
        if any(later <= token for token, later in pairwise(self.tokens)):
            raise ValueError(f"tokens are {reprlib.repr(self.tokens)}; expected ascending positions. Sort them.")

    def steps(self, i: Tensor, j: Tensor, n: int) -> list[Tensor]:
        """One step: the window, and to and from the chosen tokens."""
        near = within(i, j, self.left, self.right)
        if not self.tokens:
            return [near]
        chosen = torch.tensor(self._chosen(n), dtype=torch.long, device=i.device)
        near = near | torch.isin(j, chosen)
        return [near | torch.isin(i, chosen) if self.see_all else near]

    def _chosen(self, n: int) -> Sequence[int]:
        return self.tokens[: bisect_left(self.tokens, n)]

    def parts(self, first: int, n: int, step: int | None) -> list[Part]:
        """Blocks of queries with the keys in their reach; chosen queries apart from others, and chosen keys too."""
        chosen = self._chosen(n)
        # Chosen tokens beside each other are one stretch.
        breaks = [0, *(at for at in range(1, len(chosen)) if chosen[at] > chosen[at - 1] + 1), len(chosen)]
        runs = [(chosen[begin], chosen[end - 1] + 1) for begin, end in pairwise(breaks) if chosen]
        seeing = frozenset(chosen if self.see_all else ())

        def stretches(begin: int, end: int) -> Stretches:
            last = min(end + first, n) if self.causal else n
            low, high = max(begin + first - self.left, 0), min(end + first + self.right, last)
            if high <= low:
                # Queries far before all keys.
                return []
            if begin + first in seeing:
                return [(0, last)]
            inside = [(low, high), *runs]
            cuts = sorted({edge for each in inside for edge in each if edge <= last})
            return [(a, b) for a, b in pairwise(cuts) if any(low <= a and b <= high for low, high in inside)]

        edges = [edge for run in runs for edge in run] if seeing else []
        return [self.part(first, n, step, edges, stretches, moves=True)]


@dataclass(frozen=True)
class Blocks(Pattern):
    """`block`: blocks of tokens, and their neighbours.

    Attributes:
        size: Tokens of a block.
        neighbours: Blocks seen on each side.
        shift: Tokens by which the first block is shorter.
    """

    op: ClassVar[str] = "block_attention"
    size: int = 1
    neighbours: int = 0
    shift: int = 0

    def __post_init__(self) -> None:
        check_least("size", self.size, 1)
        check_least("neighbours", self.neighbours, 0)
        check_least("shift", self.shift, 0)
        check_form(causal=self.causal)

    def steps(self, i: Tensor, j: Tensor, n: int) -> list[Tensor]:
        """One step: blocks that are not far apart."""
        return [((i + self.shift) // self.size - (j + self.shift) // self.size).abs() <= self.neighbours]

    def parts(self, first: int, n: int, step: int | None) -> list[Part]:
        """Each block with one stretch of keys."""

        def edge(block: int) -> int:
            return min(max(block * self.size - self.shift, 0), n)

        def stretches(begin: int, end: int) -> Stretches:
            own = (begin + first + self.shift) // self.size
            return [(edge(own - self.neighbours), edge(own + (0 if self.causal else self.neighbours) + 1))]

        blocks = range((first + self.shift) // self.size, (n + self.shift) // self.size + 1)
        return [self.part(first, n, step, [edge(block) for block in blocks], stretches)]


@dataclass(frozen=True)
class Listed(Pattern):
    """`bigbird`: blocks of tokens, each with its list of blocks.

    Attributes:
        size: Tokens of a block.
        lists: For each block of queries, ascending blocks of keys, as often as they count; empty for all blocks.
    """

    op: ClassVar[str] = "bigbird_attention"
    size: int = 1
    lists: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        check_least("block", self.size, 1)

    def steps(self, i: Tensor, j: Tensor, n: int) -> list[Tensor]:
        """One step: how often the block of the key is on the list of the query's."""
        return [_table(self.lists).to(i.device)[i // self.size, j // self.size]]

    def parts(self, first: int, n: int, step: int | None) -> list[Part]:
        """Each block with the blocks on its list."""

        def stretches(begin: int, end: int) -> Stretches:
            listed = dict.fromkeys(self.lists[(begin + first) // self.size])
            return [(b * self.size, min((b + 1) * self.size, n)) for b in listed] or [(0, n)]

        return [self.part(first, n, step, range(0, n, self.size), stretches)]


@dataclass(frozen=True)
class Strided(Pattern):
    """`strided`: a window, and every l-th token.

    Attributes:
        stride: l.
    """

    op: ClassVar[str] = "strided_attention"
    stride: int = 1

    def __post_init__(self) -> None:
        check_least("stride", self.stride, 1)
        check_form(causal=self.causal)

    @property
    def count(self) -> int:
        """Two."""
        return 2

    def steps(self, i: Tensor, j: Tensor, n: int) -> list[Tensor]:
        """The keys nearer than l, and those at multiples of l."""
        return [(i - j).abs() < self.stride, (i - j) % self.stride == 0]

    def parts(self, first: int, n: int, step: int | None) -> list[Part]:
        """The window; and columns, once the tokens are laid out in rows of l, without what the window has."""
        window = Window(self.causal, left=self.stride - 1, right=0 if self.causal else self.stride - 1)
        near = window.parts(first, n, None)
        if step == 1:
            return near
        stride, place = min(self.stride, n), torch.arange(n, device="cpu")
        by_column, queries = ((x % stride).argsort(stable=True) for x in (place, place[first:]))
        ends = (place % stride).bincount(minlength=stride).cumsum(0).tolist()
        edges = [0, *(place[first:] % stride).bincount(minlength=stride).cumsum(0).tolist()]

        def stretches(begin: int, end: int) -> Stretches:
            column = bisect_right(edges, begin) - 1
            return [((0, *ends)[column], ends[column])]

        def pairs(i: Tensor, j: Tensor) -> Tensor:
            far = self.allowed(i, j, n, 2)
            return far if step == 2 else far & ~self.allowed(i, j, n, 1)

        far = Part(pairs, sorted(set(edges)), stretches, queries + first, by_column, 0)
        return [far] if step == 2 else [*near, far]


@dataclass(frozen=True)
class Summaries(Pattern):
    """`fixed`, `ltr` and `rtl`: blocks of tokens, and the summaries of the other blocks.

    Attributes:
        stride: Tokens of a block, l.
        summary: Columns of a summary, c.
        inside: What a query sees of its own block in step 1: `all`, the `past` or the `future` and itself. Summaries are the
            last columns of blocks, for the future the first. With two sides, steps 3 and 4 are those of the second.
    """

    op: ClassVar[str] = "summary_attention"
    stride: int = 1
    summary: int = 1
    inside: str = "all"

    def __post_init__(self) -> None:
        check_least("stride", self.stride, 1)
        check_least("summary", self.summary, 1)
        check_form(causal=self.causal)
        check_word("inside", self.inside, ("all", "past", "future", "past, future", "future, past"))
        if self.causal and self.inside != "past":
            raise ValueError(f"A causal pattern with inside={self.inside!r}; expected inside='past'.")

    @property
    def count(self) -> int:
        """Two for each side."""
        return 2 * len(self._sides)

    @property
    def ends(self) -> bool:
        """Whether a partial block has a summary of its last columns."""
        return not self.causal and self.inside != "future"

    @property
    def _sides(self) -> list[str]:
        return self.inside.split(", ")

    def steps(self, i: Tensor, j: Tensor, n: int) -> list[Tensor]:
        """For each side, the part of the own block, and the summaries of all blocks and the own key."""
        block = i // self.stride == j // self.stride
        own = {"all": block, "past": block & (j <= i), "future": block & (j >= i)}
        return [pairs for side in self._sides for pairs in (own[side], self._summarised(side, j, n) | (i == j))]

    def _summarised(self, side: str, j: Tensor, n: int) -> Tensor:
        if side == "future":
            return j % self.stride < self.summary
        end = (j // self.stride + 1) * self.stride
        # A causal block may still grow, so its summary is counted from its final end.
        return j >= (end if self.causal else end.clamp(max=n)) - self.summary

    def gathered(self, n: int, step: int | None) -> Tensor:
        """Positions of the tokens in the summaries that a step sees, or any of them."""
        j = torch.arange(n, device="cpu")
        sides = self._sides if step is None else [] if step % 2 else [self._sides[step // 2 - 1]]
        return j[functools.reduce(operator.or_, [self._summarised(side, j, n) for side in sides], j < 0)]

    def parts(self, first: int, n: int, step: int | None) -> list[Part]:
        """Each block with its own keys, cut where summaries are, and the summaries of the others, gathered behind all keys."""
        gone = first // self.stride * self.stride
        columns = self.gathered(n, step)
        # Ranks of summaries by block, and places where the columns of a summary begin or end.
        behind = (columns // self.stride).bincount(minlength=-(-n // self.stride)).cumsum(0).tolist()
        summarised = torch.zeros(n + 2, dtype=torch.int8, device="cpu").index_fill(0, columns + 1, 1)
        cuts = summarised.diff().nonzero().squeeze(1).tolist()

        def stretches(begin: int, end: int) -> Stretches:
            block = (begin + first) // self.stride
            low, high = block * self.stride, min((block + 1) * self.stride, n)
            own = pairwise([low, *cuts[bisect_right(cuts, low) : bisect_left(cuts, high)], high])
            far = [(0, behind[block - 1] if block else 0), (behind[block], behind[-1])]
            gathered = [(a + n - gone, b + n - gone) for a, b in (far[:1] if self.causal else far) if a < b]
            return [(a - gone, b - gone) for a, b in own] + gathered

        return [self.part(first, n, step, range(0, n, self.stride), stretches, gone=gone, gathered=columns)]


def within(i: Tensor, j: Tensor, left: int, right: int) -> Tensor:
    """Whether the keys at j are at most `left` before the queries at i and at most `right` after them."""
    return (j >= i - left) & (j <= i + right)


def draw_blocks(random: int, seed: int) -> Tensor:
    """Numbers that choose the random blocks of each query block, [blocks, random], int64."""
    check_draw(seed)
    check_least("random", random, 0)
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(2**31, (_DRAWN_BLOCKS, random), generator=generator, device="cpu")


def bigbird_lists(blocks: int, draws: Tensor, compatible: bool) -> tuple[tuple[int, ...], ...]:
    """Ascending blocks of keys for each block of queries; empty for those that see all: the first and the last.

    Lists are cached, since the next call probably needs the same ones.

    Args:
        blocks: Number of blocks.
        draws: The result of `draw_blocks`.
        compatible: Whether all random blocks repeat the first block, which is then listed that many more times.
    """
    check_tensor("draws", draws)
    if draws.ndim != 2 or not len(draws) or draws.dtype != torch.int64:
        raise ValueError(f"draws is {draws.dtype} of shape {list(draws.shape)}; expected torch.int64 [blocks, random].")
    count = changes(draws)
    if count is None:
        # Without a version counter a cached list might be stale.
        return _listed_blocks(blocks, draws, compatible)
    known = _LISTS.get(draws)
    if known is None:
        known = _LISTS[draws] = {}
    lists = known.get(key := (blocks, compatible, count))
    if lists is None:
        if len(known) >= _KEPT:
            known.clear()
        lists = known[key] = _listed_blocks(blocks, draws, compatible)
    return lists


def _listed_blocks(blocks: int, draws: Tensor, compatible: bool) -> tuple[tuple[int, ...], ...]:
    rows = torch.arange(1, max(blocks - 1, 1), device="cpu")
    seen = torch.stack([0 * rows, rows - 1, rows, rows + 1, 0 * rows + blocks - 1], 1)
    # Duplicates, and draws for which no unseen block is left, get a number beyond all blocks.
    beyond = 2**40
    seen = seen.masked_fill(F.pad(seen.diff() == 0, (1, 0)), beyond).sort(1).values
    for numbers in () if compatible else draws.cpu()[rows % len(draws)].unbind(1):
        left = blocks - (seen < beyond).sum(1)
        # The draw's index among the unseen blocks; it moves past the seen blocks before it.
        other = numbers % left.clamp(min=1)
        other = other + (seen - torch.arange(seen.shape[1], device="cpu") <= other[:, None]).sum(1)
        seen = torch.cat([seen, other.masked_fill(left == 0, beyond)[:, None]], 1).sort(1).values
    again = [0] * draws.shape[1] if compatible else []
    between = (tuple(again + [block for block in listed if block < beyond]) for listed in seen.tolist())
    return ((), *between, ())[:blocks]


@functools.lru_cache(_KEPT)
def _table(lists: tuple[tuple[int, ...], ...]) -> Tensor:
    """How often blocks of queries see blocks of keys."""
    with torch.inference_mode(False):
        rows = [torch.tensor(own, dtype=torch.long, device="cpu").bincount(minlength=len(lists)) for own in lists]
        return torch.stack([row if own else torch.ones_like(row) for row, own in zip(rows, lists, strict=True)])


@dataclass(frozen=True, eq=False)
class Block:
    """Ranks of the queries of a block, from `begin` to before `end`, and of its keys.

    Attributes:
        begin: First query.
        end: The query behind the last.
        keys: Stretches of keys.
        pairs: Whether, or how often, each query sees the first of these keys; they see all others once.
        count: Number of blocks of equal size side by side that this one stands for, each with as much of one stretch.
    """

    begin: int
    end: int
    keys: Stretches
    pairs: Tensor
    count: int = 1


@dataclass(frozen=True)
class Plan:
    """A part of a pattern, cut into blocks, and how to bring tokens into its order.

    Attributes:
        part: The part.
        order: Queries by rank; None if they are in their order.
        back: Ranks of the queries.
    """

    part: Part
    order: Tensor | None
    back: Tensor | None

    @functools.cached_property
    def blocks(self) -> list[Block]:
        """All queries in blocks, those of equal size side by side as one."""
        with torch.inference_mode(False):
            return list(_blocks(self.part))

    def gathered(self, x: Tensor) -> Tensor:
        """Keys or values, [B, H, S, D], by rank; those in their order are copied only to join others to them."""
        keys, lead = self.part.keys, self.part.lead
        front = x[:, :, x.shape[2] - lead :]
        return front if lead == len(keys) else torch.cat([front, x.index_select(2, keys[lead:].to(x.device))], 2)


@functools.lru_cache(_PLANS)
def planned(pattern: Pattern, first: int, n: int, step: int | None) -> Sequence[Plan]:
    """The parts of one step of a pattern, or of all, for the tokens from `first` on among n."""
    plans = []
    with torch.inference_mode(False):
        for part in pattern.parts(first, n, step):
            order = part.queries - first
            natural = bool((order.diff() == 1).all())
            ways = (None, None) if natural else (order, order.argsort())
            plans.append(Plan(part, *ways))
    return plans


def _blocks(part: Part) -> Iterator[Block]:
    last = None
    for first, end in pairwise(part.edges):
        for begin in range(first, end, _BLOCK if part.moves else end - first):
            block = _block(part, begin, min(begin + _BLOCK, end) if part.moves else end)
            if last is not None and torch.equal(last.pairs, block.pairs):
                # Most blocks have the same pairs, which are stored once.
                block = replace(block, pairs=last.pairs)
                if _continues(last, block):
                    keys = [(last.keys[0][0], block.keys[0][1])]
                    last = replace(last, end=block.end, keys=keys, count=last.count + 1)
                    continue
            if last is not None:
                yield last
            last = block
    if last is not None:
        yield last


def _block(part: Part, begin: int, end: int) -> Block:
    keys: Stretches = []
    for a, b in part.stretches(begin, end):
        # Beside each other they are one view.
        keys = [*keys[:-1], (keys[-1][0], b)] if keys and keys[-1][1] == a else [*keys, (a, b)]
    pairs = part.pairs(part.queries[begin:end, None], torch.cat([part.keys[a:b] for a, b in keys]))
    partial = (pairs != 1).any(0).nonzero()
    return Block(begin, end, keys, pairs[:, : int(partial[-1]) + 1 if len(partial) else 0].clone())


def _continues(last: Block, block: Block) -> bool:
    """Whether a block is as large as those before it and follows them, and its keys follow theirs."""
    sizes = [(x.end - x.begin, x.keys[0][1] - x.keys[0][0]) for x in (last, block)]
    single = len(last.keys) == len(block.keys) == 1 and block.keys[0][0] == last.keys[0][1]
    return single and sizes[0] == tuple(size * last.count for size in sizes[1])


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: int | None,
    *,
    pattern: Callable[[int], Pattern],
    scale: float,
    dropout: float,
) -> Tensor:
    """Attention of the last tokens, q [B, H, L, D], to keys [B, H, S, D], L <= S, in a step of the pattern of S tokens."""
    n = k.shape[2]
    plans = planned(pattern(n), n - q.shape[2], n, step)
    if len(plans) == 1:
        return _attend(q, k, v, plans[0], partial(_fused, scale=scale, dropout=dropout))[0]
    wide = torch.promote_types(q.dtype, torch.float32)
    queries, k, v = q.to(wide) * scale, k.to(wide), v.to(wide)
    return _joined([_attend(queries, k, v, plan, partial(_summed, dropout=dropout)) for plan in plans]).to(q.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, plan: Plan, block: Callable[..., Sequence[Tensor]]) -> Sequence[Tensor]:
    """What `block` gives for q, k, v and a mask, block by block, for all queries in their order."""
    q = q if plan.order is None else q.index_select(2, plan.order.to(q.device))
    masks = {id(own.pairs): own.pairs.to(q.device) for own in plan.blocks}
    bounds = [each for own in plan.blocks for each in own.keys]
    keys, values = (iter(stretches(plan.gathered(x), bounds)) for x in (k, v))
    results: list[Sequence[Tensor]] = []
    for own, queries in zip(plan.blocks, q.split([each.end - each.begin for each in plan.blocks], 2), strict=True):
        sides = [[next(x) for _ in own.keys] for x in (keys, values)]
        tensors = [queries, *(torch.cat(side, 2) if len(side) > 1 else side[0] for side in sides)]
        if own.count > 1:
            # Blocks beside each other are more samples, of which all have the same shape.
            tensors = [x.unflatten(2, (own.count, -1)).transpose(1, 2).flatten(0, 1) for x in tensors]
        pairs = masks[id(own.pairs)]
        pairs = F.pad(pairs, (0, tensors[1].shape[2] - pairs.shape[1]), value=1) if pairs.numel() else None
        made: Sequence[Tensor] = block(*tensors, pairs)
        if own.count > 1:
            made = [x.unflatten(0, (-1, own.count)).transpose(1, 2).flatten(2, 3) for x in made]
        results.append(made)
    joined = results[0] if len(results) == 1 else [torch.cat(each, 2) for each in zip(*results, strict=True)]
    return joined if plan.back is None else [x.index_select(2, plan.back.to(x.device)) for x in joined]


def _fused(q: Tensor, k: Tensor, v: Tensor, pairs: Tensor | None, *, scale: float, dropout: float) -> tuple[Tensor]:
    """Exact attention in PyTorch's fused kernel; what counts several times has a greater score."""
    if pairs is not None and pairs.dtype != torch.bool:
        pairs = pairs.to(q.dtype).log()
    return (sdpa(q, k, v, attn_mask=pairs, dropout_p=dropout, scale=scale),)


def _summed(q: Tensor, k: Tensor, v: Tensor, pairs: Tensor | None, *, dropout: float) -> Sums:
    """An unnormalised softmax over a part of the keys; q is scaled."""
    shape, shown = q.shape[:-1], q.new_ones(1, dtype=torch.bool) if pairs is None else pairs
    hide = q.new_zeros(shown.shape).masked_fill(~shown, torch.finfo(q.dtype).min)
    scores = hide + q @ k.transpose(-2, -1)
    # It cancels in the end, so it needs no gradient.
    top = scores.detach().amax(-1, keepdim=True)
    if without_functions():
        weights = _weights(scores, top, shown)
    else:
        weights: Tensor = _Weights.apply(scores, top, shown)  # pyright: ignore[reportAssignmentType]  # what forward returns
    return F.dropout(weights, dropout) @ v, weights.sum(-1).view(*shape, 1), top


def _weights(scores: Tensor, top: Tensor, shown: Tensor) -> Tensor:
    """`exp(scores - top)` where shown, else 0."""
    # Exponentials below the normal range are slow. If all keys are hidden, they are 1 without the mask.
    lowest = math.log(torch.finfo(scores.dtype).tiny) + 1.0
    weights = (scores - top).clamp_(min=lowest).exp_()
    # Its derivative reads the exponentials.
    return weights * shown if torch.is_grad_enabled() else weights.mul_(shown)


class _Weights(torch.autograd.Function):
    """`_weights`, whose backward pass stores only the result."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, top: Tensor, shown: Tensor) -> Tensor:
        weights = _weights(scores, top, shown)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]  # named arguments there
        (weights,) = ctx.saved_tensors
        return grad * weights, None, None


def _joined(parts: Sequence[Sequence[Tensor]]) -> Tensor:
    """One softmax over the keys of all parts."""
    top = functools.reduce(torch.maximum, [part[2] for part in parts])
    shares = [(part[2] - top).exp() for part in parts]
    weighed = [[part[which] * share for part, share in zip(parts, shares, strict=True)] for which in (0, 1)]
    out, total = (functools.reduce(operator.add, each) for each in weighed)
    return out / total


def pattern_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    pattern: Callable[[int], Pattern],
    steps: Sequence[int | None] = (None,),
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """The op of this name in `api.py`, which explains the arguments and checks them."""
    step_of_heads = partial(by_step, partial(_in_turns, pattern=pattern, scale=scale, dropout=dropout), steps=steps)
    return without_padding(step_of_heads, q, k, v, key_mask)


def _in_turns(q: Tensor, k: Tensor, v: Tensor, step: int | None, **how: Any) -> Tensor:
    return in_turns(partial(attend, step=step, **how), q, k, v)


def local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    left: int,
    right: int,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """The op of this name in `api.py`, which explains the arguments and checks them."""
    attend = partial(local_blocks, key_mask=key_mask, left=left, right=right, scale=scale, dropout=dropout)
    return in_turns(attend, q, k, v)


def local_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    *,
    left: int,
    right: int,
    scale: float,
    dropout: float,
) -> Tensor:
    """Fused exact attention between a block of queries and its stretch of keys, under the window's mask."""
    q, k, v = blank_padding(q, k, v, key_mask)
    if torch.compiler.is_exporting():
        return _all_blocks(q, k, v, key_mask, left=left, right=right, scale=scale, dropout=dropout)
    before = k.shape[2] - q.shape[2]
    if before < 0:
        # Queries that precede all keys: a mask gives them masked keys, so that they need no special case.
        key_mask = k.new_ones(k.shape[0], k.shape[2], dtype=torch.bool) if key_mask is None else key_mask
        k, v, key_mask = F.pad(k, (0, 0, -before, 0)), F.pad(v, (0, 0, -before, 0)), F.pad(key_mask, (-before, 0))
    length, keys = q.shape[2], k.shape[2]
    # Beyond the sequence there is nothing to reach.
    left, right = min(left, keys), min(right, keys)
    starts = range(keys - length, keys, _BLOCK)
    bounds = [(max(first - left, 0), min(first + _BLOCK + right, keys)) for first in starts]
    row = torch.arange(_BLOCK, device=q.device)[:, None]
    column = torch.arange(_BLOCK + left + right, device=q.device)
    # Every block has the same band, except where the sequence ends.
    band = within(row + left, column, left, right)
    out = []
    blocks = zip(starts, bounds, q.split(_BLOCK, 2), stretches(k, bounds), stretches(v, bounds), strict=True)
    for first, (begin, end), queries, own, values in blocks:
        cut = begin - (first - left)
        allowed = band[: queries.shape[2], cut : cut + end - begin]
        if key_mask is not None:
            allowed = allowed & key_mask[:, None, None, begin:end]
        out.append(_masked_attention(queries, own, values, allowed, scale, dropout, key_mask is not None))
    return torch.cat(out, 2)


def _all_blocks(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, left: int, right: int, scale: float, dropout: float
) -> Tensor:
    """The same for all blocks at once, since the number of steps of an exported program cannot depend on the length.

    There are at least as many keys as queries.
    """
    batch, heads, length, _ = q.shape
    # With one block more than needed there are always several; a program for several does not take a single one. After the
    # keys of a state there are few queries at a time, one block.
    keys = k.shape[2]
    size, blocks = (_BLOCK, (length + _BLOCK - 1) // _BLOCK + 1) if keys == length else (length, 1)
    end = blocks * size - length
    reach = torch.arange(size + left + right, device=q.device)
    # Positions in the padded keys, [blocks, reach].
    places = torch.arange(blocks, device=q.device)[:, None] * size + (keys - length) + reach
    real = k.new_ones(batch, keys, dtype=torch.bool) if key_mask is None else key_mask
    real = F.pad(real, (left, right + end))[:, places]
    own, values = (F.pad(x, (0, 0, left, right + end))[:, :, places] for x in (k, v))
    queries = F.pad(q, (0, 0, 0, end)).reshape(batch, heads, blocks, size, q.shape[3])
    queries, own, values = (x.transpose(1, 2).flatten(0, 1) for x in (queries, own, values))
    row = torch.arange(size, device=q.device)[:, None]
    band = within(row + left, reach, left, right)
    allowed = band & real.flatten(0, 1)[:, None, None, :]
    out = _masked_attention(queries, own, values, allowed, scale, dropout, True)
    out = out.reshape(batch, blocks, heads, size, v.shape[3]).transpose(1, 2)
    return out.reshape(batch, heads, blocks * size, v.shape[3])[:, :, :length]


def _masked_attention(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float, dropout: float, may_miss: bool
) -> Tensor:
    if not may_miss:
        return sdpa(q, k, v, attn_mask=allowed, dropout_p=dropout, scale=scale)
    # Kernels disagree on rows without an allowed key, so these see everything and are set to 0 afterwards.
    missed = ~allowed.any(-1, keepdim=True)
    mask = allowed | missed
    out = sdpa(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
    return out.masked_fill(missed, 0.0)
