"""LSH attention: softmax among the tokens that locality-sensitive hashing groups together."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from approx.errors import ApproxError, Exit
from approx.mechanisms.exact_part import ExactPart
from approx.mechanisms.mechanism import one_of, power_of_two, seed_number, true_or_false, whole_number
from approx_kernels.ops.exact.api import exact_attention
from approx_kernels.ops.lsh.api import VARIANTS, draw_projections, lsh_attention
from approx_kernels.ops.lsh.reference import is_exact, lsh_parts
from approx_kernels.ops.near_keys.api import Part

# Most rounds at which deduplication adds under 10% to the time, for the variants where that is possible.
_CHEAP_ROUNDS = 4


class LshAttention(ExactPart):
    """Softmax attention of each query over the keys that rounds of hashing place near it, in O(rounds n cluster D).

    `asymmetric` keeps the queries and keys of the checkpoint, sorts both by random projections and cuts them into
    clusters. `shared` also uses the queries as keys: the learned keys are lost, and the model must be fine-tuned.
    When causal, tokens are hashed into buckets that depend only on the past.

    Source: Daras et al., 2020, SMYRF: Efficient Attention using Asymmetric Clustering, arXiv 2010.05315, and Kitaev,
    Kaiser, Levskaya, 2020, Reformer, arXiv 2001.04451, for `shared`; departs from them in directions drawn once, in
    the causal form, where sorting all tokens would reveal the future, and in clusters of equal size at any length.

    Args:
        heads: Number of heads, H.
        head_dim: Size of a head, D.
        causal: Whether a query sees only keys at or before its own position.
        scale: Factor of the scores.
        variant: `asymmetric`, or `shared`, which cannot decode with a KV cache because that holds no queries.
        rounds: Rounds of hashing; more is closer to exact. Small clusters need 8.
        cluster: Tokens of a cluster; more is closer to exact.
        buckets: Buckets per cluster of the `shared` variant, a power of two; at most 128 in all. More buckets group
            tokens that are more alike. The asymmetric variant and the causal form, whose clusters are buckets, ignore
            it.
        seed: Seed of the random directions, which are a buffer and saved with the checkpoint.
        dedup: Whether a pair that meets in several rounds counts once rather than once per round. None means true with
            shared keys and in the causal form at up to 4 rounds, where it adds under 10% to the time and lowers the
            error by 17% to 20%. It means false at more rounds, where it adds up to 25%, and in the bidirectional
            asymmetric form, where it adds 20% to 33%, halves the error on a few hundred tokens and hardly changes it on
            thousands. With exact keys a pair always counts once.
        window: Nearest keys that every query sees, of the asymmetric variant, see `ExactPart`; 0 for none, None for 64 with
            `causal` and 32 without.
        sinks: First real tokens that every query sees, with `causal` only beside a window, see `ExactPart`.
        global_tokens: More tokens that every query sees, without `causal`, see `ExactPart`.
        separator: Id of the separator token, where global tokens are chosen by content; conversion fills it in.

    Raises:
        ApproxError: if a setting is wrong.
    """

    supports_decode: ClassVar[bool] = True
    takes_notes: ClassVar[bool] = True
    sparse: ClassVar[bool] = True
    gradient: ClassVar[str] = "through weights, not choices"
    compiles: ClassVar[str] = "On a CPU, shapes depend on the number of tokens in each bucket."
    examples: ClassVar[dict[str, dict[str, Any]]] = {
        "": {"rounds": 3, "cluster": 4},
        "dedup": {"rounds": 3, "cluster": 4, "dedup": True},
        "shared": {"rounds": 3, "cluster": 4, "variant": "shared"},
        "window": {"rounds": 3, "cluster": 4, "window": 4, "sinks": 2},
    }
    source: ClassVar[str] = "Daras et al. 2020, SMYRF, arXiv 2010.05315; Kitaev et al. 2020, Reformer, arXiv 2001.04451"
    exact_when: ClassVar[str] = (
        "variant = asymmetric, with cluster >= the number of real tokens of the sample, or window >= the length of the sequence."
    )
    earlier: ClassVar[dict[str, Any]] = {
        "buckets": 1,
        "window": 0,
        "sinks": 0,
        "global_tokens": "none",
        "separator": None,
    }

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
        window: int | None = 0,
        sinks: int = 0,
        global_tokens: str | list[int] = "none",
        separator: int | None = None,
    ) -> None:
        exact = {"window": window, "sinks": sinks, "global_tokens": global_tokens, "separator": separator}
        super().__init__(heads, head_dim, causal=causal, scale=scale, **exact)
        self.variant = one_of("variant", variant, VARIANTS)
        self.rounds = whole_number("rounds", rounds, 1)
        self.cluster = whole_number("cluster", cluster, 1)
        self.buckets = power_of_two("buckets", buckets)
        self.seed = seed_number(seed)
        self.dedup = None if dedup is None else true_or_false("dedup", dedup)
        self.register_buffer("projections", self._draw())
        self.joins()
        wrong = "'variant' is 'shared', which replaces the keys" if self.variant == "shared" else None
        wrong = "'dedup' is false, and a pair counts once with them" if dedup is False else wrong
        if self.has_exact_part and wrong:
            raise ApproxError(
                f"Settings 'window', 'sinks' and 'global_tokens' choose exact keys, but {wrong}. Change one of them.",
                Exit.UNSUPPORTED,
            )

    @torch.no_grad()
    def redraw(self, seed: int) -> None:
        """Draw new random directions; nothing else redraws them."""
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
        """The shared variant discards the learned keys."""
        if self.variant == "asymmetric":
            return None
        return (
            "lsh with variant 'shared' attends to normalised queries and discards the keys that the checkpoint "
            "learned: the model is useless until it is fine-tuned. Variant 'asymmetric' keeps them."
        )

    @property
    def takes_calibration(self) -> bool:
        """Whether the factor of the keys that are not exact is fitted."""
        return self.has_exact_part

    def calibrate(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, *, tokens: Tensor | None = None
    ) -> None:
        """Fit the factor of the keys that are not exact.

        Args: as for `forward`.
        """
        self.fit_weight(q, k, v, key_mask, tokens)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None = None,
        *,
        dropout: float = 0.0,
        tokens: Tensor | None = None,
        notes: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Attend; dropout acts on the weights of each round. Padded queries receive 0, but not with exact keys.

        `tokens` are the token ids of the keys, [B, S], read where global tokens are chosen by content; `notes` store hashes
        of keys.

        Raises:
            ApproxError: if the numbers of queries and keys differ in the shared variant, as with a cache.
            ValueError: if shapes or dtypes do not match.
        """
        if self.variant == "shared" and q.ndim == k.ndim == 4 and q.shape[2] != k.shape[2]:
            raise ApproxError(
                f"lsh with variant 'shared' got {q.shape[2]} queries and {k.shape[2]} keys, but it computes each key from "
                "the query of its token, and a cache holds no queries. Generate with use_cache=False, or convert with "
                "variant 'asymmetric'.",
                Exit.UNSUPPORTED,
            )
        if self.has_exact_part:
            form = {"variant": self.variant, "cluster": self.cluster, "causal": self.causal}
            if q.ndim == k.ndim == 4 and is_exact(q.shape[2], k.shape[2], **form):
                return exact_attention(q, k, v, key_mask, causal=self.causal, scale=self.scale, dropout=dropout)
            return self.attend_joined(q, k, v, key_mask, tokens, dropout)
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

    def near_and_far(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, tokens: Tensor | None, weight: Tensor
    ) -> tuple[Part, Part]:
        """What `attend_joined` joins."""
        how = {"projections": self.projections, "cluster": self.cluster}
        return lsh_parts(q, k, v, key_mask, exactly=self.exactly(k, key_mask, tokens), weight=weight, **how)

    @classmethod
    def exact_settings(cls, length: int) -> dict[str, Any]:
        """All tokens in one cluster."""
        return {"variant": "asymmetric", "cluster": max(length, 1)}

    def approximates_from(self) -> int:
        """One token more than fit into a cluster; shared queries and keys differ from two tokens on."""
        fewest = 2 if self.variant == "shared" else self.cluster * (2 if self.causal else 1) + 1
        return max(fewest, super().approximates_from()) if self.has_exact_part else fewest

    def approximated_pairs(self, length: int) -> float:
        """The pairs that fall into no common bucket, at least: rounds may find the same ones. Shared queries differ everywhere."""
        if self.variant == "shared":
            return float(length >= 2)
        if self._all_together(length):
            return 0.0
        far = super().approximated_pairs(length) if self.has_exact_part else 1.0
        return far * max(0.0, 1 - self.rounds * self._width(length) / length)

    def flops(self, length: int) -> int:
        """Hashes, and two products over the keys of each query, in every round."""
        if self._all_together(length):
            return 4 * self.heads * length * length * self.head_dim
        hashing = 2 * length * self.head_dim * self.projections.shape[2] * (1 if self.variant == "shared" else 2)
        near = 4 * length * self.near_pairs(length) * self.head_dim if self.has_exact_part else 0
        return self.heads * (near + self.rounds * (hashing + 4 * length * self._width(length) * self.head_dim))

    def memory(self, length: int) -> int:
        """Queries and outputs of all tokens, before and after merging a round, and the allowed pairs of every round."""
        if self._all_together(length):
            return 4 * self.heads * length
        plan = self.rounds * (160 if self.causal else 100 if self.variant == "shared" else 56)
        # Queries, keys and values in at least float32, and the outputs of both parts.
        parts = 20 * self.head_dim if self.has_exact_part else 0
        return self.heads * length * (16 * self.head_dim + plan + parts)

    def _all_together(self, length: int) -> bool:
        return self.variant == "asymmetric" and length <= self.cluster * (2 if self.causal else 1)

    def _width(self, length: int) -> int:
        return min(length, self.cluster * (2 if self.causal or self.variant == "shared" else 1))
