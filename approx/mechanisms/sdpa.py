"""Exact softmax attention through PyTorch's fused kernels: the baseline of every speed claim."""

from typing import Any, ClassVar

from torch import Tensor

from approx.mechanisms.mechanism import Mechanism
from approx_kernels.ops.exact.api import exact_attention


class SdpaAttention(Mechanism):
    """Fused softmax attention, in O(L S D) time and O(L) memory.

    Source: Dao et al., 2022, FlashAttention, arXiv 2205.14135, as PyTorch's scaled_dot_product_attention;
    no departures.
    """

    supports_decode: ClassVar[bool] = True
    always_exact: ClassVar[bool] = True
    source: ClassVar[str] = "Dao et al. 2022, FlashAttention, arXiv 2205.14135"
    exact_when: ClassVar[str] = "Always."

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, *, dropout: float = 0.0
    ) -> Tensor:
        """Attend; dropout acts on the attention weights."""
        return exact_attention(q, k, v, key_mask, causal=self.causal, scale=self.scale, dropout=dropout)

    @classmethod
    def exact_settings(cls, length: int) -> dict[str, Any]:
        """It is always exact."""
        return {}

    def approximates_from(self) -> None:
        """None: it is always exact."""

    def flops(self, length: int) -> int:
        """Two products over the allowed pairs; the kernels skip pairs that the causal mask hides."""
        pairs = length * (length + 1) // 2 if self.causal else length * length
        return 4 * self.heads * pairs * self.head_dim

    def memory(self, length: int) -> int:
        """One log-sum-exp per query."""
        return 4 * self.heads * length
