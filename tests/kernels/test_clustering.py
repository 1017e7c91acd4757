"""Hamming k-means against plain loops, and centroids that are fitted once."""

from itertools import pairwise

import pytest
import torch

from approx_kernels.ops.clustering import reference
from approx_kernels.ops.clustering.api import cluster_queries, draw_planes, fit_centroids, nearest_centroids


def clusters_by_loops(q, planes, draws, clusters, iterations):
    """The definition, for the queries [n, D] of one head."""
    n = len(q)
    bits = [[bool(row @ plane[:-1] > plane[-1]) for plane in planes] for row in q]
    edges = [c * n // clusters for c in range(clusters + 1)]
    centroids = [bits[low + int(draws[c]) % (high - low)] for c, (low, high) in enumerate(pairwise(edges))]
    nearest = []
    for iteration in range(iterations):
        if iteration:
            for c in range(clusters):
                members = [bits[i] for i in range(n) if nearest[i] == c]
                if not members:
                    centroids[c] = bits[(int(draws[c]) + iteration * (2**31 - 1)) % n]
                    continue
                ones = [sum(column) for column in zip(*members, strict=True)]
                centroids[c] = [
                    old if 2 * count == len(members) else 2 * count > len(members)
                    for count, old in zip(ones, centroids[c], strict=True)
                ]
        nearest = []
        for row in bits:
            distances = [sum(a != b for a, b in zip(row, centroid, strict=True)) for centroid in centroids]
            nearest.append(distances.index(min(distances)))
    return nearest


CASES = [(20, 4, 3, 5, 1), (60, 9, 8, 9, 4), (90, 7, 5, 63, 3), (150, 130, 4, 30, 3), (40, 39, 3, 2, 5)]


@pytest.mark.parametrize(("n", "clusters", "size", "bits", "iterations"), CASES)
@pytest.mark.parametrize("bias", [False, True], ids=["angle", "bias"])
@pytest.mark.sample(5)
def test_equals_its_definition(n, clusters, size, bits, iterations, bias):
    q = torch.randn(3, n, size, dtype=torch.float64)
    # Equal queries make ties and empty clusters.
    q[:, n // 2 : n // 2 + 8] = q[:, :1]
    planes, draws = draw_planes(size, bits=bits, bias=bias, clusters=clusters, seed=1)
    assignments = cluster_queries(q, planes, draws, clusters=clusters, iterations=iterations)
    assert assignments.tolist() == [clusters_by_loops(head, planes.double(), draws, clusters, iterations) for head in q]


def test_products_of_int8_and_of_float32_agree(monkeypatch):
    q = torch.randn(5, 700, 16)
    planes, draws = draw_planes(16, bits=63, bias=True, clusters=127, seed=0)
    assignments = [cluster_queries(q, planes, draws, clusters=c, iterations=10) for c in (2, 100, 127)]
    monkeypatch.setattr(reference, "_int8_is_exact_and_fast", lambda *_: False)
    for clusters, first in zip((2, 100, 127), assignments, strict=True):
        assert torch.equal(cluster_queries(q, planes, draws, clusters=clusters, iterations=10), first)


def test_heads_are_clustered_each_by_itself():
    q = torch.randn(4, 1500, 8)
    planes, draws = draw_planes(8, bits=20, bias=True, clusters=10, seed=0)
    together = cluster_queries(q, planes, draws, clusters=10, iterations=4)
    for head in range(4):
        alone = cluster_queries(q[head : head + 1], planes, draws, clusters=10, iterations=4)
        assert torch.equal(alone[0], together[head])


def test_far_groups_are_found():
    centres = torch.randn(6, 16) * 10
    label = torch.randint(6, (200,))
    q = (centres[label] + 0.01 * torch.randn(200, 16))[None]
    planes, draws = draw_planes(16, bits=63, bias=True, clusters=25, seed=0)
    assignments = cluster_queries(q, planes, draws, clusters=25, iterations=10)[0]
    for cluster in assignments.unique():
        assert label[assignments == cluster].unique().numel() == 1


def test_draws_come_from_the_seed_alone():
    torch.manual_seed(1)
    first = draw_planes(8, bits=63, bias=True, clusters=5, seed=3)
    torch.manual_seed(2)
    again, other = (draw_planes(8, bits=63, bias=True, clusters=5, seed=seed) for seed in (3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert draw_planes(8, bits=63, bias=False, clusters=5, seed=3)[0][:, -1].eq(0).all()


@pytest.mark.parametrize(
    ("planes", "draws", "clusters", "words"),
    [((63, 8), 10, 4, "planes"), ((63, 9), 3, 4, "draws"), ((63, 9), 30, 20, "fewer clusters")],
)
def test_rejects_mismatched_arguments(planes, draws, clusters, words):
    with pytest.raises(ValueError, match=words):
        cluster_queries(
            torch.randn(1, 20, 8), torch.randn(planes), torch.zeros(draws).long(), clusters=clusters, iterations=1
        )


def test_the_nearest_centroid_is_that_of_the_most_alike_scores():
    q, k = torch.randn(2, 90, 6) * torch.tensor([1.0, 5, 1, 1, 1, 1]), torch.randn(2, 70, 6) + 3
    k[:, :, 1] = 3.0
    centroids, selectors = fit_centroids(q, k, clusters=8, iterations=50, seed=0)
    assignments = nearest_centroids(q, selectors)
    for head in range(2):
        differences = (q[head][:, None] - centroids[head]) @ k[head].T
        # The second coordinate is large but equal for all keys, so it hardly counts.
        assert (assignments[head] == differences.var(-1).argmin(-1)).float().mean() > 0.9
        for cluster in assignments[head].unique():
            torch.testing.assert_close(centroids[head, cluster], q[head, assignments[head] == cluster].mean(0))


def test_centroids_of_far_groups_and_of_fewer_queries_than_centroids():
    centres = torch.randn(6, 16) * 10
    label = torch.arange(200) % 6
    q, k = (centres[label] + 0.01 * torch.randn(200, 16))[None], torch.randn(1, 50, 16)
    assignments = nearest_centroids(q, fit_centroids(q, k, clusters=40, iterations=10, seed=0)[1])[0]
    for cluster in assignments.unique():
        assert label[assignments == cluster].unique().numel() == 1
    centroids, selectors = fit_centroids(q[:, :3], k, clusters=40, iterations=10, seed=0)
    assert torch.isfinite(selectors).all()
    torch.testing.assert_close(centroids[0, nearest_centroids(q[:, :3], selectors)[0]], q[0, :3])


def test_one_key_still_separates_queries():
    q = torch.randn(1, 30, 4)
    centroids, selectors = fit_centroids(q, torch.ones(1, 1, 4), clusters=5, iterations=5, seed=0)
    assert torch.isfinite(centroids).all()
    assert nearest_centroids(q, selectors).unique().numel() == 5
