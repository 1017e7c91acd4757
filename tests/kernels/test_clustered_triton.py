"""Kernels of clustered attention against the reference in float64: masks, odd numbers, and every gradient."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import triton_cases
from approx_kernels.ops.clustered import triton as batched
from approx_kernels.ops.clustered import triton_members as members
from approx_kernels.ops.clustered import triton_own as launching
from approx_kernels.ops.clustered import triton_top
from approx_kernels.ops.clustered.api import clustered_attention
from approx_kernels.ops.clustering.api import draw_centroids, draw_planes
from triton_cases import DEVICE, ON_DEVICE, draw, multiplies_bfloat16, spoilt

pytest.importorskip("triton")

pytestmark = ON_DEVICE


def settings(size=16, *, clusters=3, topk: int | None = 4, iterations=2) -> dict[str, Any]:
    planes, draws = draw_planes(size, bits=20, bias=True, clusters=100, seed=0)
    drawn = {"planes": planes.to(DEVICE), "draws": draws.to(DEVICE)}
    return {**drawn, "clusters": clusters, "iterations": iterations, "topk": topk, "scale": 0.3}


run = partial(triton_cases.run, clustered_attention)
# Sums over tiles round differently from a single sum; by how much depends on the processor where NumPy's products stand
# in for a GPU's.
check = partial(triton_cases.check, clustered_attention, factor=6.0)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fill outputs whose padding need not be zero with NaN before kernels run."""
    made = launching.beside

    def full(x, size, padded):
        return made(x, size, padded) if padded else made(x, size, padded).fill_(torch.nan)

    monkeypatch.setattr(launching, "beside", full)
    monkeypatch.setattr(members, "_sums", spoilt(members._sums))


@pytest.mark.parametrize("topk", [None, 1, 25], ids=["plain", "top 1", "all keys"])
@pytest.mark.sample(1)
def test_one_sample(topk):
    check(draw(21, 25, heads=2), **settings(topk=topk))


@pytest.mark.slow
@pytest.mark.parametrize("size", [32, 80, 128])
def test_head_sizes(size):
    check(draw(20, 20, size=size, values=16 if size == 80 else size), **settings(size, clusters=3, topk=3))


def mask(length):
    position = torch.arange(length, device=DEVICE)
    rows = [position < 9, position % 3 != 0, position < 0, position < 2]
    return torch.stack(rows)


@pytest.mark.parametrize("topk", [None, 4], ids=["plain", "improved"])
@pytest.mark.sample(1)
def test_padding_of_samples_many_few_and_none_of_which_are_real(topk):
    check(draw(13, 13, batch=4), mask(13), **settings(topk=topk))


def test_keys_alone_are_padded():
    check(draw(9, 13, batch=2), mask(13)[[1, 2]], **settings())


@pytest.mark.parametrize("topk", [None, 3], ids=["plain", "improved"])
@pytest.mark.sample(1)
def test_a_cluster_for_each_query_is_exact(topk):
    tensors, real = draw(11, 11, batch=4), mask(11)
    how = settings(topk=topk, clusters=30)
    pairs = (real[:, None, None] & real[:, None, :, None]).expand(4, 1, 11, 11)
    scores = (tensors[0] @ tensors[1].mT * 0.3).masked_fill(~pairs, -torch.inf)
    expected = scores.softmax(-1).nan_to_num() @ tensors[2]
    torch.testing.assert_close(clustered_attention(*tensors, key_mask=real, impl="triton", **how), expected)


def test_padding_is_not_read():
    # Padding outside the real tokens; keys within a tile are read before they are masked.
    tensors, real = draw(13, 13, batch=3), mask(13)[[0, 2, 3]]
    for x in tensors:
        x.masked_fill_(~real[:, None, :, None], torch.nan)
    assert all(torch.isfinite(x).all() for x in run(tensors, real, **settings()))


def test_frozen_centroids():
    selectors = draw_centroids(1, 16, clusters=4, seed=0)[1].to(DEVICE)
    how = {"selectors": selectors, "clusters": 4, "iterations": 1, "topk": 4, "scale": 0.3}
    check(draw(13, 13, batch=2), mask(13)[[1, 3]], **how)


def test_half_precision():
    # All keys, as the order of scores that are equal in 16 bits is undefined.
    check(draw(17, 17, dtype=torch.float16), **settings(topk=17))


@multiplies_bfloat16
def test_bfloat16():
    check(draw(600, 600, size=64, dtype=torch.bfloat16), **settings(64, clusters=25, topk=None))


def test_parts_of_a_cluster_change_nothing(monkeypatch):
    tensors = draw(45, 20)
    how = settings(clusters=2, topk=5)
    whole = run(tensors, **how)
    monkeypatch.setattr(launching, "_parts", lambda *_: 3)
    assert all(torch.equal(*each) for each in zip(whole, run(tensors, **how), strict=True))


def test_strides_do_not_matter():
    triton_cases.check_strides(clustered_attention, **settings())


@pytest.mark.sample(0)
def test_operators_pass_opcheck():
    q, k, v = (x.requires_grad_() for x in draw(9, 9))
    order = torch.arange(9, dtype=torch.int32, device=DEVICE).view(1, 1, 9)
    begins = torch.tensor([[[0, 4, 9]]], dtype=torch.int32, device=DEVICE)
    opcheck(members.sum_rows.operator, (q, order, begins, True))
    means, shared = members.sum_rows(q, order, begins, True).detach(), torch.randn(1, 1, 2, 16, device=DEVICE)
    opcheck(members.spread_rows.operator, (shared.requires_grad_(), order, begins, 9, False))
    opcheck(triton_top.largest_keys.operator, (means, k.detach(), None, 3, 0.3), test_utils="test_faketensor")
    top = torch.tensor([[[[1, 5, -1], [0, 8, 1]]]], dtype=torch.int32, device=DEVICE)
    lse = torch.full((1, 1, 2), 3.0, device=DEVICE)
    opcheck(launching.improved_forward.operator, (q, k, v, means, shared, lse, top, order, begins, 0.3, False))


@pytest.mark.slow
def test_it_compiles_without_a_break():
    how = settings(clusters=3, topk=2)
    triton_cases.check_compiles(clustered_attention, draw(12, 12, batch=2), mask(12)[1:3], **how)


def test_operations_are_counted():
    with FlopCounterMode(display=False) as counter:
        clustered_attention(*draw(12, 14, values=32), impl="triton", **settings(clusters=3, topk=2))
    hashed, compared = 12 * 20 * 16, 2 * 2 * 12 * 20 * 3
    attended, chosen, per_member = 3 * 14 * (16 + 32), 3 * 14 * 16, (12 + 3) * 2 * (16 + 32)
    assert counter.get_total_flops() == 2 * (hashed + compared + attended + chosen + per_member)


def test_names_cases_without_a_kernel():
    with pytest.raises(ValueError, match="no dropout, and 0\\.1 was asked for"):
        clustered_attention(*draw(9, 9), impl="triton", dropout=0.1, **settings())
    with pytest.raises(ValueError, match="at most 128 clusters, and 129"):
        clustered_attention(*draw(140, 9), impl="triton", **settings(clusters=129) | {"draws": torch.arange(129)})


@pytest.mark.parametrize(("batch", "keys", "masked"), [(2, 12, True), (2, 14, True), (1, 14, False)])
@pytest.mark.sample(1)
def test_keys_in_parts(batch, keys, masked, monkeypatch):
    monkeypatch.setattr(batched, "_parts", lambda *_: 3)
    check(draw(keys, keys, batch=batch), mask(keys)[[0, 2]] if masked else None, **settings())


@pytest.mark.parametrize(
    ("programs", "keys", "parts"),
    [(12, 16384, 8), (96, 2048, 1), (12, 16383, 11), (12, 4099, 8), (1, 4096, 8), (12, 509, 1), (200, 4096, 1)],
)
def test_few_heads_have_their_keys_in_parts(programs, keys, parts):
    assert batched._parts(programs, keys) == parts
