"""Exact keys of cheap mechanisms: which they are, and a start that is no worse than these keys alone."""

import math

import pytest
import torch

from approx.errors import ApproxError
from approx.mechanisms import MECHANISMS
from approx.mechanisms.clustered import ClusteredAttention
from approx.mechanisms.exact_keys import ExactKeys, without_estimate
from approx.mechanisms.linear import LinearAttention
from approx.mechanisms.local import LocalAttention
from approx.mechanisms.lsh import LshAttention
from approx.mechanisms.mechanism import HeadGroups
from approx.mechanisms.performer import PerformerAttention
from approx_kernels.ops.exact.api import exact_attention
from typed import known

KINDS = (LinearAttention, PerformerAttention)
SEPARATOR = 9
FORGETFUL = ({"update": "delta"}, {"feature_map": "gated"})
over_kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
over_forms = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])


def peaked(length=150, size=16):
    """Queries, keys and values, some of whose scores are large, and a mask with padding on the left."""
    q, k, v = torch.randn(3, 2, 4, length, size).unbind()
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[0, :40] = False
    return 2 * q, k + 0.5, v, mask


def made(kind, *, causal=False, **settings):
    return kind(4, 16, causal=causal, scale=0.25, **settings)


def error(mechanism, q, k, v, mask, **tokens):
    exact = exact_attention(q, k, v, mask, causal=mechanism.causal, scale=0.25)
    apart = (mechanism(q, k, v, mask, **tokens) - exact) * mask[:, None, :, None]
    return apart.square().sum((0, 2, 3))


def weighed(mechanism, factor):
    """A mechanism whose estimates count with a factor, given by its logarithm."""
    if isinstance(mechanism, LinearAttention):
        assert mechanism.query_gate is not None
        mechanism.query_gate.data[:, -1] = factor
    else:
        mechanism.far_weight.data.fill_(factor)
    return mechanism


def without_estimates(mechanism):
    """A mechanism of which only the exact keys count."""
    return weighed(mechanism, -40.0)


@over_kinds
@over_forms
@pytest.mark.parametrize("settings", [{"window": 8}, {"window": 8, "sinks": 5}, {"window": 0, "sinks": 5}], ids=str)
@torch.no_grad()
def test_calibration_leaves_no_head_worse_than_its_exact_keys_alone(kind, causal, settings):
    q, k, v, mask = peaked()
    fitted = made(kind, causal=causal, **settings)
    fitted.calibrate(q, k, v, mask)
    alone = without_estimates(made(kind, causal=causal, **settings))
    before = made(kind, causal=causal, **settings)
    assert (error(fitted, q, k, v, mask) <= error(alone, q, k, v, mask) * 1.0001).all()
    assert error(fitted, q, k, v, mask).sum() < error(before, q, k, v, mask).sum()


@pytest.mark.parametrize("settings", FORGETFUL, ids=str)
@torch.no_grad()
def test_what_forgets_starts_no_worse_than_its_exact_keys_alone(settings):
    q, k, v, mask = peaked()
    fitted = made(LinearAttention, causal=True, window=8, **settings)
    fitted.calibrate(q, k, v, mask)
    alone = without_estimates(made(LinearAttention, causal=True, window=8, **settings))
    assert (error(fitted, q, k, v, mask) <= error(alone, q, k, v, mask) * 1.0001).all()
    assert error(fitted, q, k, v, mask).sum() < error(alone, q, k, v, mask).sum() * 0.99


@torch.no_grad()
def test_the_delta_rule_starts_each_head_where_it_helps():
    # The first two heads find what they look for again after 100 keys, the others after 9.
    q, k, v = torch.randn(3, 1, 4, 400, 16).unbind()
    k = 3 * torch.nn.functional.normalize(k, dim=-1)
    for head, lag in enumerate((100, 100, 9, 9)):
        q[:, head, lag:] = 4 * k[:, head, :-lag]
    mechanism = made(LinearAttention, causal=True, window=4, sinks=0, update="delta")
    mechanism.calibrate(q, k, v)
    assert mechanism.decay is not None
    half_lives = -math.log(2) / -torch.nn.functional.softplus(mechanism.decay[:, -1])
    assert (half_lives[:2] > half_lives[2:]).all()
    assert mechanism.decay[:, :-1].eq(0).all()


@over_kinds
@torch.no_grad()
def test_estimates_of_heads_whose_exact_keys_hold_all_weight_start_without_any(kind):
    # Each query attends to its own key alone, which a window holds.
    q = k = 12 * torch.nn.functional.normalize(torch.randn(1, 4, 100, 16), dim=-1)
    v = torch.randn(1, 4, 100, 16)
    mechanism = weighed(made(kind, window=2), 40.0)
    mask = torch.ones(1, 100, dtype=torch.bool)
    assert error(mechanism, q, k, v, mask).min() > 1
    mechanism.calibrate(q, k, v)
    torch.testing.assert_close(error(mechanism, q, k, v, mask), torch.zeros(4), atol=0.1, rtol=0.0)


@pytest.mark.parametrize(
    ("kind", "small"),
    [
        (LinearAttention, {}),
        (PerformerAttention, {}),
        (ClusteredAttention, {"clusters": 5}),
        (LshAttention, {"rounds": 2, "cluster": 6}),
    ],
)
@torch.no_grad()
def test_question_is_exact_for_all_queries(kind, small):
    q, k, v, mask = peaked(60)
    tokens = torch.randint(10, 90, (2, 60))
    tokens[0, 55], tokens[1, 20], tokens[1, 59] = SEPARATOR, SEPARATOR, SEPARATOR
    how = {"window": 0, "global_tokens": "question", "separator": SEPARATOR, **small}
    mechanism = made(kind, **how)
    exactly = mechanism.exactly(k, mask, tokens)
    # Of the first sample, whose padding comes first, tokens 40 to 55; of the second 0 to 20.
    assert exactly.chosen[0].nonzero().flatten().tolist() == list(range(40, 56))
    assert exactly.chosen[1].nonzero().flatten().tolist() == list(range(21))
    alone = without_estimates(made(kind, **how))
    of_question = exact_attention(q, k, v, exactly.chosen, causal=False, scale=0.25)
    torch.testing.assert_close(alone(q, k, v, mask, tokens=tokens)[1], of_question[1])
    # Only the separator at the end: the whole text is the question, and exact.
    tokens[1, 20] = 50
    exact = exact_attention(q, k, v, mask, causal=False, scale=0.25)
    torch.testing.assert_close(mechanism(q, k, v, mask, tokens=tokens)[1], exact[1])
    with pytest.raises(ApproxError, match="needs the token ids"):
        mechanism(q, k, v, mask)
    with pytest.raises(ValueError, match=r"tokens has shape \[2, 59\]"):
        mechanism(q, k, v, mask, tokens=tokens[:, 1:])


@over_kinds
@torch.no_grad()
def test_positions_count_real_tokens(kind):
    _, k, _, mask = peaked(60)
    chosen = made(kind, sinks=2, global_tokens=[0, 5]).exactly(k, mask).chosen
    assert chosen[0].nonzero().flatten().tolist() == [40, 41, 45]
    assert chosen[1].nonzero().flatten().tolist() == [0, 1, 5]


@over_kinds
def test_decoders_keep_their_first_tokens_and_encoders_a_window(kind):
    assert (made(kind, causal=True).window, made(kind, causal=True).sinks) == (64, 4)
    assert (made(kind).window, made(kind).sinks) == (32, 0)
    assert made(kind).approximates_from() == 34
    assert made(kind, causal=True).approximates_from() == 69


@over_kinds
@over_forms
@torch.no_grad()
def test_pairs_that_are_not_exact_are_those_whose_weights_differ(kind, causal):
    mechanism = made(kind, causal=causal, window=4, sinks=2)
    q, k, v, _ = peaked(40)
    mechanism.calibrate(q, k, v)
    exactly = mechanism.exactly(k, None)
    place = torch.arange(40)
    distance = place[:, None] - place
    near = distance.abs() <= 4 if not causal else (distance >= 0) & (distance < 4)
    seen = torch.ones_like(near) if not causal else distance >= 0
    near = (near | exactly.chosen[0]) & seen
    assert mechanism.approximated_pairs(40) == pytest.approx(1 - int(near.sum()) / int(seen.sum()))


@over_kinds
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": -1}, "window"),
        ({"sinks": 1.5}, "sinks"),
        ({"global_tokens": "everything"}, "'auto', 'none', 'first', 'separator', 'question'"),
        ({"global_tokens": [1, 1]}, "different whole numbers"),
        ({"global_tokens": "question", "causal": True}, "Say how many with 'sinks'"),
    ],
)
def test_rejects_wrong_settings(kind, settings, message):
    with pytest.raises(ApproxError, match=message):
        made(kind, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"features": 30}, "even number of at least 32"),
        ({"features": 33}, "even number"),
        ({"features": 64, "feature_map": "elu"}, "Leave it out, or choose 'hedgehog'"),
        ({"gate": False, "sinks": 2}, "need a gate"),
        ({"gate": False, "global_tokens": "question"}, "need a gate"),
        (
            {"feature_map": "gated"},
            "'feature_map' is 'gated', which reads keys in their order, but this layer is bidirectional",
        ),
        ({"update": "delta"}, "'update' is 'delta', which reads keys in their order, but this layer is bidirectional"),
        ({"update": "delta", "causal": True, "gate": False}, "'update' is 'delta', which needs a gate"),
        ({"feature_map": "gated", "causal": True, "gate": False}, "'feature_map' is 'gated', which needs a gate"),
        ({"update": "delta", "causal": True, "feature_map": "elu"}, "'feature_map' is 'elu'; allowed is one of unit"),
        ({"feature_map": "unit", "causal": True}, "'feature_map' is 'unit'; allowed is one of elu"),
        ({"update": "delta", "causal": True, "features": 32}, "has one for each of the 16 numbers"),
    ],
)
def test_linear_rejects_settings_that_exclude_each_other(settings, message):
    with pytest.raises(ApproxError, match=message):
        made(LinearAttention, **settings)


def test_learned_share_stays_within_its_limits():
    mechanism = made(PerformerAttention)
    assert {"projection", "share", "far_weight"} <= {name for name, _ in mechanism.named_parameters()}
    mechanism.share.data.copy_(torch.tensor([-0.3, 0.2, 1.4, 0.9]))
    mechanism.after_step(1)
    assert mechanism.share.tolist() == pytest.approx([0.0, 0.2, 0.9, 0.9])
    redrawn = made(PerformerAttention, redraw_every=2)
    assert "projection" not in dict(redrawn.named_parameters())


ESTIMATED = [
    (LinearAttention, {}),
    (LinearAttention, {"gate": False}),
    (PerformerAttention, {}),
    (ClusteredAttention, {"clusters": 5}),
    (LshAttention, {"rounds": 2, "cluster": 6}),
]


@pytest.mark.parametrize(("kind", "settings"), ESTIMATED, ids=lambda one: getattr(one, "__name__", str(one)))
@torch.no_grad()
def test_without_its_estimate_a_mechanism_is_local_attention(kind, settings):
    q, k, v, _ = peaked()
    for causal in (False, True):
        mechanism = made(kind, causal=causal, window=8, sinks=0, **settings)
        alone = known(without_estimate(mechanism))
        window = {"left": 7, "right": 0} if causal else {"left": 8, "right": 8}
        local = made(LocalAttention, causal=causal, **window)
        torch.testing.assert_close(alone(q, k, v), local(q, k, v), rtol=0, atol=2e-6)
        assert (mechanism(q, k, v) - local(q, k, v)).abs().max() > 1e-2


@pytest.mark.parametrize("changed", [*FORGETFUL, {"window": 0, "sinks": 5}, {"window": 8, "sinks": 5}], ids=str)
@over_kinds
@torch.no_grad()
def test_without_its_estimate_a_mechanism_keeps_its_exact_keys(kind, changed):
    if kind is PerformerAttention and changed in FORGETFUL:
        changed = {"window": 20}
    q, k, v, mask = peaked()
    mechanism = made(kind, causal=True, **changed)
    alone = known(without_estimate(mechanism))
    real = mask[:, None, :, None]
    torch.testing.assert_close(alone(q, k, v, mask) * real, without_estimates(mechanism)(q, k, v, mask) * real)
    # Decoded token by token, from a bounded state, the same.
    out, state = alone.decode(q[:, :, :100], k[:, :, :100], v[:, :, :100], mask[:, :100])
    steps = [out]
    for place in range(100, 150):
        one = slice(place, place + 1)
        out, state = alone.decode(q[:, :, one], k[:, :, one], v[:, :, one], mask[:, one], state)
        steps.append(out)
    torch.testing.assert_close(torch.cat(steps, 2) * real, alone(q, k, v, mask) * real)
    assert sum(x.untyped_storage().nbytes() for x in state.values()) < 2 * 150 * 4 * 16 * 4 * 2


@torch.no_grad()
def test_global_tokens_stay_without_an_estimate():
    q, k, v, mask = peaked()
    ids = torch.full((2, 150), 1)
    ids[:, 55] = SEPARATOR
    mechanism = made(LinearAttention, window=8, global_tokens="question", separator=SEPARATOR)
    alone = known(without_estimate(mechanism))
    assert alone.reads_tokens
    expected = without_estimates(mechanism)(q, k, v, mask, tokens=ids)
    real = mask[:, None, :, None]
    torch.testing.assert_close(alone(q, k, v, mask, tokens=ids) * real, expected * real)


def test_only_an_estimate_beside_exact_keys_can_be_switched_off():
    for name, kind in MECHANISMS.items():
        mechanism = kind(4, 16, causal=kind.supports_causal, scale=0.25, **kind.published)
        assert without_estimate(mechanism) is None, name
    limited = made(LinearAttention, window=8)
    limited.exact_below = 60
    assert known(without_estimate(limited)).exact_below == 60
    groups = HeadGroups([([0, 2], made(LocalAttention, left=3, right=3)), ([1, 3], made(LinearAttention, window=8))])
    alone = known(without_estimate(groups))
    assert isinstance(alone, HeadGroups)
    (first, local), (second, keys) = alone.members()
    assert (local, type(keys)) == (groups.groups[0], ExactKeys)
    assert [list(range(4))[one] if isinstance(one, slice) else one for one in (first, second)] == [[0, 2], [1, 3]]
    assert without_estimate(HeadGroups([([0, 1, 2, 3], made(LocalAttention))])) is None
