"""Exact attention: materialised, by PyTorch, by flash kernels, or by whatever is fastest on this machine."""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from approx.mechanisms.mechanism import Mechanism
from approx_kernels.ops.exact.api import exact_attention, materialised_attention
from approx_kernels.ops.fastest.api import fastest_attention
from approx_kernels.ops.flash.api import flash_attention


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
    searched: ClassVar[Literal["always", "healed", "named"]] = "always"
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


class SdpaAttention(Mechanism):
    """Fused softmax attention, in O(L S D) time and O(L) memory.

    Source: Dao et al., 2022, FlashAttention, arXiv 2205.14135, as PyTorch's scaled_dot_product_attention;
    no departures.
    """

    supports_decode: ClassVar[bool] = True
    always_exact: ClassVar[bool] = True
    colour: ClassVar[str | None] = "#8a8f98"
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


class FullAttention(Mechanism):
    """Plain softmax attention, step by step, in O(L S D) time and O(L S) memory.

    Source: Vaswani et al., 2017, Attention Is All You Need, arXiv 1706.03762; no departures.
    """

    supports_decode: ClassVar[bool] = True
    always_exact: ClassVar[bool] = True
    quadratic: ClassVar[bool] = True
    colour: ClassVar[str | None] = "#8a8f98"
    source: ClassVar[str] = "Vaswani et al. 2017, Attention Is All You Need, arXiv 1706.03762"
    exact_when: ClassVar[str] = "Always."

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, *, dropout: float = 0.0
    ) -> Tensor:
        """Attend; dropout acts on the attention weights. A program has PyTorch's operator, which runtimes compute in one step."""
        attend = exact_attention if torch.compiler.is_exporting() else materialised_attention
        return attend(q, k, v, key_mask, causal=self.causal, scale=self.scale, dropout=dropout)

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


class FlashAttention(Mechanism):
    """Softmax attention tile by tile with an online softmax, in O(L S D) time and O(L) memory.

    Without padding an installed FlashAttention-4 or -3 runs. With it our kernels do, which skip keys and queries before
    the first and after the last real token. Where neither can (no CUDA, dropout, another head size) it is PyTorch's
    fused attention.

    Source: Dao, 2023, FlashAttention-2, arXiv 2307.08691; departs from it in a deterministic backward pass.
    """

    supports_decode: ClassVar[bool] = True
    always_exact: ClassVar[bool] = True
    searched: ClassVar[Literal["always", "healed", "named"]] = "always"
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
