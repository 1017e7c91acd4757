"""Approximations materialise no tensor of all pairs, neither forward nor backward."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forms import FORMS, KINDS, draw, draw_mask, make


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor created; expanded tensors take no memory."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, tuple | list) else (made,):
            if isinstance(x, torch.Tensor):
                self.numbers = max(self.numbers, x.untyped_storage().nbytes() // x.element_size())
        return made


@pytest.mark.parametrize(
    ("name", "causal"), [form for form in FORMS if not (KINDS[form[0]].always_exact or KINDS[form[0]].quadratic)]
)
@pytest.mark.parametrize("kind", ["none", "arbitrary"])
@pytest.mark.sample(12)
def test_all_pairs_are_never_in_memory_forward_or_backward(name, causal, kind):
    shape = {"batch": 1, "heads": 1, "length": 2048, "size": 4, "values": 4, "seed": 3}
    mask = None if kind == "none" else draw_mask(kind, **shape)
    inputs = [x.requires_grad_() for x in draw(**shape)]
    mechanism = make(name, causal, heads=1, size=4)
    with Largest() as largest:
        torch.autograd.grad(mechanism(*inputs, mask).sum(), inputs)
    assert 2048 * 4 <= largest.numbers < 2048**2 / 4
