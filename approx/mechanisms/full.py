"""Exact softmax attention that materialises its weights: the reference."""

from typing import Any, ClassVar

from torch import Tensor

from approx.mechanisms.mechanism import Mechanism
from approx_kernels.ops.exact.api import materialised_attention


class FullAttention(Mechanism):
    """Plain softmax attention, step by step, in O(L S D) time and O(L S) memory.

    Source: Vaswani et al., 2017, Attention Is All You Need, arXiv 1706.03762; no departures.
    """

    supports_decode: ClassVar[bool] = True
    always_exact: ClassVar[bool] = True
    source: ClassVar[str] = "Vaswani et al. 2017, Attention Is All You Need, arXiv 1706.03762"
    exact_when: ClassVar[str] = "Always."

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, *, dropout: float = 0.0
    ) -> Tensor:
        """Attend; dropout acts on the attention weights."""
        return materialised_attention(q, k, v, key_mask, causal=self.causal, scale=self.scale, dropout=dropout)

    @classmethod
    def exact_settings(cls, length: int) -> dict[str, Any]:
        """It is always exact."""
        return {}

    def approximates_from(self) -> None:
        """None: it is always exact."""

    def flops(self, length: int) -> int:
        """Two dense products over all pairs, computed even where the causal mask hides them."""
        return 4 * self.heads * length * length * self.head_dim

    def memory(self, length: int) -> int:
        """The scores and the weights, [H, n, n] each; if causal, the masked scores too."""
        return (3 if self.causal else 2) * 4 * self.heads * length * length
