"""Performer attention by kernels against its specification in float64, forward and every gradient.

Under Triton's interpreter, or on a GPU where there is one.
"""

from typing import Any

import pytest
import torch

from approx_kernels.performer import draw_projection, performer_attention
from approx_kernels.triton_language import configuration
from closeness import assert_close

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


def draw(length, keys, *, batch=1, dtype=torch.float32) -> Any:
    # Heads beside each other in memory, as a model has them.
    return [torch.randn(batch, n, 1, 16).to(DEVICE, dtype).transpose(1, 2) for n in (length, keys, keys)]


def attend(tensors, key_mask, impl, features=24, **how):
    leaves: Any = [x.detach().clone().requires_grad_() for x in tensors]
    rows = draw_projection(16, features=features, orthogonal=True, seed=0).to(DEVICE)
    out = performer_attention(leaves[0], leaves[1], leaves[2], key_mask, projection=rows, scale=0.25, impl=impl, **how)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return [out, *torch.autograd.grad(out, leaves, grad.to(out.device, out.dtype))]


def check(tensors, key_mask=None, **how):
    wide = attend([x.double() for x in tensors], key_mask, "reference", **how)
    plain, found = (attend(tensors, key_mask, impl, **how) for impl in ("reference", "triton"))
    for name, *each in zip(("out", "dq", "dk", "dv"), found, plain, wide, strict=True):
        # Sums tile by tile round a little differently from one sum.
        assert_close(name, *each, factor=4.0)


@pytest.mark.parametrize(("kernel", "causal"), [("softmax", False), ("relu", False), ("relu", True)])
@pytest.mark.parametrize(("length", "keys"), [(37, 37), (20, 70), (70, 37)])
def test_kernels_give_what_the_reference_gives(kernel, causal, length, keys):
    check(draw(length, keys), kernel=kernel, causal=causal)


@pytest.mark.parametrize(("kernel", "causal"), [("softmax", False), ("relu", True)])
def test_key_masks(kernel, causal):
    real = torch.arange(37, device=DEVICE) % 3 != 1
    check(draw(37, 37, batch=2), torch.stack([real, real & False]), kernel=kernel, causal=causal)


# The default tiles, and those for smaller cards.
@pytest.mark.parametrize("number", [0, -1])
def test_half_precision_and_many_features(number):
    with configuration(number):
        check(draw(37, 37, dtype=torch.float16), causal=False, features=200)


def test_large_inputs_overflow_nothing():
    tensors = [x * 60 for x in draw(37, 37)]
    assert all(torch.isfinite(x).all() for x in attend(tensors, None, "triton", causal=False))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"causal": True}, "relative to earlier keys"),
        ({"causal": False, "dropout": 0.1}, "drop no keys"),
        ({"causal": False, "features": 2000}, "2000 features"),
    ],
)
def test_what_kernels_have_not_is_refused(changed, said):
    with pytest.raises(ValueError, match=said):
        attend(draw(5, 5), None, "triton", **changed)
