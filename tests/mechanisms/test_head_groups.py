"""Groups of heads: the properties of a layer with several mechanisms, and that each head gets its own mechanism's output."""

import pytest
import torch

from approx.mechanisms import MECHANISMS
from approx.mechanisms.mechanism import HeadGroups
from forms import SMALL

SIZE, LENGTH = 8, 30


def one(name, heads, causal=True, **settings):
    return MECHANISMS[name](heads, SIZE, causal=causal, scale=0.5, **(SMALL.get(name, {}) | settings))


def two(first, second, causal=True):
    """A layer whose heads 0 and 2 have one mechanism and whose head 1 has another."""
    return HeadGroups([([0, 2], one(first, 2, causal)), ([1], one(second, 1, causal))])


@pytest.mark.parametrize(
    ("first", "second", "state"),
    [
        ("linear", "performer", "recurrent"),
        ("linear", "local", "ring"),
        ("sinks", "local", "ring"),
        ("sinks", "full", "cache"),
        ("strided", "linear", "cache"),
    ],
)
def test_groups_decode_from_a_cache_that_all_can_read(first, second, state):
    assert two(first, second).decode_state == two(second, first).decode_state == state
    assert two(first, second).supports_decode


def test_groups_are_sparse_and_decode_as_their_mechanisms():
    assert two("linear", "local").sparse
    assert not two("linear", "full").sparse
    assert not two("full", "ltr", causal=False).supports_decode


def test_operations_add_up_and_memory_is_that_of_the_largest_group():
    small, large = one("local", 1), one("full", 2)
    both = HeadGroups([([1], small), ([0, 2], large)])
    assert both.flops(LENGTH) == small.flops(LENGTH) + large.flops(LENGTH)
    assert small.memory(LENGTH) < large.memory(LENGTH)
    assert both.memory(LENGTH) == large.memory(LENGTH) + 4 * 3 * LENGTH * SIZE
    assert repr(both).startswith("HeadGroups(\n  heads=[[1], [0, 2]]")


@pytest.mark.parametrize("order", [([0, 1], [2]), ([0, 2], [1]), ([2, 0], [1])], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_each_head_has_the_output_of_its_mechanism(order, causal):
    first, second = one("local", 2, causal), one("linear", 1, causal)
    groups = HeadGroups([(order[0], first), (order[1], second)])
    q, k, v = torch.randn(3, 2, 3, LENGTH, SIZE).unbind()
    mask = torch.arange(LENGTH) < torch.tensor([[LENGTH], [17]])
    out = groups(q, k, v, mask)
    for heads, mechanism in zip(order, (first, second), strict=True):
        assert torch.equal(out[:, heads], mechanism(q[:, heads], k[:, heads], v[:, heads], mask))


def test_each_group_is_exact_below_its_own_limit_and_the_layer_below_all_of_them():
    first, second = one("local", 1), one("linear", 1)
    first.exact_below, second.exact_below = 20, 10
    groups, exact = HeadGroups([([0], first), ([1], second)]), one("full", 2)
    assert groups.exact_below == 10
    for length, left in ((9, [True, True]), (10, [True, False]), (19, [True, False]), (20, [False, False])):
        q, k, v = torch.randn(3, 1, 2, length, SIZE).unbind()
        difference = (groups(q, k, v) - exact(q, k, v)).abs().amax((0, 2, 3))
        assert (difference < 1e-5).tolist() == left


def test_token_ids_go_to_the_groups_that_read_them():
    longformer = one("longformer", 1, causal=False, global_tokens="separator", separator=1)
    groups = HeadGroups([([0], longformer), ([1], one("local", 1, causal=False))])
    assert groups.reads_tokens
    assert not two("local", "linear").reads_tokens
    q, k, v = torch.randn(3, 1, 2, LENGTH, SIZE).unbind()
    tokens = torch.randint(0, 5, (1, LENGTH))
    expected = longformer(q[:, :1], k[:, :1], v[:, :1], tokens=tokens)
    assert torch.equal(groups(q, k, v, tokens=tokens)[:, :1], expected)


@pytest.mark.parametrize("below", [0, LENGTH + 1], ids=["approximate", "exact"])
def test_dropout_reaches_every_group(below):
    groups = two("local", "full")
    for mechanism in groups.groups:
        mechanism.exact_below = below
    q, k = torch.randn(2, 1, 3, LENGTH, SIZE).unbind()
    ones = torch.ones(1, 3, LENGTH, SIZE)
    assert torch.allclose(groups(q, k, ones), ones)
    # Dropped weights no longer sum to 1 in any head.
    assert ((groups(q, k, ones, dropout=0.5) - ones).abs().amax((0, 2, 3)) > 0.1).all()
