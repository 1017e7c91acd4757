"""Exact keys joined with estimates for the others: both implementations against dense weights in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from approx_kernels.dispatch.implementation import chosen as run_by
from approx_kernels.dispatch.implementation import implementation
from approx_kernels.ops.exact_part import cpu
from approx_kernels.ops.exact_part.api import (
    LinearFar,
    PerformerFar,
    linear_and_exact,
    linear_and_exact_decode,
    performer_and_exact,
    performer_and_exact_decode,
)
from approx_kernels.ops.exact_part.delta import delta_in_c
from approx_kernels.ops.linear.reference import continue_delta, features
from approx_kernels.ops.near_keys.cpu import near_lists
from approx_kernels.ops.near_keys.reference import Exactly, first_keys, near_keys, reach
from approx_kernels.ops.performer.api import draw_projection
from c_sources import needs_compiler
from closeness import assert_close

SCALE = 0.4
CAUSAL = Exactly(True, 3, None, SCALE)


def near_pairs(length, keys, mask, window, chosen, causal):
    """Which keys each query sees exactly, and which it sees at all, [B or 1, 1, L, S]."""
    place, key = torch.arange(length)[:, None] + keys - length, torch.arange(keys)
    left, right = reach(window, causal)
    near = ((key >= place - left) & (key <= place + right))[None] & (window > 0)
    near = near if chosen is None else near | chosen[:, None]
    seen = (key <= place)[None] if causal else torch.ones(1, length, keys, dtype=torch.bool)
    seen = seen if mask is None else seen & mask[:, None]
    return (near & seen)[:, None], seen[:, None]


def dense_near(q, k, v, mask, exactly):
    causal, window, chosen, scale, _ = exactly
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    near, _ = near_pairs(q.shape[2], k.shape[2], mask, window, chosen, causal)
    scores = (q @ k.mT * scale).masked_fill(~near, -1e30)
    largest = scores.amax(-1, keepdim=True)
    weights = (scores - largest).exp().masked_fill(~near, 0.0)
    total = weights.sum(-1)
    out = weights @ v / total.clamp(min=1.0)[..., None]
    return out, largest[..., 0] + total.clamp(min=1.0).log(), total


@given(
    length=st.integers(1, 150),
    more=st.sampled_from((0, 0, -70, 5, 90)),
    groups=st.integers(1, 2),
    shared=st.integers(1, 2),
    size=st.integers(3, 20),
    window=st.sampled_from((0, 1, 7, 64, 200)),
    density=st.sampled_from((None, 0.1, 0.5)),
    masked=st.booleans(),
    causal=st.booleans(),
)
@settings(max_examples=60)
@needs_compiler
def test_near_keys_and_their_gradients_equal_a_dense_softmax(
    length, more, groups, shared, size, window, density, masked, causal
):
    keys = max(length + more, 1)
    shapes = (groups * shared, length, size), (groups, keys, size), (groups, keys, 5)
    tensors = [torch.randn(2, *shape) for shape in shapes]
    mask = torch.rand(2, keys) < 0.7 if masked else None
    chosen = None if density is None else torch.rand(2, keys) < density
    real = mask[:, None] if mask is not None and length == keys else torch.ones(1, 1, 1, dtype=torch.bool)
    grads = torch.randn(2, groups * shared, length, 5), *torch.randn(2, 2, groups * shared, length)
    exactly = Exactly(causal, window, chosen, SCALE)
    results = []
    for near, dtype in ((dense_near, torch.float64), (near_keys, torch.float64), (near_lists, torch.float32)):
        q, k, v = inputs = [x.to(dtype).requires_grad_() for x in tensors]
        out, log, total = near(q, k, v, mask, exactly)
        counted = (total > 0) & real
        parts = out * counted[..., None], log.masked_fill(~counted, 0.0), total * counted
        loss = torch.stack([(x * grad.to(dtype)).sum() for x, grad in zip(parts, grads, strict=True)]).sum()
        results.append((*parts, *torch.autograd.grad(loss, inputs, materialize_grads=True)))
    for dense, plain, listed in zip(*results, strict=True):
        torch.testing.assert_close(plain, dense)
        torch.testing.assert_close(listed.double(), dense, rtol=2e-4, atol=2e-4)


def dense_linear(q, k, v, mask, exactly, far):
    """Outputs by weights of single pairs."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    near, seen = near_pairs(q.shape[2], k.shape[2], mask, exactly.window, exactly.chosen, exactly.causal)
    scores = (q @ k.mT * exactly.scale).masked_fill(~near, -1e30)
    exact = (scores - scores.amax(-1, keepdim=True)).exp().masked_fill(~near, 0.0)
    maps = far.maps or (None, None)
    of_queries, of_keys = features(q, far.feature_map, maps[0]), features(k, far.feature_map, maps[1])
    gates = (q @ far.query_gate[:, :-1, None] + far.query_gate[:, None, -1:]).exp()
    weights = gates * (of_queries @ (of_keys * (k @ far.key_gate[..., None]).exp()).mT)
    weights = exact + weights.masked_fill(near | ~seen, 0.0)
    total = weights.sum(-1, keepdim=True)
    return weights @ v / total.masked_fill(total == 0, 1.0)


def linear_far(feature_map, heads, size, features, dtype):
    rows = size + (feature_map == "t2r")
    columns = features // 2 if feature_map == "hedgehog" else size
    drawn = torch.randn(2, heads, rows, columns, dtype=dtype)
    maps = (drawn[0], drawn[1]) if feature_map in ("t2r", "hedgehog") else None
    gates = torch.randn(heads, size + 1, dtype=dtype) * 0.3, torch.randn(heads, size, dtype=dtype) * 0.3
    return LinearFar(feature_map, maps, *gates, 1.0)


def forgetful(feature_map, heads, size, dtype):
    """Estimates that forget, with decays and rates that differ from key to key."""
    query_gate, decay, rate = (torch.randn(3, heads, size + 1, dtype=dtype) * 0.3).unbind()
    if feature_map == "gated":
        return LinearFar(feature_map, None, query_gate, torch.randn(heads, size, dtype=dtype) * 0.3, 1.0)
    maps = torch.randn(2, heads, size, size, dtype=dtype)
    return LinearFar(feature_map, (maps[0], maps[1]), query_gate, None, 0.8, decay - 1.0, rate)


def token_by_token(q, k, v, mask, exactly, far):
    """Causal outputs by a softmax over near keys and a state that each far key changes in its turn."""
    heads, length = q.shape[1], q.shape[2]
    k, v = (x.repeat_interleave(heads // k.shape[1], 1) for x in (k, v))
    keys = k.shape[2]
    near, seen = near_pairs(length, keys, mask, exactly.window, exactly.chosen, True)
    scores = (q @ k.mT * exactly.scale).masked_fill(~(near & seen), -1e30)
    exact = (scores - scores.amax(-1, keepdim=True)).exp().masked_fill(~(near & seen), 0.0)
    x, y = q * far.input_scale, k * far.input_scale
    gates = ((x * far.query_gate[:, None, :-1]).sum(-1) + far.query_gate[:, None, -1]).exp()
    unit = far.feature_map == "unit"
    if unit:
        x, y = (torch.nn.functional.silu(each @ weight) for each, weight in zip((x, y), far.maps, strict=True))
        of_queries, of_keys = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (x, y))
        y = k * far.input_scale
        decays = 1 / (1 + ((y * far.decay[:, None, :-1]).sum(-1) + far.decay[:, None, -1]).exp())
        rates = ((y * far.rate[:, None, :-1]).sum(-1) + far.rate[:, None, -1]).sigmoid()
    else:
        of_queries, of_keys = x.softmax(-1), y.softmax(-1) * (y * far.key_gate[:, None]).sum(-1, keepdim=True).exp()
        decays = y.sigmoid() ** (1 / 16)
    # A key that is always near, or padding, leaves the state alone.
    counts = torch.ones(q.shape[0], keys, dtype=torch.bool) if mask is None else mask
    counts = counts if exactly.chosen is None else counts & ~exactly.chosen
    state = q.new_zeros(q.shape[0], heads, of_keys.shape[-1], v.shape[-1])
    weight = q.new_zeros(q.shape[0], heads, 1 if unit else of_keys.shape[-1])
    states = [(state, weight)]
    for key in range(keys):
        one, value, decay = (x[:, :, key] for x in (of_keys, v, decays.unsqueeze(-1) if unit else decays))
        if unit:
            rate = rates[:, :, key, None]
            after = decay[..., None] * state
            change = rate * (value - (one[..., None, :] @ after)[..., 0, :])
            after, written = after + one[..., None] * change[..., None, :], decay * weight + rate
        else:
            after, written = decay[..., None] * state + one[..., None] * value[..., None, :], decay * weight + one
        now = counts[:, key, None, None]
        state, weight = torch.where(now[..., None], after, state), torch.where(now, written, weight)
        states.append((state, weight))
    rows = []
    for row in range(length):
        place = row + keys - length
        state, weight = states[min(max(place + 1 - exactly.window, 0), keys)]
        query = of_queries[:, :, row]
        count = gates[:, :, row] * (weight[..., 0] if unit else (query * weight).sum(-1))
        factor = count if unit else gates[:, :, row]
        sums = (exact[:, :, row, None] @ v)[:, :, 0] + factor[..., None] * (query[:, :, None] @ state)[:, :, 0]
        total = exact[:, :, row].sum(-1) + count
        rows.append(sums / total.masked_fill(total == 0, 1.0)[..., None])
    return torch.stack(rows, 2)


@pytest.mark.parametrize("feature_map", ["unit", "gated"])
@given(
    length=st.integers(1, 40) | st.sampled_from((65, 90)),
    more=st.sampled_from((0, 0, -7, 5, 40)),
    groups=st.integers(1, 2),
    shared=st.integers(1, 2),
    size=st.sampled_from((1, 3, 8)),
    window=st.sampled_from((0, 1, 7, 200)),
    sinks=st.sampled_from((0, 3)),
    masked=st.booleans(),
)
@settings(max_examples=12, deadline=None)
@needs_compiler
def test_what_forgets_equals_a_loop_over_tokens_with_its_gradients(
    feature_map, length, more, groups, shared, size, window, sinks, masked
):
    keys, heads = max(length + more, 1), groups * shared
    tensors = [torch.randn(2, *shape) for shape in ((heads, length, size), (groups, keys, size), (groups, keys, 5))]
    mask = torch.rand(2, keys) < 0.7 if masked else None
    drawn = forgetful(feature_map, heads, size, torch.float64)
    exactly = Exactly(True, window, first_keys(tensors[1], mask, sinks), SCALE)
    real = torch.ones(1, 1, 1, 1) if mask is None or length != keys else mask[:, None, :, None]
    grad, results = torch.randn(2, heads, length, 5), []
    for run, dtype in (("loop", torch.float64), ("reference", torch.float64), ("cpu", torch.float32)):
        q, k, v = inputs = [x.to(dtype).requires_grad_() for x in tensors]
        far = cast(drawn, dtype)
        learned = [x.requires_grad_() for x in (*(far.maps or ()), *far) if torch.is_tensor(x)]
        if run == "loop":
            out = token_by_token(q, k, v, mask, exactly, far)
        else:
            out = linear_and_exact(q, k, v, mask, exactly=exactly, far=far, impl=run)
        out = out * real
        if run == "cpu":
            with torch.no_grad():
                in_c = linear_and_exact(q, k, v, mask, exactly=exactly, far=far, impl=run) * real
            torch.testing.assert_close(in_c, out, rtol=1e-4, atol=1e-5)
        gradients = torch.autograd.grad((out * grad).sum(), [*inputs, *learned], materialize_grads=True)
        results.append((out, *gradients))
    for loop, plain, fast in zip(*results, strict=True):
        torch.testing.assert_close(plain, loop)
        torch.testing.assert_close(fast.double(), loop, rtol=1e-3, atol=1e-4 * max(1.0, loop.abs().max().item()))


@pytest.mark.parametrize(
    "sizes", [(150, 150, 8, 5), (1, 70, 64, 64), (70, 3, 16, 16), (64, 128, 20, 7), (9, 9, 1, 1)], ids=str
)
@pytest.mark.parametrize("continued", [False, True])
@needs_compiler
@torch.no_grad()
def test_the_delta_rule_in_c_is_as_precise_as_in_pytorch(sizes, continued):
    length, count, size, values = sizes
    q, k, v = torch.randn(2, 3, length, size), torch.randn(2, 3, count, size), torch.randn(2, 3, count, values)
    decays, rates = -torch.rand(2, 3, count, 1), torch.rand(2, 3, count, 1)
    sums = torch.randn(2, 3, size, values)
    state = (sums, torch.rand(2, 3, 1)) if continued else None
    before = sums.clone()
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    wide = None if state is None else (state[0].double(), state[1].double())
    results = [f(q, k, v, decays, rates, state) for f in (delta_in_c, continue_delta)]
    q, k, v, decays, rates = (x.double() for x in (q, k, v, decays, rates))
    results.append(continue_delta(q, k, v, decays, rates, wide))
    names = "out", "written", "sums", "total"
    for name, in_c, plain, exact in zip(names, *((*x[:2], *x[2]) for x in results), strict=True):
        assert_close(name, in_c, plain, exact)
    assert torch.equal(sums, before), "a caller's state was overwritten"


def test_refuses_flash_linear_attention_without_a_gpu():
    q = torch.randn(1, 2, 20, 8)
    far = forgetful("unit", 2, 8, torch.float32)
    with pytest.raises(ValueError, match="flash-linear-attention needs CUDA tensors"):
        linear_and_exact(q, q, q, exactly=CAUSAL, far=far, impl="fla")


@pytest.mark.gpu
def test_flash_linear_attention_follows_the_rule():
    pytest.importorskip("fla")
    q, k, v = (torch.randn(2, 4, 300, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    with torch.device("cuda"):
        far = forgetful("unit", 4, 64, torch.float32)
    results = [linear_and_exact(q, k, v, exactly=CAUSAL, far=far, impl=impl).float() for impl in ("fla", "reference")]
    torch.testing.assert_close(*results, rtol=0.05, atol=0.05)


def cast(far, dtype):
    """The same estimate in another dtype."""
    values = [
        tuple(x.detach().to(dtype, copy=True) for x in value)
        if isinstance(value, tuple)
        else value.to(dtype)
        if torch.is_tensor(value)
        else value
        for value in far
    ]
    return type(far)(*(x.detach().clone() if torch.is_tensor(x) else x for x in values))


CASES = [
    (feature_map, window, density, masked, causal)
    for feature_map in ("elu", "t2r", "hedgehog")
    for window, density in ((0, 0.2), (5, None), (5, 0.2))
    for masked in (False, True)
    for causal in (False, True)
]


@pytest.mark.parametrize(("feature_map", "window", "density", "masked", "causal"), CASES)
@needs_compiler
@pytest.mark.sample(12)
def test_linear_and_exact_equals_weights_of_single_pairs(feature_map, window, density, masked, causal):
    q, k, v = torch.randn(2, 4, 90, 8), torch.randn(2, 2, 90, 8), torch.randn(2, 2, 90, 6).abs() + 0.1
    mask = torch.rand(2, 90) < 0.7 if masked else None
    chosen = None if density is None else torch.rand(2, 90) < density
    exactly, far = Exactly(causal, window, chosen, SCALE), linear_far(feature_map, 4, 8, 24, torch.float32)
    real = torch.ones(1, 1, 1, 1) if mask is None else mask[:, None, :, None].float()
    wide, how = (q.double(), k.double(), v.double(), mask), {"exactly": exactly, "far": cast(far, torch.float64)}
    exact = dense_linear(*wide, *how.values()) * real
    double = linear_and_exact(*wide, **how, impl="reference") * real
    torch.testing.assert_close(double, exact)
    plain = linear_and_exact(q, k, v, mask, exactly=exactly, far=far, impl="reference") * real
    for learning in (False, True):
        # In one pass, and, for gradients, from parts.
        query = q.clone().requires_grad_(learning)
        out = linear_and_exact(query, k, v, mask, exactly=exactly, far=far, impl="cpu") * real
        assert out.requires_grad == learning
        assert_close("out", out, plain, exact)


@pytest.mark.parametrize("window", [1, 5, 33, 64, 70, 130, 300])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("density", "masked"), [(None, False), (None, True), (0.2, True)])
def test_blocks_of_exported_programs_equal_weights_of_single_pairs(window, causal, density, masked, monkeypatch):
    """What programs compute, without the time to export one for each; `conversion/test_export.py` runs programs."""
    q, k, v = (torch.randn(2, heads, 150, size, dtype=torch.float64) for heads, size in ((4, 8), (2, 8), (2, 6)))
    mask = torch.rand(2, 150) < 0.7 if masked else None
    chosen = None if density is None else torch.rand(2, 150) < density
    exactly, far = Exactly(causal, window, chosen, SCALE), linear_far("hedgehog", 4, 8, 24, torch.float64)
    real = torch.ones(1, 1, 1, 1) if mask is None else mask[:, None, :, None]
    exact = dense_linear(q, k, v, mask, exactly, far)
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    out = linear_and_exact(q, k, v, mask, exactly=exactly, far=far, impl="reference")
    torch.testing.assert_close(out * real, exact * real)


@given(
    length=st.integers(1, 150),
    more=st.sampled_from((0, 0, 0, -70, 5, 90)),
    groups=st.integers(1, 2),
    shared=st.integers(1, 2),
    size=st.integers(3, 20),
    half=st.sampled_from((3, 16, 24)),
    window=st.sampled_from((0, 1, 7, 64, 200)),
    density=st.sampled_from((None, 0.1, 1.0)),
    masked=st.booleans(),
    causal=st.booleans(),
    kind=st.sampled_from(("hedgehog", "relu", "performer")),
)
@settings(max_examples=80)
@needs_compiler
def test_estimates_in_one_pass_equal_the_reference_in_float64(
    length, more, groups, shared, size, half, window, density, masked, causal, kind
):
    heads, keys = groups * shared, max(length + more, 1)
    shapes = (heads, length, size), (groups, keys, size), (groups, keys, 5)
    tensors = [torch.randn(2, *shape) for shape in shapes]
    mask = torch.rand(2, keys) < 0.7 if masked else None
    chosen = None if density is None else torch.rand(2, keys) < density
    exactly = Exactly(causal, window, chosen, SCALE)
    linear = linear_far(kind, heads, size, 2 * half, torch.float32) if kind != "performer" else None
    rows, share = draw_projection(size, features=16, orthogonal=True, seed=1).repeat(heads, 1, 1), torch.rand(heads)
    logs = tensors[0].square().sum(-1) * SCALE / -2
    performer = PerformerFar(rows, torch.randn(heads, 16) * 0.2, share, "softmax", SCALE, share, logs)
    # Outputs of padded queries are undefined.
    real = mask[:, None, :, None] if mask is not None and length == keys else torch.ones(1, 1, 1, 1)

    def attend(dtype, impl):
        q, k, v = (x.to(dtype) for x in tensors)
        numbers = torch.float64 if dtype == torch.float64 else torch.float32
        if linear is not None:
            out = linear_and_exact(q, k, v, mask, exactly=exactly, far=cast(linear, numbers), impl=impl)
        else:
            mapped, far = (q, k.repeat_interleave(shared, 1)), cast(performer, numbers)
            out = performer_and_exact(q, k, v, mask, mapped=mapped, exactly=exactly, far=far, impl=impl)
        assert out.dtype == dtype
        return out.double() * real

    expected = attend(torch.float64, "reference")
    torch.testing.assert_close(attend(torch.float32, "cpu"), expected, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(attend(torch.bfloat16, "cpu"), expected, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("of_heads", [False, True], ids=["shared rows", "rows per head"])
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
@needs_compiler
def test_performer_and_exact_equals_weights_of_single_pairs(causal, of_heads, masked):
    q, k, v = torch.randn(3, 2, 4, 90, 8).double().unbind()
    mask = torch.rand(2, 90) < 0.7 if masked else None
    rows = draw_projection(8, features=16, orthogonal=True, seed=1).double()
    offsets = torch.randn(4, 16).double() * 0.2 if of_heads else None
    rows = rows.repeat(4, 1, 1) if of_heads else rows
    exactly = Exactly(causal, 6, torch.rand(2, 90) < 0.1, SCALE)
    x, y = q * SCALE**0.5, k * SCALE**0.5
    logs = x.square().sum(-1) / -2 - math.log(16)
    share = torch.rand(4).double()
    far = PerformerFar(rows, offsets, share, "softmax", SCALE, torch.randn(4).double(), logs)
    near, seen = near_pairs(90, 90, mask, 6, exactly.chosen, causal)
    of_queries = x @ rows.mT + (0.0 if offsets is None else offsets[:, None])
    of_keys = y @ rows.mT - y.square().sum(-1, keepdim=True) / 2
    estimates = (of_queries + logs[..., None] + far.weight[:, None, None]).exp() @ of_keys.exp().mT
    near, beyond = near & seen, (~near & seen).double()
    # Of the weight of the far keys a share is spread evenly over them.
    estimates = estimates * beyond
    even = beyond / beyond.sum(-1, keepdim=True).clamp(min=1)
    estimates = estimates + share[:, None, None] * (estimates.sum(-1, keepdim=True) * even - estimates)
    weights = (q @ k.mT * SCALE).exp() * near + estimates
    total = weights.sum(-1, keepdim=True)
    exact = weights @ v / total.masked_fill(total == 0, 1.0)
    real = torch.ones(1, 1, 1, 1) if mask is None else mask[:, None, :, None].double()
    double = performer_and_exact(q, k, v, mask, mapped=(q, k), exactly=exactly, far=far, impl="reference")
    torch.testing.assert_close(double * real, exact * real)
    q, k, v = q.float(), k.float(), v.float()
    how = {"mapped": (q, k), "exactly": exactly, "far": cast(far, torch.float32)}
    plain, listed = (
        performer_and_exact(q, k, v, mask, **how, impl=impl) * real.float() for impl in ("reference", "cpu")
    )
    assert_close("out", listed, plain, exact * real, factor=4.0)


@pytest.mark.parametrize(("sinks", "window"), [(0, 5), (3, 5), (3, 0), (2, 1)])
@pytest.mark.parametrize("cuts", [(60, 61, 62, 90, 95), (1, 2, 3, 4, 5, 6, 7, 8), (40,)], ids=str)
def test_decoding_gives_what_the_whole_gives_from_a_state_of_constant_size(sinks, window, cuts):
    q, k, v = torch.randn(2, 4, 120, 8), torch.randn(2, 2, 120, 8), torch.randn(2, 2, 120, 6)
    mask = torch.ones(2, 120, dtype=torch.bool)
    mask[0, :30] = False
    rows = draw_projection(8, features=16, orthogonal=True, seed=1)
    linears = {
        "linear": linear_far("hedgehog", 4, 8, 24, torch.float32),
        **{name: forgetful(name, 4, 8, torch.float32) for name in ("unit", "gated")},
    }
    share = torch.rand(4)
    exactly = Exactly(True, window, first_keys(k, mask, sinks), SCALE)

    def mapped(q, k):
        return q, k.repeat_interleave(2, 1)

    def performer(q):
        return PerformerFar(rows, None, share, "softmax", SCALE, torch.zeros(4), q.square().sum(-1) * SCALE / -2)

    wholes = {
        **{name: linear_and_exact(q, k, v, mask, exactly=exactly, far=far) for name, far in linears.items()},
        "performer": performer_and_exact(q, k, v, mask, mapped=mapped(q, k), exactly=exactly, far=performer(q)),
    }
    kept = {"sinks": sinks, "window": window, "scale": SCALE}
    for name, whole in wholes.items():
        state, out, sizes = None, [], []
        for begin, end in zip((0, *cuts), (*cuts, 120), strict=True):
            new = slice(begin, end)
            piece = q[:, :, new], k[:, :, new], v[:, :, new], mask[:, new], state
            if name in linears:
                some, state = linear_and_exact_decode(*piece, **kept, far=linears[name])
            else:
                some, state = performer_and_exact_decode(*piece, **kept, mapped=mapped, far=performer(q[:, :, new]))
            out.append(some)
            first, last = state["span"].shape[1:3]
            sizes.append(last - first)
        assert max(sizes) <= sinks + max(window - 1, 0)
        real = mask[:, None, :, None]
        torch.testing.assert_close(torch.cat(out, 2) * real, whole * real, rtol=1e-4, atol=1e-5)


@needs_compiler
def test_one_pass_in_c_runs_wherever_nothing_needs_a_gradient(monkeypatch):
    called = []

    def spied(name, *arguments):
        called.append(name)
        compiled(name, *arguments)

    compiled = cpu.call
    monkeypatch.setattr(cpu, "call", spied)
    q = torch.randn(1, 2, 20, 8)
    rows = draw_projection(8, features=16, orthogonal=True, seed=1)
    linear = linear_far("hedgehog", 2, 8, 24, torch.float32)
    performer = PerformerFar(rows, None, None, "softmax", SCALE, torch.zeros(2), q.square().sum(-1) / -2)
    for learning in (False, True):
        q.requires_grad_(learning)
        for causal in (False, True):
            linear_and_exact(q, q, q, exactly=Exactly(causal, 3, None, SCALE), far=linear, impl="cpu")
        performer_and_exact(q, q, q, mapped=(q, q), exactly=Exactly(False, 3, None, SCALE), far=performer, impl="cpu")
        assert called == ([] if learning else ["linear/far.c"] * 3)
        called.clear()


@pytest.mark.parametrize("kernel", ["softmax", "relu"])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("window", [0, 5])
@needs_compiler
def test_gradients_of_random_rows_are_those_of_the_reference_in_float64(kernel, causal, window):
    tensors = torch.randn(2, 4, 40, 8), torch.randn(2, 2, 40, 8), torch.randn(2, 2, 40, 6)
    mask, chosen = torch.rand(2, 40) < 0.8, torch.rand(2, 40) < 0.1
    rows = draw_projection(8, features=16, orthogonal=True, seed=1).repeat(4, 1, 1)
    learned = rows, torch.randn(4, 16) * 0.2, torch.rand(4), torch.randn(4)
    exactly, weights = Exactly(causal, window, chosen, SCALE), torch.randn(2, 4, 40, 6) * mask[:, None, :, None]

    def slopes(dtype, impl):
        inputs = q, k, v, rows, offsets, share, weight = [x.to(dtype).requires_grad_() for x in (*tensors, *learned)]
        offsets = offsets if kernel == "softmax" else None
        far = PerformerFar(rows, offsets, share, kernel, SCALE, weight, q.square().sum(-1) * SCALE / -2)
        mapped = q, k.repeat_interleave(2, 1)
        out = performer_and_exact(q, k, v, mask, mapped=mapped, exactly=exactly, far=far, impl=impl)
        return torch.autograd.grad((out * weights.to(dtype)).sum(), inputs, materialize_grads=True)

    for found, right in zip(slopes(torch.float32, "cpu"), slopes(torch.float64, "reference"), strict=True):
        torch.testing.assert_close(found.double(), right, rtol=1e-3, atol=1e-4 * right.abs().max().item() + 1e-12)


@needs_compiler
def test_rows_of_long_inputs_and_other_dtypes_run_in_pytorch():
    q = torch.randn(1, 2, 1030, 8)
    rows = draw_projection(8, features=16, orthogonal=True, seed=1).requires_grad_()
    far = PerformerFar(rows, None, None, "softmax", SCALE, torch.zeros(2), q.square().sum(-1) / -2)
    exactly = Exactly(False, 3, None, SCALE)
    out = performer_and_exact(q, q, q, mapped=(q, q), exactly=exactly, far=far)
    assert run_by()["performer_and_exact"] == "reference"
    assert torch.autograd.grad(out.square().sum(), rows)[0].ne(0).any()
    with pytest.raises(ValueError, match="no gradient of the projection"):
        performer_and_exact(q, q, q, mapped=(q, q), exactly=exactly, far=far, impl="cpu")
    with implementation("reference"):
        half = linear_and_exact(
            q.half(), q.half(), q.half(), exactly=exactly, far=linear_far("elu", 2, 8, 0, torch.float32)
        )
    assert half.dtype == torch.float16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"exactly": Exactly(False, 3, torch.ones(1, 19, dtype=torch.bool), SCALE)},
            r"expected torch.bool of shape \[1, 20\]",
        ),
        ({"exactly": Exactly(False, 3, torch.ones(1, 20), SCALE)}, "chosen is torch.float32"),
        ({"exactly": Exactly(False, -1, None, SCALE)}, "window is -1"),
        ({"far": linear_far("elu", 2, 8, 0, torch.float32)._replace(feature_map="hedgehog")}, "maps is None"),
        ({"far": linear_far("elu", 2, 7, 0, torch.float32)}, "query_gate"),
        ({"far": forgetful("gated", 2, 8, torch.float32)}, "is causal; exactly.causal is False"),
        (
            {"exactly": CAUSAL, "far": forgetful("unit", 2, 8, torch.float32)._replace(rate=None)},
            "rate is None for feature_map 'unit'",
        ),
        (
            {"exactly": CAUSAL, "far": forgetful("unit", 2, 8, torch.float32)._replace(decay=torch.zeros(2, 8))},
            r"decay has shape \[2, 8\]; expected \[2, 9\]",
        ),
    ],
)
def test_rejects_arguments_that_do_not_fit(change, message):
    q = torch.randn(1, 2, 20, 8)
    how = {"exactly": Exactly(False, 3, None, SCALE), "far": linear_far("elu", 2, 8, 0, torch.float32)}
    with pytest.raises(ValueError, match=message):
        linear_and_exact(q, q, q, **how | change)
