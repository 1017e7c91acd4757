"""Local attention: exact softmax attention within a window."""

from typing import Any, ClassVar, Literal

from torch import Tensor

from approx.mechanisms.mechanism import whole_number
from approx.mechanisms.sparse import SparsePattern
from approx_kernels.ops.fastest.api import fastest_attention
from approx_kernels.ops.patterns.api import local_attention
from approx_kernels.ops.patterns.reference import Window
from approx_kernels.tokens import content, extended, newest


class LocalAttention(SparsePattern):
    """Softmax attention over the keys around each query, in O(n (left + right) D).

    Distances are measured in input positions, as models number them, and not in real tokens as in the other patterns.
    The two differ only for masks with gaps, where padding inside the window takes the place of keys.

    Source: Beltagy, Peters, Cohan, 2020, Longformer, arXiv 2004.05150; departs from it in having no global
    tokens.

    Args:
        heads: Number of heads, H.
        head_dim: Size of a head, D.
        causal: Whether a query sees only keys at or before its own position; `right` then has no effect.
        scale: Factor of the scores.
        left: Keys seen before a query's own position, 0 or more.
        right: Keys seen after a query's own position, 0 or more.

    Raises:
        ApproxError: if a setting is wrong.
    """

    supports_decode: ClassVar[bool] = True
    decode_state: ClassVar[Literal["cache", "ring", "recurrent"]] = "ring"
    compiles: ClassVar[str] = "whole"
    token_settings: ClassVar[tuple[str, ...]] = ("left", "right")
    runs_c: ClassVar[bool] = True
    examples: ClassVar[dict[str, dict[str, Any]]] = {"": {"left": 4, "right": 2}}
    timed: ClassVar[dict[Literal["bidirectional", "causal"], tuple[dict[str, Any], ...]]] = {
        "bidirectional": ({"left": 128, "right": 128},),
        "causal": ({"left": 128, "right": 0},),
    }
    candidates: ClassVar[tuple[dict[str, Any], ...]] = (
        {"left": 32, "right": 32},
        {"left": 64, "right": 64},
        {"left": 128, "right": 128},
    )
    searched: ClassVar[Literal["always", "healed", "named"]] = "always"
    colour: ClassVar[str | None] = "#a466d0"
    source: ClassVar[str] = "Beltagy et al. 2020, Longformer, arXiv 2004.05150"
    exact_when: ClassVar[str] = "left and right >= the length of the sequence - 1."

    def __init__(
        self, heads: int, head_dim: int, *, causal: bool, scale: float, left: int = 128, right: int = 128
    ) -> None:
        super().__init__(heads, head_dim, causal=causal, scale=scale)
        self.left = whole_number("left", left, 0)
        self.right = whole_number("right", right, 0)

    def over(self, length: int) -> Window:
        """A window; positions are those of the input."""
        return Window(self.causal, left=self.left, right=self.right)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, *, dropout: float = 0.0
    ) -> Tensor:
        """Attend; dropout acts on the attention weights."""
        right = 0 if self.causal else self.right
        return local_attention(q, k, v, key_mask, left=self.left, right=right, scale=self.scale, dropout=dropout)

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, state: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Attend from tokens that follow those in a state: a ring of the last `left` keys."""
        ring = extended(state, k, v, key_mask)
        k, v, key_mask = content(ring)
        if q.shape[2] == 1 and k.shape[2] <= self.left + 1:
            out = fastest_attention(q, k, v, key_mask, causal=False, scale=self.scale)
        else:
            out = self(q, k, v, key_mask)
        return out, newest(ring, self.left)

    @classmethod
    def exact_settings(cls, length: int) -> dict[str, Any]:
        """A window as wide as the sequence, on both sides."""
        return {"left": length, "right": length}

    def approximates_from(self) -> int:
        """One key beyond the shorter side of the window."""
        return (self.left if self.causal else min(self.left, self.right)) + 2

    def flops(self, length: int) -> int:
        """Two products over the pairs of each block of 64 queries and the keys in its reach."""
        return 4 * self.heads * length * min(64 + self._reach(), length) * self.head_dim

    def memory(self, length: int) -> int:
        """The outputs of the blocks before joining, and the mask of one block."""
        return 4 * self.heads * length * self.head_dim + 64 * min(64 + self._reach(), length)

    def _reach(self) -> int:
        return self.left if self.causal else self.left + self.right
