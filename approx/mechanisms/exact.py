"""Exact softmax attention by the fastest implementation on this machine."""

from typing import Any, ClassVar

from torch import Tensor

from approx.mechanisms.mechanism import Mechanism
from approx_kernels.ops.fastest.api import fastest_attention


class ExactAttention(Mechanism):
    """Softmax attention by the exact implementation that `approx doctor --probe` measured as fastest here, or a default.

    The default is compiled C on CPUs with AVX-512 from 512 keys on (128 in bfloat16 with hardware support), and
    PyTorch's SDPA otherwise. A probe also tries SDPA's back ends, lengths instead of a padding mask, on a CPU matrix
    products of a chunk of queries at a time, and on CUDA variable-length attention and the kernels of `flash`. Below
    128 keys it is SDPA. In O(L S D) time and O(L) memory, plus a chunk of 512 queries where matrix products win.
    Results differ only by the rounding of the dtype.

    Source: Vaswani et al., 2017, Attention Is All You Need, arXiv 1706.03762; no departures.
    """

    supports_decode: ClassVar[bool] = True
    always_exact: ClassVar[bool] = True
    compiles: ClassVar[str] = "The implementation is looked up at run time."
    source: ClassVar[str] = "Vaswani et al. 2017, Attention Is All You Need, arXiv 1706.03762"
    exact_when: ClassVar[str] = "Always."

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, *, dropout: float = 0.0
    ) -> Tensor:
        """Attend; dropout acts on the attention weights."""
        return fastest_attention(q, k, v, key_mask, causal=self.causal, scale=self.scale, dropout=dropout)

    @classmethod
    def exact_settings(cls, length: int) -> dict[str, Any]:
        """It is always exact."""
        return {}

    def approximates_from(self) -> None:
        """None: it is always exact."""

    def flops(self, length: int) -> int:
        """Two products over the allowed pairs; pairs that the causal mask hides are skipped."""
        pairs = length * (length + 1) // 2 if self.causal else length * length
        return 4 * self.heads * pairs * self.head_dim

    def memory(self, length: int) -> int:
        """Scores and weights of a chunk of queries of one head, or one log-sum-exp per query."""
        return 4 * max(2 * min(512, length) * length, self.heads * length)
