"""The sparse patterns as masks: the figures that the papers and the arithmetic give."""

import pytest
import torch

from approx_kernels.ops.patterns.cpu import listed
from approx_kernels.ops.patterns.reference import (
    Blocks,
    Listed,
    Pattern,
    Strided,
    Summaries,
    Window,
    bigbird_lists,
    draw_blocks,
    planned,
)
from approx_kernels.tokens import root_below


def pattern_mask(pattern: Pattern, length: int) -> torch.Tensor:
    """Which query sees which key in each step, [steps, n, n]."""
    place = torch.arange(length)
    return torch.stack([pattern.allowed(place[:, None], place, length, step + 1) for step in range(pattern.count)])


def full_information(inside: str, length: int) -> torch.Tensor:
    return pattern_mask(Summaries(stride=root_below(length), inside=inside), length)


def bigbird(length: int, block: int, random: int, seed: int = 0) -> Listed:
    return Listed(size=block, lists=bigbird_lists(-(-length // block), draw_blocks(random, seed), False))


def reached(steps):
    """Share of pairs (i, j) where i hears from j once the steps were taken, the first one in the lowest layer."""
    paths = steps[0].float()
    for step in steps[1:]:
        paths = ((step.float() @ paths) > 0).float()
    return float(paths.mean())


def test_left_to_right_has_its_known_figures():
    steps = full_information("past", 1024)
    merged = steps.any(0)
    assert int(steps.sum()) == 50_656
    assert (int(merged.sum(1).min()), int(merged.sum(1).max())) == (33, 63)
    assert round(float(merged.float().mean()), 3) == 0.047
    assert reached(steps) == 1.0
    assert round(reached(steps.flip(0)), 3) == 0.047


@pytest.mark.parametrize("inside", ["past", "future"])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 512, 1024])
def test_two_steps_reach_everything_at_any_length(inside, length):
    assert reached(full_information(inside, length)) == 1.0


def test_without_a_summary_the_last_partial_block_would_be_lost():
    steps = full_information("past", 512)
    assert 512 % 22, "the root of 512 leaves a partial block"
    steps[1, :, 506:] &= torch.eye(512, dtype=torch.bool)[:, 506:]
    assert round(1 - reached(steps), 3) == 0.012


def test_right_to_left_mirrors_left_to_right():
    ltr, rtl = (full_information(inside, 1024) for inside in ("past", "future"))
    assert torch.equal(rtl, ltr.flip(1, 2))


@pytest.mark.parametrize("pattern", [Strided(True, stride=16), Summaries(True, stride=16, inside="past")])
def test_two_causal_steps_reach_all_of_the_past(pattern):
    assert reached(pattern_mask(pattern, 200)) == pytest.approx(201 / 400)


@pytest.mark.parametrize(
    "pattern",
    [
        Blocks(True, size=7, neighbours=1, shift=3),
        Strided(True, stride=9),
        Summaries(True, stride=9, summary=2, inside="past"),
        Window(True, left=5, tokens=range(4)),
        Window(True, left=3, right=3, tokens=(0, 11), see_all=True),
    ],
    ids=str,
)
def test_a_causal_pattern_does_not_change_as_the_sequence_grows(pattern):
    assert torch.equal(pattern_mask(pattern, 50)[:, :41, :41], pattern_mask(pattern, 41))


def test_bigbird_draws_the_requested_number_of_blocks_by_seed():
    one, two = (pattern_mask(bigbird(640, 10, 3, seed), 640)[0] for seed in (0, 1))
    blocks = one[::10, ::10]
    assert torch.equal(blocks.repeat_interleave(10, 0).repeat_interleave(10, 1), one)
    assert blocks[[0, -1]].all()
    assert blocks[:, [0, -1]].all()
    assert blocks[2:-2].sum(1).eq(3 + 2 + 3).all()
    assert not torch.equal(one, two)


FOUND = [
    Window(left=9, right=70),
    Window(True, left=120, tokens=range(5)),
    Window(left=4, right=4, tokens=(0, 1, 60, 99), see_all=True),
    Window(True, left=4, tokens=(30, 31), see_all=True),
    Blocks(size=30, neighbours=1, shift=11),
    Blocks(True, size=100, shift=50),
    bigbird(133, 16, 2),
    Listed(size=16, lists=bigbird_lists(9, draw_blocks(2, 0), True)),
    Strided(stride=12),
    Strided(True, stride=7),
    Strided(stride=200),
    Summaries(stride=12, summary=3),
    Summaries(True, stride=50, summary=3, inside="past"),
    Summaries(stride=30, summary=12, inside="future, past"),
]


@pytest.mark.parametrize("first", [0, 130, 40])
@pytest.mark.parametrize("pattern", FOUND, ids=str)
def test_blocks_and_lists_look_where_the_pairs_are(pattern, first):
    n = 133
    place = torch.arange(n)
    for step in (None, *range(1, pattern.count + 1)):
        exact = pattern.allowed(place[first:, None], place, n, step).long()
        plans = planned(pattern, first, n, step)
        found, entered = torch.zeros_like(exact), torch.zeros_like(exact)
        for plan in plans:
            for block in plan.blocks:
                sizes = (block.end - block.begin) // block.count, sum(b - a for a, b in block.keys) // block.count
                rows = plan.part.queries[block.begin : block.end].view(block.count, sizes[0], 1)
                keys = torch.cat([plan.part.keys[a:b] for a, b in block.keys]).view(block.count, 1, sizes[1])
                pairs = torch.nn.functional.pad(block.pairs.long(), (0, sizes[1] - block.pairs.shape[1]), value=1)
                found.index_put_((rows - first, keys), pairs.expand(block.count, *sizes), accumulate=True)
        lists = listed(pattern, first, n, step)
        for number, (start, end) in enumerate(zip(lists.starts[:-1].tolist(), lists.starts[1:].tolist(), strict=True)):
            part, rank = plans[start // (n - first)].part, start % (n - first)
            for a, b, low, high in lists.entries[lists.counts[number] : lists.counts[number + 1]].tolist():
                i, j = torch.arange(rank, rank + end - start)[:, None], torch.arange(a, b)
                seen = (j - i - first >= low) & (j - i - first <= high)
                where = (part.queries[i] - first, part.keys[j])
                entered.index_put_(where, seen.long(), accumulate=True)
        assert torch.equal(found, exact), step
        assert torch.equal(entered, exact), step


def test_a_stretch_inside_which_distance_does_not_decide_is_refused():
    class Odd(Window):
        def steps(self, i, j, n):
            return [(i * j) % 3 == 0]

    with pytest.raises(RuntimeError, match="by more than their distance"):
        listed(Odd(left=20, right=20), 0, 20, None)
