"""Clustered attention, plain and improved: one row of attention weights for each group of similar queries."""

from typing import Any, ClassVar, Literal

from torch import Tensor

from approx.mechanisms.exact_part import ExactPart
from approx.mechanisms.mechanism import checked, seed_number, true_or_false, whole_number
from approx_kernels.ops.clustered.api import (
    MOST_DEFAULT_CLUSTERS,
    Clusters,
    causal_clustered_attention,
    clustered_attention,
    clustered_parts,
    default_clusters,
)
from approx_kernels.ops.clustering.api import draw_centroids, draw_planes, fit_centroids
from approx_kernels.ops.near_keys.api import Part
from approx_kernels.tokens import sharing

# Fewest k-means iterations for frozen centroids, which are fitted only once.
FITTED = 10


def _number_or_rule(clusters: Any) -> Clusters:
    """The number of clusters, or the rule by which it follows the length.

    Raises:
        ApproxError: if it is neither.
    """
    if type(clusters) is int:
        return whole_number("clusters", clusters, 1)
    rule = clusters is None or clusters == "auto"
    return checked("clusters", clusters, rule, "a whole number of at least 1, auto or null")


class ClusteredAttention(ExactPart):
    """Attend with the mean query of each of C clusters, in O(n C D).

    Queries are hashed to sign bits and grouped by k-means in Hamming space; all members of a cluster receive the
    output of its mean query. Cheap, but differences inside a cluster are lost: a poor choice for question answering, where
    `improved-clustered` is far better. A sample with at most C tokens is exact.

    When frozen, queries join the nearest of the centroids that each head fitted once, on a calibration batch; this
    skips k-means and is faster. The causal form is always frozen, since clusters of the current queries would reveal
    the future: exact attention inside chunks of real tokens, and the output of the nearest centroid for everything
    before, in O(n (chunk + C) D). It is exact for samples of at most one chunk.

    Source: Vyas, Katharopoulos, Fleuret, 2020, Fast Transformers with Clustered Attention, arXiv 2007.04825;
    departs from it in fixed hash planes, in the draws and ties of the clustering, and in the frozen and causal forms.

    Args:
        heads: Number of heads, H.
        head_dim: Size of a head, D.
        causal: Whether a query sees only keys at or before its own position.
        scale: Factor of the scores.
        clusters: Groups of queries, C; more is closer to exact. `auto` takes half the real tokens of a sample, from 25 to
            100; None takes 25 for samples of up to 512 real tokens and 100 beyond; both take 100 when frozen.
        bits: Sign bits of a hash, 1 to 63; unused when frozen.
        iterations: Most iterations of k-means, which stops when no assignment changes. Frozen centroids take at least
            10.
        hash_bias: Whether the hash planes are offset from the origin; Hamming distance then follows the Euclidean
            distance rather than the angle.
        frozen: Whether `calibrate` fits the centroids once; until then they are random.
        chunk: Real tokens of a chunk of the causal form; more is closer to exact. Between 64 and 512 the time
            on a CPU hardly changes: longer chunks cost more themselves but carry fewer rows from one to the next. With a
            window there are no chunks.
        seed: Seed of the hash planes and draws, or of the centroids before and during fitting; all are buffers
            and saved with the checkpoint.
        window: Nearest keys that a softmax weighs, see `ExactPart`; 0 for none, None for 64 with `causal` and 32 without.
        sinks: First real tokens that every query sees exactly, with `causal` only beside a window, see `ExactPart`.
        global_tokens: More tokens that every query sees exactly, without `causal`, see `ExactPart`.
        separator: Id of the separator token, where global tokens are chosen by content; conversion fills it in.

    Raises:
        ApproxError: if a setting is wrong.
    """

    supports_decode: ClassVar[bool] = True
    gradient: ClassVar[str] = "through weights, not choices"
    compiles: ClassVar[str] = (
        "Shapes depend on the number of real tokens, and k-means stops when no assignment changes."
    )
    examples: ClassVar[dict[str, dict[str, Any]]] = {
        "": {"clusters": 4, "iterations": 3, "chunk": 4},
        "frozen": {"clusters": 4, "frozen": True},
        "window": {"clusters": 4, "iterations": 3, "window": 4, "sinks": 2},
    }
    published: ClassVar[dict[str, Any]] = {"clusters": None}
    earlier: ClassVar[dict[str, Any]] = {"window": 0, "sinks": 0, "global_tokens": "none", "separator": None}
    timed: ClassVar[dict[Literal["bidirectional", "causal"], tuple[dict[str, Any], ...]]] = {
        "bidirectional": ({"iterations": 3}, {"iterations": 10})
    }
    candidates: ClassVar[tuple[dict[str, Any], ...]] = ({"clusters": 25}, {"clusters": 100})
    searched: ClassVar[Literal["always", "healed", "named"]] = "always"
    colour: ClassVar[str | None] = "#22a08b"
    source: ClassVar[str] = "Vyas et al. 2020, Fast Transformers with Clustered Attention, arXiv 2007.04825"
    exact_when: ClassVar[str] = (
        "clusters, or chunk where causal, >= the number of real tokens of the sample; or window >= the length of the sequence."
    )

    topk: int | None = None
    # An instance has either the first two, for clusters of the current queries, or the last two, for frozen ones.
    planes: Tensor
    draws: Tensor
    centroids: Tensor
    selectors: Tensor

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        causal: bool,
        scale: float,
        clusters: Clusters = "auto",
        bits: int = 63,
        iterations: int = 3,
        hash_bias: bool = True,
        frozen: bool = False,
        chunk: int = 256,
        seed: int = 0,
        window: int | None = 0,
        sinks: int = 0,
        global_tokens: str | list[int] = "none",
        separator: int | None = None,
    ) -> None:
        exact = {"window": window, "sinks": sinks, "global_tokens": global_tokens, "separator": separator}
        super().__init__(heads, head_dim, causal=causal, scale=scale, **exact)
        self.clusters: Clusters = _number_or_rule(clusters)
        self.bits = whole_number("bits", bits, 1, 63)
        self.iterations = whole_number("iterations", iterations, 1)
        self.hash_bias = true_or_false("hash_bias", hash_bias)
        self.frozen = true_or_false("frozen", frozen)
        self.chunk = whole_number("chunk", chunk, 1)
        self.seed = seed_number(seed)
        for name, drawn in self._draw().items():
            self.register_buffer(name, drawn)
        self.joins()

    @property
    def needs_calibration(self) -> bool:
        """Whether the centroids are fitted once: when frozen or causal."""
        return self.frozen or self.causal

    @property
    def takes_calibration(self) -> bool:
        """Whether centroids are fitted, or the factor of the keys that are not exact."""
        return self.needs_calibration or self.has_exact_part

    def calibrate(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, *, tokens: Tensor | None = None
    ) -> None:
        """Fit each head's centroids to its real queries in a batch, and the factor of the keys that are not exact.

        Args: as for `forward`.
        """
        if self.needs_calibration:
            self._fit_centroids(q, k, key_mask)
        if self.has_exact_part:
            self.fit_weight(q, k, v, key_mask, tokens)

    def _fit_centroids(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> None:
        # Copying shared keys for each query head is cheap enough here, since it runs once.
        real = [x.transpose(1, 2).flatten(0, 1) for x in (q, k.repeat_interleave(sharing(q, k), 1))]
        if key_mask is not None:
            keys = key_mask.flatten()
            real = [x[keys] if x.shape[0] == keys.shape[0] else x for x in real]
        if all(x.shape[0] for x in real):
            count = self._most()
            q, k = (x.transpose(0, 1) for x in real)
            fitted = fit_centroids(q, k, clusters=count, iterations=max(self.iterations, FITTED), seed=self.seed)
            self.centroids.copy_(fitted[0])
            self.selectors.copy_(fitted[1])

    def redraw(self, seed: int) -> None:
        """Draw new hash planes, or new centroids, which must then be fitted again; nothing else redraws them."""
        self.seed = seed_number(seed)
        for name, drawn in self._draw().items():
            self.get_buffer(name).copy_(drawn)

    def _draw(self) -> dict[str, Tensor]:
        most = self._most()
        if self.needs_calibration:
            drawn = draw_centroids(self.heads, self.head_dim, clusters=most, seed=self.seed)
            return dict(zip(("centroids", "selectors"), drawn, strict=True))
        drawn = draw_planes(self.head_dim, bits=self.bits, bias=self.hash_bias, clusters=most, seed=self.seed)
        return dict(zip(("planes", "draws"), drawn, strict=True))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None = None,
        *,
        dropout: float = 0.0,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """Attend; dropout acts on shared weights and on a query's own. Padded queries receive 0, but not with exact keys.

        `tokens` are the token ids of the keys, [B, S], read where global tokens are chosen by content.
        """
        if self.has_exact_part:
            return self.attend_joined(q, k, v, key_mask, tokens, dropout)
        state = dict(self.named_buffers())
        shared = {"topk": self.topk, "scale": self.scale, "dropout": dropout}
        if self.causal:
            return causal_clustered_attention(q, k, v, key_mask, chunk=self.chunk, **state, **shared)
        state.pop("centroids", None)
        count = self._most() if self.frozen else self.clusters
        return clustered_attention(q, k, v, key_mask, clusters=count, iterations=self.iterations, **state, **shared)

    def near_and_far(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, tokens: Tensor | None, weight: Tensor
    ) -> tuple[Part, Part]:
        """What `attend_joined` joins."""
        state = {name: x for name, x in self.named_buffers() if name != "far_weight"}
        count = self._most() if self.frozen else self.clusters
        exactly = self.exactly(k, key_mask, tokens)
        how = {**state, "clusters": count, "iterations": self.iterations}
        return clustered_parts(q, k, v, key_mask, exactly=exactly, weight=weight, **how)

    @classmethod
    def exact_settings(cls, length: int) -> dict[str, Any]:
        """One cluster per query, and one chunk for the whole sequence."""
        return {"clusters": max(length, 1), "chunk": max(length, 1)}

    def approximates_from(self) -> int:
        """One token more than the clusters, `topk` or a chunk hold; a single key with a shared weight stays exact."""
        if self.has_exact_part:
            return self._joined_from(bool(self.far_weight.all()))
        if self.causal:
            chunk = max(self.chunk, (self.topk or 0) + 1)
            return chunk * (1 if chunk - (self.topk or 0) > 1 else 2) + 1
        return max(self._clusters(1), self.topk or 0) + 1

    def differs_from(self) -> int:
        """As `approximates_from`, but with exact keys factors of heads differ."""
        return self._joined_from(bool(self.far_weight.any())) if self.has_exact_part else self.approximates_from()

    def _joined_from(self, weighed: bool) -> int:
        """One token more than the clusters and the exact keys hold; without a factor, the tangent of a single key is exact."""
        return max(0 if self.causal else self._clusters(1) + 1, self.far_from(1 if weighed else 2))

    def approximated_pairs(self, length: int) -> float:
        """Every pair, or where causal those outside the chunks: also keys that queries weigh themselves share a mass."""
        if length < self.differs_from():
            return 0.0
        if self.has_exact_part:
            return super().approximated_pairs(length)
        if not self.causal:
            return 1.0
        chunk = max(self.chunk, (self.topk or 0) + 1)
        chunks = [min(chunk, length - start) for start in range(0, length, chunk)]
        return 1 - sum(size * (size + 1) for size in chunks) / (length * (length + 1))

    def flops(self, length: int) -> int:
        """Hashes, distances of all iterations, attention of the mean queries, and each query's own weights."""
        clusters, size, topk = self._clusters(length), self.head_dim, min(self.topk or 0, length)
        if self.has_exact_part:
            return self._joined_flops(length)
        if self.causal:
            # Each centroid sums a mean key as well as a mean value.
            past = 0 if length <= self.chunk else 8 * clusters + 4 * topk
            return self.heads * length * size * (past + 4 * min(self.chunk, length))
        if length <= clusters:
            return 4 * self.heads * length * length * size
        choosing = clusters if self.frozen else self.bits + 1
        lloyd = 0 if self.frozen else self.iterations * clusters * (self.bits + 1)
        return self.heads * length * (2 * (choosing * size + lloyd) + 4 * (clusters + topk) * size)

    def _joined_flops(self, length: int) -> int:
        """Exact keys; and for the others choosing clusters, sums of blocks of 64 keys under each row, those that queries
        take, and single keys of the blocks that a window touches.
        """
        clusters, size = self._clusters(length), self.head_dim
        if length <= clusters and not self.causal:
            clusters = length
        choosing = clusters if self.needs_calibration else self.bits + 1
        lloyd = 0 if self.needs_calibration else self.iterations * clusters * (self.bits + 1)
        blocks = -(-length // 64)
        strip = min(64 * (1 + -(-self.window // 64) * (1 if self.causal else 2)), length) if self.window else 0
        taken = blocks * clusters * 4 * size / (64 if strip else length)
        per_query = (
            2 * (choosing * size + lloyd) + 6 * size * (clusters + strip) + taken + 4 * size * self.near_pairs(length)
        )
        return round(self.heads * length * per_query)

    def memory(self, length: int) -> int:
        """Scores, weights and remainder of the centroids, or the clustering, with all heads at once."""
        clusters = self._clusters(length)
        if self.has_exact_part:
            return self._joined_memory(length)
        if self.causal:
            return (
                4 * self.heads * length * (3 * min(self.chunk, length) + (4 * clusters if length > self.chunk else 0))
            )
        if length <= clusters:
            return 4 * self.heads * length
        clustering = clusters + (0 if self.frozen else self.bits + 1)
        return 4 * self.heads * length * max(clustering, 3 * clusters if self.topk else 0)

    def _joined_memory(self, length: int) -> int:
        """Scores and weights of rows, the sums that each takes, and scores and weights of keys in reach of a window."""
        clusters, blocks = min(self._clusters(length), length), -(-length // 64)
        strip = min(64 * (1 + -(-self.window // 64) * (1 if self.causal else 2)), length) if self.window else 0
        sums = 4 * self.head_dim * clusters * blocks + 2 * clusters * blocks * (blocks if strip else 1)
        rows = 2 * clusters * length + sums
        return 4 * self.heads * (rows + length * (2 * (strip + self.near_pairs(length)) + 8 * self.head_dim))

    def _clusters(self, length: int) -> int:
        """Clusters of a sample."""
        if isinstance(self.clusters, int) or self.needs_calibration:
            return self._most()
        return default_clusters(length, self.clusters)

    def _most(self) -> int:
        """The most clusters of any sample."""
        return self.clusters if isinstance(self.clusters, int) else MOST_DEFAULT_CLUSTERS


class ImprovedClusteredAttention(ClusteredAttention):
    """Attend with the mean query of each of C clusters, then correct its K largest weights, in O(n (C + K) D).

    Each member of a cluster recomputes the weights of the K keys that the mean query weighs most, within the mass
    that the mean query gave them; the other keys keep the shared weights. A sample with at most C tokens is exact.

    When frozen, queries join the nearest of the centroids that each head fitted once, on a calibration batch; this
    skips k-means and is faster. The causal form is always frozen, since clusters of the current queries would reveal
    the future: exact attention inside chunks of real tokens; before them, the query's own weights on the K keys that
    its nearest centroid weighs most, and the centroid's weights on all others, in O(n (chunk + C + K) D). All share
    one normaliser, in which the mass of those others is a first-order expansion around the centroid. It is exact for
    samples of at most one chunk.

    On queries, keys and values of a trained encoder under a causal mask (MiniLM, n = 2048, chunk 64, K 32, error
    relative to exact attention, mean of six layers) 100 centroids fitted to other text give an error of 0.12, random
    ones 0.36, groups of keys in place of queries 0.26, and chunks alone 0.73; centroids fitted to the sequence's own
    earlier queries, which a cache does not hold, were no better. Chunks of 256 give 0.10. With rotary embeddings a
    centroid retains only the low-frequency components of the queries.

    Source: Vyas, Katharopoulos, Fleuret, 2020, Fast Transformers with Clustered Attention, arXiv 2007.04825;
    departs from it in fixed hash planes, in the draws and ties of the clustering, in differentiating the mass,
    and in the frozen and causal forms.

    Args:
        heads: Number of heads, H.
        head_dim: Size of a head, D.
        causal: Whether a query sees only keys at or before its own position.
        scale: Factor of the scores.
        clusters: Groups of queries, C; more is closer to exact. None takes 25 for samples of up to 512 real tokens and 100
            beyond; `auto` takes half the real tokens, from 25 to 100; both take 100 when frozen.
        topk: Keys that each query weighs itself, K; more is closer to exact.
        bits: Sign bits of a hash, 1 to 63; unused when frozen.
        iterations: Most iterations of k-means, which stops when no assignment changes. Frozen centroids take at least
            10.
        hash_bias: Whether the hash planes are offset from the origin; Hamming distance then follows the Euclidean
            distance rather than the angle.
        frozen: Whether `calibrate` fits the centroids once; until then they are random.
        chunk: Real tokens of a chunk of the causal form, raised to `topk` + 1 if smaller; more is closer to exact.
        seed: Seed of the hash planes and draws, or of the centroids before and during fitting; all are buffers
            and saved with the checkpoint.

    Raises:
        ApproxError: if a setting is wrong.
    """

    examples: ClassVar[dict[str, dict[str, Any]]] = {
        "": {"clusters": 4, "topk": 5, "iterations": 3, "chunk": 4},
        "frozen": {"clusters": 4, "topk": 5, "frozen": True},
    }
    earlier: ClassVar[dict[str, Any]] = {}
    colour: ClassVar[str | None] = "#2f7fd6"

    exact_when: ClassVar[str] = (
        "topk >= the number of real keys; or clusters, or chunk where causal, >= the number of real tokens."
    )

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        causal: bool,
        scale: float,
        clusters: Clusters = None,
        topk: int = 32,
        bits: int = 63,
        iterations: int = 5,
        hash_bias: bool = True,
        frozen: bool = False,
        chunk: int = 256,
        seed: int = 0,
    ) -> None:
        super().__init__(
            heads,
            head_dim,
            causal=causal,
            scale=scale,
            clusters=clusters,
            bits=bits,
            iterations=iterations,
            hash_bias=hash_bias,
            frozen=frozen,
            chunk=chunk,
            seed=seed,
        )
        self.topk = whole_number("topk", topk, 1)

    @classmethod
    def exact_settings(cls, length: int) -> dict[str, Any]:
        """Every query weighs every key itself."""
        return {"topk": max(length, 1)}
