"""Longformer attention: a window, and global tokens that see and are seen by all."""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from approx.errors import ApproxError, Exit, shown
from approx.mechanisms.mechanism import BY_CONTENT, chosen_by_content, positions_of, whole_number
from approx.mechanisms.sparse import SparsePattern
from approx_kernels.ops.patterns.api import pattern_attention
from approx_kernels.ops.patterns.reference import Window


class LongformerAttention(SparsePattern):
    """Softmax attention within a window and to and from g global tokens, in O(n (window + g) D).

    Global tokens are chosen by position, counted among the real tokens of a sample, or by content: all separators,
    or the question, which ends with the first separator. A sample without a separator has no such token; if its only
    separator is at the end, all of it is the question and attends exactly. A classifier reads the first token.

    Source: Beltagy, Peters, Cohan, 2020, Longformer, arXiv 2004.05150; departs from it in using the same projections
    for global tokens as for all others. A Longformer initialised by copying a checkpoint's projections, as the
    authors' is, gives the same outputs.

    Args:
        heads: Number of heads, H.
        head_dim: Size of a head, D.
        causal: Whether a query sees only keys at or before its own position, global ones included; must be false
            where global tokens are chosen by content, since decoding sees only the newest token ids.
        scale: Factor of the scores.
        window: w, 1 or more: a query sees the keys with |i - j| <= w / 2.
        global_tokens: `first`, a list of positions (a sample too short for one goes without it), `separator` or
            `question`.
        separator: Id of the separator token, used where global tokens are chosen by content; for None, conversion takes
            it from the checkpoint's tokenizer or config.

    Raises:
        ApproxError: if a setting is wrong, or a causal layer would choose by content.
    """

    supports_decode: ClassVar[bool] = True
    token_settings: ClassVar[tuple[str, ...]] = ("window",)
    examples: ClassVar[dict[str, dict[str, Any]]] = {"": {"window": 4, "global_tokens": [0, 3]}}
    candidates: ClassVar[tuple[dict[str, Any], ...]] = ({"window": 128}, {"window": 256}, {})
    searched: ClassVar[Literal["always", "healed", "named"]] = "always"
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
        global_tokens: Literal["first", "separator", "question"] | list[int] = "first",
        separator: int | None = None,
    ) -> None:
        super().__init__(heads, head_dim, causal=causal, scale=scale)
        self.window = whole_number("window", window, 1)
        self._positions = positions_of(global_tokens, ("first", *BY_CONTENT))
        self.global_tokens = global_tokens
        self.separator = None if separator is None else whole_number("separator", separator, 0)
        if causal and self.reads_tokens:
            raise ApproxError(
                f"Setting 'global_tokens' is {shown(global_tokens)}, but this layer is causal: it decodes with a cache, which "
                "stores no token ids to locate separators. Use 'first' or a list of positions.",
                Exit.UNSUPPORTED,
            )

    @property
    def reads_tokens(self) -> bool:
        """Whether `forward` needs the token ids."""
        return self.global_tokens in BY_CONTENT

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None = None,
        *,
        dropout: float = 0.0,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """Attend; dropout acts on the attention weights. Padded queries receive 0.

        `tokens` are the token ids of the keys, [B, S], read where global tokens are chosen by content.
        """
        if not self.reads_tokens:
            return super().forward(q, k, v, key_mask, dropout=dropout)
        out = []
        every = chosen_by_content(self.global_tokens, self.separator, tokens, key_mask, (k.shape[0], k.shape[2]))
        for sample, chosen in enumerate(every):
            mask = None if key_mask is None else key_mask[sample : sample + 1]
            places = (chosen if mask is None else chosen[mask[0]]).nonzero().flatten().tolist()
            window = self._window(tuple(places), once=True)
            qkv = q[sample : sample + 1], k[sample : sample + 1], v[sample : sample + 1]
            out.append(
                pattern_attention(*qkv, mask, pattern=lambda _, own=window: own, scale=self.scale, dropout=dropout)
            )
        return torch.cat(out)

    def over(self, length: int) -> Window:
        """The window, and to and from global tokens; those chosen by content are not counted, since their number varies."""
        return self._window(tuple(self._positions))

    def pattern(self, length: int) -> Tensor:
        """The pairs that it computes.

        Raises:
            ValueError: if content chooses the global tokens.
        """
        if self.reads_tokens:
            raise ValueError(
                f"Global tokens chosen by '{self.global_tokens}' stand elsewhere in each input; a pattern needs positions."
            )
        return super().pattern(length)

    def _window(self, tokens: tuple[int, ...], once: bool = False) -> Window:
        return Window(
            self.causal, left=self.window // 2, right=self.window // 2, tokens=tokens, see_all=True, once=once
        )

    @classmethod
    def exact_settings(cls, length: int) -> dict[str, Any]:
        """A window as wide as the sequence, on both sides."""
        return {"window": max(2 * length, 1)}

    def approximates_from(self) -> int:
        """One token beyond the window of the first token that is not global; content may select no global tokens."""
        first, chosen = 0, set(self._positions)
        while first in chosen:
            first += 1
        last = first + self.window // 2 + 1
        while last in chosen:
            last += 1
        return last + 1

    def flops(self, length: int) -> int:
        """Two products over the pairs of each block of 64 queries with its window and the global tokens, both ways.

        Global tokens chosen by content are not counted, since their number depends on the input.
        """
        pairs = self._keys(length) + min(len(self._positions), length)
        return 4 * self.heads * length * pairs * self.head_dim

    def memory(self, length: int) -> int:
        """The outputs of the blocks before joining, and the keys, values and mask of one block."""
        keys = self._keys(length)
        return 4 * self.heads * (length + 2 * keys) * self.head_dim + 64 * keys

    def _keys(self, length: int) -> int:
        sides = 1 if self.causal else 2
        return min(64 + sides * (self.window // 2) + len(self._positions), length)
