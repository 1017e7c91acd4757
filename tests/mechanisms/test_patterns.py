"""Every sparse pattern equals dense attention under its own mask, for every mode of its steps."""

import pytest
import torch

from approx.errors import ApproxError
from approx.mechanisms.bigbird import BigBirdAttention
from approx.mechanisms.block import BlockAttention
from approx.mechanisms.fixed import FixedAttention
from approx.mechanisms.full_information import LtrAttention, RtlAttention
from approx.mechanisms.local import LocalAttention
from approx.mechanisms.longformer import LongformerAttention
from approx.mechanisms.sinks import SinksAttention
from approx.mechanisms.strided import StridedAttention

# More heads than any pattern has steps.
HEADS = 5
KINDS = {
    "block": BlockAttention,
    "strided": StridedAttention,
    "fixed": FixedAttention,
    "ltr": LtrAttention,
    "rtl": RtlAttention,
    "bigbird": BigBirdAttention,
    "sinks": SinksAttention,
    "longformer": LongformerAttention,
}
SETTINGS = [
    ("block", {"size": 5}),
    ("block", {"size": 6, "neighbours": 1, "shift": 3}),
    ("block", {"size": 6, "shift": "alternate"}),
    ("strided", {}),
    ("strided", {"stride": 4, "step": 1}),
    ("strided", {"stride": 4, "step": 2}),
    ("strided", {"stride": 7, "mode": "heads"}),
    ("fixed", {"stride": None, "summary": 2}),
    ("fixed", {"stride": 6, "summary": 2}),
    ("fixed", {"stride": 6, "summary": 2, "step": 1}),
    ("fixed", {"stride": 6, "summary": 2, "step": 2}),
    ("fixed", {"stride": 6, "summary": 6, "mode": "heads"}),
    ("ltr", {}),
    ("ltr", {"stride": 5, "summary": 3, "step": 2}),
    ("ltr", {"mode": "heads"}),
    ("rtl", {}),
    ("rtl", {"stride": 5, "summary": 3, "step": 2}),
    ("rtl", {"step": 1}),
    ("ltr", {"both_directions": True, "summary": 2}),
    ("ltr", {"both_directions": True, "stride": 5, "summary": 3}),
    ("rtl", {"both_directions": True, "stride": 5, "summary": 2, "mode": "heads"}),
    ("rtl", {"both_directions": True, "mode": "interleave", "step": 4}),
    ("strided", {"mode": "interleave"}),
    ("bigbird", {"block": 3, "random": 1}),
    ("bigbird", {"block": 4, "random": 0}),
    ("bigbird", {"block": 3, "random": 40}),
    ("sinks", {"sinks": 2, "window": 4}),
    ("sinks", {"sinks": 100, "window": 1}),
    ("longformer", {"window": 4}),
    ("longformer", {"window": 5, "global_tokens": [9, 3, 100]}),
]
FORMS = [
    pytest.param(name, settings, causal, id=f"{name}-{number}-{'causal' if causal else 'bidirectional'}")
    for number, (name, settings) in enumerate(SETTINGS)
    for causal in (False, True)
    if (KINDS[name].supports_causal if causal else KINDS[name].supports_bidirectional)
]
over_forms = pytest.mark.parametrize(("name", "settings", "causal"), FORMS)


def make(name, settings, causal):
    return KINDS[name](HEADS, 8, causal=causal, scale=0.35, **settings)


def allowed_pairs(mechanism, length):
    """The pairs that each head may see, [heads, n, n]."""
    settings = mechanism.settings
    steps = mechanism.pattern(length)
    if settings.get("mode") == "heads":
        return steps[torch.arange(HEADS) % len(steps)]
    step = 1 if settings.get("mode") == "interleave" and settings["step"] is None else settings.get("step")
    return (steps.any(0) if step is None else steps[step - 1]).expand(HEADS, length, length)


def dense(inputs, allowed):
    q, k, v = inputs
    return (0.35 * q @ k.transpose(-2, -1)).masked_fill(~allowed, -torch.inf).softmax(-1) @ v


@over_forms
@pytest.mark.parametrize("length", [1, 2, 36, 67, 130])
@pytest.mark.sample(40)
def test_it_equals_dense_attention_under_its_mask_forward_and_backward(name, settings, causal, length):
    q, k, v, grad = torch.randn(4, 2, HEADS, length, 8, dtype=torch.float64).unbind()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    mechanism = make(name, settings, causal)
    actual, expected = mechanism(*inputs), dense(inputs, allowed_pairs(mechanism, length))
    torch.testing.assert_close(actual, expected)
    for ours, theirs in zip(
        torch.autograd.grad(actual, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@over_forms
def test_positions_count_the_real_tokens_of_each_sample(name, settings, causal):
    q, k, v = torch.randn(3, 4, HEADS, 60, 8, dtype=torch.float64).unbind()
    place = torch.arange(60)
    mask = torch.stack([place < 41, place >= 19, torch.rand(60) < 0.6, place >= 0])
    mechanism = make(name, settings, causal)
    out = mechanism(q, k, v, mask)
    for sample, real in enumerate(mask):
        alone = [x[sample : sample + 1, :, real] for x in (q, k, v)]
        expected = dense(alone, allowed_pairs(mechanism, int(real.sum())))
        torch.testing.assert_close(out[sample : sample + 1, :, real], expected)
        assert out[sample][:, ~real].eq(0).all(), "padded queries receive nothing"


@pytest.mark.parametrize(("name", "settings", "causal"), [form for form in FORMS if form.values[2]])
def test_tokens_one_by_one_see_the_same_keys(name, settings, causal):
    q, k, v = torch.randn(3, 2, HEADS, 70, 8, dtype=torch.float64).unbind()
    mechanism = make(name, settings, causal)
    mask = torch.arange(70) >= torch.tensor([[0], [23]])
    whole = mechanism(q, k, v, mask)
    for seen in (1, 24, 35, 36, 64, 65, 70):
        for new in (1, 3):
            new = min(new, seen)
            step = mechanism(q[:, :, seen - new : seen], k[:, :, :seen], v[:, :, :seen], mask[:, :seen])
            torch.testing.assert_close(step, whole[:, :, seen - new : seen])


@pytest.mark.parametrize("name", ["strided", "fixed", "ltr", "rtl"])
def test_one_step_and_heads_in_turn_exclude_each_other(name):
    with pytest.raises(ApproxError, match="'mode' is 'heads'; allowed is 'merged' or 'interleave' with a step"):
        make(name, {"mode": "heads", "step": 1}, False)


@pytest.mark.parametrize(
    ("name", "both", "count"),
    [("strided", {}, 2), ("fixed", {}, 2), ("ltr", {}, 2), ("rtl", {"both_directions": True}, 4)],
)
def test_interleaved_layers_take_turns_and_keep_an_explicit_step(name, both, count):
    kind = KINDS[name]
    asked = {**kind.defaults(), **both, "mode": "interleave"}
    turns = [kind.for_layer(asked, rank) for rank in range(5)]
    assert [turn["step"] for turn in turns] == [rank % count + 1 for rank in range(5)]
    assert all(kind.for_layer(turn, 1) == turn == make(name, turn, False).settings for turn in turns)
    assert make(name, asked, False).settings == asked
    merged = asked | {"mode": "merged"}
    assert kind.for_layer(merged, 1) == merged


def test_an_alternating_shift_is_half_a_block_in_every_other_layer():
    asked = {"size": 7, "neighbours": 0, "shift": "alternate"}
    turns = [BlockAttention.for_layer(asked, rank) for rank in range(4)]
    assert [turn["shift"] for turn in turns] == [0, 3, 0, 3]
    assert BlockAttention.for_layer({"shift": "alternate"}, 1)["shift"] == 64
    assert make("block", asked, True).settings == asked
    settings = asked | {"shift": 2}
    assert BlockAttention.for_layer(settings, 1) == settings


@pytest.mark.parametrize("name", ["ltr", "rtl"])
def test_two_interleaved_layers_reach_everything_only_with_the_first_step_below(name):
    q, k, _ = torch.randn(3, 1, 1, 1024, 4).unbind()
    kind = KINDS[name]
    lower, upper = (
        kind(1, 4, causal=False, scale=0.5, **kind.for_layer({"mode": "interleave"}, rank)).weights(q, k)[0, 0] > 0
        for rank in range(2)
    )
    assert ((upper.float() @ lower.float()) > 0).all()
    assert round(((lower.float() @ upper.float()) > 0).float().mean().item(), 3) == 0.047


def test_a_causal_window_has_no_right_side():
    q, k, v = torch.randn(3, 1, 2, 150, 8).unbind()
    causal, plain = (
        LocalAttention(2, 8, causal=causal, scale=0.35, left=20, right=right)
        for causal, right in ((True, 9), (False, 0))
    )
    torch.testing.assert_close(causal(q, k, v), plain(q, k, v))
