"""Kernels of LSH attention against the reference in float64: every form, masks, odd numbers, and every gradient.

Under Triton's interpreter, which takes a second for a few dozen tokens, or on a GPU where there is one.
"""

from typing import Any

import pytest
import torch
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

from approx_kernels.ops.lsh import triton_rounds as launching
from approx_kernels.ops.lsh import triton_tokens as summing
from approx_kernels.ops.lsh.api import draw_projections, lsh_attention
from approx_kernels.ops.lsh.sorted_rounds import sorted_rounds
from closeness import assert_close

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []

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


def draw(length, keys, *, size=16, values=16, heads=1, batch=1, dtype=torch.float32):
    # Heads of a token are contiguous in memory, as in a model.
    shapes = (length, size), (keys, size), (keys, values)
    return [torch.randn(batch, n, heads, d).to(DEVICE, dtype).transpose(1, 2) for n, d in shapes]


def drawn(size, variant, causal, rounds=ROUNDS):
    return draw_projections(size, rounds=rounds, variant=variant, causal=causal, seed=4).to(DEVICE)


def attend(
    q, k, v, key_mask=None, *, projections=None, cluster=CLUSTER, rounds=ROUNDS, impl: Any = "triton", **form: Any
):
    if projections is None:
        projections = drawn(q.shape[3], form["variant"], form["causal"], rounds)
    return lsh_attention(q, k, v, key_mask, projections=projections, cluster=cluster, scale=0.6, impl=impl, **form)


def run(tensors, impl, key_mask=None, **form):
    """Outputs and the gradients in q, k and v."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = attend(*leaves, key_mask=key_mask, impl=impl, **form)
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(out.shape, generator=generator).to(out.device, out.dtype)
    return [out, *torch.autograd.grad(out, leaves, grad)]


def check(tensors, *arguments, **form):
    wide = run([x.double() for x in tensors], "reference", *arguments, **form)
    plain, computed = (run(tensors, impl, *arguments, **form) for impl in ("reference", "triton"))
    for name, *each in zip(("out", "dq", "dk", "dv"), computed, plain, wide, strict=True):
        # Sums over tiles and rounds round a few times more than a single sum.
        assert_close(name, *each, factor=6.0)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fill the outputs of kernels with NaN before they run."""
    for module, name in (
        (launching, "_empty"),
        (launching, "_empty_gradients"),
        (launching, "_running"),
        (summing, "_empty_tokens"),
    ):
        monkeypatch.setattr(module, name, _full_of_nan(getattr(module, name)))


def _full_of_nan(make):
    def made(*arguments):
        computed = make(*arguments)
        for x in computed if isinstance(computed, tuple) else (computed,):
            x.fill_(torch.nan)
        return computed

    return made


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
@pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter cannot multiply bfloat16")
def test_bfloat16(form):
    check(draw(700, 700, size=64, heads=2, batch=4, dtype=torch.bfloat16), mask(700), **form, cluster=64)


@pytest.mark.slow
def test_it_compiles_without_a_break():
    leaves, real = [x.requires_grad_() for x in draw(35, 35, batch=2)], mask(35)[:2]
    projections = drawn(16, "asymmetric", True)

    def call(q, k, v):
        return attend(q, k, v, real, projections=projections, **CAUSAL)

    out, expected = torch.compile(call, fullgraph=True, backend="aot_eager")(*leaves), call(*leaves)
    torch.testing.assert_close(out, expected)
    computed, wanted = (torch.autograd.grad(x.square().sum(), leaves) for x in (out, expected))
    torch.testing.assert_close(computed, wanted)


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
    q, k, v = draw(20, 20)
    odd = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k)]
    spread = v.repeat(1, 1, 2, 1)[:, :, ::2]
    assert torch.equal(attend(odd[0], odd[1], spread, **CAUSAL), attend(q, k, spread.contiguous(), **CAUSAL))


@pytest.mark.sample(0)
def test_it_repeats_bit_by_bit():
    tensors = draw(50, 50, dtype=torch.float16)
    one, two = (run(tensors, "triton", **CAUSAL) for _ in range(2))
    assert all(torch.equal(*each) for each in zip(one, two, strict=True))


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
