"""Blocks, windows with chosen tokens, and summaries by lists of keys in C give what their references give."""

from functools import partial

import pytest
import torch

from approx_kernels.adaptive_span import adaptive_span_attention
from approx_kernels.blocks import bigbird_attention, block_attention, draw_blocks
from approx_kernels.c_language import library
from approx_kernels.global_tokens import global_token_attention
from approx_kernels.key_lists.cpu import FAR, attend_lists, cut
from approx_kernels.key_lists.forward_c import FORWARD
from approx_kernels.lsh import draw_projections, lsh_attention
from approx_kernels.strided import strided_attention
from approx_kernels.summaries import summary_attention
from closeness import assert_close

needs_compiler = pytest.mark.skipif(isinstance(library(FORWARD), str), reason="there is no C compiler here")


def summaries(*tensors, stride, steps=(None,), **how):
    return summary_attention(*tensors, stride=lambda tokens: stride, steps=steps, **how)


def lsh(q, k, v, mask, causal=False, **how):
    # Bidirectional, it has no key mask where there are other numbers of queries than of keys.
    drawn = draw_projections(q.shape[3], rounds=3, variant="asymmetric", causal=causal, seed=0)
    kind = {"variant": "asymmetric", "cluster": 20, "dedup": False, "causal": causal}
    mask = mask if causal or q.shape[2] == k.shape[2] else None
    return lsh_attention(q, k, v, mask, projections=drawn, **kind, **how)


PATTERNS = {
    "lsh": lsh,
    "lsh, causal": partial(lsh, causal=True),
    **{
        f"adaptive span {causal}": partial(
            adaptive_span_attention, spans=torch.tensor([7.0, 40.25]), ramp=12, causal=causal
        )
        for causal in (False, True)
    },
    **{
        f"strided {step} {causal}": partial(strided_attention, stride=lambda tokens: 11, causal=causal, steps=(step,))
        for step in (None, 1, 2)
        for causal in (False, True)
    },
    **{
        f"block {size} {causal}": partial(block_attention, size=size, neighbours=1, shift=5, causal=causal)
        for size in (16, 128)
        for causal in (False, True)
    },
    "bigbird": partial(bigbird_attention, block=16, draws=draw_blocks(2, 0)),
    "bigbird, compatible": partial(bigbird_attention, block=16, draws=draw_blocks(2, 0), compatible=True),
    "longformer": partial(global_token_attention, left=20, right=20, tokens=(0, 50, 7), see_all=True, causal=False),
    "sinks": partial(global_token_attention, left=30, right=0, tokens=range(4), see_all=False, causal=True),
    **{
        f"{inside} {step} {causal}": partial(
            summaries, stride=11, summary=2, inside=inside, causal=causal, steps=(step,)
        )
        for inside, causal in (("all", False), ("past", False), ("past", True), ("future", False), ("both", False))
        for step in (None, 1, 2)
    },
}


@needs_compiler
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("queries", "keys", "masked"), [(130, 130, False), (40, 201, True), (150, 150, True)])
def test_lists_give_what_the_reference_gives(name, dtype, queries, keys, masked):
    # Values of one sign, as sums that cancel say nothing; as projections lay heads out.
    q, grad = (torch.randn(2, queries, 2, width).to(dtype) for width in (24, 17))
    k, v = (torch.randn(2, keys, 2, width).to(dtype) for width in (24, 17))
    mask = torch.rand(2, keys) < 0.8 if masked else None
    results: list[tuple[torch.Tensor, ...]] = []
    for impl, wide in (("cpu", dtype), ("reference", dtype), ("reference", torch.float64)):
        inputs = [x.transpose(1, 2).to(wide).requires_grad_() for x in (q, k, v.abs())]
        out = PATTERNS[name](inputs[0], inputs[1], inputs[2], mask, scale=0.3, impl=impl)
        results.append((out, *torch.autograd.grad(out, inputs, grad.transpose(1, 2).to(wide))))
    for which, found, plain, exact in zip("oqkv", results[0], results[1], results[2], strict=True):
        assert_close(f"{name} {which}", found, plain, exact, factor=4.0)


@needs_compiler
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_all_queries_are_hashed_where_there_are_fewer_keys(causal):
    q, k, v = torch.randn(2, 90, 8)[:, None], torch.randn(2, 41, 8)[:, None], torch.rand(2, 41, 8)[:, None]
    found, plain = (lsh(q, k, v, None, causal, scale=0.3, impl=impl) for impl in ("cpu", "reference"))
    torch.testing.assert_close(found, plain)


@needs_compiler
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_spans_are_learned_through_c(causal):
    q, k, v = torch.randn(3, 2, 3, 90, 8).unbind()
    found = []
    for impl, dtype in (("cpu", torch.float32), ("reference", torch.float64)):
        # At whole numbers one distance lies where the ramp begins.
        spans = torch.tensor([0.0, 17.3, 40.0], dtype=dtype, requires_grad=True)
        how = {"spans": spans, "ramp": 9, "causal": causal, "scale": 0.4, "impl": impl}
        out = adaptive_span_attention(q.to(dtype), k.to(dtype), v.to(dtype), **how)
        found.append(torch.autograd.grad(out.square().sum(), spans)[0].float())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@needs_compiler
def test_a_key_listed_twice_counts_twice_and_nobody_s_query_is_zero():
    q, k, v = torch.randn(3, 1, 1, 5, 4)
    everything, nothing = (0, 5, -FAR, FAR), (3, 3, -FAR, FAR)
    entries = [[everything, (1, 2, -FAR, FAR)], [nothing]]
    out = attend_lists(q, k, v, None, before=0, starts=[0, 3, 5], entries=entries, scale=1.0)
    exact = (q @ k.transpose(2, 3)).exp() * torch.tensor([1.0, 2.0, 1.0, 1.0, 1.0])
    expected = (exact / exact.sum(-1, keepdim=True)) @ v
    torch.testing.assert_close(out[:, :, :3], expected[:, :, :3])
    assert out[:, :, 3:].eq(0).all()


def test_rows_are_cut_evenly_and_none_is_lost():
    assert cut(3, 3) == []
    assert cut(0, 96) == [0]
    assert cut(10, 138) == [10, 74]
