"""NaN or infinity in padding reaches no output and no gradient, in plain PyTorch and in C."""

import math

import pytest
import torch

from approx_kernels.dispatch.implementation import implementation
from forms import FORMS, SELF_ONLY, draw, draw_mask, make

# PyTorch's SDPA multiplies padded values by 0, as documented; blanking them first would cost up to half of its time.
FINITE_ONLY = ("exact", "flash", "sdpa")
CASES = [
    {"kind": "arbitrary", "length": 77},
    {"kind": "arbitrary", "length": 77, "bad": math.inf},
    {"kind": "right", "length": 9},
    {"kind": "left", "length": 40, "dtype": torch.bfloat16},
    {"kind": "one row empty", "length": 40},
    {"kind": "left", "length": 20, "keys": 77},
    {"kind": "arbitrary", "length": 1, "keys": 77},
]


def attended(mechanism, inputs, mask, impl):
    """Outputs at real queries, with and without gradients, and the gradients at all tokens."""
    q, k, v = (x.clone().requires_grad_() for x in inputs)
    same = q.shape[2] == k.shape[2]
    queries = mask if same else torch.ones(q.shape[0], q.shape[2], dtype=torch.bool)
    with implementation(impl):
        with torch.no_grad():
            plain = mechanism(q, k, v, mask).transpose(1, 2)[queries]
        out = mechanism(q, k, v, mask).transpose(1, 2)[queries]
    return [plain, out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))]


def check(name, causal, impl, *, kind, length, bad=math.nan, keys=None, dtype=torch.float32):
    shape = {"batch": 2, "heads": 2, "length": length, "size": 16, "values": 16, "seed": 3}
    mask = draw_mask(kind, **shape | {"length": keys or length})
    inputs = [x.to(dtype) for x in draw(**shape, keys=keys)]
    padded = ~mask[:, None, :, None]
    spoiled = [x.masked_fill(padded, bad) if x.shape[2] == mask.shape[1] else x for x in inputs]
    assert not all(x.isfinite().all() for x in spoiled), "nothing was spoiled"
    mechanism = make(name, causal, heads=2, size=16)
    expected, actual = (attended(mechanism, each, mask, impl) for each in (inputs, spoiled))
    for here, there in zip(actual, expected, strict=True):
        torch.testing.assert_close(here, there)


# Where there are fewer queries than keys, they are not made from each other.
EVERY = [
    pytest.param(name, causal, case, id=f"{name}-{'causal' if causal else 'bidirectional'}-{number}")
    for name, causal in FORMS
    for number, case in enumerate(CASES)
    if name not in FINITE_ONLY and not ("keys" in case and name in SELF_ONLY)
]


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize(("name", "causal", "case"), EVERY)
@pytest.mark.sample(100)
def test_padding_may_hold_anything(name, causal, case, impl):
    check(name, causal, impl, **case)
