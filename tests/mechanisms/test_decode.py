"""Decoding from a ring or a recurrent state equals the whole forward pass, in bounded memory."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from closeness import assert_close
from forms import CAUSAL, KINDS, MASKS, draw, draw_mask, few, make, shapes

BOUNDED = [name for name in CAUSAL if KINDS[name].decode_state != "cache"]


def decoded(mechanism, tensors, mask, cuts):
    """Outputs of consecutive pieces that end at the cuts, and the state after each."""
    (q, k, v), out, states, state = tensors, [], [], None
    for begin, end in zip((0, *cuts), cuts, strict=False):
        piece = slice(begin, end)
        real = None if mask is None else mask[:, piece]
        joined, state = mechanism.decode(q[:, :, piece], k[:, :, piece], v[:, :, piece], real, state)
        out.append(joined)
        states.append(state)
    return torch.cat(out, 2), states


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize("kind", MASKS)
@given(shape=shapes, cuts=st.lists(st.integers(1, 66), max_size=4), one_by_one=st.booleans(), grad=st.booleans())
@few
@pytest.mark.sample(4)
def test_pieces_equal_the_whole_sequence(name, kind, shape, cuts, one_by_one, grad):
    length = shape["length"]
    mechanism = make(name, True, heads=shape["heads"], size=shape["size"])
    q, k, v = draw(**shape)
    mask = None if kind == "none" else draw_mask(kind, **shape)
    ends = range(1, length + 1) if one_by_one else sorted({*(cut % length for cut in cuts), length} - {0})
    with torch.set_grad_enabled(grad):  # without, what a state holds is written over
        decoded_outputs, _ = decoded(mechanism, (q, k, v), mask, tuple(ends))
    whole = mechanism(q, k, v, mask)
    if mask is not None:  # what padding receives has no meaning
        decoded_outputs, whole = (x.masked_fill(~mask[:, None, :, None], 0.0) for x in (decoded_outputs, whole))
    torch.testing.assert_close(decoded_outputs, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", BOUNDED)
@given(shape=shapes, new=st.integers(1, 66))
@few
def test_a_state_starts_from_keys_without_their_queries(name, shape, new):
    length = shape["length"]
    last = slice(length - 1 - (new - 1) % length, length)
    mechanism = make(name, True, heads=shape["heads"], size=shape["size"])
    mask = draw_mask("left", **shape)
    q, k, v = draw(**shape)
    out, state = mechanism.decode(q[:, :, last], k, v, mask, None)
    torch.testing.assert_close(out, mechanism(q, k, v, mask)[:, :, last])
    _, whole = mechanism.decode(q, k, v, mask, None)
    torch.testing.assert_close(state, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize("kind", ["none", "arbitrary"])
@pytest.mark.sample(11)
def test_the_state_does_not_grow(name, kind):
    shape = {"batch": 2, "heads": 2, "length": 260, "size": 8, "values": 4, "seed": 1}
    mechanism = make(name, True, heads=2, size=8)
    mask = None if kind == "none" else draw_mask(kind, **shape)
    with torch.no_grad():
        _, states = decoded(mechanism, draw(**shape), mask, (200, *range(201, 261)))
    bytes_held = [sum(x.untyped_storage().nbytes() for x in state.values()) for state in states]
    assert bytes_held[-1] == bytes_held[-50]
    # A view must not keep a long prompt alive either.
    assert bytes_held[0] <= bytes_held[-1]


@pytest.mark.parametrize("name", BOUNDED)
def test_samples_of_a_state_can_be_selected(name):
    shape = {"batch": 3, "heads": 2, "length": 20, "size": 8, "values": 8, "seed": 2}
    mechanism = make(name, True, heads=2, size=8)
    mask, choice, later = draw_mask("left", **shape), [2, 0, 0, 1], [0, 1, 2, 2]
    tensors = tuple(draw(**shape))
    _, (state,) = decoded(mechanism, tensors, mask, (15,))
    state = {key: x[choice] for key, x in state.items()}
    q, k, v = (torch.cat([x[choice, :, :15], x[later, :, 15:]], 2) for x in tensors)
    mask = torch.cat([mask[choice, :15], mask[later, 15:]], 1)
    out, _ = mechanism.decode(q[:, :, 15:], k[:, :, 15:], v[:, :, 15:], mask[:, 15:], state)
    padded = ~mask[:, None, 15:, None]
    torch.testing.assert_close(
        out.masked_fill(padded, 0.0), mechanism(q, k, v, mask)[:, :, 15:].masked_fill(padded, 0.0)
    )


@pytest.mark.parametrize("name", BOUNDED)
def test_a_state_is_as_precise_as_the_whole(name):
    shape = {"batch": 1, "heads": 2, "length": 70, "size": 8, "values": 8, "seed": 3}
    mechanism = make(name, True, heads=2, size=8)
    tensors = [x.bfloat16() for x in draw(**shape)]
    decoded_outputs, _ = decoded(mechanism, tensors, None, tuple(range(1, 71)))
    assert_close(name, decoded_outputs, mechanism(*tensors), mechanism(*(x.double() for x in tensors)))
