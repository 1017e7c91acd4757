"""Full-information patterns: left to right and right to left, two steps that let every token reach every other."""

import math
from typing import Any, ClassVar, Literal

from torch import Tensor

from approx.mechanisms.mechanism import Mechanism, chosen_steps, whole_number
from approx_kernels.summaries import root_below, summary_attention


class LtrAttention(Mechanism):
    """Softmax attention to the past of the own block and to the last c columns of all blocks, in O(n (l + c n / l) D).

    Step 1 is the own block up to the own position, step 2 the summaries and the own key: after step 1 and then
    step 2, in the layer above, every token has reached every other. There is no causal form, since all tokens see
    all summaries: that is `fixed`. Positions count the real tokens of a sample.

    Source: Daras, Odena, Zhang, Dimakis, 2019, Your Local GAN, arXiv 1911.12287; departs from it in the summary of
    the last, partial block.

    Args:
        heads: Number of heads, H.
        head_dim: Size of a head, D.
        causal: Must be false.
        scale: Factor of the scores.
        stride: Tokens of a block, l, 1 or more; None takes the root of the number of real tokens of each sample,
            rounded down.
        summary: Columns of a summary, c, from 1 to l.
        mode: `merged`, where every head sees the union of the steps, or `heads`, where heads take the steps in turn.
        step: 1 or 2, the only step that this layer uses; None uses both. Rules that give odd and even layers their
            steps interleave the pattern, step 1 in the lower of two layers: the other way round little is reached.

    Raises:
        ApproxError: if `causal` is asked for, a setting is wrong, or `step` meets `mode: heads`.
    """

    supports_causal: ClassVar[bool] = False
    supports_decode: ClassVar[bool] = False
    sparse: ClassVar[bool] = True
    source: ClassVar[str] = "Daras et al. 2019, Your Local GAN, arXiv 1911.12287"
    exact_when: ClassVar[str] = "summary = stride, with both steps merged."

    _inside: ClassVar[Literal["past", "future"]] = "past"

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        causal: bool,
        scale: float,
        stride: int | None = None,
        summary: int = 1,
        mode: Literal["merged", "heads"] = "merged",
        step: int | None = None,
    ) -> None:
        super().__init__(heads, head_dim, causal=causal, scale=scale)
        self.stride = None if stride is None else whole_number("stride", stride, 1)
        self.summary = whole_number("summary", summary, 1, self.stride)
        self._steps = chosen_steps(mode, step, 2)
        self.mode = mode
        self.step = step

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, *, dropout: float = 0.0
    ) -> Tensor:
        """Attend; dropout acts on the attention weights. Padded queries receive 0."""
        return summary_attention(
            q,
            k,
            v,
            key_mask,
            stride=self.stride,
            summary=self.summary,
            inside=self._inside,
            causal=False,
            steps=self._steps,
            scale=self.scale,
            dropout=dropout,
        )

    @classmethod
    def exact_settings(cls, length: int) -> dict[str, Any]:
        """Every column is a summary."""
        return {"stride": max(length, 1), "summary": max(length, 1), "mode": "merged", "step": None}

    def flops(self, length: int) -> int:
        """Two products over the pairs of whole blocks and summaries."""
        return 4 * self.heads * length * math.ceil(self._keys(length)) * self.head_dim

    def memory(self, length: int) -> int:
        """The outputs of the blocks before they are joined, and the keys, values and mask of one block."""
        keys = math.ceil(self._keys(length))
        stride = min(self.stride or root_below(length), length)
        return 4 * self.heads * (length + 2 * keys) * self.head_dim + stride * keys

    def _keys(self, length: int) -> float:
        """Keys that meet a query, as a mean over the steps that the heads use."""
        stride = self.stride or root_below(length)
        merged = stride + self.summary * (math.ceil(length / stride) - 1)
        keys = {1: stride, 2: merged, None: merged}
        return min(sum(keys[step] for step in self._steps) / len(self._steps), length)


class RtlAttention(LtrAttention):
    """Softmax attention to the future of the own block and to the first c columns of all blocks: `ltr` mirrored.

    Source: Daras, Odena, Zhang, Dimakis, 2019, Your Local GAN, arXiv 1911.12287; departs from it in nothing.
    """

    _inside: ClassVar[Literal["past", "future"]] = "future"
