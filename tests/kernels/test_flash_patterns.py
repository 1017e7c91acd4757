"""Every pattern through the flash kernels gives what its own specification gives, outputs and gradients."""

import pytest
import torch

from approx.mechanisms import MECHANISMS
from approx_kernels.dispatch.implementation import chosen, implementation
from approx_kernels.ops.flash import listed, padding
from approx_kernels.ops.flash.api import flash

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []

# Small enough that every pattern drops pairs; blocks are not aligned with tiles of 32.
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
    # Outputs of padded queries are undefined.
    out = out * key_mask[:, None, -out.shape[2] :, None]
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    return [out, *torch.autograd.grad((out * weight).sum(), [*leaves, *mechanism.parameters()])]


def check(pattern, length, key_mask):
    name, causal, settings = pattern
    mechanism = MECHANISMS[name](1, 16, causal=causal, scale=0.3, **settings).to(DEVICE)
    batch, keys = key_mask.shape
    tensors = [torch.randn(batch, n, 1, 16).transpose(1, 2).to(DEVICE) for n in (length, keys, keys)]
    key_mask = key_mask.to(DEVICE)
    expected = outputs(mechanism, tensors, key_mask, "reference")
    computed = outputs(mechanism, tensors, key_mask, "triton")
    assert chosen()["flash"] == "triton"
    for one, other in zip(computed, expected, strict=True):
        # Both are float32; sums of at most 37 terms of about 1, in two orders.
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("length", [37, 20])
@pytest.mark.parametrize("pattern", PATTERNS, ids=name_of)
@pytest.mark.sample(2)
def test_a_pattern_through_the_kernels(pattern, length):
    check(pattern, length, torch.arange(37)[None] >= 4)


# The last sample has no query where there are 20, and the one before it no token at all.
RIGHT = torch.arange(37) < torch.tensor([[30], [37], [0], [15]])


@pytest.mark.slow
@pytest.mark.parametrize("length", [37, 20])
@pytest.mark.parametrize("pattern", PATTERNS, ids=name_of)
def test_samples_of_several_lengths(pattern, length):
    check(pattern, length, RIGHT if length == 37 else RIGHT[[0, 3]])


# These patterns do not depend on the number of real tokens.
ANY_LENGTH = [
    pattern
    for pattern in PATTERNS
    if pattern[0] in ("block", "sinks", "longformer") or (pattern[1] and pattern[0] in ("strided", "fixed"))
]


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ANY_LENGTH, ids=name_of)
def test_nothing_waits_for_a_mask_while_a_graph_is_captured(pattern, monkeypatch):
    monkeypatch.setattr(padding, "capturing", lambda: True)
    monkeypatch.setattr(padding, "_read", lambda mask: pytest.fail("it was read"))
    holes = torch.arange(37) % 3 != 0
    check(pattern, 37, torch.stack([holes, torch.arange(37) > 5]))


def test_samples_share_a_launch_and_layers_share_the_mask(monkeypatch):
    launched = []
    monkeypatch.setattr(
        listed, "flash", lambda q, *arguments, **how: launched.append(len(q)) or flash(q, *arguments, **how)
    )
    q, k, v = torch.randn(3, 4, 1, 37, 16, device=DEVICE)
    mask = RIGHT.to(DEVICE).clone()
    longformer, bigbird = (
        MECHANISMS[name](1, 16, causal=False, scale=0.3, **settings).to(DEVICE)
        for name, settings in (("longformer", {"window": 10}), ("bigbird", {"block": 16, "random": 1}))
    )
    with implementation("triton"):
        longformer(q, k, v, mask)
        assert launched == [4]
        # 30 tokens are two blocks, 37 are three, 0 and 15 are one.
        bigbird(q, k, v, mask)
        assert launched[1:] == [1, 1, 2]
    counts = padding._read(mask)[0]
    assert padding._read(mask)[0] is counts
    mask[0, 7:] = False
    assert padding._read(mask) == ([7, 37, 0, 15], True)


def test_keeps_a_list_that_a_graph_reads(monkeypatch):
    monkeypatch.setattr(listed, "_LISTS", {})
    monkeypatch.setattr(listed, "_CAPTURED", set())
    monkeypatch.setattr(listed, "_KEPT", 2)
    listed.kept("before", object)
    first = listed.kept("in a graph", object)
    with monkeypatch.context() as graph:
        graph.setattr(listed, "capturing", lambda: True)
        assert listed.kept("in a graph", object) is first
    for number in range(5):
        listed.kept(number, object)
    assert listed.kept("in a graph", pytest.fail) is first
    assert list(listed._LISTS) == ["in a graph", 3, 4]
