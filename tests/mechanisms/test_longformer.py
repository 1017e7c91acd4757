"""Longformer's global tokens chosen by content, which differ in number and place between samples."""

import pytest
import torch

from approx.errors import ApproxError, Exit
from approx.mechanisms.longformer import LongformerAttention

SEPARATOR = 5


def make(chosen, separator: int | None = SEPARATOR):
    return LongformerAttention(2, 8, causal=False, scale=0.35, window=6, global_tokens=chosen, separator=separator)


def dense(q, k, v, marked):
    """Attention of one sample, [1, H, n, D], under the mask of the definition."""
    place = torch.arange(q.shape[2])
    allowed = ((place[:, None] - place).abs() <= 3) | marked | marked[:, None]
    return (0.35 * q @ k.transpose(-2, -1)).masked_fill(~allowed, -torch.inf).softmax(-1) @ v


def marked_by(chosen, ids):
    """Which tokens of one sample are global, read token by token."""
    is_global, before = [], True
    for token in ids.tolist():
        is_global.append(token == SEPARATOR or (chosen == "question" and before))
        before &= token != SEPARATOR
    marked = torch.tensor(is_global)
    if chosen == "question":
        first = ids.tolist().index(SEPARATOR) if SEPARATOR in ids else -1
        marked[first + 1 :] = False
    return marked


@pytest.mark.parametrize("chosen", ["separator", "question"])
@pytest.mark.parametrize("kind", ["none", "right", "arbitrary"])
@pytest.mark.parametrize("length", [1, 70, 150])
def test_it_equals_dense_attention_of_each_sample_forward_and_backward(chosen, kind, length):
    q, k, v, grad = torch.randn(4, 4, 2, length, 8, dtype=torch.float64).unbind()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    ids = torch.randint(0, 14, (4, length))
    ids[3][ids[3] == SEPARATOR] = 0
    place = torch.arange(length)
    masks = {
        "none": torch.ones(4, length, dtype=torch.bool),
        "right": place < torch.tensor([[length], [1], [length - 1], [length]]).clamp(min=1),
        "arbitrary": torch.rand(4, length) < 0.7,
    }
    mask = masks[kind]
    # Batches may be padded with the separator.
    ids = ids.where(mask, SEPARATOR)
    actual = make(chosen)(*inputs, None if kind == "none" else mask, tokens=ids)
    expected = torch.zeros_like(actual)
    for sample, real in enumerate(mask):
        if real.any():
            alone = [x[sample : sample + 1, :, real] for x in inputs]
            expected[sample, :, real] = dense(*alone, marked=marked_by(chosen, ids[sample][real]))[0]
    torch.testing.assert_close(actual, expected)
    for ours, theirs in zip(
        torch.autograd.grad(actual, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_weights_take_the_tokens_too():
    q, k, v = torch.randn(3, 2, 2, 40, 8).unbind()
    ids = torch.randint(3, 8, (2, 40))
    mechanism = make("separator")
    torch.testing.assert_close(mechanism.weights(q, k, tokens=ids) @ v, mechanism(q, k, v, tokens=ids))


def test_without_tokens_or_a_separator_it_says_what_is_missing():
    q, k, v = torch.randn(3, 1, 2, 9, 8).unbind()
    with pytest.raises(ValueError, match="needs the token ids, 'tokens'"):
        make("question")(q, k, v)
    with pytest.raises(ValueError, match="needs the setting 'separator'"):
        make("question", None)(q, k, v, tokens=torch.zeros(1, 9, dtype=torch.long))
    with pytest.raises(ValueError, match=r"tokens has shape \[1, 8\]; expected \[1, 9\]"):
        make("question")(q, k, v, tokens=torch.zeros(1, 8, dtype=torch.long))
    assert not make([0, 4]).reads_tokens


@pytest.mark.parametrize("chosen", ["separator", "question"])
def test_a_causal_layer_cannot_choose_by_content(chosen):
    with pytest.raises(ApproxError, match="causal") as caught:
        LongformerAttention(2, 8, causal=True, scale=1.0, global_tokens=chosen)
    assert caught.value.exit_code == Exit.UNSUPPORTED
