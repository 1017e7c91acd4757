"""Performer attention in C gives what its reference gives, token by token too."""

import pytest
import torch

from approx_kernels.dispatch.implementation import chosen
from approx_kernels.ops.performer.api import draw_projection, performer_attention, performer_decode
from c_sources import needs_compiler
from closeness import assert_close


@pytest.mark.parametrize("kernel", ["softmax", "relu"])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("queries", "keys", "size", "features", "large", "masked"),
    [
        (70, 130, 24, 50, 20.0, True),
        (90, 33, 8, 16, 1.0, False),
        (130, 130, 40, 20, 3.0, True),
        (1, 90, 5, 7, 1.0, False),
    ],
)
@needs_compiler
def test_c_equals_the_reference(kernel, causal, dtype, queries, keys, size, features, large, masked):
    # Values of one sign, so that sums do not cancel; heads laid out as by projections. Some large keys are e^1000 away.
    q, k = torch.randn(2, queries, 2, size) * large, torch.randn(2, keys, 2, size) * large * torch.rand(2, keys, 2, 1)
    v, grad = torch.rand(2, keys, 2, 17) + 0.1, torch.rand(2, queries, 2, 17) + 0.1
    mask = torch.rand(2, keys) < 0.7 if masked else None
    rows = draw_projection(size, features=features, orthogonal=True, seed=0)
    results: list[tuple[torch.Tensor, ...]] = []
    for impl, wide in (("cpu", dtype), ("reference", dtype), ("reference", torch.float64)):
        inputs = [x.to(dtype).transpose(1, 2).to(wide).requires_grad_() for x in (q, k, v)]
        how = {"projection": rows, "kernel": kernel, "causal": causal, "scale": 0.3, "impl": impl}
        out = performer_attention(inputs[0], inputs[1], inputs[2], mask, **how)
        outer = grad.to(dtype).transpose(1, 2).to(wide)
        results.append((out, *torch.autograd.grad(out, inputs, outer)))
    for which, actual, plain, exact in zip("oqkv", results[0], results[1], results[2], strict=True):
        # Gradients of queries and keys are differences of sums, which round on both sides.
        assert_close(which, actual, plain, exact, factor=8.0 if which in "qk" else 4.0)


@needs_compiler
def test_a_long_causal_sum_gathers_no_roundings():
    q, k, v = *torch.randn(2, 1, 2, 4096, 16), torch.rand(1, 2, 4096, 16)
    how = {"projection": draw_projection(16, features=32, orthogonal=True, seed=0), "kernel": "relu", "causal": True}
    results: list[tuple[torch.Tensor, ...]] = []
    for impl, wide in (("cpu", torch.float32), ("reference", torch.float32), ("reference", torch.float64)):
        inputs = [x.to(wide).requires_grad_() for x in (q, k, v)]
        out = performer_attention(inputs[0], inputs[1], inputs[2], None, **how, scale=0.25, impl=impl)
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    for which, actual, plain, exact in zip("oqkv", *results, strict=True):
        assert_close(which, actual, plain, exact)


@pytest.mark.parametrize("kernel", ["softmax", "relu"])
@needs_compiler
def test_sums_are_overwritten_while_decoding_and_kept_while_training(kernel):
    q, k, v = torch.randn(3, 2, 3, 70, 8)
    k[:, :, 50] *= 30
    ways = {"projection": draw_projection(8, features=20, orthogonal=True, seed=0), "kernel": kernel, "scale": 0.4}
    whole = performer_attention(q, k, v, **ways, causal=True, impl="reference")
    out, state = performer_decode(q[:, :, :40], k[:, :, :40], v[:, :, :40], **ways)
    torch.testing.assert_close(out, whole[:, :, :40])
    places = {name: x.data_ptr() for name, x in state.items()}
    for last in range(41, 71):
        piece = slice(last - 1, last)
        out, state = performer_decode(q[:, :, piece], k[:, :, piece], v[:, :, piece], None, state, **ways)
        torch.testing.assert_close(out, whole[:, :, piece])
    assert {name: x.data_ptr() for name, x in state.items()} == places
    assert chosen()["performer_decode"] == "cpu"
    _, plain = performer_decode(q, k, v, **ways, impl="reference")
    assert {name: x.shape for name, x in plain.items()} == {name: x.shape for name, x in state.items()}
    with pytest.raises(ValueError, match="no_grad"):
        performer_decode(q.requires_grad_(), k, v, None, state, **ways, impl="cpu")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"dtype": torch.float16}, "float16; allowed are"),
        ({"projection": torch.ones(3, 4, requires_grad=True)}, "no gradient of the projection"),
    ],
)
def test_c_refuses_unsupported_forms_and_auto_uses_the_reference(changed, words):
    q = torch.ones(1, 2, 5, 4, dtype=changed.get("dtype", torch.float32))
    how = {"projection": torch.ones(3, 4), "causal": False, "scale": 0.5, **changed}
    how.pop("dtype", None)
    with pytest.raises(ValueError, match=words):
        performer_attention(q, q, q, **how, impl="cpu")
    assert performer_attention(q, q, q, **how).shape == q.shape
    assert chosen()["performer_attention"] == "reference"
