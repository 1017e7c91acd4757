"""Sparse patterns on a CPU: lists of keys for C, made from the pairs of a pattern."""

import functools
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from approx_kernels.ops.key_lists.cpu import FAR, MOST_ROWS, WINDOW_ROWS, Entry, attend, cut
from approx_kernels.ops.patterns.reference import Part, Pattern, Plan, planned

# Lists, by pattern and numbers of tokens.
_KEPT = 256


class Lists(NamedTuple):
    """The arguments of `attend` that hold lists and orders, see `attend_lists`; and the plan by which to gather keys, or None."""

    starts: Tensor
    counts: Tensor
    entries: Tensor
    queries: Tensor | None
    keys: Tensor | None
    plan: Plan | None


def pattern_lists(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: int | None = None,
    key_mask: Tensor | None = None,
    *,
    pattern: Callable[[int], Pattern],
    scale: float,
    dropout: float = 0.0,
    totals: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of the last tokens, q [B, H, L, D], to keys [B, G, S, D] in a step of the pattern of S tokens.

    Only of a window there may be more queries than keys.

    Returns:
        Outputs [B, H, L, E]; and if `totals`, the normaliser of each query relative to its largest weight, [B, H, L] in float32.
    """
    n, before = k.shape[2], k.shape[2] - q.shape[2]
    *lists, plan = listed(pattern(n), before, n, step)
    if plan is not None:
        k, v = plan.gathered(k), plan.gathered(v)
    mask = None if key_mask is None else key_mask.contiguous()
    out, _, relative = attend(
        q, k, v, mask, None, *lists, None, None, None, before, scale, 1, 0.0, dropout, totals=totals
    )
    return out, relative


@functools.lru_cache(_KEPT)
def listed(pattern: Pattern, before: int, n: int, step: int | None) -> Lists:
    """The lists of a step of a pattern, or of all, for the tokens from `before` on among n.

    If queries keep their order, keys that stand elsewhere are gathered; otherwise C reads both by rank.
    """
    with torch.inference_mode(False):
        plans = planned(pattern, before, n, step)
        starts, entries = [], []
        for number, plan in enumerate(plans):
            for first, last in pairwise(plan.part.edges):
                for begin, end in pairwise([*cut(first, last, WINDOW_ROWS if plan.part.moves else MOST_ROWS), last]):
                    starts.append(number * (n - before) + begin)
                    entries.append(_joined(_entries(plan.part, begin, end, before)))
        counts = torch.tensor([0, *map(len, entries)]).cumsum(0)
        flat = torch.tensor([each for own in entries for each in own], dtype=torch.int32).view(-1, 4)
        lists = torch.tensor([*starts, len(plans) * (n - before)]), counts, flat
        if len(plans) == 1 and plans[0].order is None:
            return Lists(*lists, None, None, plans[0])
        queries = torch.stack([plan.part.queries - before for plan in plans]).int()
        return Lists(*lists, queries, torch.stack([plan.part.keys for plan in plans]).int(), None)


def _entries(part: Part, begin: int, end: int, before: int) -> Iterator[Entry]:
    """The list of a block of queries, by ranks.

    Raises:
        RuntimeError: if inside a stretch more than the distance decides what is seen.
    """
    for first, last in part.stretches(begin, end):
        pairs = part.pairs(part.queries[begin:end, None], part.keys[first:last])
        if (times := int(pairs.max())) == pairs.min():
            yield from [(first, last, -FAR, FAR)] * times
            continue
        if pairs.dtype != torch.bool or not torch.equal(pairs[1:, 1:], pairs[:-1, :-1]):
            raise RuntimeError(f"Queries {begin} to {end} see keys {first} to {last} by more than their distance.")
        # By distance, from that of the last query and the first key on.
        seen = torch.cat([pairs[:, 0].flip(0), pairs[0, 1:]])
        edges = pad(seen.int(), (1, 1)).diff().nonzero().squeeze(1).tolist()
        least = first - (before + end - 1)
        for low, high in zip(edges[::2], edges[1::2], strict=True):
            yield first, last, least + low if low else -FAR, least + high - 1 if high < len(seen) else FAR


def _joined(entries: Iterable[Entry]) -> list[Entry]:
    """Entries beside each other that reach equally far, as one."""
    joined: list[Entry] = []
    for entry in entries:
        first = entry[0]
        if joined and joined[-1][1] == first and joined[-1][2:] == entry[2:]:
            first = joined.pop()[0]
        joined.append((first, *entry[1:]))
    return joined
