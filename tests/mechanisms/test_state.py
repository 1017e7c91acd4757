"""The check that a mechanism's tensors are usable, and its message about the first that is not."""

import pytest
import torch

from approx.mechanisms.mechanism import unusable_state
from forms import FORMS, make, over


def drawn():
    return make("clustered", False, heads=2, size=8)


@over(FORMS)
def test_every_new_mechanism_has_a_usable_state(name, causal):
    mechanism = make(name, causal, heads=2, size=8)
    assert unusable_state(mechanism) is None
    mechanism.after_step(10)
    assert unusable_state(mechanism.to(torch.bfloat16)) is None


def test_a_tensor_of_another_shape_or_dtype_is_named():
    mechanism = drawn()
    draws = mechanism.get_buffer("draws")
    mechanism.draws = draws[:2]
    assert unusable_state(mechanism) == "draws has shape [2]; its settings make [4]"
    mechanism.draws = draws.int()  # from a file, transformers makes int64 of them
    assert unusable_state(mechanism) == "draws is torch.int32; its settings make torch.int64"


@pytest.mark.parametrize(
    ("value", "usable"), [(0, True), (2**31 - 1, True), (-1, False), (2**31, False)], ids=lambda part: str(part)
)
def test_draws_are_usable_from_the_smallest_to_the_largest_that_there_are(value, usable):
    mechanism = drawn()
    draws = mechanism.get_buffer("draws")
    draws[1] = value
    problem = unusable_state(mechanism)
    assert (problem is None) is usable
    if problem is not None:
        assert (
            problem
            == f"draws holds values from {int(draws.min())} to {int(draws.max())}; draws lie between 0 and 2^31 - 1"
        )


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_not_finite_is_not_usable(value):
    mechanism = drawn()
    mechanism.get_buffer("planes").view(-1)[-1] = value
    assert unusable_state(mechanism) == "planes holds NaN or infinity"


def test_a_tensor_that_the_settings_do_not_make_is_named():
    mechanism = drawn()
    mechanism.register_buffer("more", torch.zeros(2))
    assert unusable_state(mechanism) == "more does not belong to a mechanism with these settings"
