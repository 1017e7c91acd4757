"""Estimators that are fitted to data: their mean, the fitted parameters, and separate rows per head."""

import numpy as np
import pytest
import torch

from approx_kernels.ops.performer.api import (
    ESTIMATORS,
    Fitted,
    draw_projection,
    fit_estimator,
    performer_attention,
    performer_decode,
)
from c_sources import needs_compiler
from closeness import assert_close

fitted_ones = pytest.mark.parametrize("estimator", [name for name in ESTIMATORS if name != "positive"])
SCALE = 0.4


def drawn(*, tokens=200, heads=2, size=2, keys=None):
    """Queries and keys far from the origin, longer in some directions than in others, that correlate."""
    stretch = torch.randn(2, heads, size, size).double()
    q, k = (torch.randn(1, heads, n, size).double() for n in (tokens, tokens if keys is None else keys))
    return q @ stretch[0] + 1.5, k @ stretch[1] - 0.7


def grid(size):
    """Nodes and weights that integrate over N(0, 1) in each coordinate, all but exactly, [M, size] and [M]."""
    nodes, weights = (torch.from_numpy(x) for x in np.polynomial.hermite_e.hermegauss(120))
    weights = weights / weights.sum()
    every = torch.cartesian_prod(*[nodes] * size).view(-1, size)
    return every, torch.cartesian_prod(*[weights] * size).view(len(every), -1).prod(1)


def features(fitted, q, k, rows):
    """Logarithms of the features of queries and keys, in float64."""
    fitted = Fitted(*(x.double() for x in fitted))
    (q, k), (scaled, offsets) = fitted.inputs(q, k, SCALE), fitted.rows(rows)
    q, k = q * SCALE**0.5, k * SCALE**0.5
    return q @ scaled.mT + offsets[:, None], k @ scaled.mT - k.square().sum(-1, keepdim=True) / 2


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_mean_over_all_rows_is_the_softmax_kernel(estimator):
    q, k = (0.6 * x for x in drawn())
    fitted = fit_estimator(q, k, estimator=estimator, scale=SCALE)
    rows, weights = grid(2)
    heights, logs = features(fitted, q[:, :, :20], k[:, :, :30], rows)
    mean = (heights[..., :, None, :] + logs[..., None, :, :] + weights.log()).logsumexp(-1)
    wanted = SCALE * q[:, :, :20] @ k[:, :, :30].mT
    # Up to one number for each query, which the normaliser takes out; what was fitted is kept in float32.
    torch.testing.assert_close(mean.softmax(-1), wanted.softmax(-1), atol=1e-5, rtol=1e-4)


def spread(fitted, q, k):
    """Logarithm of the second moment of the estimate of a weight over its square, mean over pairs, for each head."""
    rows, weights = grid(2)
    heights, logs = features(fitted, q, k, rows)
    pairs = heights[..., :, None, :] + logs[..., None, :, :]
    mean = (pairs + weights.log()).logsumexp(-1)
    return ((2 * pairs + weights.log()).logsumexp(-1) - 2 * mean).mean((0, 2, 3))


@pytest.mark.slow
def test_each_estimator_varies_less_than_the_one_before():
    q, k = (0.4 * x for x in drawn(tokens=40))
    spreads = {name: spread(fit_estimator(q, k, estimator=name, scale=SCALE), q, k) for name in ESTIMATORS}
    assert (spreads["positive"] > spreads["oprf"]).all(), spreads
    assert (spreads["oprf"] > spreads["sderf"]).all(), spreads
    assert (spreads["sderf"] > spreads["aderf"]).all(), spreads


@pytest.mark.slow
@fitted_ones
def test_no_other_curvature_varies_less(estimator):
    q, k = (0.4 * x for x in drawn(tokens=40))
    fitted = fit_estimator(q, k, estimator=estimator, scale=SCALE)
    assert (fitted.curvature < 0).all()
    best = spread(fitted, q, k)
    for factor in (0.8, 1.25):
        assert (spread(fitted._replace(curvature=fitted.curvature * factor), q, k) > best).all()


@fitted_ones
def test_maps_leave_the_weights_as_they_are(estimator):
    q, k = drawn(size=5)
    fitted = fit_estimator(q, k, estimator=estimator, scale=SCALE)
    x, y = Fitted(*(each.double() for each in fitted)).inputs(q, k, SCALE)
    torch.testing.assert_close((SCALE * x @ y.mT).softmax(-1), (SCALE * q @ k.mT).softmax(-1), atol=1e-5, rtol=1e-4)


def test_queries_and_keys_come_to_the_same_moments_around_opposite_means():
    q, k = drawn(size=6, tokens=4000)
    fitted = fit_estimator(q, k, estimator="aderf", scale=SCALE)
    x, y = fitted.inputs(q, k, SCALE)
    torch.testing.assert_close(x.mean(2), -y.mean(2), atol=1e-4, rtol=1e-4)
    ours, theirs = (torch.stack([head.T.cov() for head in each[0]]) for each in (x, y))
    # Only the ridge separates them.
    torch.testing.assert_close(ours, theirs, atol=0.05 * float(ours.abs().max()), rtol=0.0)


def test_padding_is_not_fitted_to_and_nothing_real_fits_nothing():
    q, k = drawn(tokens=30)
    mask = torch.rand(1, 30) < 0.6
    padded, real = ~mask[:, None, :, None], mask[0]
    bad = q.masked_fill(padded, torch.nan), k.masked_fill(padded, torch.nan)
    fitted = fit_estimator(*bad, mask, estimator="aderf", scale=SCALE)
    wanted = fit_estimator(q[:, :, real], k[:, :, real], estimator="aderf", scale=SCALE)
    torch.testing.assert_close(fitted, wanted)
    nothing = fit_estimator(q, k, torch.zeros_like(mask), estimator="aderf", scale=SCALE)
    torch.testing.assert_close(nothing, Fitted.plain(2, 2))
    with pytest.raises(ValueError, match="estimator is"):
        fit_estimator(q, k, estimator="best", scale=SCALE)


@pytest.mark.parametrize("tokens", [1, 3])
@fitted_ones
def test_fits_few_or_equal_tokens_too(estimator, tokens):
    q, k = (torch.ones(1, 2, tokens, 16) * factor for factor in (3.0, 0.0))
    fitted = fit_estimator(q, k, estimator=estimator, scale=SCALE)
    assert all(x.isfinite().all() for x in fitted)
    x, y = fitted.inputs(q, k, SCALE)
    rows, _ = fitted.rows(draw_projection(16, features=8, orthogonal=True, seed=0))
    assert performer_attention(x, y, q, projection=rows, causal=False, scale=SCALE).isfinite().all()


def inputs(dtype, *, queries, keys, batch=2, heads=3, size=8, values=5):
    shapes = ((queries, size), (keys, size), (keys, values))
    return [torch.randn(batch, n, heads, d).to(dtype).transpose(1, 2) for n, d in shapes]


def own_rows(*, heads=3, features=20, size=8):
    rows = torch.stack([draw_projection(size, features=features, orthogonal=True, seed=seed) for seed in range(heads)])
    return rows * 1.3, torch.randn(heads, features) * 3


def one_by_one(q, k, v, mask, rows, offsets, share, *, causal):
    """Pair by pair and head by head in float64."""
    heights = q @ rows.double().mT + offsets.double()[:, None]
    logs = k @ rows.double().mT - k.square().sum(-1, keepdim=True) / 2
    pairs = (heights[..., :, None, :] + logs[..., None, :, :]).logsumexp(-1)
    seen = mask[:, None, None].expand_as(pairs)
    seen = seen.tril(k.shape[2] - q.shape[2]) if causal else seen
    weights = pairs.masked_fill(~seen, -1e30).softmax(-1) * seen
    uniform = seen / seen.sum(-1, keepdim=True).clamp(min=1)
    share = share.double()[:, None, None]
    return ((1 - share) * weights + share * uniform) @ v


@pytest.mark.parametrize("impl", ["reference", pytest.param("cpu", marks=needs_compiler)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize(("queries", "keys"), [(1, 70), (130, 130), (40, 100), (90, 33)])
def test_heads_with_separate_rows_offsets_and_shares(impl, dtype, causal, queries, keys):
    tensors, mask = inputs(dtype, queries=queries, keys=keys), torch.rand(2, keys) < 0.7
    rows, offsets = own_rows()
    share, results = torch.tensor([0.0, 0.3, 1.0]), []
    for wide in (dtype, torch.float64):
        q, k, v = (x.to(wide, copy=True).requires_grad_() for x in tensors)
        how = {"projection": rows, "offsets": offsets, "share": share, "causal": causal, "scale": 0.5}
        out = performer_attention(q, k, v, mask, **how, impl=impl if wide == dtype else "reference")
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
        if wide == dtype:
            plain = performer_attention(q, k, v, mask, **how, impl="reference")
            results.append((plain, *torch.autograd.grad(plain.square().sum(), (q, k, v))))
        else:
            formula = one_by_one(q * 0.5**0.5, k * 0.5**0.5, v, mask, rows, offsets, share, causal=causal)
            # Outputs of padded queries are undefined.
            real = mask[:, None, :, None] if queries == keys else torch.ones(())
            torch.testing.assert_close(out * real, formula * real)
    for which, actual, plain, exact in zip("oqkv", *results, strict=True):
        # Gradients of queries and keys are differences of sums, which round on both sides.
        assert_close(which, actual, plain, exact, factor=8.0 if which in "qk" else 4.0)


@pytest.mark.parametrize("impl", ["reference", pytest.param("cpu", marks=needs_compiler)])
def test_token_by_token_equals_the_whole_sequence(impl):
    q, k, v = inputs(torch.float32, queries=70, keys=70)
    mask = torch.arange(70) >= torch.tensor([[0], [9]])
    rows, offsets = own_rows()
    ways = {"projection": rows, "offsets": offsets, "share": torch.tensor([0.0, 0.3, 0.9]), "scale": 0.5, "impl": impl}
    whole, state = performer_attention(q, k, v, mask, **ways, causal=True), None
    for cut in (slice(0, 40), *(slice(i, i + 1) for i in range(40, 60)), slice(60, 70)):
        out, state = performer_decode(q[:, :, cut], k[:, :, cut], v[:, :, cut], mask[:, cut], state, **ways)
        torch.testing.assert_close(out, whole[:, :, cut])
    assert state is not None
    assert state["values"].shape == (2, 3, 1, 6)


def test_rejects_mismatched_arguments():
    q, k, v = inputs(torch.float32, queries=4, keys=4)
    rows, offsets = own_rows()
    how = {"causal": False, "scale": 1.0}
    with pytest.raises(ValueError, match="projection has shape"):
        performer_attention(q, k, v, projection=rows[:2], **how)
    for wrong in ({"projection": rows[0]}, {"projection": rows, "kernel": "relu"}, {"projection": rows[:, :9]}):
        with pytest.raises(ValueError, match="offsets have shape"):
            performer_attention(q, k, v, **wrong, offsets=offsets, **how)
    with pytest.raises(ValueError, match="share has shape"):
        performer_attention(q, k, v, projection=rows, share=torch.ones(2), **how)
