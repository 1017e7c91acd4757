"""BigBird compared with Hugging Face's, with blocks that count several times, and the state of its random blocks."""

import pytest
import torch

from approx.mechanisms.bigbird import BigBirdAttention
from approx_kernels.ops.patterns.reference import _KEPT, _LISTS, bigbird_lists, draw_blocks


@pytest.mark.parametrize("length", [1, 5, 11, 12, 30, 65])
@pytest.mark.parametrize("random", [0, 3])
def test_compatible_counts_the_first_block_as_often_as_it_is_listed(length, random):
    q, k, v, grad = torch.randn(4, 2, 3, length, 8, dtype=torch.float64).unbind()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    actual = BigBirdAttention(3, 8, causal=False, scale=0.35, block=4, random=random, compatible=True)(*inputs)
    block = torch.arange(length) // 4
    last = (length - 1) // 4
    counts = ((block[:, None] - block).abs() <= 1) | (block == 0) | (block == last)
    counts = counts.double() + random * (block == 0)
    counts[(block == 0) | (block == last)] = 1
    expected = (0.35 * inputs[0] @ inputs[1].mT + counts.log()).softmax(-1) @ inputs[2]
    torch.testing.assert_close(actual, expected)
    for ours, theirs in zip(
        torch.autograd.grad(actual, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_lists_are_kept_until_the_draws_change_and_only_so_many():
    draws = draw_blocks(2, 0)
    first = bigbird_lists(20, draws, False)
    assert bigbird_lists(20, draws, False) is first
    draws.copy_(draw_blocks(2, 1))
    assert bigbird_lists(20, draws, False) == bigbird_lists(20, draw_blocks(2, 1), False) != first
    for blocks in range(1, 2 * _KEPT):
        bigbird_lists(blocks, draws, False)
    assert len(_LISTS[draws]) <= _KEPT
    with torch.inference_mode():
        frozen = draws.clone()
        bigbird_lists(20, frozen, False)
        frozen.copy_(draw_blocks(2, 0))
        assert bigbird_lists(20, frozen, False) == first


def test_random_blocks_are_drawn_from_all_that_are_not_seen_and_serve_again_in_long_inputs():
    draws = draw_blocks(3, 0)
    lists = bigbird_lists(1500, draws, False)
    assert all(sorted(set(listed)) == list(listed) for listed in lists)
    assert {len(listed) for listed in lists[2:-2]} == {8}
    spread = torch.tensor([block for listed in lists[2:-2] for block in listed[1:-1]]).float() / 1499
    assert 0.4 < float(spread.mean()) < 0.6
