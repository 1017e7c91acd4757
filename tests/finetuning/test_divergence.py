"""Divergences against exact sums in float64, and the surrogate's squared gradient against the curvature."""

from types import SimpleNamespace

import pytest
import torch

from approx.finetuning.divergence import divergence, surrogate


class Outputs(SimpleNamespace):
    def items(self):
        return vars(self).items()

    def __getitem__(self, name):
        return vars(self)[name]


@pytest.mark.parametrize("shape", [(3, 5), (3, 7, 5)])
def test_classes_and_tokens_diverge_by_their_mean_kl(shape):
    torch.manual_seed(0)
    mask = None if len(shape) == 2 else torch.arange(7).expand(3, 7) < torch.tensor([[7], [4], [1]])
    target, outputs = Outputs(logits=torch.randn(shape)), Outputs(logits=torch.randn(shape))
    p, q = target.logits.double().softmax(-1), outputs.logits.double().softmax(-1)
    per_token = (p * (p / q).log()).sum(-1)
    expected = per_token if mask is None else (per_token * mask).sum(1) / mask.sum(1)
    assert torch.allclose(divergence(outputs, target, mask).double(), expected, rtol=1e-5)
    assert torch.equal(divergence(target, target, mask), torch.zeros(3))


def test_labels_that_do_not_exclude_each_other_diverge_by_the_sum_of_their_kl():
    torch.manual_seed(0)
    target, outputs = Outputs(logits=torch.randn(3, 5)), Outputs(logits=torch.randn(3, 5))
    p, q = target.logits.double().sigmoid(), outputs.logits.double().sigmoid()
    expected = (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).sum(-1)
    assert torch.allclose(divergence(outputs, target, None, several=True).double(), expected, rtol=1e-5)
    assert torch.equal(divergence(target, target, None, several=True), torch.zeros(3))


def test_padding_does_not_count_for_answers():
    torch.manual_seed(0)
    mask = torch.tensor([[True, True, True, False, False]])
    target, outputs = torch.randn(2, 1, 5).unbind(0)
    changed = outputs.clone()
    changed[:, 3:] += 100
    of = [
        divergence(Outputs(start_logits=x, end_logits=x), Outputs(start_logits=target, end_logits=target), mask)
        for x in (outputs, changed)
    ]
    assert torch.equal(*of)
    p, q = target[:, :3].double().softmax(-1), outputs[:, :3].double().softmax(-1)
    assert torch.allclose(of[0].double(), 2 * (p * (p / q).log()).sum(-1), rtol=1e-5)


def test_hidden_states_diverge_by_their_relative_error_and_numbers_by_their_square():
    torch.manual_seed(0)
    target, outputs = torch.randn(2, 2, 4, 6).unbind(0)
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    expected = [
        float((outputs - target)[0].norm() / target[0].norm()),
        float((outputs - target)[1, :2].norm() / target[1, :2].norm()),
    ]
    apart = divergence(Outputs(last_hidden_state=outputs), Outputs(last_hidden_state=target), mask)
    assert apart.tolist() == pytest.approx(expected, rel=1e-5)
    assert divergence(Outputs(logits=torch.tensor([[2.0]])), Outputs(logits=torch.tensor([[0.5]])), None).tolist() == [
        2.25
    ]


MASKS = {
    "tokens": torch.tensor([[True, True, True], [True, True, False]]),
    "ends": torch.tensor([[True, True, True, True], [True, True, True, False]]),
}


@pytest.mark.parametrize(
    ("shape", "several", "masked"),
    [
        ((2, 4), False, None),
        ((2, 3, 4), False, None),
        ((2, 4), True, None),
        ((2, 3, 4), False, "tokens"),
        ((2, 4), False, "ends"),
    ],
)
def test_the_squared_gradient_of_the_surrogate_is_twice_the_divergence_of_a_small_change(shape, several, masked):
    torch.manual_seed(0)
    logits = torch.randn(shape, dtype=torch.float64)
    mask = MASKS.get(masked)
    change = torch.randn(shape, dtype=torch.float64) * 0.03
    generator = torch.Generator().manual_seed(0)
    draws, total = 600, torch.zeros(2, dtype=torch.float64)
    for _ in range(draws):
        leaf = logits.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(surrogate(Outputs(logits=leaf), mask, generator, several=several), [leaf])
        total += (gradient * change).flatten(1).sum(1).square()
    exact = divergence(Outputs(logits=logits + change), Outputs(logits=logits), mask, several=several).double()
    # The mean of 600 squares is known to about 6 %; terms of third order add half as much.
    assert torch.allclose(total / draws / 2, exact, rtol=0.2, atol=1e-6)


def test_the_squared_gradient_of_numbers_and_hidden_states_is_their_squared_change():
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    number, states = torch.randn(2, 1, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)
    for name, value, real in (("logits", number, None), ("last_hidden_state", states, mask)):
        change = torch.randn(value.shape, dtype=torch.float64)
        total = torch.zeros(2, dtype=torch.float64)
        for _ in range(600):
            leaf = value.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(surrogate(Outputs(**{name: leaf}), real, generator), [leaf])
            total += (gradient * change).flatten(1).sum(1).square()
        real_change = change if real is None else change * real[:, :, None]
        size = 1 if real is None else (value * real[:, :, None]).flatten(1).square().sum(1)
        # For hidden states of their relative change, without the padding.
        assert torch.allclose(total / 600, real_change.flatten(1).square().sum(1) / size, rtol=0.2)
