"""Longformer attention: a window, and global tokens that see and are seen by all."""

from typing import Any, ClassVar, Literal

from torch import Tensor

from approx.errors import ApproxError
from approx.mechanisms.mechanism import Mechanism, whole_number
from approx_kernels.global_tokens import global_token_attention


class LongformerAttention(Mechanism):
    """Softmax attention within a window and to and from g global tokens, in O(n (window + g) D).

    Global tokens are chosen by position, counted among the real tokens of a sample: the first token is what a
    classifier reads. Separators and questions stand elsewhere in each sample and cannot be chosen. Global tokens use
    the projections of all others.

    Source: Beltagy, Peters, Cohan, 2020, Longformer, arXiv 2004.05150; departs from it in having no projections of
    their own for global tokens.

    Args:
        heads: Number of heads, H.
        head_dim: Size of a head, D.
        causal: Whether a query sees only keys at or before its own position, global ones included.
        scale: Factor of the scores.
        window: w, 1 or more: a query sees the keys with |i - j| <= w / 2.
        global_tokens: `first`, or a list of positions; a sample too short for one goes without it.

    Raises:
        ApproxError: if a setting is wrong.
    """

    supports_decode: ClassVar[bool] = True
    sparse: ClassVar[bool] = True
    source: ClassVar[str] = "Beltagy et al. 2020, Longformer, arXiv 2004.05150"
    exact_when: ClassVar[str] = "window / 2 >= the number of real tokens of the sample - 1."

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        causal: bool,
        scale: float,
        window: int = 512,
        global_tokens: Literal["first"] | list[int] = "first",
    ) -> None:
        super().__init__(heads, head_dim, causal=causal, scale=scale)
        self.window = whole_number("window", window, 1)
        self._tokens = _positions(global_tokens)
        self.global_tokens = global_tokens

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, *, dropout: float = 0.0
    ) -> Tensor:
        """Attend; dropout acts on the attention weights. Padded queries receive 0."""
        return global_token_attention(
            q,
            k,
            v,
            key_mask,
            left=self.window // 2,
            right=self.window // 2,
            tokens=self._tokens,
            see_all=True,
            causal=self.causal,
            scale=self.scale,
            dropout=dropout,
        )

    @classmethod
    def exact_settings(cls, length: int) -> dict[str, Any]:
        """A window as wide as the sequence, to both sides."""
        return {"window": max(2 * length, 1)}

    def flops(self, length: int) -> int:
        """Two products over the pairs of each block of 64 queries with its window and the global tokens, both ways."""
        pairs = self._keys(length) + min(len(self._tokens), length)
        return 4 * self.heads * length * pairs * self.head_dim

    def memory(self, length: int) -> int:
        """The outputs of the blocks before they are joined, and the keys, values and mask of one block."""
        keys = self._keys(length)
        return 4 * self.heads * (length + 2 * keys) * self.head_dim + 64 * keys

    def _keys(self, length: int) -> int:
        sides = 1 if self.causal else 2
        return min(64 + sides * (self.window // 2) + len(self._tokens), length)


def _positions(global_tokens: Any) -> list[int]:
    """The positions of the global tokens, in order."""
    if global_tokens == "first":
        return [0]
    whole = isinstance(global_tokens, list) and all(type(token) is int and token >= 0 for token in global_tokens)
    if not whole or not global_tokens or len(set(global_tokens)) < len(global_tokens):
        raise ApproxError(
            f"Setting 'global_tokens' is {global_tokens!r}; allowed is 'first' or a list of different whole numbers of "
            "at least 0. Change it or leave it out."
        )
    return sorted(global_tokens)
