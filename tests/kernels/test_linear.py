"""Linear attention: how the work is cut cannot matter."""

from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from approx_kernels.dispatch.implementation import chosen
from approx_kernels.ops.linear import reference
from approx_kernels.ops.linear.api import FEATURE_MAPS, linear_attention, linear_decode
from c_sources import needs_compiler
from closeness import assert_close, at_real_queries, with_float64


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (63, 63), (129, 129), (17, 129), (129, 63)])
def test_chunks_and_blocks_of_heads_change_nothing(monkeypatch, causal, queries, keys):
    tensors = torch.randn(2, 3, queries, 24), torch.randn(2, 3, keys, 24), torch.randn(2, 3, keys, 16)
    grad, mask = torch.randn(2, 3, queries, 16), torch.rand(2, keys) < 0.7
    results = {}
    for cut, dtype in (((64, 2**17), torch.float64), ((8, 1), torch.float32), ((64, 2**17), torch.float32)):
        monkeypatch.setattr(reference, "_CHUNK", cut[0])
        monkeypatch.setattr(reference, "_BLOCK", cut[0])
        monkeypatch.setattr(reference, "_CACHED", cut[1])
        q, k, v = (x.to(dtype).requires_grad_() for x in tensors)
        out = linear_attention(q, k, v, mask, causal=causal, eps=1e-6, impl="reference")
        results[cut, dtype] = (out, *torch.autograd.grad(out, (q, k, v), grad.to(dtype)))
    exact, small, usual = results.values()
    for name, actual, plain, wanted in zip("oqkv", small, usual, exact, strict=True):
        assert_close(name, actual, plain, wanted, factor=4.0)


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [None, "arbitrary", "nobody"])
@pytest.mark.parametrize("feature_map", ["elu", "relu"])
@given(
    queries=st.integers(1, 140),
    keys=st.integers(1, 140),
    heads=st.integers(1, 3),
    size=st.integers(1, 40),
    values=st.integers(1, 40),
)
@settings(max_examples=6)
@example(queries=64, keys=64, heads=2, size=64, values=64)
@example(queries=33, keys=129, heads=1, size=24, values=17)
@example(queries=129, keys=33, heads=1, size=8, values=16)
@needs_compiler
@pytest.mark.sample(10)
def test_c_equals_the_reference(causal, dtype, kind, feature_map, queries, keys, heads, size, values):
    # Values of one sign, as sums that cancel say nothing; as projections lay heads out.
    q, grad = (torch.randn(2, queries, heads, width).to(dtype) for width in (size, values))
    k, v = (torch.randn(2, keys, heads, width).to(dtype) for width in (size, values))
    v, grad = v.abs() + 0.1, grad.abs() + 0.1
    mask = None if kind is None else torch.rand(2, keys) < (0.7 if kind == "arbitrary" else 0.0)
    q, k, v, grad = (x.transpose(1, 2) for x in (q, k, v, grad))
    form = {"causal": causal, "feature_map": feature_map, "input_scale": -0.7, "eps": 1e-3}
    for name, *each in with_float64(partial(linear_attention, key_mask=mask, **form), (q, k, v), grad, dtype):
        # Gradients of queries and keys are differences of sums, which round on both sides.
        assert_close(name, *each, factor=8.0 if name in ("dq", "dk") else 2.0)


@needs_compiler
def test_sums_are_overwritten_while_decoding_and_kept_while_training():
    q, k, v = torch.randn(3, 2, 3, 70, 8)
    whole = linear_attention(q, k, v, causal=True, impl="reference")
    out, state = linear_decode(q[:, :, :40], k[:, :, :40], v[:, :, :40])
    torch.testing.assert_close(out, whole[:, :, :40])
    place = state["sums"].data_ptr()
    for last in range(41, 71):
        piece = slice(last - 1, last)
        out, state = linear_decode(q[:, :, piece], k[:, :, piece], v[:, :, piece], None, state)
        torch.testing.assert_close(out, whole[:, :, piece])
    assert state["sums"].data_ptr() == place
    assert chosen()["linear_decode"] == "cpu"
    linear_decode(q.requires_grad_(), k, v, None, state)
    assert chosen()["linear_decode"] == "reference"
    with pytest.raises(ValueError, match="no_grad"):
        linear_decode(q, k, v, None, state, impl="cpu")


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
@pytest.mark.parametrize("width", [0, 1, 40, 300])
@pytest.mark.parametrize(("queries", "keys", "size"), [(130, 130, 64), (65, 200, 24), (200, 90, 17), (9, 9, 5)])
@needs_compiler
@pytest.mark.sample(40)
def test_c_equals_the_reference_for_every_map_and_window(causal, dtype, feature_map, width, queries, keys, size):
    q, grad = (torch.randn(2, queries, 3, size).to(dtype) for _ in range(2))
    k, v = (torch.randn(2, keys, 3, size).to(dtype) for _ in range(2))
    v, grad = v.abs() + 0.1, grad.abs() + 0.1
    mask = torch.rand(2, keys) < 0.7 if queries != 130 else None
    maps, mix = parts_of(feature_map, width, 3, size, torch.float32)
    results = {}
    for name, impl, wide in (("c", "cpu", dtype), ("plain", "reference", dtype), ("exact", "reference", torch.float64)):
        inputs = [x.transpose(1, 2).to(wide).requires_grad_() for x in (q, k, v)]
        learned = [x.detach().to(torch.promote_types(wide, torch.float32)).requires_grad_() for x in maps or ()]
        mixed = None if mix is None else mix.detach().to(torch.promote_types(wide, torch.float32)).requires_grad_()
        ways = {"causal": causal, "feature_map": feature_map, "window": width, "scale": 0.3, "eps": 1e-3}
        fitted = (learned[0], learned[1]) if learned else None
        out = linear_attention(inputs[0], inputs[1], inputs[2], mask, **ways, maps=fitted, mix=mixed, impl=impl)
        inputs = [*inputs, *learned, *(() if mixed is None else (mixed,))]
        grads = torch.autograd.grad(out, inputs, grad.transpose(1, 2).to(wide), materialize_grads=True)
        results[name] = (out, *grads)
    for name, actual, plain, exact in zip("oqkvabc", results["c"], results["plain"], results["exact"], strict=False):
        # Gradients are differences of sums, which round on both sides.
        assert_close(name, actual, plain, exact, factor=2.0 if name in "ov" else 16.0)


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
@pytest.mark.parametrize("width", [0, 1, 40])
@torch.no_grad()
@needs_compiler
def test_products_in_bfloat16_are_as_accurate_without_gradients(causal, feature_map, width):
    q, k, v = torch.randn(3, 2, 3, 150, 32).bfloat16()
    maps, mix = parts_of(feature_map, width, 3, 32, torch.float32)
    ways = {"causal": causal, "feature_map": feature_map, "window": width, "scale": 0.3, "eps": 1e-3}
    actual, plain = (linear_attention(q, k, v, **ways, maps=maps, mix=mix, impl=impl) for impl in ("cpu", "reference"))
    maps, mix = None if maps is None else (maps[0].double(), maps[1].double()), None if mix is None else mix.double()
    exact = linear_attention(q.double(), k.double(), v.double(), **ways, maps=maps, mix=mix, impl="reference")
    assert_close("o", actual, plain, exact)


def test_c_refuses_unsupported_forms_and_auto_uses_the_reference():
    q = torch.ones(1, 2, 5, 4, dtype=torch.float16)
    with pytest.raises(ValueError, match="float16; allowed are"):
        linear_attention(q, q, q, causal=False, impl="cpu")
    assert linear_attention(q, q, q, causal=False).shape == q.shape
    assert chosen()["linear_attention"] == "reference"


@needs_compiler
def test_decoding_in_c_refuses_unsupported_forms_and_auto_uses_the_reference():
    q, k = torch.ones(1, 2, 5, 4), torch.ones(1, 2, 3, 4)
    with pytest.raises(ValueError, match="5 queries and 3 keys"):
        linear_decode(q, k, k, impl="cpu")
    assert linear_decode(q, k, k)[0].shape == q.shape
    assert chosen()["linear_decode"] == "reference"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
@pytest.mark.parametrize("width", [0, 1, 5, 70])
@pytest.mark.parametrize("masked", [False, True], ids=["", "padded"])
@given(
    cuts=st.lists(st.integers(1, 149), max_size=4, unique=True),
    size=st.sampled_from((5, 24, 64)),
    values=st.sampled_from((3, 16, 64, 81)),
)
@settings(max_examples=4)
@example(cuts=list(range(1, 81)), size=24, values=17)
@example(cuts=[90, 91, 92], size=64, values=64)
@torch.no_grad()
@needs_compiler
@pytest.mark.sample(5)
def test_decoding_in_c_equals_the_reference(dtype, feature_map, width, masked, cuts, size, values):
    # As projections lay heads out.
    q, k, v = (torch.randn(2, 150, 3, n).to(dtype).transpose(1, 2) for n in (size, size, values))
    v = v.abs() + 0.1
    mask = torch.rand(2, 150) < 0.7 if masked else None
    maps, mix = parts_of(feature_map, width, 3, size, torch.float32)
    ways = {"feature_map": feature_map, "window": width, "scale": -0.3, "input_scale": 0.7, "eps": 1e-3}
    actual, reached = pieces((q, k, v), mask, cuts, impl="cpu", maps=maps, mix=mix, **ways)
    plain, known = pieces((q, k, v), mask, cuts, impl="reference", maps=maps, mix=mix, **ways)
    wide = None if maps is None else (maps[0].double(), maps[1].double())
    ways |= {"maps": wide, "mix": None if mix is None else mix.double()}
    exact, sums = pieces([x.double() for x in (q, k, v)], mask, cuts, impl="reference", **ways)
    assert_close("o", at_real_queries(actual, mask), at_real_queries(plain, mask), at_real_queries(exact, mask))
    assert reached["sums"].dtype == known["sums"].dtype == torch.float32
    # Features of a prompt in 16 bits are rounded before they are summed.
    known_sums = known["sums"] if dtype == torch.float32 else known["sums"].bfloat16().float()
    assert_close("sums", reached["sums"], known_sums, sums["sums"])
    assert all(torch.equal(reached[name], expected) for name, expected in known.items() if name != "sums")


def pieces(tensors, mask, cuts, **ways):
    """Outputs of tokens that come in pieces, and the state after the last."""
    out, states = [], []
    for begin, end in zip((0, *sorted(cuts)), (*sorted(cuts), tensors[0].shape[2]), strict=True):
        q, k, v = (x[:, :, begin:end] for x in tensors)
        piece, state = linear_decode(
            q, k, v, None if mask is None else mask[:, begin:end], states[-1] if states else None, **ways
        )
        out.append(piece)
        states.append(state)
    return torch.cat(out, 2), state


@needs_compiler
def test_parameters_have_gradients_while_decoding():
    q = torch.randn(1, 2, 5, 8)
    maps, mix = parts_of("hedgehog", 3, 2, 8, torch.float32)
    out, _ = linear_decode(q, q, q, feature_map="hedgehog", maps=maps, window=3, mix=mix)
    assert chosen()["linear_decode"] == "reference"
    learned = [x for x in (*(maps or ()), mix) if x is not None]
    assert all(each.ne(0).any() for each in torch.autograd.grad(out.square().sum(), learned))


def test_numbers_of_a_long_sequence_stay_small_in_float16():
    # The sums reach 2^17, beyond float16: they are float32 inside.
    q, k, v = (torch.ones(1, 1, 70_000, 1, dtype=torch.float16) for _ in range(3))
    for causal in (False, True):
        out = linear_attention(q, k, v, causal=causal, eps=1e-6)
        torch.testing.assert_close(out, torch.ones_like(out))


def parts_of(feature_map, window, heads, size, dtype):
    """Learned matrices away from their initial values, and the factor of a window."""
    rows = size + (feature_map == "t2r")
    learned = feature_map in ("t2r", "hedgehog")
    query_map, key_map = torch.randn(2, heads, rows, size).to(dtype).requires_grad_().unbind()
    return (query_map, key_map) if learned else None, torch.rand(heads).to(dtype).requires_grad_() if window else None


def one_by_one(x, feature_map, weight):
    if feature_map == "elu":
        return torch.where(x > 0, x + 1, x.exp())
    if feature_map == "relu":
        return x.clamp(min=0)
    if feature_map == "softmax":
        return x.exp() / x.exp().sum(-1, keepdim=True)
    if feature_map == "t2r":
        ones = torch.ones_like(x[..., :1])
        return (torch.cat([x, ones], -1) @ weight).clamp(min=0)
    both = torch.stack([x @ weight, -x @ weight])
    return torch.cat(tuple(both.exp() / both.exp().sum(-1, keepdim=True)), -1)


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
@pytest.mark.parametrize("width", [0, 1, 5, 70])
@pytest.mark.parametrize(("queries", "keys"), [(65, 65), (130, 200), (90, 70)])
@pytest.mark.sample(50)
def test_every_map_and_window_is_its_formula_over_all_pairs(causal, feature_map, width, queries, keys):
    q, k, v = (torch.randn(2, 3, n, 8).double().requires_grad_() for n in (queries, keys, keys))
    mask, grad = torch.rand(2, keys) < 0.8, torch.randn(2, 3, queries, 8).double()
    maps, mix = parts_of(feature_map, width, 3, 8, torch.float64)
    diagonal = torch.arange(queries)[:, None] + keys - queries
    distance = torch.arange(keys) - diagonal
    near = (distance > -width) & (distance <= 0) if causal else (distance.abs() <= width) & (width > 0)
    far = ~near & (distance <= 0) if causal else ~near
    near, far = (each & mask[:, None, None] for each in (near, far))

    f, g = (one_by_one(x, feature_map, None if maps is None else maps[i]) for i, x in enumerate((q, k)))
    expected = f @ g.transpose(-2, -1) * far
    if mix is not None:
        scores = (0.3 * q @ k.transpose(-2, -1)).masked_fill(~near, -1e9)
        expected = expected + mix[:, None, None] * (scores - scores.amax(-1, keepdim=True)).exp() * near
    sums = expected.sum(-1, keepdim=True)
    expected = expected @ v / (sums.clamp(min=1e-9) if width else sums + 1e-9)

    actual = linear_attention(
        q, k, v, mask, causal=causal, feature_map=feature_map, maps=maps, window=width, mix=mix, scale=0.3, eps=1e-9
    )
    actual, expected = (at_real_queries(x, mask) for x in (actual, expected))
    torch.testing.assert_close(actual, expected)
    inputs = [q, k, v, *(maps or ()), *(() if mix is None else (mix,))]
    for ours, theirs in zip(
        torch.autograd.grad(actual, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"feature_map": "gelu"}, "feature_map is 'gelu'; expected one of elu"),
        ({"feature_map": "hedgehog"}, "maps has shapes None; expected"),
        ({"maps": (torch.zeros(2, 4, 4), torch.zeros(2, 4, 4))}, "expected None for elu"),
        ({"feature_map": "t2r", "maps": (torch.zeros(2, 4, 4), torch.zeros(2, 4, 4))}, "5, 4"),
        ({"window": 3}, "mix is None"),
        ({"window": 3, "mix": torch.ones(3)}, "mix has shape"),
    ],
)
def test_rejects_mismatched_parts(changed, words):
    q = torch.zeros(1, 2, 5, 4)
    with pytest.raises(ValueError, match=words):
        linear_attention(q, q, q, causal=False, eps=1e-6, **changed)
