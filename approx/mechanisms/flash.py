"""Exact softmax attention through FlashAttention or our own GPU kernels."""

from typing import Any, ClassVar

from torch import Tensor

from approx.mechanisms.mechanism import Mechanism
from approx_kernels.ops.flash.api import flash_attention


class FlashAttention(Mechanism):
    """Softmax attention tile by tile with an online softmax, in O(L S D) time and O(L) memory.

    Without padding an installed FlashAttention-4 or -3 runs. With it our kernels do, which skip keys and queries before the
    first and after the last real token. Where neither can (no CUDA, dropout, another head size) it is PyTorch's fused attention.

    Source: Dao, 2023, FlashAttention-2, arXiv 2307.08691; departs from it in a deterministic backward pass.
    """

    supports_decode: ClassVar[bool] = True
    always_exact: ClassVar[bool] = True
    source: ClassVar[str] = "Dao 2023, FlashAttention-2, arXiv 2307.08691"
    exact_when: ClassVar[str] = "Always."

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, *, dropout: float = 0.0
    ) -> Tensor:
        """Attend; dropout acts on the attention weights."""
        return flash_attention(q, k, v, key_mask, causal=self.causal, scale=self.scale, dropout=dropout)

    @classmethod
    def exact_settings(cls, length: int) -> dict[str, Any]:
        """It is always exact."""
        return {}

    def approximates_from(self) -> None:
        """None: it is always exact."""

    def flops(self, length: int) -> int:
        """Two products over the allowed pairs; tiles that the causal mask hides are skipped."""
        pairs = length * (length + 1) // 2 if self.causal else length * length
        return 4 * self.heads * pairs * self.head_dim

    def memory(self, length: int) -> int:
        """One log-sum-exp per query."""
        return 4 * self.heads * length
