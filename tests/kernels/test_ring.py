"""A ring keeps the keys in reach of later queries, in buffers that are written in place."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from approx_kernels.tokens import LEAST_ROOM, content, extended, first_and_newest, newest

pieces = st.lists(st.integers(1, 2 * LEAST_ROOM), min_size=1, max_size=4)


def numbered(batch: int, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [B, 2, n, 3] and values [B, 2, n, 1] that encode their sample and place."""
    place = torch.arange(first, first + count, dtype=torch.float64)
    number = (place + 10_000 * torch.arange(batch)[:, None])[:, None, :, None]
    return number.expand(batch, 2, count, 3).contiguous(), -number.expand(batch, 2, count, 1).contiguous()


def places(ring) -> list[list[int]]:
    """The places of the real keys of each sample, in their order."""
    k, v, real = content(ring)
    assert torch.equal(k[..., :1], -v)
    assert bool((k == k[:, :1, :, :1]).all())
    number = k[:, 0, :, 0].long() % 10_000
    real = torch.ones_like(number, dtype=torch.bool) if real is None else real
    return [row[keep].tolist() for row, keep in zip(number, real, strict=True)]


def steps(prompt: list[int], singles: int) -> list[int]:
    return [*prompt, *[1] * singles]


@given(
    pieces=pieces,
    singles=st.integers(0, 90),
    first=st.integers(0, 5),
    count=st.integers(0, 70),
    gone=st.integers(0, 30),
)
def test_holds_the_first_and_newest_keys_of_every_sample(pieces, singles, first, count, gone):
    ring, seen = None, 0
    padding = (0, gone)
    with torch.no_grad():
        for n in steps(pieces, singles):
            place = torch.arange(seen, seen + n)
            mask = torch.stack([place >= some for some in padding])
            ring = extended(ring, *numbered(2, seen, n), None if bool(mask.all()) else mask)
            ring = first_and_newest(ring, first, count)
            seen += n
            real = [list(range(some, seen)) for some in padding]
            expected = [row if len(row) <= first + count else row[:first] + row[len(row) - count :] for row in real]
            assert places(ring) == expected


@given(pieces=pieces, singles=st.integers(0, 90), count=st.integers(0, 70), grad=st.booleans())
def test_holds_the_newest_places_and_does_not_change_its_arguments(pieces, singles, count, grad):
    ring, seen, parts = None, 0, []
    with torch.set_grad_enabled(grad):
        for n in steps(pieces, singles):
            k, v = numbered(1, seen, n)
            parts.append((k, v))
            ring = newest(extended(ring, k, v, None), count)
            seen += n
            assert places(ring) == [list(range(max(seen - count, 0), seen))]
    for place, (k, v) in enumerate(parts):
        assert torch.equal(k, -v.expand_as(k))
        assert k[0, 0, 0, 0] == sum(steps(pieces, singles)[:place])


def test_tokens_that_follow_are_written_into_the_room_and_sizes_have_a_bound():
    ring, moves, at = None, 0, None
    with torch.no_grad():
        for step in range(1000):
            ring = first_and_newest(extended(ring, *numbered(1, step, 1), None), 4, 100)
            moves, at = moves + (at != ring["k"].data_ptr()), ring["k"].data_ptr()
            assert ring["k"].shape[2] <= 104 + LEAST_ROOM
    assert moves <= 1 + 1000 // LEAST_ROOM


def test_a_mask_is_dropped_when_padding_is_left_behind():
    mask = torch.tensor([[False, False, True], [True, True, True]])
    with torch.no_grad():
        ring = newest(extended(None, *numbered(2, 0, 3), mask), 4)
        assert content(ring)[2] is not None
        for step in range(3, 6):
            ring = newest(extended(ring, *numbered(2, step, 1), None), 4)
    assert content(ring)[2] is None
    assert places(ring) == [[2, 3, 4, 5]] * 2


@pytest.mark.parametrize("choose", [lambda x: x[[1, 1, 0]], lambda x: x.index_select(0, torch.tensor([1, 1, 0]))])
def test_selected_samples_are_independent(choose):
    with torch.no_grad():
        ring = newest(extended(None, *numbered(2, 0, 8), None), 5)
        ring = {name: choose(x) for name, x in ring.items()}
        k, v = numbered(3, 8, 1)
        ring = newest(extended(ring, k, v, None), 5)
    assert content(ring)[0][:, 0, :, 0].tolist() == [
        [10_004, 10_005, 10_006, 10_007, 8],
        [10_004, 10_005, 10_006, 10_007, 10_008],
        [4, 5, 6, 7, 20_008],
    ]


def test_gradients_reach_every_key():
    (k, v), (later, last) = numbered(1, 0, 3), numbered(1, 3, 1)
    leaves = [x.requires_grad_() for x in (k, v, later, last)]
    ring = newest(extended(None, k, v, None), 3)
    before = content(ring)[0]
    weights = before.square().sum()
    ring = newest(extended(ring, later, last, None), 3)
    first, *others = torch.autograd.grad(weights + sum(x.square().sum() for x in content(ring)[:2]), leaves)
    assert first[0, 0, :, 0].tolist() == [0.0, 4.0, 8.0]
    assert all(bool(x.any()) for x in others)


def test_a_ring_made_in_inference_mode_continues_outside():
    with torch.inference_mode():
        ring = newest(extended(None, *numbered(1, 0, 3), None), 3)
    with torch.no_grad():
        ring = newest(extended(ring, *numbered(1, 3, 1), None), 3)
    assert places(ring) == [[1, 2, 3]]


def test_numbers_that_need_more_precision_are_not_rounded():
    k, v = numbered(1, 0, 2)
    with torch.no_grad():
        ring = newest(extended(None, k.float(), v.float(), None), 3)
        ring = newest(extended(ring, k + 1 / 3, v - 1 / 3, None), 3)
    assert content(ring)[0].dtype == torch.float64
    assert content(ring)[0][0, 0, -1, 0] == 1 + 1 / 3
