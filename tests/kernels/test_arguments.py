"""What ops take beside q, k and v is checked before any code reads it: buffers of a checkpoint may hold anything."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from approx_kernels.ops.adaptive_span.api import adaptive_span_attention
from approx_kernels.ops.clustered.api import causal_clustered_attention, clustered_attention
from approx_kernels.ops.clustering.api import cluster_queries, draw_centroids, draw_planes
from approx_kernels.ops.clustering.cpu import cluster_samples
from approx_kernels.ops.linear.api import linear_attention, linear_decode
from approx_kernels.ops.lsh.api import draw_projections, lsh_attention
from approx_kernels.ops.performer.api import draw_projection, performer_attention
from c_sources import needs_compiler

HEADS, LENGTH, SIZE, CLUSTERS = 2, 40, 8, 6
Q, K, V = (torch.randn(1, HEADS, LENGTH, SIZE, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
PLANES, DRAWS = draw_planes(SIZE, bits=16, bias=True, clusters=CLUSTERS, seed=0)
CENTROIDS, SELECTORS = draw_centroids(HEADS, SIZE, clusters=CLUSTERS, seed=0)


def clustered(impl: str, **changed: Any) -> torch.Tensor:
    right = {"planes": PLANES, "draws": DRAWS, "clusters": CLUSTERS, "iterations": 3, "topk": 4, "scale": 0.3}
    return clustered_attention(Q, K, V, **(right | changed), impl=impl)


def causal_clustered(impl: str, **changed: Any) -> torch.Tensor:
    right = {"centroids": CENTROIDS, "selectors": SELECTORS, "chunk": 8, "topk": 4, "scale": 0.3}
    return causal_clustered_attention(Q, K, V, **(right | changed), impl=impl)


def queries(impl: str, **changed: Any) -> torch.Tensor:
    right = {"planes": PLANES, "draws": DRAWS, "clusters": CLUSTERS, "iterations": 3}
    return cluster_queries(Q[0], **(right | changed), impl=impl)


def performer(impl: str, **changed: Any) -> torch.Tensor:
    right = {"projection": draw_projection(SIZE, features=16, orthogonal=True, seed=0), "causal": False, "scale": 0.3}
    return performer_attention(Q, K, V, **(right | changed), impl=impl)


def linear(impl: str, **changed: Any) -> torch.Tensor:
    return linear_attention(Q, K, V, causal=True, **changed, impl=impl)


def spans(impl: str, **changed: Any) -> torch.Tensor:
    right = {"spans": torch.full((HEADS,), 4.0), "ramp": 3, "causal": True, "scale": 0.3}
    return adaptive_span_attention(Q, K, V, **(right | changed), impl=impl)


def lsh(impl: str, **changed: Any) -> torch.Tensor:
    causal = changed.pop("causal", False)
    drawn = draw_projections(SIZE, rounds=2, variant="asymmetric", causal=causal, seed=0)
    right = {"projections": drawn, "variant": "asymmetric", "cluster": 8, "dedup": False, "scale": 0.3}
    return lsh_attention(Q, K, V, causal=causal, **(right | changed), impl=impl)


SELECTED = {"planes": None, "draws": None, "selectors": SELECTORS}
WRONG: list[tuple[Callable[..., torch.Tensor], dict[str, Any], str]] = [
    (clustered, {"draws": DRAWS[:3]}, r"draws has shape \[3\]; expected at least 6 numbers"),
    (clustered, {"draws": DRAWS.int()}, "draws is torch.int32; expected torch.int64"),
    (clustered, {"draws": DRAWS[None]}, "draws has shape"),
    (clustered, {"draws": DRAWS.to("meta")}, "draws is on meta, q on cpu"),
    (clustered, {"draws": DRAWS[:25], "clusters": None}, r"draws has shape \[6\]; expected at least 25 numbers"),
    (clustered, {"planes": PLANES[:, :-1]}, r"planes has shape \[16, 8\]; expected \[bits, 9\] to fit q"),
    (clustered, {"planes": PLANES[:0]}, r"planes has shape \[0, 9\]"),
    (clustered, {"planes": PLANES.long()}, "planes is torch.int64; expected a floating dtype"),
    (clustered, {"planes": PLANES.repeat(5, 1)}, "planes has 80 rows; expected 64 at most"),
    (clustered, {"clusters": 0}, "clusters is 0; expected 1 or more"),
    (clustered, {"iterations": 0}, "iterations is 0; expected 1 or more"),
    (clustered, {"topk": 0}, "topk is 0; expected 1 or more"),
    (
        clustered,
        SELECTED | {"selectors": SELECTORS[..., :-1]},
        r"selectors has shape \[2, 6, 8\]; expected \[2, 6, 9\]",
    ),
    (clustered, SELECTED | {"selectors": SELECTORS[:1]}, "selectors has shape"),
    (clustered, SELECTED | {"selectors": SELECTORS.long()}, "selectors is torch.int64"),
    (clustered, SELECTED | {"clusters": None}, "clusters is None beside selectors"),
    (causal_clustered, {"centroids": CENTROIDS[..., :-1]}, "centroids has shape"),
    (causal_clustered, {"selectors": SELECTORS[:, :-1]}, "selectors has shape"),
    (causal_clustered, {"selectors": SELECTORS.to("meta")}, "selectors is on meta"),
    (causal_clustered, {"chunk": 0}, "chunk is 0; expected 1 or more"),
    (queries, {"draws": DRAWS[:3]}, "draws has shape"),
    (queries, {"draws": DRAWS.int()}, "draws is torch.int32"),
    (queries, {"planes": PLANES[:, :-1]}, "planes has shape"),
    (queries, {"clusters": 0}, "clusters is 0"),
    (performer, {"projection": torch.zeros(16, SIZE - 1)}, "projection has shape"),
    (performer, {"projection": torch.zeros(16, SIZE, dtype=torch.int64)}, "projection is torch.int64"),
    (performer, {"projection": torch.zeros(16, SIZE, device="meta")}, "projection is on meta"),
    (performer, {"share": torch.zeros(HEADS + 1)}, "share has shape"),
    (linear, {"window": 3, "mix": torch.zeros(HEADS, dtype=torch.int64)}, "mix is torch.int64"),
    (linear, {"window": -1}, "window is -1; expected 0 or more"),
    (spans, {"spans": torch.zeros(HEADS + 1)}, r"spans has shape \[3\]; expected \[2\]"),
    (spans, {"spans": torch.zeros(HEADS, dtype=torch.int64)}, "spans is torch.int64"),
    (spans, {"ramp": 0}, "ramp is 0; expected 1 or more"),
    (lsh, {"projections": torch.zeros(2, SIZE, 1)}, r"projections has shape \[2, 8, 1\]; expected \[rounds, 10, 1\]"),
    (lsh, {"projections": torch.zeros(0, SIZE + 2, 1)}, "projections has shape"),
    (lsh, {"causal": True, "projections": torch.zeros(2, SIZE + 2, 16)}, "projections has shape"),
    (lsh, {"cluster": 0}, "cluster is 0; expected 1 or more"),
    (lsh, {"variant": "symmetric"}, "variant is 'symmetric'; expected one of asymmetric, shared"),
]
IMPLEMENTATIONS = ["reference", pytest.param("cpu", marks=needs_compiler)]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("op", [clustered, causal_clustered, queries, performer, linear, spans, lsh])
def test_what_is_right_is_taken(op, impl):
    assert op(impl).isfinite().all()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("op", "changed", "words"), WRONG)
def test_what_does_not_fit_is_refused(op, changed, words, impl):
    with pytest.raises(ValueError, match=words):
        op(impl, **changed)


@needs_compiler
@pytest.mark.parametrize("draws", [-1, 2**62, -(2**63)])
@pytest.mark.parametrize("op", [clustered, queries])
def test_c_reads_no_query_at_a_negative_place(op, draws):
    wrong = DRAWS.clone()
    wrong[2] = draws
    with pytest.raises(ValueError, match=r"draws run from .* expected numbers from 0 to 2\^62 - 1"):
        op("cpu", draws=wrong)


@needs_compiler
def test_samples_want_no_more_clusters_than_were_drawn():
    counts = torch.full((1,), LENGTH)
    with pytest.raises(ValueError, match="expected at least 7 numbers"):
        cluster_samples(Q, None, counts, torch.full((1,), CLUSTERS + 1), PLANES, DRAWS, 3)


@needs_compiler
@pytest.mark.parametrize(
    "sums", [(1, HEADS, SIZE - 1, SIZE + 1), (1, HEADS, SIZE, SIZE), (1, HEADS + 1, SIZE, SIZE + 1)]
)
def test_the_sums_of_a_cache_fit_the_queries(sums):
    newest = Q[:, :, :1], K[:, :, :1], V[:, :, :1]
    with torch.no_grad(), pytest.raises(ValueError, match=r"C got|sums are of 3 heads"):
        linear_decode(*newest, None, {"sums": torch.zeros(sums)}, impl="cpu")
