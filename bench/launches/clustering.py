"""The kernels of the clustering, for few and for many clusters, with heads whole and in parts."""

from collections.abc import Callable, Iterator

import torch

from approx_kernels.ops.clustering import triton as clustering
from bench.offline import Launch


def launches() -> Iterator[Launch]:
    """Hashes of each dtype, k-means and the sort."""
    for clusters in (64, 100):
        yield Launch(f"bfloat16, 64, {clusters} clusters", _clusters(torch.bfloat16, 64, clusters))
    yield Launch("bfloat16, 64, 100 clusters, heads in parts", _clusters(torch.bfloat16, 64, 100, length=16384))
    yield Launch("float32, 128, 25 clusters, tokens", _clusters(torch.float32, 128, 25, tokens=True))
    yield Launch("sort, 100 clusters", _sort(100), tensor_cores=False)


def _clusters(
    dtype: torch.dtype, size: int, clusters: int, *, length: int = 1024, tokens: bool = False
) -> Callable[[], None]:
    def run() -> None:
        q = torch.empty(1, length, 4, size, dtype=dtype).transpose(1, 2)
        places = torch.zeros(1, length, dtype=torch.int32) if tokens else None
        counts = torch.full((1,), length), torch.full((1,), clusters)
        planes, draws = torch.empty(63, size + 1), torch.zeros(clusters, dtype=torch.int64)
        clustering.cluster_samples(q, places, *counts, planes, draws, clusters, 2)

    return run


def _sort(most: int) -> Callable[[], None]:
    def run() -> None:
        counts = torch.full((1,), 1024), torch.full((1,), most)
        clustering.sort_queries(torch.zeros(1, 4, 1024, dtype=torch.int32), None, *counts, most)

    return run
