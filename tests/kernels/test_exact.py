"""The forms of exact attention against the oracle, and against each other."""

import inspect
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from approx_kernels.dispatch.implementation import chosen
from approx_kernels.ops.exact.api import exact_attention
from approx_kernels.ops.exact.compiled import compiled_attention, compiled_few, few_obstacle
from approx_kernels.ops.exact.cpu import batched_attention, chunked_attention
from approx_kernels.ops.exact.lengths import by_lengths
from approx_kernels.ops.fastest import varlen
from approx_kernels.ops.fastest.api import fastest_attention
from approx_kernels.ops.fastest.ways import ways
from c_sources import needs_compiler
from closeness import assert_close, at_real_queries, with_float64


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("masked", [False, True], ids=["all real", "masked"])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 63), (17, 17), (129, 129), (63, 129), (129, 17)])
@pytest.mark.parametrize("size", [24, 64])
@pytest.mark.sample(24)
def test_fused_equals_reference_forward_and_backward(causal, masked, queries, keys, size):
    grad = torch.randn(2, 3, queries, 16)
    tensors = torch.randn(2, 3, queries, size), torch.randn(2, 3, keys, size), torch.randn(2, 3, keys, 16)
    mask = torch.rand(2, keys) < 0.7 if masked else None
    # Outputs of padded queries are undefined.
    real = mask[:, None, :, None] if mask is not None and queries == keys else torch.ones(())

    def attend(q, k, v, impl):
        return exact_attention(q, k, v, mask, causal=causal, scale=0.3, impl=impl) * real

    for each in with_float64(attend, tensors, grad, torch.float32, "auto"):
        assert_close(*each, factor=4.0)


def test_a_masked_key_equals_a_missing_one():
    q, k, v = torch.randn(3, 1, 2, 10, 8).unbind()
    mask = torch.tensor([[True] * 6 + [False] * 4])
    impls: tuple[str, ...] = ("reference", "auto", "cpu")
    for impl in impls:
        out = exact_attention(q, k, v, mask, causal=False, scale=0.3, impl=impl)
        shorter = exact_attention(q, k[:, :, :6], v[:, :, :6], causal=False, scale=0.3, impl=impl)
        # Outputs of padded queries are undefined.
        torch.testing.assert_close(out[:, :, :6], shorter[:, :, :6])


shapes = st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 70), st.integers(1, 70), st.integers(0, 2**16))


def draw(shape, dtype=torch.float32):
    """q, k, v laid out as a model lays them out, and a mask with holes whose last key is real."""
    batch, heads, length, keys, seed = shape
    generator = torch.Generator().manual_seed(seed)
    tensors = (
        torch.randn(batch, n, heads, d, generator=generator).to(dtype).transpose(1, 2)
        for n, d in ((length, 8), (keys, 8), (keys, 5))
    )
    mask = torch.rand(batch, keys, generator=generator) < 0.6
    mask[:, -1] = True
    return *tensors, mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@given(shape=shapes, chunk=st.integers(1, 80))
@settings(max_examples=15)
@pytest.mark.sample(3)
def test_chunks_equal_float64_forward_and_backward(dtype, causal, shape, chunk):
    assume(not causal or shape[2] <= shape[3])
    *tensors, _ = draw(shape, dtype)
    # Values of one sign, so that outputs do not cancel.
    tensors[2] = tensors[2].abs()

    def run(attend, dtype):
        q, k, v = (x.to(dtype).requires_grad_() for x in tensors)
        out = attend(q, k, v)
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

    actual = run(lambda *x: chunked_attention(*x, causal=causal, scale=0.3, chunk=chunk), dtype)
    plain = run(lambda *x: exact_attention(*x, causal=causal, scale=0.3, impl="reference"), dtype)
    exact = run(lambda *x: exact_attention(*x, causal=causal, scale=0.3, impl="reference"), torch.float64)
    # In 16 bits scores and weights are rounded; the reference computes them in float32.
    assert_close("output", actual[0], plain[0], exact[0], factor=4.0)
    if dtype == torch.float32 and shape[3] > 1:
        for name, *each in zip(("q", "k", "v"), actual[1:], plain[1:], exact[1:], strict=True):
            assert_close(f"gradient of {name}", *each, factor=8.0)


@pytest.mark.parametrize(("queries", "causal"), [(7, False), (7, True), (4, True), (4, False)])
@pytest.mark.sample(1)
def test_gradients_of_chunks_are_right(queries, causal):
    q, k, v = (torch.randn(2, 2, n, 3, dtype=torch.double, requires_grad=True) for n in (queries, 7, 7))
    mask = torch.rand(2, 7) < 0.7

    def attend(q, k, v):
        return chunked_attention(q, k, v, causal=causal, scale=0.4, chunk=3)

    assert torch.autograd.gradcheck(attend, (q, k, v))
    assert torch.autograd.gradcheck(lambda *x: by_lengths(attend, x[0], x[1], x[2], mask, causal=causal), (q, k, v))


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@given(shape=shapes, empty=st.booleans())
@settings(max_examples=30)
def test_lengths_equal_a_mask_wherever_a_query_is_real(causal, shape, empty):
    q, k, v, mask = draw(shape)
    if empty:
        mask[0] = False
    masked = exact_attention(q, k, v, mask, causal=causal, scale=0.3)
    actual = exact_attention(q, k, v, mask, causal=causal, scale=0.3, impl="cpu")
    batched = batched_attention(q, k, v, mask, causal=causal, scale=0.3)
    length, keys = q.shape[2], k.shape[2]
    real = mask.any(1, keepdim=True).expand(-1, length)
    if causal or length == keys:
        real = F.pad(mask, (max(length - keys, 0), 0))[:, -length:]
    for out in (actual, batched):
        torch.testing.assert_close(out.transpose(1, 2)[real], masked.transpose(1, 2)[real])
        assert out[~mask.any(1)].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@given(
    queries=st.integers(1, 8),
    more=st.integers(0, 200),
    size=st.sampled_from([16, 80]),
    values=st.sampled_from([32, 128, 144]),
    masked=st.booleans(),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=25)
@needs_compiler
def test_few_queries_in_c_equal_the_reference(dtype, causal, queries, more, size, values, masked, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(2, n, 3, d, generator=generator).to(dtype).transpose(1, 2)
        for n, d in ((queries, size), (queries + more, size), (queries + more, values))
    )
    # The second sample may have no key at all.
    mask = torch.rand(2, queries + more, generator=generator) < torch.tensor([[0.5], [seed % 2]]) if masked else None
    actual = compiled_few(q, k, v, mask, causal=causal, scale=0.3)
    how: Any = {"causal": causal, "scale": 0.3, "impl": "reference"}
    plain = exact_attention(q, k, v, mask, **how)
    exact = exact_attention(q.double(), k.double(), v.double(), mask, **how)
    assert_close("output", *(at_real_queries(x, mask) for x in (actual, plain, exact)), factor=4.0)


@needs_compiler
def test_few_queries_in_c_stay_finite_and_let_nan_through():
    q, k, v = torch.randn(3, 1, 1, 100, 16).unbind()
    out = compiled_few(q[:, :, :1] * 1e4, k, v, None, causal=True, scale=1.0)
    torch.testing.assert_close(out, exact_attention(q[:, :, :1] * 1e4, k, v, causal=True, scale=1.0))
    for x in (k, v):
        spoilt = x.clone()
        spoilt[:, :, 70] = torch.nan
        inputs = (spoilt, v) if x is k else (k, spoilt)
        assert compiled_few(q[:, :, :2], *inputs, None, causal=False, scale=0.3).isnan().all()


@pytest.mark.parametrize(
    ("size", "grad", "words"), [(24, False, "multiples of 16 are allowed"), (16, True, "Decode under torch.no_grad()")]
)
def test_few_queries_in_c_name_unsupported_arguments(size, grad, words):
    q, k, v = torch.randn(3, 1, 1, 4, size).requires_grad_(grad).unbind()
    assert words in (few_obstacle(q, k, v) or "")


def test_values_of_padding_do_not_matter_with_lengths():
    q, k, v, mask = draw((3, 2, 30, 30, 5), torch.bfloat16)
    mask[0] = False
    hidden = ~mask[:, None, :, None]
    out = exact_attention(q, k, v, mask, causal=False, scale=0.3, impl="cpu")
    wild = [x.masked_fill(hidden, float("inf")) for x in (q, k, v)]
    assert torch.equal(exact_attention(wild[0], wild[1], wild[2], mask, causal=False, scale=0.3, impl="cpu"), out)


def varlen_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
    return plain_varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, query.shape[-1] ** -0.5)


def varlen_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    assert window_size in ((-1, -1), (-1, 0))
    return plain_varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size == (-1, 0), scale)


def plain_varlen(query, key, value, q_starts, k_starts, max_q, max_k, causal, scale):
    """The documented result of `varlen_attn`, [tokens, H, D], sample by sample."""
    assert q_starts.dtype == k_starts.dtype == torch.int32
    out = []
    for (a, b), (c, d) in zip(pairwise(q_starts.tolist()), pairwise(k_starts.tolist()), strict=True):
        assert b - a <= max_q
        assert d - c <= max_k
        if b > a:
            parts = (x.transpose(0, 1)[None] for x in (query[a:b], key[c:d], value[c:d]))
            out.append(exact_attention(*parts, causal=causal, scale=scale)[0].transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("version", [varlen_2_10, varlen_2_11])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@given(shape=shapes)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_packed_samples_equal_a_mask_in_every_version_of_varlen(monkeypatch, version, causal, shape):
    monkeypatch.setattr(varlen, "varlen_attn", version)
    q, k, v, mask = draw(shape)
    mask[0] = False
    out = varlen.packed_attention(q, k, v, mask, causal=causal, scale=0.3)
    lengths = exact_attention(q, k, v, mask, causal=causal, scale=0.3, impl="cpu")
    torch.testing.assert_close(out, lengths)


def test_this_version_of_varlen_accepts_our_arguments():
    known = inspect.signature(varlen.varlen_attn).parameters
    assert {"window_size", "is_causal"} & known.keys()
    assert "CUDA" in str(varlen.obstacle(torch.zeros(1, 1, 1, 8)))


@pytest.mark.parametrize("attend", [exact_attention, fastest_attention])
def test_an_implementation_that_cannot_run_is_refused_with_the_remedy(attend):
    q = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ValueError, match=r"no dropout, and 0\.5 was asked for\. Ask for 'auto'"):
        attend(q, q, q, causal=False, scale=1.0, dropout=0.5, impl="cpu")
    with pytest.raises(ValueError, match=r"no implementation 'triton'; it has .*reference"):
        attend(q, q, q, causal=False, scale=1.0, impl="triton")
    with pytest.raises(ValueError, match=r"on the meta\. Move them to the cpu"):
        attend(*(q.to("meta"),) * 3, causal=False, scale=1.0, impl="cpu")
    with pytest.raises(ValueError, match=r"are float16, .*Convert them, or ask for 'auto'"):
        attend(*(q.half(),) * 3, causal=False, scale=1.0, impl="cpu")


def test_the_fastest_implementation_can_be_requested():
    q = torch.randn(1, 1, 128, 64)
    fastest_attention(q, q, q, causal=False, scale=0.1)
    assert chosen()["fastest_attention"] in ways("cpu", padded=False, few=False)
    for dropout, length in ((0.1, 128), (0.0, 127)):
        few = q[:, :, :length]
        fastest_attention(few, few, few, causal=False, scale=0.1, dropout=dropout)
        assert chosen()["fastest_attention"] == "default SDPA"


@needs_compiler
@pytest.mark.parametrize("spread", [1.0, 4.0])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_sums_over_many_keys_gather_no_more_roundings_than_those_of_sdpa(causal, spread):
    q, k, v = torch.randn(3, 1, 1, 4096, 64).unbind()
    q = q * spread
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal)
    plain = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    made = compiled_attention(q, k, v, causal=causal, scale=64**-0.5)
    assert (made - exact).norm() < 1.5 * (plain - exact).norm()
