"""Arguments other than q, k and v are checked before any code reads them: buffers of a checkpoint may hold anything."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from approx_kernels.ops.adaptive_span.api import adaptive_span_attention
from approx_kernels.ops.clustered.api import causal_clustered_attention, clustered_attention
from approx_kernels.ops.clustering.api import cluster_queries, draw_centroids, draw_planes
from approx_kernels.ops.clustering.cpu import cluster_samples
from approx_kernels.ops.exact.api import exact_attention
from approx_kernels.ops.key_lists.cpu import FAR, attend_lists
from approx_kernels.ops.linear.api import linear_attention, linear_decode
from approx_kernels.ops.lsh.api import draw_projections, lsh_attention
from approx_kernels.ops.patterns.api import local_attention, pattern_attention
from approx_kernels.ops.patterns.reference import (
    Blocks,
    Listed,
    Pattern,
    Strided,
    Summaries,
    Window,
    bigbird_lists,
    draw_blocks,
)
from approx_kernels.ops.performer.api import draw_projection, performer_attention
from approx_kernels.ops.topk.api import topk_attention
from c_sources import needs_compiler

HEADS, LENGTH, SIZE, CLUSTERS = 2, 40, 8, 6
Q, K, V = (torch.randn(1, HEADS, LENGTH, SIZE, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
PLANES, DRAWS = draw_planes(SIZE, bits=16, bias=True, clusters=CLUSTERS, seed=0)
BLOCKS = draw_blocks(1, 0)
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


def patterned(impl: str, pattern: Callable[[int], Pattern], steps: Any = (None,)) -> torch.Tensor:
    return pattern_attention(Q, K, V, pattern=pattern, steps=steps, scale=0.3, impl=impl)


def strided(impl: str, stride: Any = lambda tokens: 3, steps: Any = (1, 2), causal: Any = True) -> torch.Tensor:
    return patterned(impl, lambda tokens: Strided(causal, stride=stride(tokens)), steps)


def summaries(impl: str, stride: Any = lambda tokens: 5, steps: Any = (1, 2), **changed: Any) -> torch.Tensor:
    right: dict[str, Any] = {"causal": True, "summary": 2, "inside": "past"}
    return patterned(impl, lambda tokens: Summaries(stride=stride(tokens), **(right | changed)), steps)


def blocks(impl: str, **changed: Any) -> torch.Tensor:
    right: dict[str, Any] = {"size": 8, "neighbours": 1, "shift": 2}
    return patterned(impl, lambda tokens: Blocks(**(right | changed)))


def bigbird(impl: str, block: Any = 8, draws: Any = BLOCKS) -> torch.Tensor:
    return patterned(impl, lambda tokens: Listed(size=block, lists=bigbird_lists(-(-tokens // block), draws, False)))


def chosen(impl: str, **changed: Any) -> torch.Tensor:
    right = {"left": 2, "right": 2, "tokens": (0, 5), "see_all": True}
    return patterned(impl, lambda tokens: Window(**(right | changed)))


def window(impl: str, **changed: Any) -> torch.Tensor:
    return local_attention(Q, K, V, **({"left": 2, "right": 2, "scale": 0.3} | changed), impl=impl)


def topk(impl: str, **changed: Any) -> torch.Tensor:
    return topk_attention(Q, K, V, **({"topk": 4, "causal": True, "scale": 0.3} | changed), impl=impl)


def exact(impl: str, **changed: Any) -> torch.Tensor:
    return exact_attention(Q, K, V, **({"causal": True, "scale": 0.3} | changed), impl=impl)


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
    (clustered, {"draws": DRAWS[:25], "clusters": "auto"}, r"draws has shape \[6\]; expected at least 25 numbers"),
    (clustered, {"clusters": "many"}, "clusters is 'many'; expected one of auto"),
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
    (clustered, SELECTED | {"clusters": "auto"}, "clusters is auto beside selectors"),
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
    (performer, {"kernel": "exp"}, "kernel is 'exp'; expected one of softmax, relu"),
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
    (lsh, {"variant": ["shared"]}, "variant is .'shared'.; expected one of"),
    (lsh, {"dedup": 1}, "dedup is 1; expected True or False"),
    (lsh, {"buckets": 2.0}, "buckets is 2.0; expected a whole number"),
    *((op, {"steps": (3,)}, "a step is 3; expected a number from 1 to 2, or None") for op in (strided, summaries)),
    *((op, {"steps": (0,)}, "a step is 0; expected 1 or more") for op in (strided, summaries)),
    *((op, {"steps": ()}, r"steps is \(\); expected a list") for op in (strided, summaries)),
    *((op, {"steps": 1}, "steps is 1; expected a list") for op in (strided, summaries)),
    *((op, {"steps": (True,)}, "a step is True; expected a whole number") for op in (strided, summaries)),
    *((op, {"stride": lambda tokens: -2}, "stride is -2; expected 1 or more") for op in (strided, summaries)),
    *((op, {"stride": lambda tokens: 0}, "stride is 0; expected 1 or more") for op in (strided, summaries)),
    *((op, {"stride": lambda tokens: 2.0}, "stride is 2.0; expected a whole number") for op in (strided, summaries)),
    *((op, {"stride": lambda tokens: tokens}, "a causal pattern needs one stride") for op in (strided, summaries)),
    (summaries, {"summary": 0}, "summary is 0; expected 1 or more"),
    (summaries, {"inside": "left"}, "inside is 'left'; expected one of all, past, future"),
    (summaries, {"inside": None}, "inside is None; expected one of"),
    *((summaries, {"inside": side}, f"inside='{side}'; expected inside='past'") for side in ("all", "future")),
    (blocks, {"size": 0}, "size is 0; expected 1 or more"),
    (blocks, {"neighbours": -1}, "neighbours is -1; expected 0 or more"),
    (blocks, {"shift": -40}, "shift is -40; expected 0 or more"),
    (blocks, {"size": 10**30}, "size is 1000.*; expected 2147483647 or less"),
    (bigbird, {"block": -3}, "block is -3; expected 1 or more"),
    (bigbird, {"draws": draw_blocks(1, 0).int()}, "draws is torch.int32"),
    (bigbird, {"draws": draw_blocks(1, 0)[:0]}, r"draws is torch.int64 of shape \[0, 1\]"),
    (bigbird, {"draws": None}, "draws is of type NoneType; expected a torch.Tensor"),
    (chosen, {"tokens": (0, -1)}, "a chosen token is -1; expected 0 or more"),
    (chosen, {"tokens": (0.5,)}, "a chosen token is 0.5; expected a whole number"),
    (chosen, {"tokens": 3}, "tokens is of type int; expected a tuple of positions"),
    (chosen, {"tokens": (5, 0)}, r"tokens are \(5, 0\); expected ascending positions"),
    (chosen, {"left": -1}, "left is -1; expected 0 or more"),
    (window, {"right": -1}, "right is -1; expected 0 or more"),
    (window, {"left": True}, "left is True; expected a whole number"),
    (topk, {"topk": 0}, "topk is 0; expected 1 or more"),
    *((op, {"scale": float("nan")}, "scale is nan; expected a finite number") for op in (exact, topk, window, lsh)),
    *((op, {"scale": None}, "scale is None; expected a finite number") for op in (exact, topk, window, lsh)),
    *((op, {"dropout": -0.5}, "dropout is -0.5; expected a probability") for op in (exact, topk, window, lsh)),
    *((op, {"causal": 1}, "causal is 1; expected True or False") for op in (exact, topk, strided, lsh)),
]
IMPLEMENTATIONS = ["reference", pytest.param("cpu", marks=needs_compiler)]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("op", dict.fromkeys(op for op, _, _ in WRONG), ids=lambda op: op.__name__)
def test_accepts_valid_arguments(op, impl):
    assert op(impl).isfinite().all()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("op", "changed", "words"), WRONG)
def test_rejects_mismatched_arguments(op, changed, words, impl):
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
def test_rejects_more_clusters_than_draws():
    counts = torch.full((1,), LENGTH)
    with pytest.raises(ValueError, match="expected at least 7 numbers"):
        cluster_samples(Q, None, counts, torch.full((1,), CLUSTERS + 1), PLANES, DRAWS, 3)


@needs_compiler
@pytest.mark.parametrize(
    "sums", [(1, HEADS, SIZE - 1, SIZE + 1), (1, HEADS, SIZE, SIZE), (1, HEADS + 1, SIZE, SIZE + 1)]
)
def test_checks_the_sums_of_a_cache_against_the_queries(sums):
    newest = Q[:, :, :1], K[:, :, :1], V[:, :, :1]
    with torch.no_grad(), pytest.raises(ValueError, match=r"state.'sums'. has shape .* to fit q"):
        linear_decode(*newest, None, {"sums": torch.zeros(sums)}, impl="cpu")


EVERYTHING = (0, LENGTH, -FAR, FAR)


@needs_compiler
@pytest.mark.parametrize(
    ("starts", "entries"),
    [
        ([0, 30], [[EVERYTHING]]),
        ([0, 30, 20, LENGTH], [[EVERYTHING]] * 3),
        ([0, 0, LENGTH], [[EVERYTHING]] * 2),
        ([-5, LENGTH], [[EVERYTHING]]),
        ([0, LENGTH + 1], [[EVERYTHING]]),
        ([LENGTH], []),
        ([0, LENGTH], [[(-1, LENGTH, -FAR, FAR)]]),
        ([0, LENGTH], [[(0, LENGTH + 1, -FAR, FAR)]]),
        ([0, LENGTH], [[(0, LENGTH, -(2**31), FAR)]]),
    ],
)
def test_c_refuses_blocks_and_lists_that_reach_beyond_the_tensors(starts, entries):
    with pytest.raises(ValueError, match="reach beyond"):
        attend_lists(Q, K, V, None, before=0, starts=starts, entries=entries, scale=0.3)


@pytest.mark.parametrize("seed", [float("nan"), 1.0, True, None, 2**64, -(2**63) - 1])
@pytest.mark.parametrize(
    "draw",
    [
        lambda seed: draw_planes(SIZE, bits=16, bias=True, clusters=CLUSTERS, seed=seed),
        lambda seed: draw_centroids(HEADS, SIZE, clusters=CLUSTERS, seed=seed),
        lambda seed: draw_blocks(2, seed),
        lambda seed: draw_projection(SIZE, features=16, orthogonal=True, seed=seed),
        lambda seed: draw_projections(SIZE, rounds=2, variant="shared", causal=False, seed=seed),
    ],
    ids=["planes", "centroids", "blocks", "features", "rounds"],
)
def test_a_seed_is_a_whole_number(draw, seed):
    with pytest.raises(ValueError, match="seed is"):
        draw(seed)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"q": [[1.0]]}, "q is of type list; expected a torch.Tensor"),
        ({"k": None}, "k is of type NoneType"),
        ({"v": V.to_sparse()}, "v has layout torch.sparse_coo; expected torch.strided"),
        (dict.fromkeys("qkv", Q.to(torch.float8_e5m2)), "q, k, v have dtypes torch.float8_e5m2"),
        (dict.fromkeys("qkv", Q.to(torch.complex64)), "k is torch.complex64; expected a floating dtype"),
        ({"k": K[:, :, :1].expand(-1, -1, 2**30, -1), "v": V[:, :, :1].expand(-1, -1, 2**30, -1)}, "fewer than 2.30"),
        ({"key_mask": [True] * LENGTH}, "key_mask is of type list"),
    ],
    ids=["list", "none", "sparse", "eight bits", "complex", "huge", "mask"],
)
def test_rejects_sparse_and_integer_tensors(changed, words):
    with pytest.raises(ValueError, match=words):
        exact_attention(**({"q": Q, "k": K, "v": V} | changed), causal=False, scale=0.3)
