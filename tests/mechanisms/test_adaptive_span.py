"""Adaptive span: exact until a span is short; spans are learned, calibrated, and read once."""

import copy
import gzip
import json
import pickle

import pytest
import torch
from torch.nn import functional as F

from approx.conversion import surgery
from approx.mechanisms import MECHANISMS
from approx.mechanisms.adaptive_span import AdaptiveSpanAttention
from approx.planning.plan import Plan, Rule
from approx.planning.positions import example_inputs
from zoo import tiny

both = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])


def make(heads=3, size=16, causal=False, **settings):
    return AdaptiveSpanAttention(heads, size, causal=causal, scale=size**-0.5, **settings)


def set_spans(mechanism, *spans):
    with torch.no_grad():
        mechanism.fraction.copy_(torch.tensor(spans) / mechanism.max_span)


@both
@pytest.mark.parametrize("keys", [1, 64, 200])
@pytest.mark.parametrize("masked", [False, True], ids=["all real", "masked"])
def test_at_the_longest_span_it_is_exact_forward_and_backward(causal, keys, masked):
    q, k, v, grad = torch.randn(4, 2, 3, keys, 16).unbind()
    mask = torch.rand(2, keys) < 0.8 if masked else None
    results = []
    for mechanism in (make(causal=causal, max_span=200), MECHANISMS["sdpa"](3, 16, causal=causal, scale=0.25)):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = mechanism(*inputs, mask)
        if mask is not None:
            # Outputs of padded queries are undefined.
            out = out * mask[:, None, :, None]
        results.append([out, *torch.autograd.grad(out, inputs, grad)])
    # C sums in another order.
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)


@both
def test_training_and_inference_compute_the_same(causal):
    mechanism = make(causal=causal, max_span=150)
    set_spans(mechanism, 3.3, 70.1, 149.9)
    q, k, v = torch.randn(3, 2, 3, 170, 16).unbind()
    trained = mechanism(q, k, v)
    assert trained.requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(mechanism.eval()(q, k, v), trained.detach(), atol=1e-6, rtol=1e-5)


def test_without_the_penalty_nothing_pulls_the_longest_span_and_with_it_spans_shrink():
    mechanism = make(max_span=64, ramp=8)
    q, k, v = torch.randn(3, 1, 3, 40, 16).unbind()
    assert not mechanism(q, k, v).requires_grad
    optimizer = torch.optim.SGD(mechanism.parameters(), lr=1e-3)
    sums = []
    for _ in range(10):
        sums.append(mechanism.penalty().item())
        (mechanism(q, k, v).square().mean() + 0.5 * mechanism.penalty()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert sums[0] == 3 * 64
    assert sums == sorted(set(sums), reverse=True)


def test_a_head_that_needs_its_keys_keeps_them_against_the_penalty():
    # Head 0 finds its answer 30 tokens back, head 1 next to itself; both spans start in between.
    tokens = torch.eye(100)[None, None].expand(1, 2, -1, -1)
    target = torch.stack([tokens[0, 0].roll(shift, 0) for shift in (30, 1)])[:, 40:]
    q, k = torch.stack([tokens[0, 0].roll(shift, 0) for shift in (30, 1)])[None] * 3, tokens
    mechanism = AdaptiveSpanAttention(2, 100, causal=True, scale=1.0, max_span=80, ramp=16)
    set_spans(mechanism, 20.0, 20.0)
    optimizer = torch.optim.Adam(mechanism.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        loss = -(mechanism(q, k, tokens)[0, :, 40:] * target).sum(-1).clamp(min=1e-6).log().mean()
        (loss + 1e-4 * mechanism.penalty()).backward()
        optimizer.step()
    far, near = mechanism.spans.tolist()
    assert near < 5 < 14 < far


@pytest.mark.parametrize("architecture", ["BertForSequenceClassification", "GPT2LMHeadModel"])
def test_training_a_converted_model_with_its_penalty_shortens_every_span(architecture):
    model = tiny(architecture)
    surgery.convert(model, Plan((Rule("adaptive-span", "0,2", {"max_span": 40, "ramp": 4}),)))
    inputs = example_inputs(model, 24, batch=2)
    optimizer = torch.optim.SGD(model.train().parameters(), lr=1e-3)
    sums = [model.attention_penalty().item()]
    for _ in range(5):
        optimizer.zero_grad()
        (model(**inputs).logits.square().mean() + 0.5 * model.attention_penalty()).backward()
        optimizer.step()
        sums.append(model.attention_penalty().item())
    assert sums[0] == 2 * 4 * 40
    assert sums == sorted(set(sums), reverse=True)
    surgery.revert(model)
    assert not hasattr(model, "attention_penalty")


def test_models_without_learned_spans_have_no_penalty():
    model = tiny("BertModel")
    surgery.convert(model, Plan((Rule("local", "all", {}),)))
    assert model.attention_penalty().item() == 0


def test_a_step_beyond_the_limits_comes_back():
    mechanism = make(max_span=50)
    with torch.no_grad():
        mechanism.fraction.copy_(torch.tensor([-0.1, 1.1, 0.5]))
    assert mechanism.spans.tolist() == [0.0, 50.0, 25.0]
    (outwards,) = torch.autograd.grad((mechanism.spans * torch.tensor([1.0, -1.0, 1.0])).sum(), mechanism.fraction)
    (inwards,) = torch.autograd.grad((mechanism.spans * torch.tensor([-1.0, 1.0, 1.0])).sum(), mechanism.fraction)
    assert outwards.tolist() == [0.0, 0.0, 50.0]
    assert inwards.tolist() == [-50.0, 50.0, 50.0]


def planted(length, reach):
    """Queries and keys of heads that attend evenly to everything within `reach` tokens, at scale 1."""
    away = (torch.arange(length)[:, None] - torch.arange(length)).abs()
    scores = torch.stack([torch.where(away <= each, 0.0, -40.0) for each in reach])[None]
    return scores, torch.eye(length).expand_as(scores)


@both
@pytest.mark.parametrize("keep", [0.95, 1.0])
@pytest.mark.parametrize("ramp", [8, 130], ids=["short ramp", "ramp beyond the batch"])
def test_calibrated_spans_are_the_shortest_that_keep_the_mass_and_far_looking_heads_keep_the_longest(
    causal, keep, ramp
):
    q, k = planted(120, (0, 5, 24, 200))
    mechanism = AdaptiveSpanAttention(
        4, 120, causal=causal, scale=1.0, max_span=300, ramp=ramp, start="calibrated", keep=keep
    )
    assert mechanism.needs_calibration
    mask = torch.arange(120)[None] < 110
    mechanism.calibrate(q, k, torch.randn(1, 4, 120, 3), mask)
    away = torch.arange(110)[:, None] - torch.arange(110)
    allowed = (away >= 0) | (not causal)
    weights = q[0, :, :110, :110].masked_fill(~allowed, -1e30).softmax(-1)

    def retained(span):
        return (weights * ((ramp + span - away.abs()) / ramp).clamp(0, 1)).sum(-1).mean(-1)

    # Over half of the longest distance counts as far.
    shortest = [next((z for z in range(60) if retained(z)[head] >= keep - 1e-6), 300) for head in range(4)]
    assert mechanism.spans.tolist() == pytest.approx(shortest)
    if keep == 1.0:
        assert shortest == [0, 5, 24, 300]


def test_calibration_without_any_real_token_changes_nothing():
    mechanism = make(start="calibrated")
    q, k, v = torch.randn(3, 1, 3, 9, 16).unbind()
    mechanism.calibrate(q, k, v, torch.zeros(1, 9, dtype=torch.bool))
    assert mechanism.spans.tolist() == [1024.0] * 3


def test_shape_of_the_state_follows_from_the_settings_and_carries_the_calibration():
    mechanism, fresh = make(start="calibrated", max_span=100), make(start="calibrated", max_span=100)
    set_spans(mechanism, 1.0, 2.0, 3.0)
    fresh.load_state_dict(mechanism.state_dict())
    assert torch.equal(fresh.spans, mechanism.spans)
    assert {name: x.shape for name, x in fresh.state_dict().items()} == {"fraction": (3,)}


def test_spans_are_read_once_from_an_accelerator_and_again_after_every_change(monkeypatch):
    monkeypatch.setattr(AdaptiveSpanAttention, "_reads_at_once", lambda self: False)
    mechanism = make(max_span=100).eval()
    reads = []

    def spans(mechanism):
        return 100 * mechanism.fraction.detach().float()

    monkeypatch.setattr(AdaptiveSpanAttention, "spans", property(lambda self: reads.append(1) or spans(self)))

    def known(mechanism):
        values, before = mechanism._known(), len(reads)
        assert values == spans(mechanism).tolist()
        assert mechanism._known() is values, "read twice"
        assert len(reads) == before
        return values

    assert known(mechanism) == [100.0] * 3
    set_spans(mechanism, 10.0, 20.0, 30.0)
    known(mechanism)
    mechanism.fraction.grad = torch.ones(3)
    torch.optim.SGD(mechanism.parameters(), lr=0.01).step()
    known(mechanism)
    mechanism.load_state_dict({"fraction": torch.tensor([0.1, 0.2, 0.3])})
    known(mechanism)
    mechanism.load_state_dict({"fraction": torch.tensor([0.4, 0.5, 0.6])}, assign=True)
    known(mechanism)
    known(mechanism.to(torch.bfloat16))
    known(mechanism.to(torch.float32))
    for twin in (copy.deepcopy(mechanism), pickle.loads(pickle.dumps(mechanism))):
        with torch.no_grad():
            while twin.fraction._version <= mechanism.fraction._version:
                twin.fraction.mul_(0.9)
                known(twin)
    mechanism.train()
    mechanism.fraction.data.mul_(0.5)
    assert mechanism._known() == spans(mechanism).tolist()


def test_costs_follow_the_spans():
    mechanism, exact = (kind(3, 16, causal=True, scale=0.25) for kind in (AdaptiveSpanAttention, MECHANISMS["sdpa"]))
    assert mechanism.flops(1000) == exact.flops(1000)
    set_spans(mechanism, 1024.0, 30.0, 100.0)
    assert mechanism.flops(1000) == exact.flops(1000) // 3 + 4 * 1000 * 16 * ((64 + 64) + (64 + 192))


def test_calibration_keeps_the_mass_in_every_head_of_a_real_model(shared_checkpoints, shared_data):
    transformers = pytest.importorskip("transformers")
    seen = []

    def attend(module, q, k, v, mask, *, scaling, **rest):
        seen.append((q, k, v, scaling))
        return F.scaled_dot_product_attention(q, k, v, scale=scaling).transpose(1, 2), None

    transformers.AttentionInterface.register("seen", attend)
    folder = shared_checkpoints / "minilm-squad"
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="seen").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with gzip.open(shared_data / "longdocs" / "movie_reviews" / "train.jsonl.gz", "rt", encoding="utf-8") as lines:
        text = json.loads(next(lines))["text"]
    with torch.no_grad():
        model(**tokenizer(text, truncation=True, max_length=384, return_tensors="pt"))
    near = 0
    for q, k, v, scale in seen:
        mechanism = AdaptiveSpanAttention(*q.shape[1::2], causal=False, scale=scale, start="calibrated", keep=0.95)
        mechanism.calibrate(q, k, v)
        near += (mechanism.spans < 1024).sum().item()
        away = (torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])).abs()
        soft = ((32 + mechanism.spans[:, None, None] - away) / 32).clamp(0, 1)
        mass = ((scale * q @ k.transpose(-2, -1)).softmax(-1) * soft).sum(-1).mean((0, 2))
        assert (mass >= 0.95 - 1e-5).all()
    assert len(seen) == 6
    assert near > 0
