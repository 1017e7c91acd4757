"""LSH attention: softmax among the tokens that locality-sensitive hashing brings together."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from approx.errors import ApproxError, Exit
from approx.mechanisms.mechanism import Mechanism, one_of, power_of_two, seed_number, true_or_false, whole_number
from approx_kernels.ops.lsh.api import VARIANTS, draw_projections, lsh_attention

# Rounds up to which pairs that count once take under a tenth more time, where they do at all.
_CHEAP_ROUNDS = 4


class LshAttention(Mechanism):
    """Softmax attention of each query over the keys that rounds of hashing put beside it, in O(rounds n cluster D).

    `asymmetric` keeps the queries and keys of the checkpoint, sorts both by random projections and cuts them into
    clusters. `shared` uses the queries as keys as well: what the model has learned of keys is lost, and it has to be
    fine-tuned. Causal, a token is hashed into buckets that depend on the past alone.

    Source: Daras et al., 2020, SMYRF: Efficient Attention using Asymmetric Clustering, arXiv 2010.05315, and Kitaev,
    Kaiser, Levskaya, 2020, Reformer, arXiv 2001.04451, for `shared`; departs from them in directions drawn once, in
    the causal form, where sorting all tokens would show the future, and in clusters of equal sizes at any length.

    Args:
        heads: Number of heads, H.
        head_dim: Size of a head, D.
        causal: Whether a query sees only keys at or before its own position.
        scale: Factor of the scores.
        variant: `asymmetric`, or `shared`, which has no decoding on top of a cache, for that holds no queries.
        rounds: Rounds of hashing; more is closer to exact. Small clusters want 8.
        cluster: Tokens of a cluster; more is closer to exact.
        buckets: Buckets for each cluster of the `shared` variant, a power of two; 128 in all at most. More of them bring tokens
            together that are more alike. The other variant and the causal form, whose clusters are buckets, have no choice.
        seed: Seed of the random directions, which are a buffer and saved with the checkpoint.
        dedup: Whether a pair counts once however many rounds bring it together, rather than once for each. None is yes with
            shared keys and in the causal form at up to 4 rounds, where it takes under a tenth more time and the error falls by a
            sixth to a fifth. It is no at more rounds, where it takes up to a quarter more time, and in the bidirectional
            asymmetric form, where it takes a fifth to a third more, halves the error on some hundreds of tokens and hardly
            changes it on thousands.

    Raises:
        ApproxError: if a setting is wrong.
    """

    supports_decode: ClassVar[bool] = True
    takes_notes: ClassVar[bool] = True
    sparse: ClassVar[bool] = True
    gradient: ClassVar[str] = "through weights, not choices"
    compiles: ClassVar[str] = "On a CPU, how many tokens each bucket has decides the shapes."
    source: ClassVar[str] = "Daras et al. 2020, SMYRF, arXiv 2010.05315; Kitaev et al. 2020, Reformer, arXiv 2001.04451"
    exact_when: ClassVar[str] = "variant = asymmetric, with cluster >= the number of real tokens of the sample."
    earlier: ClassVar[dict[str, Any]] = {"buckets": 1}

    projections: Tensor

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        causal: bool,
        scale: float,
        variant: str = "asymmetric",
        rounds: int = 4,
        cluster: int = 64,
        buckets: int = 4,
        seed: int = 0,
        dedup: bool | None = None,
    ) -> None:
        super().__init__(heads, head_dim, causal=causal, scale=scale)
        self.variant = one_of("variant", variant, VARIANTS)
        self.rounds = whole_number("rounds", rounds, 1)
        self.cluster = whole_number("cluster", cluster, 1)
        self.buckets = power_of_two("buckets", buckets)
        self.seed = seed_number(seed)
        self.dedup = None if dedup is None else true_or_false("dedup", dedup)
        self.register_buffer("projections", self._draw())

    @torch.no_grad()
    def redraw(self, seed: int) -> None:
        """Draw other random directions; nothing else ever does."""
        self.seed = seed_number(seed)
        self.projections.copy_(self._draw())

    def _draw(self) -> Tensor:
        return draw_projections(
            self.head_dim, rounds=self.rounds, variant=self.variant, causal=self.causal, seed=self.seed
        )

    @property
    def _dedup_is_cheap(self) -> bool:
        return self.rounds <= _CHEAP_ROUNDS and (self.causal or self.variant == "shared")

    @property
    def warning(self) -> str | None:
        """The shared variant throws learned keys away."""
        if self.variant == "asymmetric":
            return None
        return (
            "lsh with variant 'shared' attends to normalised queries and discards the keys that the checkpoint has "
            "learned: the model is of no use until it is fine-tuned. Variant 'asymmetric' keeps them."
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None = None,
        *,
        dropout: float = 0.0,
        notes: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Attend; dropout acts on the attention weights of each round. Padded queries receive 0. Noted are hashes of keys.

        Raises:
            ApproxError: if the shared variant gets other numbers of queries than of keys, as with a cache.
            ValueError: if the shapes or dtypes do not fit together.
        """
        if self.variant == "shared" and q.ndim == k.ndim == 4 and q.shape[2] != k.shape[2]:
            raise ApproxError(
                f"lsh with variant 'shared' was given {q.shape[2]} queries and {k.shape[2]} keys, but makes each key from "
                "the query of its token, and a cache holds no queries. Generate with use_cache=False, or convert with "
                "variant 'asymmetric'.",
                Exit.UNSUPPORTED,
            )
        return lsh_attention(
            q,
            k,
            v,
            key_mask,
            projections=self.projections,
            variant=self.variant,
            cluster=self.cluster,
            buckets=self.buckets,
            dedup=self._dedup_is_cheap if self.dedup is None else self.dedup,
            causal=self.causal,
            scale=self.scale,
            dropout=dropout,
            notes=notes,
        )

    @classmethod
    def exact_settings(cls, length: int) -> dict[str, Any]:
        """All tokens in one cluster."""
        return {"variant": "asymmetric", "cluster": max(length, 1)}

    def approximates_from(self) -> int:
        """One token more than are taken together; queries in place of keys differ as soon as there are two tokens."""
        return 2 if self.variant == "shared" else self.cluster * (2 if self.causal else 1) + 1

    def flops(self, length: int) -> int:
        """Hashes, and two products over the stretch of keys of each query, in every round."""
        if self._all_together(length):
            return 4 * self.heads * length * length * self.head_dim
        hashing = 2 * length * self.head_dim * self.projections.shape[2] * (1 if self.variant == "shared" else 2)
        return self.heads * self.rounds * (hashing + 4 * length * self._width(length) * self.head_dim)

    def memory(self, length: int) -> int:
        """Queries and outputs of all tokens, before and after a round is merged, and who sees whom in every round."""
        if self._all_together(length):
            return 4 * self.heads * length
        plan = self.rounds * (160 if self.causal else 100 if self.variant == "shared" else 56)
        return self.heads * length * (16 * self.head_dim + plan)

    def _all_together(self, length: int) -> bool:
        return self.variant == "asymmetric" and length <= self.cluster * (2 if self.causal else 1)

    def _width(self, length: int) -> int:
        return min(length, self.cluster * (2 if self.causal or self.variant == "shared" else 1))
