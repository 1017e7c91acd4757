"""The definition of each sparse pattern: the pairs of positions in each of its steps."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from approx_kernels.runtime.pytorch import changes
from approx_kernels.tokens import CAUSAL_STRIDE, check_draw, check_least, root_above, root_below

# Query blocks with their own draws; later blocks reuse them.
_DRAWN_BLOCKS = 1024
# Cached lists by draws, for a limited number of block counts each.
_LISTS = WeakTensorKeyDictionary()
_KEPT = 64


def pattern_mask(name: str, length: int, causal: bool, settings: Mapping[str, Any]) -> Tensor:
    """Which query sees which key in each step of a sparse pattern, in O(n^2): for tests, figures and plots.

    A layer with `step` null and `mode` merged computes the union of the steps.

    Args:
        name: Name of the mechanism, e.g. `strided`.
        length: Number of tokens, n, at least 1.
        causal: Whether a query sees only keys at or before its own position.
        settings: All settings of the mechanism, except `mode` and `step`, which choose among the steps and are ignored.
            If they differ between layers, this is the lowest layer.

    Returns:
        [steps, n, n] bool, rows are queries.

    Raises:
        ValueError: if the pattern is unknown, has no such form, or the length is below 1.
    """
    if name not in _STEPS:
        raise ValueError(f"Pattern '{name}' is unknown; known are {', '.join(_STEPS)}.")
    if length < 1:
        raise ValueError(f"A pattern over {length} tokens was asked for; expected at least 1.")
    if (name in _ONLY_CAUSAL) if not causal else (name in _ONLY_BIDIRECTIONAL):
        raise ValueError(f"Pattern '{name}' has no {'causal' if causal else 'bidirectional'} form.")
    i, j = torch.arange(length)[:, None], torch.arange(length)
    steps = torch.stack([pairs.expand(length, length) for pairs in _STEPS[name](i, j, length, causal, settings)])
    return steps & (j <= i) if causal else steps


def left_out(
    name: str,
    length: int,
    causal: bool,
    settings: Mapping[str, Any],
    steps: Sequence[int | None] = (None,),
    heads: int = 1,
) -> float:
    """The share of all pairs that a pattern leaves out, averaged over heads, counted in at most 256 rows of queries.

    Args:
        name: As in `pattern_mask`.
        length: As in `pattern_mask`.
        causal: As in `pattern_mask`.
        settings: As in `pattern_mask`.
        steps: The steps that heads take in turn, from 1; None for all of them merged.
        heads: Number of heads.
    """
    i = torch.linspace(0, length - 1, min(length, 256)).round().long()[:, None]
    j = torch.arange(length)
    allowed = (j <= i) if causal else torch.ones(len(i), length, dtype=torch.bool)
    seen = torch.stack(
        [(pairs & allowed).expand(len(i), length) for pairs in _STEPS[name](i, j, length, causal, settings)]
    )
    taken = [steps[head % len(steps)] for head in range(heads)]
    kept = [float((seen.any(0) if step is None else seen[step - 1]).sum()) for step in taken]
    return 1 - sum(kept) / heads / float(allowed.sum())


def draw_blocks(random: int, seed: int) -> Tensor:
    """Numbers that choose the random blocks of each query block, [blocks, random], int64."""
    check_draw(seed)
    check_least("random", random, 0)
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(2**31, (_DRAWN_BLOCKS, random), generator=generator, device="cpu")


def bigbird_lists(blocks: int, draws: Tensor, compatible: bool) -> Sequence[Sequence[int]]:
    """Ascending blocks of keys for each block of queries; empty for those that see all: the first and the last.

    Lists are cached, since the next call probably needs the same ones.

    Args:
        blocks: Number of blocks.
        draws: The result of `draw_blocks`.
        compatible: Whether all random blocks repeat the first block, which is then listed that many more times.
    """
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


def _listed_blocks(blocks: int, draws: Tensor, compatible: bool) -> list[list[int]]:
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
    between = [again + [block for block in listed if block < beyond] for listed in seen.tolist()]
    return [[], *between, []][:blocks]


def _local(i: Tensor, j: Tensor, n: int, causal: bool, settings: Mapping[str, Any]) -> list[Tensor]:
    return [(j >= i - settings["left"]) & (j <= i + settings["right"])]


def _block(i: Tensor, j: Tensor, n: int, causal: bool, settings: Mapping[str, Any]) -> list[Tensor]:
    size, shift = settings["size"], 0 if settings["shift"] == "alternate" else settings["shift"]
    return [((i + shift) // size - (j + shift) // size).abs() <= settings["neighbours"]]


def _strided(i: Tensor, j: Tensor, n: int, causal: bool, settings: Mapping[str, Any]) -> list[Tensor]:
    stride = settings["stride"] or (CAUSAL_STRIDE if causal else root_above(n))
    return [(i - j).abs() < stride, (i - j) % stride == 0]


def _fixed(i: Tensor, j: Tensor, n: int, causal: bool, settings: Mapping[str, Any]) -> list[Tensor]:
    stride = settings["stride"] or (CAUSAL_STRIDE if causal else root_above(n))
    # A causal block may still grow, so its summary is counted from its final end.
    end = (j // stride + 1) * stride if causal else ((j // stride + 1) * stride).clamp(max=n)
    return [i // stride == j // stride, (j >= end - settings["summary"]) | (i == j)]


def _ltr(i: Tensor, j: Tensor, n: int, causal: bool, settings: Mapping[str, Any]) -> list[Tensor]:
    return _both_ways(i, j, n, settings)[: 4 if settings.get("both_directions") else 2]


def _rtl(i: Tensor, j: Tensor, n: int, causal: bool, settings: Mapping[str, Any]) -> list[Tensor]:
    steps = _both_ways(i, j, n, settings)
    return steps[2:] + steps[:2] if settings.get("both_directions") else steps[2:]


def _both_ways(i: Tensor, j: Tensor, n: int, settings: Mapping[str, Any]) -> list[Tensor]:
    stride, summary = settings["stride"] or root_below(n), settings["summary"]
    block, end = i // stride == j // stride, ((j // stride + 1) * stride).clamp(max=n)
    first, last = j % stride < summary, j >= end - summary
    return [block & (j <= i), last | (i == j), block & (j >= i), first | (i == j)]


def _bigbird(i: Tensor, j: Tensor, n: int, causal: bool, settings: Mapping[str, Any]) -> list[Tensor]:
    blocks = math.ceil(n / settings["block"])
    own, other = i // settings["block"], j // settings["block"]
    seen = torch.zeros(blocks, blocks, dtype=torch.bool)
    draws = draw_blocks(settings["random"], settings["seed"])
    for row, listed in enumerate(bigbird_lists(blocks, draws, settings["compatible"])):
        seen[row, listed] = True
    ends = (own == 0) | (own == blocks - 1) | (other == 0) | (other == blocks - 1)
    return [ends | ((own - other).abs() <= 1) | seen[own, other]]


def _sinks(i: Tensor, j: Tensor, n: int, causal: bool, settings: Mapping[str, Any]) -> list[Tensor]:
    return [(j < settings["sinks"]) | (i - j < settings["window"])]


def _longformer(i: Tensor, j: Tensor, n: int, causal: bool, settings: Mapping[str, Any]) -> list[Tensor]:
    tokens = [0] if settings["global_tokens"] == "first" else settings["global_tokens"]
    if isinstance(tokens, str):
        raise ValueError(
            f"Global tokens chosen by '{tokens}' stand elsewhere in each input; a pattern needs positions."
        )
    chosen = torch.isin(torch.arange(n), torch.tensor(tokens, dtype=torch.long))
    return [((i - j).abs() <= settings["window"] / 2) | chosen | chosen[i]]


_STEPS: dict[str, Callable[[Tensor, Tensor, int, bool, Mapping[str, Any]], list[Tensor]]] = {
    "local": _local,
    "block": _block,
    "strided": _strided,
    "fixed": _fixed,
    "ltr": _ltr,
    "rtl": _rtl,
    "bigbird": _bigbird,
    "sinks": _sinks,
    "longformer": _longformer,
}
_ONLY_CAUSAL = ("sinks",)
_ONLY_BIDIRECTIONAL = ("ltr", "rtl", "bigbird")
