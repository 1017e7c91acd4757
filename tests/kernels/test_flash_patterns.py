"""Every pattern through the flash kernels gives what its own specification gives, outputs and gradients."""

import pytest
import torch

from approx.mechanisms import MECHANISMS
from approx_kernels.implementation import chosen, implementation

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []

# Small enough that every pattern leaves pairs out; blocks end where tiles of 32 do not.
PATTERNS = [
    ("flash", False, {}),
    ("local", False, {"left": 9, "right": 3}),
    ("local", True, {"left": 9}),
    ("block", False, {"size": 10, "neighbours": 1, "shift": 5}),
    ("block", True, {"size": 10, "neighbours": 1, "shift": 0}),
    ("adaptive-span", False, {"max_span": 12, "ramp": 4}),
    ("bigbird", False, {"block": 5, "random": 2}),
    ("bigbird", False, {"block": 5, "random": 2, "compatible": True}),
    ("sinks", True, {"sinks": 2, "window": 9}),
    ("longformer", False, {"window": 10, "global_tokens": [0, 30]}),
    ("longformer", True, {"window": 10, "global_tokens": [0]}),
    ("strided", False, {"stride": 7}),
    ("strided", True, {"stride": 7}),
    ("strided", False, {"stride": 7, "step": 2}),
    ("fixed", False, {"stride": 8, "summary": 2}),
    ("fixed", True, {"stride": 8, "summary": 2}),
    ("ltr", False, {"stride": 7}),
    ("rtl", False, {"stride": 7, "summary": 2}),
    ("ltr", False, {"stride": 7, "both_directions": True}),
]


def name_of(pattern):
    name, causal, settings = pattern
    return "-".join([name, "causal" if causal else "bidirectional", *(f"{k}={v}" for k, v in settings.items())])


def outputs(mechanism, tensors, key_mask, impl):
    leaves = [x.clone().requires_grad_() for x in tensors]
    with implementation(impl):
        out = mechanism(*leaves, key_mask)
    # What a padded query receives has no meaning.
    out = out * key_mask[:, None, -out.shape[2] :, None]
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    return [out, *torch.autograd.grad((out * weight).sum(), [*leaves, *mechanism.parameters()])]


CASES = [(pattern, length) for pattern in PATTERNS for length in (37, 20)]


@pytest.mark.parametrize(
    ("pattern", "length"), CASES, ids=[f"{length}-{name_of(pattern)}" for pattern, length in CASES]
)
def test_a_pattern_through_the_kernels(pattern, length):
    name, causal, settings = pattern
    mechanism = MECHANISMS[name](1, 16, causal=causal, scale=0.3, **settings).to(DEVICE)
    tensors = [torch.randn(1, n, 1, 16).transpose(1, 2).to(DEVICE) for n in (length, 37, 37)]
    key_mask = torch.ones(1, 37, dtype=torch.bool, device=DEVICE)
    key_mask[:, :4] = False
    expected = outputs(mechanism, tensors, key_mask, "reference")
    found = outputs(mechanism, tensors, key_mask, "triton")
    assert chosen()["flash"] == "triton"
    for one, other in zip(found, expected, strict=True):
        # Both are float32; sums of at most 37 terms of about 1, in two orders.
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)
