"""Clustered attention in C, also causal, against its specification: the same clusters, closeness, padding, decoding, threads."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from approx_kernels.cpu.compile import load
from approx_kernels.dispatch.implementation import chosen
from approx_kernels.ops.clustered.api import causal_clustered_attention, clustered_attention
from approx_kernels.ops.clustering.api import cluster_queries, draw_centroids, draw_planes
from c_sources import needs_compiler
from closeness import assert_close, equal_and_falling_scores

pytestmark = needs_compiler


CENTROIDS, SELECTORS = draw_centroids(2, 24, clusters=12, seed=0)
FITTED = {"centroids": CENTROIDS, "selectors": SELECTORS, "scale": 0.3}
BOTH = (clustered_attention, causal_clustered_attention)


def attend(op: Any, impl: str, dtype: torch.dtype, *arguments: Any, **settings: Any) -> tuple[torch.Tensor, ...]:
    """The output and the gradients, on inputs that are rounded to 16 bits, so that every dtype chooses the same."""
    *tensors, grad, mask = arguments
    q, k, v = inputs = tuple(x.bfloat16().to(dtype).requires_grad_() for x in tensors)
    out = op(q, k, v, mask, impl=impl, **settings)
    assert chosen()[op.__name__] == impl
    return out, *torch.autograd.grad(out, inputs, grad.bfloat16().to(dtype))


def check(op: Any, dtype: torch.dtype, *arguments: Any, factor: float, **settings: Any) -> None:
    exact = attend(op, "reference", torch.float64, *arguments, **settings)
    plain, made = (attend(op, impl, dtype, *arguments, **settings) for impl in ("reference", "cpu"))
    for name, actual, reference, right in zip("oqkv", made, plain, exact, strict=True):
        assert_close(name, actual, reference, right, factor=factor)


def with_threads(count: int, call: Any) -> Any:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(count)
        return call()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("frozen", [False, True], ids=["k-means", "frozen"])
@settings(max_examples=10)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 120), st.integers(1, 120)),
    square=st.booleans(),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    clusters=st.sampled_from([1, 5, 33, None, "auto"]),
    topk=st.sampled_from([None, 1, 7, 40, 200]),
    bits=st.integers(1, 63),
    fill=st.sampled_from([None, 0.0, 0.5, 0.9]),
    seed=st.integers(0, 1000),
)
def test_is_as_accurate_as_the_reference(dtype, frozen, shape, square, sizes, clusters, topk, bits, fill, seed):
    torch.manual_seed(seed)
    batch, heads, length, keys = shape
    keys = length if square else keys
    q, k = (torch.randn(batch, n, heads, sizes[0]).transpose(1, 2) for n in (length, keys))
    v, grad = torch.randn(batch, heads, keys, sizes[1]), torch.randn(batch, heads, length, sizes[1])
    mask = None if fill is None else torch.rand(batch, keys) < fill
    if mask is not None and length == keys:
        grad = grad * mask[:, None, :, None]
    if frozen:
        clusters = clusters if isinstance(clusters, int) else 33
        _, selectors = draw_centroids(heads, sizes[0], clusters=clusters, seed=seed)
        way = {"selectors": selectors}
    else:
        planes, draws = draw_planes(
            sizes[0], bits=bits, bias=True, clusters=clusters if isinstance(clusters, int) else 100, seed=seed
        )
        way = {"planes": planes, "draws": draws}
    way |= {"clusters": clusters, "iterations": 3, "topk": topk, "scale": 0.3}
    check(clustered_attention, dtype, q, k, v, grad, mask, factor=8.0, **way)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n", "clusters", "bits"), [(60, 9, 5), (513, 100, 63), (1500, 300, 63), (700, 699, 40)])
def test_the_clusters_are_those_of_the_reference(dtype, n, clusters, bits):
    q = torch.randn(3, n, 24).to(dtype)
    # Equal queries make ties and empty clusters.
    q[:, n // 2 : n // 2 + 30] = q[:, :1]
    planes, draws = draw_planes(24, bits=bits, bias=True, clusters=clusters, seed=0)
    for iterations in (1, 2, 6):
        results = [
            cluster_queries(q, planes, draws, clusters=clusters, iterations=iterations, impl=impl)
            for impl in ("reference", "cpu")
        ]
        assert torch.equal(*results)


def test_distinguishes_more_clusters_than_16_bits_can_count():
    n, clusters = 2**16 + 3, 2**16 + 1
    planes, draws = draw_planes(64, bits=63, bias=True, clusters=clusters, seed=0)
    assignments = cluster_queries(torch.randn(1, n, 64), planes, draws, clusters=clusters, iterations=1, impl="cpu")[0]
    # Each centroid is one query of its stretch, whose nearest it is: no two random queries share all 63 bits.
    starts = torch.arange(clusters + 1) * n // clusters
    assert torch.equal(assignments[starts[:-1] + draws % starts.diff()].long(), torch.arange(clusters))


def test_equal_keys_and_far_scores_change_nothing():
    q, v = torch.randn(1, 2, 300, 16) * 30, torch.randn(1, 2, 300, 16)
    k = torch.randn(1, 2, 3, 16).repeat(1, 1, 100, 1)
    planes, draws = draw_planes(16, bits=63, bias=True, clusters=25, seed=0)
    # Copies of a key tie, and any of them may be chosen, so their values are equal too.
    v = v[:, :, :3].repeat(1, 1, 100, 1)
    way = {"planes": planes, "draws": draws, "clusters": 25, "iterations": 3, "topk": 32, "scale": 1.0}
    check(clustered_attention, torch.float32, q, k, v, v, None, factor=8.0, **way)


@pytest.mark.parametrize("topk", [None, 16], ids=["plain", "improved"])
def test_threads_neighbours_and_repetition_change_no_bit(topk):
    q, k, v, grad = torch.randn(4, 3, 5, 200, 24).unbind()
    mask = torch.arange(200) < torch.tensor([[200], [20], [150]])
    planes, draws = draw_planes(24, bits=63, bias=True, clusters=25, seed=0)
    way = {"planes": planes, "draws": draws, "clusters": 25, "iterations": 3, "topk": topk, "scale": 0.2}
    run = partial(attend, clustered_attention, "cpu", torch.float32, **way)
    first = run(q, k, v, grad, mask)
    again = with_threads(3, lambda: run(q, k, v, grad, mask))
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    for sample, count in enumerate(mask.sum(1).tolist()):
        alone = (x[sample : sample + 1, :, :count] for x in (q, k, v, grad))
        for one, all_of_them in zip(run(*alone, None), first, strict=True):
            assert torch.equal(one[0], all_of_them[sample, :, :count])


@pytest.mark.parametrize("keys", [513, 515, 518, 522])
def test_finds_the_largest_keys_of_clusters_in_rows_of_any_length(keys):
    q, k, v = equal_and_falling_scores(256, keys)
    planes, draws = draw_planes(8, bits=32, bias=True, clusters=200, seed=0)
    how = {"planes": planes, "draws": draws, "clusters": 200, "iterations": 2, "topk": 6, "scale": 0.5}
    actual, expected = (clustered_attention(q, k, v, impl=impl, **how) for impl in ("cpu", "reference"))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_nan_is_not_hidden():
    q, k, v = torch.randn(3, 1, 1, 80, 8).unbind()
    planes, draws = draw_planes(8, bits=20, bias=True, clusters=9, seed=0)
    k[0, 0, 40, 3] = float("nan")
    for topk in (None, 4):
        out = clustered_attention(
            q, k, v, planes=planes, draws=draws, clusters=9, iterations=2, topk=topk, scale=0.3, impl="cpu"
        )
        assert out.isnan().any(-1).all()


WAYS: list[dict[str, Any]] = [
    {"clusters": 9, "iterations": 2, "topk": 4, "scale": 0.3},
    {"chunk": 8, "topk": 4, **FITTED},
]


@pytest.mark.parametrize(("op", "way"), list(zip(BOTH, WAYS, strict=True)), ids=["bidirectional", "causal"])
def test_refuses_unsupported_arguments_explicitly_and_auto_uses_the_reference(op, way):
    q = torch.randn(1, 2, 40, 24, dtype=torch.float64)
    if op is clustered_attention:
        planes, draws = draw_planes(24, bits=20, bias=True, clusters=9, seed=0)
        way = {"planes": planes, "draws": draws, **way}
    with pytest.raises(ValueError, match="float64"):
        op(q, q, q, impl="cpu", **way)
    op(q, q, q, **way)
    assert chosen()[op.__name__] == "reference"


def test_runs_without_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "no-such-compiler")
    load.cache_clear()
    try:
        q = torch.randn(1, 2, 40, 8)
        planes, draws = draw_planes(8, bits=20, bias=True, clusters=9, seed=0)
        way = {"planes": planes, "draws": draws, "clusters": 9, "iterations": 2, "topk": 4, "scale": 0.3}
        clustered_attention(q, q, q, **way)
        assert chosen()["clustered_attention"] == "reference"
        with pytest.raises(ValueError, match="Install gcc"):
            clustered_attention(q, q, q, impl="cpu", **way)
    finally:
        load.cache_clear()


@pytest.mark.parametrize("keys", [40, 300])
def test_chooses_the_first_keys_of_equal_scores(keys):
    # Opposite queries in one cluster: their mean is 0, and sees all keys alike.
    one, other = torch.randn(2, 16)
    q = torch.stack([one, -one, other, -other])[None, None]
    k, v = torch.randn(1, 1, keys, 16), torch.randn(1, 1, keys, 8)
    planes, draws = draw_planes(16, bits=8, bias=False, clusters=1, seed=0)
    how = {"planes": planes, "draws": draws, "clusters": 1, "iterations": 2, "topk": 7, "scale": 0.3}
    out = clustered_attention(q, k, v, **how, impl="cpu")
    near = (0.3 * q @ k[:, :, :7].mT).softmax(-1) @ v[:, :, :7] * 7 / keys
    torch.testing.assert_close(out, near + v[:, :, 7:].sum(2, keepdim=True) / keys)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@settings(max_examples=10)
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 150), st.integers(1, 150)),
    square=st.booleans(),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    clusters=st.sampled_from([1, 5, 33]),
    chunk=st.sampled_from([1, 7, 64, 100]),
    topk=st.sampled_from([None, 1, 7, 40]),
    fill=st.sampled_from([None, 0.0, 0.7]),
    seed=st.integers(0, 1000),
)
def test_the_causal_form_is_as_accurate_as_the_reference(
    dtype, shape, square, sizes, clusters, chunk, topk, fill, seed
):
    torch.manual_seed(seed)
    batch, heads, length, keys = shape
    keys = length if square else keys
    # Heads laid out as by projections, and values of one sign, so that sums do not cancel.
    q, k = (torch.randn(batch, n, heads, sizes[0]).transpose(1, 2) for n in (length, keys))
    v, grad = torch.rand(batch, heads, keys, sizes[1]), torch.randn(batch, heads, length, sizes[1])
    mask = None if fill is None else torch.rand(batch, keys) < fill
    centroids, selectors = draw_centroids(heads, sizes[0], clusters=clusters, seed=seed)
    way = {"centroids": centroids, "selectors": selectors, "chunk": chunk, "topk": topk, "scale": 0.3}
    check(causal_clustered_attention, dtype, q, k, v, grad, mask, factor=4.0, **way)


def test_far_scores_and_keys_that_lose_their_place_change_nothing():
    # Scores rise along the sequence: every key takes the place of an earlier one, and all peaks move on.
    q = torch.randn(1, 2, 400, 24).abs()
    k = torch.arange(1.0, 401)[None, None, :, None] * torch.rand(1, 2, 400, 24) / 10
    v = torch.rand(1, 2, 400, 24)
    centroids, selectors = draw_centroids(2, 24, clusters=12, seed=0)
    way = {"centroids": centroids.abs(), "selectors": selectors, "chunk": 70, "topk": 32, "scale": 0.3}
    check(causal_clustered_attention, torch.float32, q, k, v, v, None, factor=4.0, **way)


@pytest.mark.parametrize("topk", [None, 16], ids=["plain", "improved"])
@pytest.mark.parametrize("new", [1, 3, 40])
def test_new_queries_on_a_cache_equal_the_whole_sequence(topk, new):
    q, k, v = torch.randn(3, 2, 2, 200, 24).unbind()
    whole = causal_clustered_attention(q, k, v, chunk=30, topk=topk, **FITTED, impl="cpu")
    last = causal_clustered_attention(q[:, :, -new:], k, v, chunk=30, topk=topk, **FITTED, impl="cpu")
    torch.testing.assert_close(last, whole[:, :, -new:])


def test_threads_and_neighbours_change_no_bit_of_the_causal_form():
    tensors = torch.randn(4, 3, 2, 200, 24).unbind()
    run = partial(attend, causal_clustered_attention, "cpu", torch.float32, chunk=30, topk=16, **FITTED)
    first, others = run(*tensors, None), with_threads(3, lambda: run(*tensors, None))
    alone = run(*(x[1:2] for x in tensors), None)
    for each, other, single in zip(first, others, alone, strict=True):
        assert torch.equal(other, each)
        assert torch.equal(single, each[1:2])


@pytest.mark.parametrize("topk", [None, 16], ids=["plain", "improved"])
def test_unseen_keys_have_no_gradient(topk):
    q, k, v, grad = torch.randn(4, 1, 2, 200, 24).unbind()
    grad[:, :, 77:] = 0
    how = {"chunk": 30, "topk": topk, **FITTED}
    _, *grads = attend(causal_clustered_attention, "cpu", torch.float32, q, k, v, grad, None, **how)
    # The first query sees only itself.
    assert all(x[:, :, 77:].eq(0).all() and x[:, :, 1:77].ne(0).all() for x in grads)


def test_gradients_may_arrive_in_any_layout():
    q, k, v = torch.randn(3, 1, 2, 90, 24).unbind()
    way = {"chunk": 30, "topk": 7, "impl": "cpu", **FITTED}
    inputs = [x.requires_grad_() for x in (q, k, v)]
    expanded = torch.autograd.grad(causal_clustered_attention(q, k, v, **way).sum(), inputs)
    whole = torch.autograd.grad(causal_clustered_attention(q, k, v, **way), inputs, torch.ones(1, 2, 90, 24))
    assert all(map(torch.equal, expanded, whole))


@pytest.mark.parametrize("topk", [None, 4])
def test_nan_reaches_later_queries(topk):
    q, k, v = torch.randn(3, 1, 2, 80, 24).unbind()
    k[:, :, 40, 3] = float("nan")
    out = causal_clustered_attention(q, k, v, chunk=10, topk=topk, **FITTED, impl="cpu")
    assert out[:, :, 40:].isnan().any(-1).all()
    assert not out[:, :, :40].isnan().any()
