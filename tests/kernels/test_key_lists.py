"""Blocks, windows with chosen tokens, and summaries by lists of keys in C give what their references give."""

from functools import partial
from typing import Any

import pytest
import torch

from approx_kernels.ops.adaptive_span.api import adaptive_span_attention
from approx_kernels.ops.key_lists.cpu import FAR, attend_lists, cut
from approx_kernels.ops.lsh.api import draw_projections, lsh_attention
from approx_kernels.ops.patterns.api import pattern_attention
from approx_kernels.ops.patterns.reference import Blocks, Listed, Strided, Summaries, Window, bigbird_lists, draw_blocks
from c_sources import needs_compiler
from closeness import assert_close, with_float64


def bigbird(tokens, compatible):
    return Listed(size=16, lists=bigbird_lists(-(-tokens // 16), DRAWS, compatible))


def patterned(pattern: Any, step: int | None = None) -> Any:
    of: Any = pattern if callable(pattern) else lambda tokens: pattern
    return partial(pattern_attention, pattern=of, steps=(step,))


DRAWS = draw_blocks(2, 0)


def lsh(q, k, v, key_mask, causal=False, **how):
    # The bidirectional form has no key mask if the numbers of queries and keys differ.
    drawn = draw_projections(q.shape[3], rounds=3, variant="asymmetric", causal=causal, seed=0)
    kind = {"variant": "asymmetric", "cluster": 20, "dedup": False, "causal": causal}
    key_mask = key_mask if causal or q.shape[2] == k.shape[2] else None
    return lsh_attention(q, k, v, key_mask, projections=drawn, **kind, **how)


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
        f"strided {step} {causal}": patterned(Strided(causal, stride=11), step)
        for step in (None, 1, 2)
        for causal in (False, True)
    },
    **{
        f"block {size} {causal}": patterned(Blocks(causal, size=size, neighbours=1, shift=5))
        for size in (16, 128)
        for causal in (False, True)
    },
    "bigbird": patterned(partial(bigbird, compatible=False)),
    "bigbird, compatible": patterned(partial(bigbird, compatible=True)),
    "longformer": patterned(Window(left=20, right=20, tokens=(0, 7, 50), see_all=True)),
    "sinks": patterned(Window(True, left=30, tokens=range(4))),
    **{
        f"{inside} {step} {causal}": patterned(Summaries(causal, stride=11, summary=2, inside=inside), step)
        for inside, causal in (
            ("all", False),
            ("past", False),
            ("past", True),
            ("future", False),
            ("past, future", False),
        )
        for step in (None, 1, 2)
    },
}


@needs_compiler
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("queries", "keys", "masked"), [(130, 130, False), (40, 201, True), (150, 150, True)])
@pytest.mark.sample(30)
def test_lists_equal_the_reference(name, dtype, queries, keys, masked):
    # Values of one sign, as sums that cancel say nothing; as projections lay heads out.
    q, grad = (torch.randn(2, queries, 2, width).to(dtype) for width in (24, 17))
    k, v = (torch.randn(2, keys, 2, width).to(dtype) for width in (24, 17))
    mask = torch.rand(2, keys) < 0.8 if masked else None
    q, k, v, grad = (x.transpose(1, 2) for x in (q, k, v.abs(), grad))
    attend = partial(PATTERNS[name], key_mask=mask, scale=0.3)
    for which, *each in with_float64(attend, (q, k, v), grad, dtype):
        assert_close(f"{name} {which}", *each, factor=4.0)


@needs_compiler
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_all_queries_are_hashed_where_there_are_fewer_keys(causal):
    q, k, v = torch.randn(2, 90, 8)[:, None], torch.randn(2, 41, 8)[:, None], torch.rand(2, 41, 8)[:, None]
    actual, plain = (lsh(q, k, v, None, causal, scale=0.3, impl=impl) for impl in ("cpu", "reference"))
    torch.testing.assert_close(actual, plain)


@needs_compiler
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_spans_are_learned_through_c(causal):
    q, k, v = torch.randn(3, 2, 3, 90, 8).unbind()
    grads = []
    for impl, dtype in (("cpu", torch.float32), ("reference", torch.float64)):
        # At whole numbers one distance lies where the ramp begins.
        spans = torch.tensor([0.0, 17.3, 40.0], dtype=dtype, requires_grad=True)
        how = {"spans": spans, "ramp": 9, "causal": causal, "scale": 0.4, "impl": impl}
        out = adaptive_span_attention(q.to(dtype), k.to(dtype), v.to(dtype), **how)
        grads.append(torch.autograd.grad(out.square().sum(), spans)[0].float())
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


@needs_compiler
def test_a_key_listed_twice_counts_twice_and_unlisted_queries_are_zero():
    q, k, v = torch.randn(3, 1, 1, 5, 4)
    everything, nothing = (0, 5, -FAR, FAR), (3, 3, -FAR, FAR)
    entries = [[everything, (1, 2, -FAR, FAR)], [nothing]]
    out = attend_lists(q, k, v, None, before=0, starts=[0, 3, 5], entries=entries, scale=1.0)
    exact = (q @ k.transpose(2, 3)).exp() * torch.tensor([1.0, 2.0, 1.0, 1.0, 1.0])
    expected = (exact / exact.sum(-1, keepdim=True)) @ v
    torch.testing.assert_close(out[:, :, :3], expected[:, :, :3])
    assert out[:, :, 3:].eq(0).all()


def test_rows_are_cut_evenly_into_whole_strips_and_none_is_lost():
    assert cut(3, 3) == []
    assert cut(0, 96) == [0]
    assert cut(10, 138) == [10, 74]
    assert cut(0, 200) == [0, 96, 192]
    assert cut(0, 200, 192) == [0, 128]


# Enough for tiles, and for every way to see half of a group of 32 keys.
WINDOWS = {
    "all": (0, 200, -FAR, FAR),
    "some": (37, 150, -FAR, FAR),
    "past": (0, 200, -FAR, 0),
    "window": (0, 200, -40, 9),
    "ahead": (0, 200, 60, FAR),
}


def drawn(dtype=torch.bfloat16, keys=200, size=24, values=17, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(2, n, 3, d, generator=generator).to(dtype) for n, d in ((130, size), (keys, size), (keys, values))
    )
    return [x.transpose(1, 2) for x in (q, k, v.abs())]


def plainly(q, k, v, mask, entries, scale, wide=torch.float64, before=70):
    """Weights of all queries by entries, and the outputs."""
    i, j = before + torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    times = torch.stack(
        [((j >= b) & (j < e) & (j - i >= low) & (j - i <= high)).double() for b, e, low, high in entries]
    ).sum(0)
    times = times * (1.0 if mask is None else mask[:, None, None, :].double())
    scores = q.to(wide) @ k.to(wide).transpose(2, 3) * scale
    return (scores + times.log().to(wide)).softmax(-1).nan_to_num(0.0) @ v.to(wide)


@needs_compiler
@pytest.mark.parametrize("names", [(name,) for name in WINDOWS] + [("some", "window"), ("past", "ahead")], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize(("size", "values"), [(64, 64), (24, 17), (80, 96), (128, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.sample(30)
def test_lists_in_order_are_as_exact_as_plain_attention(dtype, names, masked, size, values):
    q, k, v = drawn(dtype, size=size, values=values)
    mask = None
    if masked:
        mask = torch.rand(2, 200) < 0.7
        # A whole group of keys, and a sample of which one key is real.
        mask[0, 64:96], mask[1, :] = False, torch.arange(200) == 190
    entries = [WINDOWS[name] for name in names]
    exact = plainly(q, k, v, mask, entries, scale=0.2)
    plain = plainly(q, k, v, mask, entries, scale=0.2, wide=torch.float32).to(dtype)
    starts = cut(0, 130)
    lists = {"before": 70, "starts": [*starts, 130], "entries": [entries] * len(starts)}
    actual = attend_lists(q, k, v, mask, **lists, scale=0.2)
    # Weights are rounded too, not the result alone.
    assert_close(str(names), actual, plain, exact, factor=3.0)


@needs_compiler
@pytest.mark.parametrize("name", ["all", "window"])
@pytest.mark.parametrize("order", ["a slope", "rising", "falling", "a cliff", "a peak", "low"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_far_apart_meet_in_one_softmax(dtype, order, name):
    q, k, v = drawn(dtype)
    # Scores of the keys run from -1000 to 1000, or jump there, which no single number that weights are relative to
    # survives; on the slope they rise by so much that earlier ones still count.
    height = {
        "a slope": torch.linspace(-0.02, 0.02, 200),
        "rising": torch.linspace(-1, 1, 200),
        "falling": torch.linspace(1, -1, 200),
        "a cliff": torch.where(torch.arange(200) < 100, -1.0, 1.0),
        "a peak": torch.where(torch.arange(200) == 130, 1.0, -1.0),
        "low": -torch.ones(200),
    }[order]
    q, k = q.abs() + 1, (k * 0.1 + 40 * height[:, None]).to(dtype)
    entries = [WINDOWS[name]]
    exact = plainly(q, k, v, None, entries, scale=1.0)
    plain = plainly(q, k, v, None, entries, scale=1.0, wide=torch.float32).to(dtype)
    actual = attend_lists(q, k, v, None, before=70, starts=[0, 130], entries=[entries], scale=1.0)
    # Scores of a thousand are rounded by a ten-thousandth in float32: that is what weights are then off by.
    assert_close(order, actual, plain, exact, factor=6.0)


@needs_compiler
def test_nan_reaches_only_queries_that_see_it():
    q, k, v = drawn()
    k[0, 0, 150], k[:, :, 99], v[:, :, 99] = torch.nan, torch.nan, torch.inf
    mask = (torch.arange(200) != 99).repeat(2, 1)
    lists = {"before": 70, "starts": [0, 96, 130], "entries": [[WINDOWS["window"]]] * 2}
    actual = attend_lists(q, k, v, mask, **lists, scale=0.2)
    lost = torch.zeros(2, 3, 130, dtype=torch.bool)
    lost[0, 0, 141 - 70 : 190 - 70 + 1] = True
    assert torch.equal(actual.isnan().all(-1), lost)
    assert torch.equal(actual.isnan().any(-1), lost)


@needs_compiler
@pytest.mark.parametrize("ramp", [1, 6])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_spans_end_wherever_a_group_of_keys_does(ramp, causal):
    spans = torch.tensor([0.0, 1.0, 24.5, 25.0, 26.0, 30.0, 31.0, 32.0, 33.0, 57.0, 58.25, 64.0, 500.0])
    q, k = (torch.randn(1, 130, 13, 16).bfloat16().transpose(1, 2) for _ in range(2))
    # Values of the identity make outputs equal to the weights.
    v = torch.eye(130).bfloat16().expand(1, 13, 130, 130)
    attend = partial(adaptive_span_attention, ramp=ramp, causal=causal, scale=0.3)
    actual = attend(q, k, v, spans=spans, impl="cpu")
    plain = attend(q, k, v, spans=spans, impl="reference")
    exact = attend(q.double(), k.double(), v.double(), spans=spans.double(), impl="reference")
    assert_close("spans", actual, plain, exact, factor=3.0)
    assert torch.equal(actual > 0, exact > 0)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_order_changes_nothing_where_everything_is_seen(dtype):
    q, k, v = drawn(dtype)
    mask, everything = torch.rand(2, 200) < 0.6, [[WINDOWS["all"]]]
    orders = torch.randperm(130)[None], torch.randperm(200)[None]
    actual, plain = (
        attend_lists(q, k, v, mask, before=70, starts=[0, 130], entries=everything, scale=0.2, orders=order)
        for order in (orders, None)
    )
    torch.testing.assert_close(actual, plain)


@needs_compiler
@pytest.mark.parametrize("name", ["lsh", "lsh, causal", "strided None True", "adaptive span True"])
def test_parts_and_orders_are_the_same_with_any_number_of_threads(name):
    inputs, before = (
        [x.transpose(1, 2)[:, :, :130] for x in torch.randn(3, 1, 130, 2, 24).bfloat16()],
        torch.get_num_threads(),
    )
    try:
        torch.set_num_threads(1)
        alone = PATTERNS[name](*inputs, None, scale=0.3, impl="cpu")
        torch.set_num_threads(16)
        assert torch.equal(PATTERNS[name](*inputs, None, scale=0.3, impl="cpu"), alone)
    finally:
        torch.set_num_threads(before)


@needs_compiler
def test_heads_that_are_cut_for_more_threads_give_the_same():
    q, k, v = drawn()
    starts, before = cut(0, 130, 32), torch.get_num_threads()
    lists = {"before": 70, "starts": [*starts, 130], "entries": [[WINDOWS["past"]]] * len(starts)}
    try:
        torch.set_num_threads(1)
        alone = attend_lists(q, k, v, None, **lists, scale=0.2)
        torch.set_num_threads(16)
        assert torch.equal(attend_lists(q, k, v, None, **lists, scale=0.2), alone)
    finally:
        torch.set_num_threads(before)
