"""Grouped-query attention: shared keys give the same as repeated keys, without repeating them."""

from typing import Any

import pytest
import torch

from approx.mechanisms.mechanism import HeadGroups
from approx_kernels.dispatch.implementation import implementation
from forms import CAUSAL, KINDS, MASKS, SELF_ONLY, draw, draw_mask, make, over_forms

HEADS = 4
GROUPS = (1, 2, 4)
# Long enough for all of `SMALL` to approximate.
SHAPE = {"batch": 2, "heads": HEADS, "length": 37, "size": 16, "values": 16, "seed": 6}
BOUNDED = [name for name in CAUSAL if KINDS[name].decode_state != "cache"]
# C sums in another order for several query heads than for one; in float32 the last digits differ.
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-5}


def grouped(groups, *, keys=None, seed=6) -> Any:
    """Queries of all heads, keys and values of some."""
    q, _, _ = draw(**SHAPE | {"seed": seed})
    _, k, v = draw(**SHAPE | {"heads": groups, "seed": seed + 1}, keys=keys)
    return q, k, v


def repeated(*shared) -> Any:
    return [x.repeat_interleave(HEADS // x.shape[1], 1) for x in shared]


def mechanism_of(name, causal) -> Any:
    # Different spans in different heads, and maps other than the identity.
    mechanism = make(name, causal, heads=HEADS, size=SHAPE["size"])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter.add_(torch.rand(parameter.shape, generator=generator) * 0.3 - 0.3)
    return mechanism


def with_gradients(mechanism, mask, q, k, v) -> Any:
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = mechanism(*inputs, mask)
    weight = torch.linspace(-1, 1, out.numel()).view(out.shape)
    if mask is not None:
        weight = weight * mask[:, None, :, None]
    return out.detach(), torch.autograd.grad((out * weight).sum(), inputs)


@over_forms
@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("kind", ["none", "left", "arbitrary"])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.sample(36)
def test_shared_keys_are_as_good_as_repeated_ones(name, causal, groups, kind, impl):
    mechanism = mechanism_of(name, causal)
    mask = None if kind == "none" else draw_mask(kind, **SHAPE)
    q, k, v = grouped(groups)
    with implementation(impl):
        out, (dq, dk, dv) = with_gradients(mechanism, mask, q, k, v)
        other, (dq_other, *summands) = with_gradients(mechanism, mask, q, *repeated(k, v))
    real = torch.ones(SHAPE["batch"], SHAPE["length"], dtype=torch.bool) if mask is None else mask
    torch.testing.assert_close(out.transpose(1, 2)[real], other.transpose(1, 2)[real], **CLOSE)
    torch.testing.assert_close(dq, dq_other, **CLOSE)
    for grad, each in zip((dk, dv), summands, strict=True):
        torch.testing.assert_close(grad, each.unflatten(1, (groups, -1)).sum(2), **CLOSE)


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.sample(16)
def test_a_state_of_shared_keys_equals_the_whole_sequence(name, groups, masked, impl):
    mechanism = mechanism_of(name, True)
    q, k, v = grouped(groups)
    mask = draw_mask("left", **SHAPE) if masked else torch.ones(SHAPE["batch"], SHAPE["length"], dtype=torch.bool)
    outputs: list[Any] = []
    state: Any = None
    with torch.no_grad(), implementation(impl):
        for begin, end in ((0, 11), (11, 12), (12, 19), *((at, at + 1) for at in range(19, SHAPE["length"]))):
            part = slice(begin, end)
            key_mask = mask[:, part] if masked else None
            out, state = mechanism.decode(q[:, :, part], k[:, :, part], v[:, :, part], key_mask, state)
            outputs.append(out)
        whole = mechanism(q, *repeated(k, v), mask if masked else None)
    torch.testing.assert_close(torch.cat(outputs, 2).transpose(1, 2)[mask], whole.transpose(1, 2)[mask], **CLOSE)
    # Each query head has its own features or gates of the keys; everything else is stored once per key head.
    learned = any(getattr(mechanism, name, None) is not None for name in ("key_map", "key_gate"))
    heads = {part: x.shape[1] for part, x in state.items() if part in ("k", "v", "sums", "top", "values")}
    assert heads == {part: HEADS if part in ("sums", "top", "values") and learned else groups for part in heads}


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("name", [name for name in CAUSAL if name not in SELF_ONLY])
@pytest.mark.sample(4)
def test_one_query_makes_nothing_as_large_as_repeated_keys(name, impl):
    keys, size = 4096, 64
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 8, 1, size, generator=generator)
    k, v = torch.randn(2, 1, 1, keys, size, generator=generator)
    mechanism = make(name, True, heads=8, size=size)
    state = None
    with torch.inference_mode(), implementation(impl):
        if mechanism.decode_state != "cache":
            _, state = mechanism.decode(q, k, v, None, None)

        def step():
            if state is None:
                return mechanism(q, k, v)
            return mechanism.decode(q, q[:, :1], q[:, :1], None, state)

        step()
        with torch.profiler.profile(profile_memory=True) as profile:
            step()
    events = profile.events()
    assert events, "nothing was seen"
    largest = max(event.self_cpu_memory_usage for event in events)
    assert largest < 8 * keys * size * 4


@pytest.mark.parametrize("heads", [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 2], [3]], [[3, 0], [2, 1]]], ids=str)
@pytest.mark.parametrize("groups", GROUPS)
def test_groups_of_heads_read_their_own_keys(heads, groups):
    parts = [("local", heads[0]), ("linear", heads[1])]
    mechanism = HeadGroups(
        [(members, make(name, True, heads=len(members), size=SHAPE["size"])) for name, members in parts]
    )
    q, k, v = grouped(groups)
    whole, weights = with_gradients(mechanism, None, q, *repeated(k, v))
    out, gradients = with_gradients(mechanism, None, q, k, v)
    torch.testing.assert_close(out, whole, **CLOSE)
    torch.testing.assert_close(gradients[1], weights[1].unflatten(1, (groups, -1)).sum(2), **CLOSE)
    with torch.no_grad():
        first, state = mechanism.decode(q[:, :, :20], k[:, :, :20], v[:, :, :20])
        rest, _ = mechanism.decode(q[:, :, 20:], k[:, :, 20:], v[:, :, 20:], None, state)
    torch.testing.assert_close(torch.cat([first, rest], 2), whole, **CLOSE)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("groups", GROUPS)
def test_dense_weights_of_shared_keys(groups, kind):
    q, k, _ = grouped(groups)
    mask = draw_mask(kind, **SHAPE)
    mechanism = make("local", True, heads=HEADS, size=SHAPE["size"])
    torch.testing.assert_close(mechanism.weights(q, k, mask), mechanism.weights(q, repeated(k)[0], mask), **CLOSE)
