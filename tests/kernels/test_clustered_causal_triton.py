"""Kernels of causal clustered attention against the reference in float64: masks, caches, odd numbers, and every gradient.

Under Triton's interpreter, which takes seconds for a few dozen tokens, or on a GPU where there is one.
"""

from functools import partial
from typing import Any

import pytest
import torch
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import triton_cases
from approx_kernels.ops.clustered import triton_causal_far
from approx_kernels.ops.clustered.api import causal_clustered_attention
from approx_kernels.ops.clustering.api import draw_centroids
from triton_cases import DEVICE, ON_DEVICE, draw, multiplies_bfloat16, spoilt

pytest.importorskip("triton")

pytestmark = ON_DEVICE


def settings(size=16, *, heads=1, clusters=3, chunk=8, topk: int | None = 3) -> dict[str, Any]:
    centroids, selectors = (x.to(DEVICE) for x in draw_centroids(heads, size, clusters=clusters, seed=0))
    return {"centroids": centroids, "selectors": selectors, "chunk": chunk, "topk": topk, "scale": 0.3}


run = partial(triton_cases.run, causal_clustered_attention)
# Sums chunk by chunk round a little differently from one sum.
check = partial(triton_cases.check, causal_clustered_attention, factor=4.0)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fill the outputs of kernels with NaN and arbitrary numbers before they run."""
    monkeypatch.setattr(torch.Tensor, "new_empty", spoilt(torch.Tensor.new_empty, 77))
    monkeypatch.setattr(torch, "empty_like", spoilt(torch.empty_like, 77))


@pytest.mark.slow
@pytest.mark.parametrize("topk", [None, 1, 7], ids=["plain", "top 1", "all but one of a chunk"])
def test_one_sample(topk):
    check(draw(29, 29), **settings(topk=topk))


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.sample(0)
def test_samples_and_heads(heads):
    check(draw(19, 19, batch=2, heads=heads, values=32), **settings(heads=heads, topk=2))


@pytest.mark.slow
@pytest.mark.parametrize("size", [32, 80, 128])
def test_head_sizes(size):
    check(draw(14, 14, size=size, values=16 if size == 80 else size), **settings(size, chunk=5, topk=2))


@pytest.mark.parametrize("keys", [8, 16, 17], ids="{} tokens in chunks of 8".format)
@pytest.mark.sample(0)
def test_chunks_that_the_tokens_fill(keys):
    check(draw(keys, keys), **settings())


@pytest.mark.slow
def test_more_kept_keys_than_a_tile_has():
    check(draw(39, 39), **settings(chunk=19, topk=18))


def test_more_queries_of_one_row_than_a_tile_has():
    check(draw(40, 40), **settings(clusters=1, chunk=20, topk=5))


@pytest.mark.slow
def test_more_rows_than_a_tile_has():
    check(draw(45, 45), **settings(clusters=130, chunk=40, topk=1))


def mask(keys):
    position = torch.arange(keys, device=DEVICE)
    return torch.stack([position < 17, position % 3 != 0, position < 0, position > 8])


@pytest.mark.parametrize("topk", [None, 3], ids=["plain", "improved"])
@pytest.mark.sample(1)
def test_padding_of_samples_many_few_and_none_of_which_are_real(topk):
    check(draw(13, 13, batch=4), mask(13), **settings(chunk=5, topk=topk))


@pytest.mark.slow
@pytest.mark.parametrize(("length", "masked"), [(1, True), (12, False), (12, True), (30, False)])
def test_queries_on_a_cache_and_more_queries_than_keys(length, masked):
    real = mask(25)[[1, 3]] if masked else None
    check(draw(length, 25, batch=2), real, **settings(clusters=4))


def test_two_queries_at_the_end_of_the_last_chunk_of_a_cache():
    check(draw(2, 16), torch.ones(1, 16, dtype=torch.bool, device=DEVICE), **settings())


def test_one_chunk_of_padded_samples():
    check(draw(13, 13, batch=4), mask(13), **settings(chunk=13))


@pytest.mark.slow
@pytest.mark.parametrize("length", [13, 4])
def test_padding_is_not_read(length):
    tensors, real = draw(13, 13, batch=4), mask(13)
    for x in tensors:
        x.masked_fill_(~real[:, None, :, None], torch.nan)
    computed = run([tensors[0][:, :, -length:], *tensors[1:]], real, **settings(chunk=5))
    assert all(torch.isfinite(x).all() for x in computed)


@pytest.mark.slow
@pytest.mark.sample(1)
def test_dropped_keys():
    # Scores rise along the sequence: every key takes the place of an earlier one, and the largest scores move on.
    q, k = torch.randn(1, 1, 30, 16).abs(), torch.arange(1.0, 31)[:, None] * torch.rand(1, 1, 30, 16) / 8
    tensors, how = [q.to(DEVICE), k.to(DEVICE), torch.rand(1, 1, 30, 16, device=DEVICE)], settings()
    check(tensors, **(how | {"centroids": how["centroids"].abs()}))


@pytest.mark.sample(0)
def test_equal_scores_do_not_add_keys():
    q, k, v = draw(30, 30)
    computed = causal_clustered_attention(q, torch.zeros_like(k), v, impl="triton", **settings())
    torch.testing.assert_close(computed, v.cumsum(2) / torch.arange(1, 31, device=DEVICE)[:, None])


@pytest.mark.sample(0)
def test_half_precision():
    check(draw(29, 29, size=32, values=32, dtype=torch.float16), **settings(32))


@multiplies_bfloat16
def test_bfloat16():
    check(draw(1100, 1100, size=64, values=64, dtype=torch.bfloat16), **settings(64, clusters=25, chunk=256, topk=None))


@pytest.mark.sample(0)
def test_the_future_changes_no_bit_and_has_no_gradient():
    tensors, grad = draw(30, 30), torch.randn(1, 1, 30, 16, device=DEVICE)
    grad[:, :, 19:] = 0
    first, *grads = run(tensors, grad=grad, **settings())
    assert all(x[:, :, 19:].eq(0).all() for x in grads)
    for x in tensors:
        x[:, :, 19:] *= 100
    changed, *_ = run(tensors, grad=grad, **settings())
    assert torch.equal(first[:, :, :19], changed[:, :, :19])
    assert not torch.equal(first[:, :, 19:], changed[:, :, 19:])


@pytest.mark.slow
def test_neighbours_change_no_bit():
    tensors = draw(21, 21, batch=3)
    computed, alone = (
        run(x, grad=torch.ones(1, device=DEVICE), **settings()) for x in (tensors, [x[1:2] for x in tensors])
    )
    for each, single in zip(computed, alone, strict=True):
        assert torch.equal(each[1:2], single)


@pytest.mark.slow
def test_strides_do_not_matter():
    triton_cases.check_strides(causal_clustered_attention, **settings())


@pytest.mark.slow
@pytest.mark.parametrize("topk", [0, 2], ids=["plain", "improved"])
def test_operators_pass_opcheck(topk):
    q, k, v = (x.requires_grad_() for x in draw(11, 11))
    near, lse = torch.randn(1, 1, 11, 16, device=DEVICE), torch.randn(1, 1, 11, device=DEVICE)
    rows, order = torch.randn(1, 1, 2, 16, device=DEVICE), torch.randperm(11, device=DEVICE).int().view(1, 1, 11)
    begins = torch.tensor([[[0, 2, 4, 6, 7, 9, 11]]], dtype=torch.int32, device=DEVICE)
    arguments = q, k, v, near.requires_grad_(), lse.requires_grad_(), rows, order, begins, 5, topk, 0.3, False
    opcheck(triton_causal_far.far_forward.operator, arguments)


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True], ids=["all real", "masked"])
def test_it_compiles_without_a_break(masked):
    real = mask(10)[1:3] if masked else None
    how = settings(chunk=5, topk=2)
    triton_cases.check_compiles(causal_clustered_attention, draw(10, 10, batch=2), real, **how)


@pytest.mark.sample(0)
def test_operations_are_counted():
    q, k, v = (x.requires_grad_() for x in draw(24, 24, values=32))
    how = settings(topk=2)
    with FlopCounterMode(display=False) as counter:
        out = causal_clustered_attention(q, k, v, impl="triton", **how)
        forward = counter.get_total_flops()
        out.sum().backward()
    groups, near = 24 * 3 * 16, 3 * 36 * (16 + 32)
    past, nearest = 3 * 16 * (3 * 16 + 32), 24 * 2 * (16 + 32)
    assert forward == 2 * (groups + near + past + nearest)
    back = 3 * 36 * (4 * 16 + 3 * 32) + 3 * 16 * (4 * 16 + 2 * 32) + 24 * 2 * (4 * 16 + 3 * 32)
    assert counter.get_total_flops() - forward == 2 * back


def test_names_cases_without_a_kernel():
    with pytest.raises(ValueError, match="no dropout, and 0\\.1 was asked for"):
        causal_clustered_attention(*draw(9, 9), impl="triton", dropout=0.1, **settings())
    with pytest.raises(ValueError, match="at most 2048 tokens, and 2100"):
        causal_clustered_attention(*draw(3, 2101), impl="triton", **settings(chunk=2100))
    with pytest.raises(ValueError, match="at most 32767 chunks, 2 tokens each"):
        causal_clustered_attention(*draw(1, 65535), impl="triton", **settings(chunk=1, topk=1))
