"""Local attention equals dense attention under its own mask."""

import pytest
import torch

from approx.mechanisms.local import LocalAttention


def dense(q, k, v, *, left, right, scale, mask=None):
    queries, keys = q.shape[2], k.shape[2]
    distance = torch.arange(keys)[None] - torch.arange(keys - queries, keys)[:, None]
    allowed = (distance >= -left) & (distance <= right)
    allowed = allowed[None, None] if mask is None else allowed & mask[:, None, None]
    scores = (scale * q @ k.transpose(-2, -1)).masked_fill(~allowed, -1e30)
    return (scores.softmax(-1) * allowed) @ v


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (200, 200), (64, 64), (65, 65), (130, 300), (300, 130), (3, 90)])
@pytest.mark.parametrize(("left", "right"), [(0, 0), (3, 0), (0, 5), (70, 20), (500, 500)])
@pytest.mark.parametrize("masked", [False, True], ids=["all real", "masked"])
def test_it_equals_dense_attention_under_its_mask_forward_and_backward(queries, keys, left, right, masked):
    q = torch.randn(2, 2, queries, 8).requires_grad_()
    k, v = (torch.randn(2, 2, keys, 8).requires_grad_() for _ in range(2))
    mask = torch.rand(2, keys) < 0.7 if masked else None
    grad = torch.randn(2, 2, queries, 8)
    if mask is not None and queries <= keys:
        # Outputs of padded queries are undefined.
        grad = grad * mask[:, None, keys - queries :, None]
    actual = LocalAttention(2, 8, causal=False, scale=0.35, left=left, right=right)(q, k, v, mask)
    expected = dense(q, k, v, left=left, right=right, scale=0.35, mask=mask)
    torch.testing.assert_close(actual * (grad != 0), expected * (grad != 0), atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(
        torch.autograd.grad(actual, (q, k, v), grad), torch.autograd.grad(expected, (q, k, v), grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_causal_is_a_window_without_a_right_side():
    q, k, v = torch.randn(3, 1, 2, 150, 8).unbind()
    out = LocalAttention(2, 8, causal=True, scale=0.35, left=20, right=9)(q, k, v)
    torch.testing.assert_close(out, dense(q, k, v, left=20, right=0, scale=0.35))
