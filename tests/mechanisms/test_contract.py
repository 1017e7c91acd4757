"""The ten rules that hold for every mechanism, in every form it has."""

import re
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.func import functional_call, grad, jvp
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from approx_kernels.dispatch.implementation import implementation
from closeness import assert_close
from forms import (
    CAUSAL,
    FORMS,
    KINDS,
    MASKS,
    SELF_ONLY,
    SMALL,
    draw,
    draw_mask,
    few,
    lengths,
    make,
    over,
    over_forms,
    over_two_lengths,
    shapes,
)

LEARNED = [(name, causal) for name, causal in FORMS if list(make(name, causal, heads=1, size=1).parameters())]


def real_rows(out, mask):
    """The outputs of real queries, [tokens, H, E]."""
    return out.transpose(1, 2)[mask]


@over_forms
@pytest.mark.parametrize("kind", MASKS)
@given(shape=shapes)
@few
@pytest.mark.sample(20)
def test_shapes_dtypes_and_gradients_are_right_and_empty_rows_are_zero(name, causal, kind, shape):
    q, k, v = (x.requires_grad_() for x in draw(**shape))
    mask = draw_mask(kind, **shape)
    mechanism = make(name, causal, heads=shape["heads"], size=shape["size"])
    out = mechanism(q, k, v, None if kind == "none" else mask)
    assert out.shape == (*q.shape[:3], shape["values"])
    assert out.dtype == q.dtype
    assert torch.isfinite(out).all()
    gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert all(torch.isfinite(g).all() for g in gradients)
    assert out[~mask.any(1)].eq(0).all()
    for gradient in gradients[1:]:
        assert gradient.transpose(1, 2)[~mask].eq(0).all(), "a masked key or value has a gradient"


@over_forms
@pytest.mark.parametrize("kind", MASKS[1:])
@given(shape=shapes)
@few
@pytest.mark.sample(20)
def test_contents_of_padding_do_not_matter(name, causal, kind, shape):
    mechanism = make(name, causal, heads=shape["heads"], size=shape["size"])
    mask = draw_mask(kind, **shape)
    q, k, v = draw(**shape)
    out = mechanism(q, k, v, mask)
    padded = ~mask[:, None, :, None]
    other = mechanism(*(x.masked_fill(padded, 1e3) for x in (q, k, v)), mask)
    torch.testing.assert_close(real_rows(other, mask), real_rows(out, mask))


@over_forms
@pytest.mark.parametrize("side", ["right", "left"])
@given(shape=shapes, extra=st.integers(1, 70))
@few
@pytest.mark.sample(14)
def test_amount_of_padding_and_batch_neighbours_do_not_matter(name, causal, side, shape, extra):
    mechanism = make(name, causal, heads=shape["heads"], size=shape["size"])
    q, k, v = draw(**shape)
    mask = draw_mask(side, **shape)
    ends = (0, extra) if side == "right" else (extra, 0)
    longer = mechanism(*(F.pad(x, (0, 0, *ends), value=7.0) for x in (q, k, v)), F.pad(mask, ends))
    longer = longer[:, :, : shape["length"]] if side == "right" else longer[:, :, extra:]
    for sample, real in enumerate(mask):
        alone = mechanism(*(x[sample : sample + 1, :, real] for x in (q, k, v)))[0]
        torch.testing.assert_close(longer[sample, :, real], alone)


@over_forms
@given(shape=shapes)
@few
@pytest.mark.sample(14)
def test_a_mask_of_real_keys_alone_changes_nothing(name, causal, shape):
    mechanism = make(name, causal, heads=shape["heads"], size=shape["size"])
    q, k, v = draw(**shape)
    everything = torch.ones(shape["batch"], shape["length"], dtype=torch.bool)
    torch.testing.assert_close(mechanism(q, k, v, everything), mechanism(q, k, v))


@over_two_lengths
@pytest.mark.parametrize("kind", MASKS)
@given(shape=shapes, keys=lengths)
@few
@pytest.mark.sample(14)
def test_other_numbers_of_keys_than_queries(name, causal, kind, shape, keys):
    assume(keys != shape["length"])
    mechanism = make(name, causal, heads=shape["heads"], size=shape["size"])
    q, k, v = (x.requires_grad_() for x in draw(**shape, keys=keys))
    mask = draw_mask(kind, **shape | {"length": keys})
    out = mechanism(q, k, v, None if kind == "none" else mask)
    assert torch.isfinite(out).all()
    assert out[~mask.any(1)].eq(0).all()
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(out.sum(), (q, k, v)))
    other = mechanism(q, *(x.masked_fill(~mask[:, None, :, None], 1e3) for x in (k, v)), mask)
    torch.testing.assert_close(other, out)


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("kind", ["none", "right", "arbitrary"])
@given(shape=shapes, cut=st.integers(0, 299))
@few
@pytest.mark.sample(20)
def test_causal_never_sees_the_future(name, kind, shape, cut):
    cut = cut % shape["length"]
    mechanism = make(name, True, heads=shape["heads"], size=shape["size"])
    mask = draw_mask(kind, **shape)
    q, k, v = past = tuple(draw(**shape))
    future = tuple(torch.cat([x[:, :, : cut + 1], x[:, :, cut + 1 :] * -3 + 5], 2) for x in past)
    torch.testing.assert_close(mechanism(*future, mask)[:, :, : cut + 1], mechanism(q, k, v, mask)[:, :, : cut + 1])


@pytest.mark.parametrize("name", [name for name in CAUSAL if KINDS[name].supports_decode and name not in SELF_ONLY])
@given(shape=shapes, new=lengths)
@few
@pytest.mark.sample(10)
def test_new_queries_on_a_cache_equal_the_whole_sequence(name, shape, new):
    new = (new - 1) % shape["length"] + 1
    mechanism = make(name, True, heads=shape["heads"], size=shape["size"])
    mask = draw_mask("left", **shape)
    q, k, v = draw(**shape)
    torch.testing.assert_close(mechanism(q[:, :, -new:], k, v, mask), mechanism(q, k, v, mask)[:, :, -new:])


@over_forms
def test_forward_draws_nothing_and_repeats_itself(name, causal):
    shape = {"batch": 2, "heads": 2, "length": 40, "size": 8, "values": 8, "seed": 3}
    q, k, v = draw(**shape)
    mechanism, twin = (make(name, causal, heads=2, size=8) for _ in range(2))
    before = torch.random.get_rng_state()
    first = mechanism(q, k, v)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(mechanism(q, k, v), first)
    assert torch.equal(twin(q, k, v), first)
    stranger = make(name, causal, heads=2, size=8, **({"seed": 5} if "seed" in mechanism.settings else {}))
    stranger.load_state_dict(mechanism.state_dict())
    assert torch.equal(stranger(q, k, v), first), "state is missing from the state dict"


def drawn_with(name, causal, seed) -> Any:
    return KINDS[name](2, 8, causal=causal, scale=0.5, **SMALL[name] | {"seed": seed})


# A compatible BigBird counts its first block instead of random ones.
@over([form for form in FORMS if "seed" in KINDS[form[0]].defaults() and form[0] != "bigbird compatible"])
def test_a_redraw_is_explicit_and_gives_what_its_seed_gives(name, causal):
    tensors = tuple(draw(batch=1, heads=2, length=300, size=8, values=8, seed=3))
    mechanism = drawn_with(name, causal, 0)
    first = mechanism(*tensors)
    mechanism.redraw(1)
    assert mechanism.settings["seed"] == 1
    assert not torch.equal(mechanism(*tensors), first)
    assert torch.equal(mechanism(*tensors), drawn_with(name, causal, 1)(*tensors))


@over_forms
@pytest.mark.parametrize("kind", ["none", "arbitrary"])
@pytest.mark.sample(2)
def test_gradients_are_right(name, causal, kind):
    shape = {"batch": 2, "heads": 1, "length": 9, "size": 3, "values": 2, "seed": 1}
    mask = None if kind == "none" else draw_mask(kind, **shape)
    mechanism = make(name, causal, heads=1, size=3)
    q, k, v = (x.double().requires_grad_() for x in draw(**shape))
    assert torch.autograd.gradcheck(lambda q, k, v: mechanism(q, k, v, mask), (q, k, v))


@over_forms
@pytest.mark.sample(20)
def test_activations_that_are_checkpointed_give_the_same_gradients(name, causal):
    shape = {"batch": 2, "heads": 2, "length": 40, "size": 16, "values": 16, "seed": 3}
    inputs = [x.requires_grad_() for x in draw(**shape)]
    mechanism = make(name, causal, heads=2, size=16)
    expected = torch.autograd.grad(mechanism(*inputs).sum(), inputs)
    again = torch.autograd.grad(checkpoint(mechanism, *inputs, use_reentrant=False).sum(), inputs)
    torch.testing.assert_close(again, expected)


@pytest.mark.parametrize(("name", "causal"), LEARNED)
@pytest.mark.parametrize("kind", ["none", "arbitrary"])
@pytest.mark.sample(3)
def test_gradients_of_parameters_are_right(name, causal, kind):
    shape = {"batch": 2, "heads": 2, "length": 9, "size": 3, "values": 2, "seed": 1}
    mask = None if kind == "none" else draw_mask(kind, **shape)
    mechanism = make(name, causal, heads=2, size=3)
    inputs = [x.double() for x in draw(**shape)]
    names, learned = zip(*mechanism.named_parameters(), strict=True)
    # Away from the initial values, where a clip may have its kink.
    learned = [torch.nn.Parameter(x.detach().double() * 0.93) for x in learned]

    def attend(*learned):
        out = functional_call(mechanism, dict(zip(names, learned, strict=True)), (*inputs, mask))
        # Blank padded queries; a feature map may have its kink at 0.
        return out if mask is None else real_rows(out, mask)

    assert torch.autograd.gradcheck(attend, learned)


def changed_gradients(loss, inputs, directions):
    """How the gradients change along the directions, by differences of first derivatives in float64."""
    step, sides = 1e-6, []
    for sign in (1, -1):
        moved = [(x + sign * step * u).detach().requires_grad_() for x, u in zip(inputs, directions, strict=True)]
        sides.append(torch.autograd.grad(loss(*moved), moved, allow_unused=True, materialize_grads=True))
    return [(up - down) / (2 * step) for up, down in zip(*sides, strict=True)]


def differentiated_twice(loss, inputs, directions):
    """The same by differentiating the gradients."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    slopes = torch.autograd.grad(loss(*inputs), inputs, create_graph=True, allow_unused=True, materialize_grads=True)
    along = sum(((slope * u).sum() for slope, u in zip(slopes, directions, strict=True)), torch.zeros(()))
    return torch.autograd.grad(along, inputs, allow_unused=True, materialize_grads=True)


def forward_over_reverse(loss, inputs, directions):
    return jvp(grad(loss, argnums=tuple(range(len(inputs)))), tuple(inputs), tuple(directions))[1]


def reverse_over_reverse(loss, inputs, directions):
    def along(*inputs):
        slopes = grad(loss, argnums=tuple(range(len(inputs))))(*inputs)
        return sum((slope * u).sum() for slope, u in zip(slopes, directions, strict=True))

    return grad(along, argnums=tuple(range(len(inputs))))(*inputs)


# How to differentiate twice, in which implementation and dtype, and whether it may be refused.
TWICE = {
    "reference": (differentiated_twice, "reference", torch.float64, False),
    "plain": (differentiated_twice, "plain", torch.float64, True),
    "on a cpu": (differentiated_twice, "cpu", torch.float32, True),
    "interpreted": (differentiated_twice, "triton", torch.float32, True),
    "forward over reverse": (forward_over_reverse, "auto", torch.float64, False),
    "reverse over reverse": (reverse_over_reverse, "auto", torch.float64, True),
}
WAYS = [pytest.param(way, marks=pytest.mark.slow) if way == "interpreted" else way for way in TWICE]
# What PyTorch's fused attention says, what we do, and what the kernels of clusters say of their mean queries.
REFUSED = (
    r"derivative for aten::_scaled_dot_product\w+ is not implemented|SDPBackend.MATH|no implementation|cannot run"
    r"|^The gradient of a mean is not differentiated again\.$"
)


def losses_and_slopes(name, causal, size):
    """A loss with constant gradients of the outputs, and one without; where to differentiate them, and what that gives."""
    shape = {"batch": 2, "heads": 2, "length": 9, "size": size, "values": size, "seed": 1}
    mask = draw_mask("right", **shape)
    mechanism = make(name, causal, heads=2, size=size)
    names = [name for name, _ in mechanism.named_parameters()]
    # Away from the initial values, where a clip may have its kink.
    inputs = [*(x.double() for x in draw(**shape)), *(x.detach().double() * 0.93 for x in mechanism.parameters())]
    generator = torch.Generator().manual_seed(2)
    weights, *directions = (torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in (inputs[2], *inputs))
    weights = weights * mask[:, None, :, None]

    def loss(power, q, k, v, *learned):
        out = functional_call(mechanism, dict(zip(names, learned, strict=True)), (q, k, v, mask))
        return (out**power * weights.to(out.dtype)).sum()

    with implementation("reference"):
        for each in (partial(loss, 1), partial(loss, 2)):
            yield each, inputs, directions, changed_gradients(each, inputs, directions)


@over_forms
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sample(12)
def test_second_derivatives_are_right_or_refused(name, causal, way):
    differentiate, impl, dtype, may_refuse = TWICE[way]
    for loss, inputs, directions, expected in losses_and_slopes(name, causal, 16 if way == "interpreted" else 3):
        try:
            with implementation(impl), sdpa_kernel(SDPBackend.MATH) if way == "reference" else nullcontext():
                found = differentiate(loss, [x.to(dtype) for x in inputs], [u.to(dtype) for u in directions])
        except (RuntimeError, ValueError) as error:
            if may_refuse and re.search(REFUSED, str(error)):
                continue
            raise
        # Where a slope is 0, only rounding is left of it.
        least = 1e-6 * max(right.abs().max().item() for right in expected)
        for slope, right in zip(found, expected, strict=True):
            tolerance = 1e-6 if dtype == torch.float64 else 1e-3
            atol = tolerance * max(right.abs().max().item(), least)
            torch.testing.assert_close(slope.double(), right, rtol=tolerance, atol=atol)


@over_forms
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", MASKS)
@given(shape=shapes)
@few
@pytest.mark.sample(15)
def test_precision_is_that_of_the_dtype(name, causal, dtype, kind, shape):
    # Values of one sign, since cancellation would inflate the relative error.
    q, k, v = (x.to(dtype) for x in draw(**shape))
    v = v.abs()
    mask = draw_mask(kind, **shape)
    assume(mask.any())
    mechanism = make(name, causal, heads=shape["heads"], size=shape["size"])

    def attend(*inputs):
        return real_rows(mechanism(*inputs, None if kind == "none" else mask), mask)

    exact = attend(q.double(), k.double(), v.double())
    # Nothing in this dtype is closer than the exact result, rounded. 16-bit inputs are computed in float32 and
    # round at the end; in float32 the score, the weight, the normaliser and the sum round as well.
    factor = 5.0 if dtype == torch.float32 else 2.0
    assert_close(f"{name} in {dtype}", attend(q, k, v), exact.to(dtype), exact, factor)


@over_forms
@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.slow), torch.float32], ids=str
)
def test_scores_of_ten_thousand_stay_finite(name, causal, dtype):
    shape = {"batch": 2, "heads": 2, "length": 40, "size": 16, "values": 16, "seed": 3}
    q, k, v = draw(**shape)
    q, k = (x * (1e4 / (q @ k.transpose(-2, -1) / 4).abs().max()) ** 0.5 for x in (q, k))
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, v))
    out = make(name, causal, heads=2, size=16)(q, k, v, draw_mask("arbitrary", **shape))
    assert torch.isfinite(out).all()
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(out.sum(), (q, k, v)))


@over_forms
def test_autocast_takes_the_dtypes_that_a_model_has_under_it(name, causal):
    shape = {"batch": 2, "heads": 2, "length": 40, "size": 16, "values": 16, "seed": 3}
    q, k, v = draw(**shape)
    mechanism, mask = make(name, causal, heads=2, size=16), draw_mask("right", **shape)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = mechanism(q, k, v.bfloat16(), mask)
    torch.testing.assert_close(out.float(), mechanism(q, k, v, mask), atol=0.05, rtol=0.05)


@over_forms
@pytest.mark.sample(20)
def test_dropout_is_unbiased_and_only_there_when_asked_for(name, causal):
    samples = 1500
    shape = {"batch": 1, "heads": 1, "length": 7, "size": 4, "values": 3, "seed": 11}
    q, k, v = draw(**shape)
    mechanism = make(name, causal, heads=1, size=4)
    before = mechanism(q, k, v)
    torch.manual_seed(0)
    dropped = mechanism(*(x.expand(samples, -1, -1, -1) for x in (q, k, v)), dropout=0.25)
    assert not torch.equal(dropped[0], dropped[1])
    spread = dropped.std(0) / samples**0.5
    assert ((dropped.mean(0) - before[0]).abs() <= 5 * spread + 1e-6).all()


@over_forms
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.sample(12)
def test_weights_give_the_output_back(name, causal, kind):
    shape = {"batch": 3, "heads": 2, "length": 40, "size": 8, "values": 8, "seed": 4}
    mask = draw_mask(kind, **shape)
    q, k, v = draw(**shape)
    mechanism = make(name, causal, heads=2, size=8)
    weights = mechanism.weights(q, k, mask)
    assert weights.shape == (3, 2, 40, 40)
    torch.testing.assert_close(weights @ v, mechanism(q, k, v, mask))
    if not mechanism.averages:
        return
    assert (weights >= 0).all()
    sums = weights.sum(-1)
    assert ((sums - 1).abs().le(1e-4) | sums.eq(0)).all()


@over_forms
@given(shape=shapes)
@few
@pytest.mark.sample(5)
def test_memory_layout_does_not_matter(name, causal, shape):
    mechanism = make(name, causal, heads=shape["heads"], size=shape["size"])
    q, k, v = draw(**shape)
    torch.testing.assert_close(mechanism(q.contiguous(), k.contiguous(), v.contiguous()), mechanism(q, k, v))


UNFIT = [
    ({"q": torch.zeros(2, 3, 5)}, "q has shape"),
    ({"k": torch.zeros(2, 3, 5, 5)}, "k has shape"),
    (dict.fromkeys("kv", torch.zeros(2, 2, 5, 4)), "2 heads for the 3 of q"),
    ({"v": torch.zeros(2, 3, 6, 4)}, "v has shape"),
    ({"v": torch.zeros(2, 3, 5, 4, dtype=torch.float16)}, "dtypes"),
    (dict.fromkeys("qkv", torch.zeros(2, 3, 0, 4)), "each at least 1"),
    (dict.fromkeys("qkv", torch.zeros(0, 3, 5, 4)), "each at least 1"),
    ({"key_mask": torch.ones(2, 5)}, "key_mask is torch.float32"),
    ({"key_mask": torch.ones(2, 4, dtype=torch.bool)}, "key_mask"),
]


@over_forms
def test_tensors_that_do_not_fit_are_refused(name, causal):
    mechanism = make(name, causal, heads=3, size=4)
    for changed, words in UNFIT:
        with pytest.raises(ValueError, match=words):
            mechanism(**dict.fromkeys("qkv", torch.zeros(2, 3, 5, 4)) | changed)
