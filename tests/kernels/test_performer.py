"""Performer attention equals the formula over all pairs, for any chunks and any size of features, and in C its reference."""

from functools import partial

import pytest
import torch

from approx_kernels.dispatch.implementation import chosen
from approx_kernels.ops.performer import reference
from approx_kernels.ops.performer.api import draw_projection, performer_attention, performer_decode
from c_sources import needs_compiler
from closeness import assert_close, at_real_queries, with_float64


def dense(q, k, v, mask, rows, *, kernel, causal, scale):
    """All pairs, from logarithms of features in float64."""
    q, k = q * scale**0.5, k * scale**0.5
    queries, keys = q @ rows.T.double(), k @ rows.T.double()
    if kernel == "relu":
        logs = ((queries.relu() + 1e-3) @ (keys.relu() + 1e-3).transpose(-2, -1)).log()
    else:
        keys = keys - k.square().sum(-1, keepdim=True) / 2
        logs = (queries[..., :, None, :] + keys[..., None, :, :]).logsumexp(-1)
    allowed = mask[:, None, None].expand_as(logs)
    allowed = allowed.tril(k.shape[2] - q.shape[2]) if causal else allowed
    return (logs.masked_fill(~allowed, -1e30).softmax(-1) * allowed) @ v


@pytest.mark.parametrize("kernel", ["softmax", "relu"])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("large", [1.0, 20.0], ids=["usual", "large"])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 63), (65, 65), (40, 130), (129, 63)])
def test_equals_its_formula_over_all_pairs_forward_and_backward(kernel, causal, large, queries, keys):
    q, k, v = (torch.randn(2, 2, n, 8).double() for n in (queries, keys, keys))
    # With large ones, some keys are e^1000 away from others in every feature.
    q, k, v = (x.requires_grad_() for x in (q * large, k * large * torch.rand(2, 2, keys, 1), v))
    mask, grad = torch.rand(2, keys) < 0.8, torch.randn(2, 2, queries, 8).double()
    rows = draw_projection(8, features=24, orthogonal=True, seed=0)
    settings = {"kernel": kernel, "causal": causal, "scale": 0.35}
    actual = performer_attention(q, k, v, mask, projection=rows, **settings)
    expected = dense(q, k, v, mask, rows, **settings)
    actual, expected = at_real_queries(actual, mask), at_real_queries(expected, mask)
    torch.testing.assert_close(actual, expected)
    for ours, theirs in zip(
        torch.autograd.grad(actual, (q, k, v), grad), torch.autograd.grad(expected, (q, k, v), grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("large", [1.0, 20.0], ids=["usual", "large"])
def test_chunks_and_blocks_of_heads_change_nothing(monkeypatch, causal, large):
    q, k, v = (torch.randn(2, 3, 130, 8).double() * size for size in (large, large, 1.0))
    mask, rows = torch.rand(2, 130) < 0.7, draw_projection(8, features=16, orthogonal=True, seed=0)
    results = []
    for chunk, cached in ((64, 2**17), (7, 1), (1, 1)):
        monkeypatch.setattr(reference, "CHUNK", chunk)
        monkeypatch.setattr(reference, "_CACHED", cached)
        results.append(performer_attention(q, k, v, mask, projection=rows, causal=causal, scale=0.35))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])


@pytest.mark.parametrize("kernel", ["softmax", "relu"])
@pytest.mark.parametrize(("past", "future"), [(1.0, 3.0), (1.0, 100.0), (30.0, 0.01)])
@pytest.mark.parametrize("cut", [0, 20, 63, 64, 100])
def test_later_keys_change_no_bit_of_a_query(kernel, past, future, cut):
    q, k, v = torch.randn(3, 2, 3, 130, 16).unbind()
    mask = torch.rand(2, 130) < 0.8
    rows = draw_projection(16, features=32, orthogonal=True, seed=0)
    later = (torch.arange(130) > cut)[:, None]
    q, k, v = (x * past for x in (q, k, v))
    # Features of small keys rise e^1000 above those of large ones, and the queries between must not know.
    changed = [torch.where(later, x / past * -future + future, x) for x in (q, k, v)]
    before, after = (
        performer_attention(q, k, v, mask, projection=rows, kernel=kernel, causal=True, scale=0.25)
        for q, k, v in ((q, k, v), changed)
    )
    assert torch.equal(before[:, :, : cut + 1], after[:, :, : cut + 1])


def test_a_first_key_far_below_all_others_does_not_set_the_scale():
    q, k, v = torch.randn(3, 1, 2, 130, 16).unbind()
    k[:, :, 0] *= 40
    rows = draw_projection(16, features=64, orthogonal=True, seed=0)
    everything = torch.ones(1, 130, dtype=torch.bool)
    exact = dense(q.double(), k.double(), v.double(), everything, rows, kernel="softmax", causal=True, scale=0.25)
    out = performer_attention(q, k, v, projection=rows, causal=True, scale=0.25)
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [1, 8, 24])
@pytest.mark.parametrize("features", [1, 16, 100])
def test_orthogonal_rows_come_in_blocks_with_separate_lengths(size, features):
    rows = draw_projection(size, features=features, orthogonal=True, seed=3)
    assert rows.shape == (features, size)
    for block in rows.split(size):
        products = block @ block.T
        torch.testing.assert_close(products, products.diagonal().diag(), atol=1e-5, rtol=0)
    again = draw_projection(size, features=features, orthogonal=True, seed=3)
    assert torch.equal(rows, again)
    assert not torch.equal(rows, draw_projection(size, features=features, orthogonal=True, seed=4))


@pytest.mark.parametrize("orthogonal", [False, True])
def test_every_coordinate_is_a_standard_normal(orthogonal):
    rows = draw_projection(8, features=80_000, orthogonal=orthogonal, seed=0)
    moments = [rows.mean(0), rows.square().mean(0), rows.pow(4).mean(0)]
    for moment, expected, spread in zip(moments, (0.0, 1.0, 3.0), (1.0, 2**0.5, 96**0.5), strict=True):
        assert ((moment - expected).abs() < 5 * spread / 80_000**0.5).all()


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
    how = {"key_mask": mask, "projection": rows, "kernel": kernel, "causal": causal, "scale": 0.3}
    q, k, v, grad = (x.transpose(1, 2) for x in (q, k, v, grad))
    for which, *each in with_float64(partial(performer_attention, **how), (q, k, v), grad, dtype):
        # Gradients of queries and keys are differences of sums, which round on both sides.
        assert_close(which, *each, factor=8.0 if which in ("dq", "dk") else 4.0)


@needs_compiler
def test_a_long_causal_sum_gathers_no_roundings():
    q, k, v = *torch.randn(2, 1, 2, 4096, 16), torch.rand(1, 2, 4096, 16)
    rows = draw_projection(16, features=32, orthogonal=True, seed=0)
    attend = partial(performer_attention, projection=rows, kernel="relu", causal=True, scale=0.25)
    for one in with_float64(attend, (q, k, v), torch.rand(1, 2, 4096, 16), torch.float32):
        assert_close(*one)


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
