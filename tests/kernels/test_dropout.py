"""Dropout in C: its mask is read from the weights, and gradients equal those of the plain formula under this mask."""

from functools import partial

import pytest
import torch

from approx_kernels.ops.adaptive_span.api import adaptive_span_attention
from approx_kernels.ops.clustered.api import causal_clustered_attention, clustered_attention
from approx_kernels.ops.clustering.api import draw_centroids, draw_planes
from approx_kernels.ops.key_lists.cpu import FAR, attend_lists
from approx_kernels.ops.linear.api import linear_attention
from approx_kernels.ops.lsh.api import draw_projections, lsh_attention
from approx_kernels.ops.patterns.api import local_attention, pattern_attention
from approx_kernels.ops.patterns.reference import Blocks, Listed, Strided, Summaries, Window, bigbird_lists, draw_blocks
from approx_kernels.ops.performer.api import draw_projection, performer_attention
from approx_kernels.ops.topk.api import topk_attention
from c_sources import needs_compiler
from closeness import assert_close, at_real_queries

pytestmark = needs_compiler

TOKENS, SIZE = 130, 16
# Several rounds may contain a pair, and each drops it independently.
ROUNDS = 3


def lsh(q, k, v, mask=None, *, causal, **how):
    drawn = draw_projections(SIZE, rounds=ROUNDS, variant="asymmetric", causal=causal, seed=0)
    kind = {"variant": "asymmetric", "cluster": 20, "dedup": False, "causal": causal}
    return lsh_attention(q, k, v, mask, projections=drawn, **kind, **how)


def clustered(*tensors, topk, **how):
    planes, draws = draw_planes(SIZE, bits=31, bias=True, clusters=20, seed=0)
    way = {"planes": planes, "draws": draws, "clusters": 20, "iterations": 3, "topk": topk}
    return clustered_attention(*tensors, **way, **how)


def causal_clustered(*tensors, **how):
    centroids, selectors = draw_centroids(2, SIZE, clusters=12, seed=0)
    return causal_clustered_attention(*tensors, centroids=centroids, selectors=selectors, **how)


DRAWS = draw_blocks(2, 0)
MECHANISMS = {
    "linear": partial(linear_attention, causal=False, eps=1e-3),
    "linear, causal": partial(linear_attention, causal=True, eps=1e-3),
    "performer": partial(
        performer_attention, projection=draw_projection(SIZE, features=24, orthogonal=True, seed=0), causal=True
    ),
    "local": partial(local_attention, left=30, right=20),
    "bigbird": partial(
        pattern_attention, pattern=lambda tokens: Listed(size=16, lists=bigbird_lists(-(-tokens // 16), DRAWS, False))
    ),
    **{
        name: partial(pattern_attention, pattern=lambda tokens, pattern=pattern: pattern)
        for name, pattern in {
            "block": Blocks(True, size=16, neighbours=1, shift=5),
            "strided": Strided(stride=11),
            "longformer": Window(left=20, right=20, tokens=(0, 7, 50)),
            "fixed": Summaries(True, stride=11, summary=2, inside="past"),
        }.items()
    },
    "adaptive span": partial(adaptive_span_attention, spans=torch.tensor([7.0, 40.25]), ramp=12, causal=False),
    "top k": partial(topk_attention, topk=9, causal=True),
    "clustered": partial(clustered, topk=None),
    "improved clustered": partial(clustered, topk=24),
    "improved clustered, all keys": partial(clustered, topk=TOKENS),
    "clustered, causal": partial(causal_clustered, chunk=70, topk=None),
    "improved clustered, causal": partial(causal_clustered, chunk=25, topk=17),
    "lsh": partial(lsh, causal=False),
    "lsh, causal": partial(lsh, causal=True),
}


def drawn(dtype=torch.float32):
    # Small numbers make weights of one size, and rounded ones let every dtype choose the same keys.
    q, k, v, grad = torch.randn(4, 2, 2, TOKENS, SIZE).bfloat16().to(dtype).unbind()
    return q, k, v.abs(), grad


def attend(name, *tensors, seed=None, dropout=0.3, impl="cpu"):
    if seed is not None:
        torch.manual_seed(seed)
    return MECHANISMS[name](*tensors, scale=0.2, dropout=dropout, impl=impl)


def factors(name, q, k, mask=None, seed=0, dropout=0.3):
    """The dropout factor of each weight, NaN for zero weights; weights are the outputs for values of the identity."""
    one = torch.eye(TOKENS).expand(2, 2, -1, -1)
    weights, dropped_weights = (attend(name, q, k, one, mask, seed=seed, dropout=p) for p in (0.0, dropout))
    return torch.where(weights > 1e-6, dropped_weights / weights, torch.nan)


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["whole", "masked", "last queries"])
@pytest.mark.sample(40)
def test_outputs_and_gradients_are_those_of_the_formula_under_the_mask(name, dtype, kind):
    q, k, v, grad = drawn()
    mask = torch.rand(2, TOKENS) < 0.8 if kind == "masked" else None
    if kind == "last queries":
        q, grad = q[:, :, -45:], grad[:, :, -45:]
    # Multiples of the share of a round, or 0 and 1, up to rounding.
    steps = 0.7 * (6 if name.startswith("lsh") else 1)
    counts = (factors(name, q, k, mask).nan_to_num() * steps).round() / steps
    if name.startswith("lsh"):
        assert ((counts > 0.1) & (counts < 1.3)).any(), "rounds drop on their own"
    else:
        assert counts.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    results: list[tuple[torch.Tensor, ...]] = []
    for impl, wide in (("cpu", dtype), ("reference", dtype), ("reference", torch.float64)):
        inputs = [x.to(wide).requires_grad_() for x in (q, k, v)]
        if impl == "cpu":
            out = attend(name, *inputs, mask, seed=0)
        else:
            one = torch.eye(TOKENS, dtype=wide).expand(2, 2, -1, -1)
            weights = attend(name, *inputs[:2], one, mask, dropout=0.0, impl=impl)
            out = (weights * counts.to(wide)) @ inputs[2]
        out = at_real_queries(out, mask)
        results.append((out, *torch.autograd.grad(out, inputs, grad.to(wide))))
    for which, actual, plain, exact in zip("oqkv", *results, strict=True):
        assert_close(f"{name} {which}", actual, plain, exact, factor=8.0)


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("dropout", [0.1, 0.95])
@pytest.mark.sample(8)
def test_drops_the_requested_share_of_weights(name, dropout):
    q, k, _, _ = drawn()
    shares = torch.stack(
        [1 - (1 - dropout) * factors(name, q, k, seed=seed, dropout=dropout).nanmean() for seed in range(20)]
    )
    assert (shares.mean() - dropout).abs() <= 5 * shares.std() / 20**0.5
    assert shares.std() < 0.05


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.sample(4)
def test_the_mean_over_seeds_is_what_it_is_without_dropout(name):
    q, k, v, _ = drawn()
    samples = torch.stack([attend(name, q, k, v, seed=seed) for seed in range(100)])
    # The largest deviation of that many means is about four standard deviations.
    away = (samples.mean(0) - attend(name, q, k, v, dropout=0.0)) / (samples.std(0) / 100**0.5)
    assert away.abs().max() < 5.5


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.sample(13)
def test_the_seed_decides_and_threads_do_not_and_c_is_what_runs(name):
    q, k, v, grad = drawn()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    runs, threads = [], torch.get_num_threads()
    try:
        for seed, count, impl in ((0, 1, "cpu"), (0, 1, "auto"), (0, 2, "cpu"), (1, 1, "cpu")):
            torch.set_num_threads(count)
            out = attend(name, *inputs, seed=seed, impl=impl)
            runs.append([out, *torch.autograd.grad(out, inputs, grad)])
    finally:
        torch.set_num_threads(threads)
    first, again, with_two, other = runs
    assert all(map(torch.equal, first, again))
    assert all(map(torch.equal, first, with_two))
    assert not any(map(torch.equal, first, other))


@pytest.mark.parametrize("name", MECHANISMS)
def test_dropout_may_be_zero_and_one(name):
    q, k, v, _ = drawn()
    before = torch.get_rng_state()
    MECHANISMS[name](q, k, v, scale=0.2)
    attend(name, q, k, v, dropout=0.0)
    assert torch.equal(torch.get_rng_state(), before), "nothing is drawn where nothing is dropped"
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = attend(name, *inputs, dropout=1.0)
    assert all(x.eq(0).all() for x in (out, *torch.autograd.grad(out.sum(), inputs)))
    assert attend(name, q, k, v, dropout=0.999).isfinite().all()
    with pytest.raises(ValueError, match="dropout"):
        attend(name, q, k, v, dropout=1.5)


def test_the_mask_is_the_hash_whatever_the_width_of_vectors_and_the_order_of_keys():
    q, k, _, _ = drawn()
    one = torch.eye(TOKENS).expand(2, 2, -1, -1)
    everything, half = (0, TOKENS, -FAR, FAR), ((40, TOKENS, -FAR, FAR), (0, 40, -FAR, FAR))
    for starts, entries in (([0, TOKENS], [[everything]]), ([0, 7, 50, TOKENS], [half] * 3)):
        torch.manual_seed(5)
        actual = attend_lists(q, k, one, None, before=0, starts=starts, entries=entries, scale=0.2, dropout=0.4)
        torch.manual_seed(5)
        seed = int(torch.randint(2**63 - 1, ()))
        for b, h, i, j in torch.cartesian_prod(torch.arange(2), torch.arange(2), *[torch.arange(0, TOKENS, 9)] * 2):
            assert (actual[b, h, i, j] == 0) == dropped(seed, int(2 * b + h), int(i), int(j), 0.4)


def dropped(seed, item, query, key, dropout):
    """The hash of c_dropout.py in whole numbers."""

    def mixed(x):
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    of = mixed((mixed((seed + item) % 2**64) + query) % 2**64)
    x = (key + of) % 2**32
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15 ^ of >> 32) * 0x846CA68B % 2**32
    return x >> 8 < round(dropout * 2**24)


def test_queries_heads_and_samples_drop_other_keys_without_regard_to_one_another():
    q = torch.zeros(2, 2, TOKENS, SIZE)
    everything = {"left": TOKENS, "right": TOKENS, "scale": 1.0, "dropout": 0.5}
    one = torch.eye(TOKENS).expand(2, 2, -1, -1)
    signs = (local_attention(q, q, one, **everything, impl="cpu") > 0).float().flatten(0, 2) * 2 - 1
    # Products of independent rows have a standard deviation of the root of their length.
    products = (signs @ signs.T).triu(1)
    count = len(signs) * (len(signs) - 1) / 2
    assert products.abs().max() < 6 * TOKENS**0.5
    assert (products.square().sum() / count / TOKENS - 1).abs() < 5 * (2 / count) ** 0.5
