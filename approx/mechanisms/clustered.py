"""Clustered attention: one row of attention weights for each group of similar queries."""

from typing import Any, ClassVar

from torch import Tensor

from approx.mechanisms.mechanism import Mechanism, seed_number, true_or_false, whole_number
from approx_kernels.clustered import MOST_DEFAULT_CLUSTERS, clustered_attention, default_clusters
from approx_kernels.clustering import draw_planes


class ClusteredAttention(Mechanism):
    """Attend with the mean query of each of C clusters, in O(n C D).

    Queries are hashed to sign bits and grouped by k-means in Hamming space; a cluster's members all receive
    what its mean query attends to. Cheap, and blind to differences inside a cluster: never the first choice
    for question answering. A sample with at most C tokens is exact.

    Source: Vyas, Katharopoulos, Fleuret, 2020, Fast Transformers with Clustered Attention, arXiv 2007.04825;
    departs from it in fixed hash planes and in the draws and ties of the clustering.

    Args:
        heads: Number of heads, H.
        head_dim: Size of a head, D.
        causal: Must be false: the clusters see the whole sequence.
        scale: Factor of the scores.
        clusters: Groups of queries, C; more is closer to exact. None takes 25 for samples of up to 512 real
            tokens and 100 beyond.
        bits: Sign bits of a hash, 1 to 63.
        iterations: Assignments of the k-means, at most; it ends when nothing moves.
        hash_bias: Whether the hash planes miss the origin; Hamming distance then follows the Euclidean distance
            rather than the angle.
        seed: Seed of the hash planes and draws, which are buffers and saved with the checkpoint.

    Raises:
        ApproxError: if `causal` is asked for or a setting is wrong.
    """

    supports_causal: ClassVar[bool] = False
    supports_decode: ClassVar[bool] = False
    gradient: ClassVar[str] = "through weights, not choices"
    source: ClassVar[str] = "Vyas et al. 2020, Fast Transformers with Clustered Attention, arXiv 2007.04825"
    exact_when: ClassVar[str] = "clusters >= the number of real tokens of the sample."

    planes: Tensor
    draws: Tensor

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        causal: bool,
        scale: float,
        clusters: int | None = None,
        bits: int = 63,
        iterations: int = 10,
        hash_bias: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(heads, head_dim, causal=causal, scale=scale)
        self.clusters = None if clusters is None else whole_number("clusters", clusters, 1)
        self.bits = whole_number("bits", bits, 1, 63)
        self.iterations = whole_number("iterations", iterations, 1)
        self.hash_bias = true_or_false("hash_bias", hash_bias)
        self.seed = seed_number(seed)
        planes, draws = self._draw()
        self.register_buffer("planes", planes)
        self.register_buffer("draws", draws)

    def redraw(self, seed: int) -> None:
        """Draw other hash planes; nothing else ever does."""
        self.seed = seed_number(seed)
        for buffer, drawn in zip((self.planes, self.draws), self._draw(), strict=True):
            buffer.copy_(drawn)

    def _draw(self) -> tuple[Tensor, Tensor]:
        most = self.clusters or MOST_DEFAULT_CLUSTERS
        return draw_planes(self.head_dim, bits=self.bits, bias=self.hash_bias, clusters=most, seed=self.seed)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, *, dropout: float = 0.0
    ) -> Tensor:
        """Attend; dropout acts on the weights that a cluster shares. Padded queries receive 0."""
        return clustered_attention(
            q,
            k,
            v,
            key_mask,
            planes=self.planes,
            draws=self.draws,
            clusters=self.clusters,
            iterations=self.iterations,
            topk=None,
            scale=self.scale,
            dropout=dropout,
        )

    @classmethod
    def exact_settings(cls, length: int) -> dict[str, Any]:
        """One cluster for each query."""
        return {"clusters": max(length, 1)}

    def flops(self, length: int) -> int:
        """Hashes, distances of all iterations, attention of the mean queries."""
        clusters = self.clusters or default_clusters(length)
        if length <= clusters:
            return 4 * self.heads * length * length * self.head_dim
        hashing = 2 * length * (self.head_dim + self.iterations * clusters) * (self.bits + 1)
        return self.heads * (hashing + 4 * clusters * length * self.head_dim)

    def memory(self, length: int) -> int:
        """Bits and products of the clustering, if all heads are clustered at once."""
        clusters = self.clusters or default_clusters(length)
        if length <= clusters:
            return 4 * self.heads * length
        return 4 * self.heads * length * (self.bits + 1 + clusters)
