"""Kernels of LSH attention against the reference in float64: every form, masks, odd numbers, and every gradient."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import triton_cases
from approx_kernels.ops.lsh import triton_rounds as launching
from approx_kernels.ops.lsh import triton_tokens as summing
from approx_kernels.ops.lsh.api import draw_projections, lsh_attention
from approx_kernels.ops.lsh.sorted_rounds import sorted_rounds
from triton_cases import DEVICE, ON_DEVICE, draw, multiplies_bfloat16, spoilt

pytest.importorskip("triton")

pytestmark = ON_DEVICE

ROUNDS, CLUSTER = 3, 5
ALL = [
    (variant, causal, dedup)
    for variant in ("asymmetric", "shared")
    for causal in (False, True)
    for dedup in (False, True)
]
FORMS = [
    pytest.param(
        {"variant": variant, "causal": causal, "dedup": dedup},
        id=f"{variant}-{'causal' if causal else 'bidirectional'}{'-dedup' * dedup}",
    )
    for variant, causal, dedup in ALL
]
CAUSAL: dict[str, Any] = {"variant": "asymmetric", "causal": True, "dedup": False}
CAUSAL_DEDUP = CAUSAL | {"dedup": True}


def drawn(size, variant, causal, rounds=ROUNDS):
    return draw_projections(size, rounds=rounds, variant=variant, causal=causal, seed=4).to(DEVICE)


def attend(
    q, k, v, key_mask=None, *, projections=None, cluster=CLUSTER, rounds=ROUNDS, impl: Any = "triton", **form: Any
):
    if projections is None:
        projections = drawn(q.shape[3], form["variant"], form["causal"], rounds)
    return lsh_attention(q, k, v, key_mask, projections=projections, cluster=cluster, scale=0.6, impl=impl, **form)


run = partial(triton_cases.run, attend)
# Sums over tiles and rounds round a few times more than a single sum.
check = partial(triton_cases.check, attend, factor=6.0)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fill the outputs of kernels with NaN before they run."""
    for module, name in (
        (launching, "_empty"),
        (launching, "_empty_gradients"),
        (launching, "_running"),
        (summing, "_empty_tokens"),
    ):
        monkeypatch.setattr(module, name, spoilt(getattr(module, name)))


def mask(length):
    """Samples with holes, without padding, of one token and of none."""
    position = torch.arange(length, device=DEVICE)
    return torch.stack([position % 3 != 0, position < length, position == 4, position < 0])


# Unpack the values of marked parameters, which the test would otherwise get instead of a form.
@pytest.mark.parametrize(
    "form", [*FORMS[:3], *(pytest.param(*form.values, id=form.id, marks=pytest.mark.slow) for form in FORMS[3:])]
)
@pytest.mark.sample(1)
def test_every_form_under_a_key_mask(form):
    check(draw(35, 35, batch=4), mask(35), **form)


@pytest.mark.parametrize("form", [FORMS[0], FORMS[2], FORMS[5], FORMS[7]])
@pytest.mark.sample(1)
def test_batches_without_padding(form):
    check(draw(37, 37, heads=2), **form, rounds=2)


@pytest.mark.slow
@pytest.mark.parametrize(("length", "keys"), [(9, 41), (41, 20)])
@pytest.mark.parametrize("form", FORMS[:4])
def test_other_numbers_of_keys_than_of_queries(length, keys, form):
    check(draw(length, keys, batch=2), mask(keys)[:2], **form, rounds=2)


def test_scores_far_below_zero():
    q, k, v = draw(23, 23)
    check([q + 6, k - 6, v], **CAUSAL, rounds=2)


@pytest.mark.slow
@pytest.mark.parametrize("size", [32, 64, 80, 96, 128])
def test_head_sizes(size):
    check(draw(14, 14, size=size, values=16 if size == 80 else size), **CAUSAL_DEDUP, rounds=2)


@pytest.mark.parametrize("form", [FORMS[3], FORMS[4]])
@pytest.mark.sample(1)
def test_half_precision(form):
    check(draw(90, 90, dtype=torch.float16), **form, cluster=20, rounds=2)


@pytest.mark.parametrize("form", FORMS)
@multiplies_bfloat16
def test_bfloat16(form):
    check(draw(700, 700, size=64, heads=2, batch=4, dtype=torch.bfloat16), mask(700), **form, cluster=64)


@pytest.mark.slow
def test_it_compiles_without_a_break():
    how = CAUSAL | {"projections": drawn(16, "asymmetric", True)}
    triton_cases.check_compiles(attend, draw(35, 35, batch=2), mask(35)[:2], same=torch.allclose, **how)


@pytest.mark.parametrize("form", FORMS)
def test_queries_that_see_a_rank_are_adjacent(form):
    q, k, _ = draw(60, 60, batch=4, heads=2)
    projections = drawn(16, form["variant"], form["causal"])
    computed = sorted_rounds(q, k, mask(60), projections=projections, cluster=CLUSTER, buckets=1, **form)
    low, end = (bound.gather(-1, computed.queries.long())[..., None] for bound in (computed.low, computed.end))
    begins = torch.arange(0, computed.tokens.shape[3], 4, device=DEVICE)
    seeing = (low < end) & (low < begins + 4) & (end > begins)
    observers = launching._observers(computed.queries, computed.low, computed.end, computed.tokens.shape[3], 4)
    first, past = (x[..., None, :] for x in observers)
    place = torch.arange(60, device=DEVICE)[:, None]
    assert torch.equal(seeing, (place >= first) & (place < past))


def test_strides_do_not_matter():
    triton_cases.check_strides(attend, **CAUSAL)


@pytest.mark.sample(0)
def test_it_repeats_bit_by_bit():
    triton_cases.check_repeats(attend, **CAUSAL)


@pytest.mark.parametrize("own_keys", ["always", "last resort"])
@pytest.mark.sample(0)
def test_operators_pass_opcheck(own_keys):
    q, k, v = (x.requires_grad_() for x in draw(9, 9))
    projections = drawn(16, "asymmetric", True, rounds=2)
    with torch.no_grad():
        how = {"variant": "asymmetric", "cluster": 2, "buckets": 1, "causal": True, "dedup": True}
        *plan, ranks = sorted_rounds(q, k, None, projections=projections, **how)
    opcheck(launching.lsh_forward.operator, (q, k, v, None, plan, ranks, own_keys, 4, 0.3))


def test_operations_are_counted():
    q, k, v = (x.requires_grad_() for x in draw(20, 20, values=32))
    with FlopCounterMode(display=False) as counter:
        out = attend(q, k, v, **CAUSAL_DEDUP, rounds=2)
        forward = counter.get_total_flops()
        out.sum().backward()
    pairs, hashed = 2 * 20 * 2 * CLUSTER, 2 * 2 * 20 * 16
    assert forward == 2 * pairs * (16 + 32) + 2 * hashed
    assert counter.get_total_flops() - forward == 2 * pairs * (4 * 16 + 3 * 32)


@pytest.mark.parametrize("form", FORMS)
def test_names_cases_without_a_kernel(form):
    with pytest.raises(ValueError, match=r"no dropout, and 0\.1 was asked for\. Set the attention dropout to 0"):
        attend(*draw(20, 20), **form, dropout=0.1)
    with pytest.raises(ValueError, match="head size is 24; allowed are"):
        attend(*draw(20, 20, size=24), **form)
