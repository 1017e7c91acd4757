"""Attention sinks: the first tokens and the most recent ones."""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from approx.mechanisms.mechanism import whole_number
from approx.mechanisms.sparse import SparsePattern
from approx_kernels.ops.fastest.api import fastest_attention
from approx_kernels.ops.patterns.reference import Window
from approx_kernels.runtime.pytorch import sdpa
from approx_kernels.tokens import blank_padding, content, extended, first_and_newest, sharing


class SinksAttention(SparsePattern):
    """Softmax attention to the first s tokens and the last w, including the query's own, in O(n (s + w) D).

    A model trained with exact attention puts its surplus weight on the first tokens, which a plain window would drop.
    Positions count the real tokens of a sample, so left padding does not move the sinks.

    Source: Xiao, Tian, Chen, Han, Lewis, 2023, Efficient Streaming Language Models with Attention Sinks,
    arXiv 2309.17453; departs from it in keeping the keys' original positions.

    Args:
        heads: Number of heads, H.
        head_dim: Size of a head, D.
        causal: Must be true.
        scale: Factor of the scores.
        sinks: First tokens that every query sees, s, 0 or more.
        window: Last tokens that a query sees, w, 1 or more; the query's own is one of them.

    Raises:
        ApproxError: if `causal` is false or a setting is wrong.
    """

    supports_bidirectional: ClassVar[bool] = False
    supports_decode: ClassVar[bool] = True
    decode_state: ClassVar[Literal["cache", "ring", "recurrent"]] = "ring"
    token_settings: ClassVar[tuple[str, ...]] = ("window", "sinks")
    examples: ClassVar[dict[str, dict[str, Any]]] = {"": {"sinks": 2, "window": 4}}
    timed: ClassVar[dict[Literal["bidirectional", "causal"], tuple[dict[str, Any], ...]]] = {
        "causal": ({"window": 252},)
    }
    candidates: ClassVar[tuple[dict[str, Any], ...]] = ({"window": 128}, {"window": 256}, {})
    searched: ClassVar[Literal["always", "healed", "named"]] = "always"
    source: ClassVar[str] = (
        "Xiao et al. 2023, Efficient Streaming Language Models with Attention Sinks, arXiv 2309.17453"
    )
    exact_when: ClassVar[str] = "sinks + window >= the number of real tokens of the sample."

    def __init__(
        self, heads: int, head_dim: int, *, causal: bool, scale: float, sinks: int = 4, window: int = 1020
    ) -> None:
        super().__init__(heads, head_dim, causal=causal, scale=scale)
        self.sinks = whole_number("sinks", sinks, 0)
        self.window = whole_number("window", window, 1)

    def over(self, length: int) -> Window:
        """The first tokens and a window."""
        return Window(True, left=self.window - 1, tokens=range(self.sinks))

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, state: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Attend from tokens that follow those in a state: the first s real keys and a ring of the last w - 1.

        Dropping the keys in between does not change the result: distances within the window stay the same.
        """
        ring = extended(state, k, v, key_mask)
        k, v, key_mask = content(ring)
        if torch.compiler.is_exporting() and key_mask is not None:
            out = self._all_pairs(q, k, v, key_mask)
        elif q.shape[2] == 1 and k.shape[2] <= self.sinks + self.window:
            out = fastest_attention(q, k, v, key_mask, causal=False, scale=self.scale)
        else:
            out = self(q, k, v, key_mask)
        return out, first_and_newest(ring, self.sinks, self.window - 1)

    def _all_pairs(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor) -> Tensor:
        """The same under a mask, for programs, whose shapes cannot depend on the number of real tokens."""
        q, k, v = blank_padding(q, k, v, key_mask)
        rank = key_mask.cumsum(1)
        own, rank = rank[:, -q.shape[2] :, None], rank[:, None]
        seen = (rank <= own) & ((rank > own - self.window) | (rank <= self.sinks)) & key_mask[:, None]
        # Runtimes disagree on padding that sees no key.
        seen = (seen | ~seen.any(-1, keepdim=True))[:, None]
        return sdpa(q, k, v, attn_mask=seen, scale=self.scale, enable_gqa=sharing(q, k) > 1)

    @classmethod
    def exact_settings(cls, length: int) -> dict[str, Any]:
        """A window as wide as the sequence."""
        return {"window": max(length, 1)}

    def approximates_from(self) -> int:
        """One token between the sinks and the window."""
        return self.sinks + self.window + 1

    def flops(self, length: int) -> int:
        """Two products over the pairs of each block of 64 queries with its window and the sinks."""
        return 4 * self.heads * length * self._keys(length) * self.head_dim

    def memory(self, length: int) -> int:
        """The outputs of the blocks before joining, and the keys, values and mask of one block."""
        keys = self._keys(length)
        return 4 * self.heads * (length + 2 * keys) * self.head_dim + 64 * keys

    def _keys(self, length: int) -> int:
        return min(63 + self.window + self.sinks, length)
