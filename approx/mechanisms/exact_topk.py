"""Exact top-k attention: softmax over the largest scores of each query."""

from typing import Any, ClassVar

from torch import Tensor

from approx.mechanisms.mechanism import Mechanism, whole_number
from approx_kernels.ops.topk.api import topk_attention


class ExactTopkAttention(Mechanism):
    """Softmax attention of each query over the K keys with its largest scores, in O(L S D).

    All scores are computed: it is a reference for the quality of choosing keys, and saves nothing.

    Source: Gupta, Dar, Goodman, Ciprut, Berant, 2021, Memory-efficient Transformers via Top-k Attention,
    arXiv 2106.06899; no departures.

    Args:
        heads: Number of heads, H.
        head_dim: Size of a head, D.
        causal: Whether a query sees only keys at or before its own position.
        scale: Factor of the scores.
        topk: Keys that each query keeps, K; more is closer to exact.

    Raises:
        ApproxError: if a setting is wrong.
    """

    supports_decode: ClassVar[bool] = True
    sparse: ClassVar[bool] = True
    gradient: ClassVar[str] = "through weights, not choices"
    runs_c: ClassVar[bool] = True
    quadratic: ClassVar[bool] = True
    examples: ClassVar[dict[str, dict[str, Any]]] = {"": {"topk": 5}}
    source: ClassVar[str] = "Gupta et al. 2021, Memory-efficient Transformers via Top-k Attention, arXiv 2106.06899"
    exact_when: ClassVar[str] = "topk >= the number of real keys."

    def __init__(self, heads: int, head_dim: int, *, causal: bool, scale: float, topk: int = 32) -> None:
        super().__init__(heads, head_dim, causal=causal, scale=scale)
        self.topk = whole_number("topk", topk, 1)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, *, dropout: float = 0.0
    ) -> Tensor:
        """Attend; dropout acts on the attention weights."""
        return topk_attention(q, k, v, key_mask, topk=self.topk, causal=self.causal, scale=self.scale, dropout=dropout)

    @classmethod
    def exact_settings(cls, length: int) -> dict[str, Any]:
        """Every query keeps every key."""
        return {"topk": max(length, 1)}

    def approximates_from(self) -> int:
        """One key more than a query keeps."""
        return self.topk + 1

    def approximated_pairs(self, length: int) -> float:
        """The pairs that are not among the largest of their query."""
        chosen = min(self.topk, length)
        if not self.causal:
            return 1 - chosen / length
        # Early queries see fewer keys than they may keep.
        return (length - chosen) * (length - chosen + 1) / (length * (length + 1))

    def flops(self, length: int) -> int:
        """Two dense products over all pairs, computed even where the causal mask or the choice hides them."""
        return 4 * self.heads * length * length * self.head_dim

    def memory(self, length: int) -> int:
        """Scores and weights of a block of 64 queries."""
        return 2 * 4 * self.heads * min(length, 64) * length
