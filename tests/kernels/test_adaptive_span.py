"""Adaptive span: the windows of groups of heads give what the soft mask over everything gives."""

import pytest
import torch

from approx_kernels.ops.adaptive_span import reference
from approx_kernels.ops.adaptive_span.api import adaptive_span_attention, mass_by_distance, window_sizes
from c_sources import needs_compiler
from closeness import at_real_queries

HEADS, RAMP = 4, 20


def distances(queries, keys):
    return torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)


def dense(q, k, v, *, spans, causal, mask=None):
    away = distances(q.shape[2], k.shape[2])
    soft = ((RAMP + spans[:, None, None] - away.abs()) / RAMP).clamp(0, 1) * ((away >= 0) | (not causal))
    soft = soft[None] if mask is None else soft * mask[:, None, None]
    scores = 0.3 * q @ k.transpose(-2, -1)
    weights = (scores - scores.amax(-1, keepdim=True)).exp() * soft
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-300) @ v


def inputs(queries, keys, dtype=torch.float64):
    q = torch.randn(2, HEADS, queries, 8, dtype=dtype)
    k, v = torch.randn(2, 2, HEADS, keys, 8, dtype=dtype)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


@pytest.mark.parametrize(
    "queries_keys", [(1, 1), (5, 5), (200, 200), (130, 300), (300, 130), (90, 3), (1, 200)], ids=str
)
@pytest.mark.parametrize("masked", [False, True], ids=["all real", "masked"])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_equals_the_softmax_of_scores_and_log_mask_forward_and_backward(queries_keys, masked, causal):
    queries, keys = queries_keys
    spans = torch.rand(HEADS, dtype=torch.float64) * torch.tensor([0.5, 60.0, 150.0, 400.0])
    q, k, v = inputs(queries, keys)
    tensors = q, k, v, spans.requires_grad_()
    mask = torch.rand(2, keys) < 0.7 if masked else None
    out = adaptive_span_attention(q, k, v, mask, spans=spans, ramp=RAMP, causal=causal, scale=0.3)
    expected = dense(q, k, v, spans=spans, causal=causal, mask=mask)
    out, expected = at_real_queries(out, mask), at_real_queries(expected, mask)
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, tensors, grad, materialize_grads=True)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, tensors, grad))


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.sample(1)
def test_the_gradient_of_the_spans_is_that_of_finite_differences(causal):
    q, k, v = inputs(90, 90)
    spans = torch.tensor([0.3, 11.7, 40.2, 63.9], dtype=torch.float64, requires_grad=True)

    def attend(spans):
        return adaptive_span_attention(q.detach(), k, v, spans=spans, ramp=RAMP, causal=causal, scale=0.3)[:, :, ::9]

    assert torch.autograd.gradcheck(attend, spans)


@pytest.mark.parametrize("needed", [False, True], ids=["inference", "training"])
def test_blocks_change_nothing(monkeypatch, needed):
    q, k, v = inputs(129, 150, torch.float32)
    spans = torch.tensor([0.0, 7.5, 31.2, 100.0], requires_grad=needed)
    results = []
    for block in (1000, 64, 5):
        monkeypatch.setattr(reference, "_BLOCK", block)
        out = adaptive_span_attention(q, k, v, spans=spans, ramp=RAMP, causal=True, scale=0.3, impl="reference")
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], atol=1e-5, rtol=1e-4)


def test_heads_of_about_the_same_span_share_a_window_that_holds_their_ramp():
    assert window_sizes([0, 31.5, 32, 32.1, 90, 600, 999], 32, 999) == [64, 64, 64, 128, 128, 640, None]
    assert window_sizes([0, 31.5, 90], 32, 70) == [64, 64, None]
    assert window_sizes([0, 60, 70], 32, 70) == [64, 70, None]


def test_each_head_pays_for_its_own_window_only(monkeypatch):
    q, k, v = inputs(1024, 1024, torch.float32)
    pairs = []
    fused = reference._fused

    def counted(q, k, *rest):
        pairs.append((q.shape[1], q.shape[2] * k.shape[2]))
        return fused(q, k, *rest)

    monkeypatch.setattr(reference, "_fused", counted)
    spans = torch.tensor([20.0, 200.0, 30.0, 20.0])
    adaptive_span_attention(q, k, v, spans=spans, ramp=32, causal=True, scale=0.3, impl="reference")
    three, one = (sum(each for heads, each in pairs if heads == group) for group in (3, 1))
    assert {heads for heads, _ in pairs} == {1, 3}
    assert three <= 1024 * (64 + 64)
    assert one <= 1024 * (64 + 256)


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("queries_keys", [(1, 1), (150, 150), (20, 150), (150, 20)], ids=str)
def test_mass_by_distance_is_that_of_exact_attention(queries_keys, causal):
    queries, keys = queries_keys
    q, k, _ = inputs(queries, keys)
    mask = torch.rand(2, keys) < 0.7
    mask[:, 0] = True
    mask[1] = False
    away = distances(queries, keys)
    allowed = ((away >= 0) | (not causal)) & mask[:, None, None]
    allowed = allowed & mask[:, None, :, None] if queries == keys else allowed
    weights = (0.3 * q @ k.transpose(-2, -1)).masked_fill(~allowed, -1e30).softmax(-1) * allowed
    counted = allowed.any(-1).sum()
    expected = torch.stack(
        [(weights * (away.abs() == x)).sum((0, 2, 3)) / counted for x in range(max(queries, keys))], 1
    )
    torch.testing.assert_close(mass_by_distance(q, k, mask, causal=causal, scale=0.3), expected)


@needs_compiler
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("shortest", [5.0, 100.0], ids=["some", "all"])
def test_heads_that_span_everything_run_in_c_too(monkeypatch, rows, causal, shortest):
    # The largest head size that C supports for few queries.
    q, k, v = torch.randn(2, HEADS, rows, 16), *torch.randn(2, 2, HEADS, 40, 16)
    monkeypatch.setattr(reference, "exact_attention", lambda *_, **__: pytest.fail("C was asked for"))
    form = {"spans": torch.tensor([100.0, shortest, 100.0, 100.0]), "causal": causal}
    for mask in (None, torch.arange(40) < torch.tensor([[40], [25]])):
        out = adaptive_span_attention(q, k, v, mask, **form, ramp=RAMP, scale=0.3, impl="cpu")
        torch.testing.assert_close(out, dense(q, k, v, **form, mask=mask), atol=1e-5, rtol=1e-4)
