"""The rate between divergence and points, and the loss estimated from both."""

import math

import pytest

from approx.searching.cost import Exchange, Measured


def test_the_rate_is_the_geometric_mean_of_plans_beyond_their_noise():
    clear = [Measured(0.1, 1.0, 0.2), Measured(0.4, 1.0, 0.4)]
    noisy = [Measured(0.2, 4.0, 2.0), Measured(0.3, -1.0, 0.1), Measured(0.3, None, None)]
    assert Exchange.of([*noisy, *clear]).rate == pytest.approx(math.sqrt(10.0 * 2.5))


@pytest.mark.parametrize(
    ("plans", "rate"),
    [
        # Nothing is certain: what the most damaging plan could have lost.
        ([Measured(0.1, 0.5, 1.0), Measured(0.4, 0.2, 0.3)], (0.2 + 0.3) / 0.4),
        ([Measured(0.4, -2.0, 0.5)], 1e-9 / 0.4),
        ([Measured(0.5, None, None)], 1e-9 / 0.5),
        ([Measured(0.0, 0.0, 0.0)], 1e-9 / 1e-12),
    ],
)
def test_without_a_clear_loss_the_most_damaging_plan_bounds_the_rate(plans, rate):
    assert Exchange.of(plans).rate == pytest.approx(rate)


@pytest.mark.parametrize(
    ("measured", "loss"),
    [
        (Measured(0.2, None, None), 2.0),
        # A measurement without error is believed.
        (Measured(0.2, 3.0, 0.0), 3.0),
        # Both errors are 1: halfway.
        (Measured(0.2, 4.0, 1.0), 3.0),
        # The exchanged loss weighs by half its size: 1/4 against 1 here.
        (Measured(0.4, 0.0, 1.0), (4.0 * 0.25) / 1.25),
    ],
)
def test_a_loss_is_weighed_from_the_measured_and_the_exchanged_one(measured, loss):
    assert Exchange(10.0).loss(measured) == pytest.approx(loss)
