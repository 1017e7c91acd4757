"""Full-information patterns: left to right and right to left, two steps that let every token reach every other."""

import math
from typing import Any, ClassVar, Literal

from approx.mechanisms.mechanism import true_or_false, whole_number
from approx.mechanisms.sparse import SteppedPattern
from approx_kernels.ops.patterns.reference import Summaries
from approx_kernels.tokens import root_below


class LtrAttention(SteppedPattern):
    """Softmax attention to the past inside a query's block and to the last c columns of all blocks, in O(n (l + c n / l) D).

    Step 1 is the query's own block up to itself, step 2 the summaries and its own key: after step 1 in one layer and
    step 2 in the next, every token can reach every other. There is no causal form, since all tokens see all
    summaries; use `fixed` for that. Positions count the real tokens of a sample.

    Source: Daras, Odena, Zhang, Dimakis, 2019, Your Local GAN, arXiv 1911.12287; departs from it in the summary of
    the last, partial block.

    Args:
        heads: Number of heads, H.
        head_dim: Size of a head, D.
        causal: Must be false.
        scale: Factor of the scores.
        stride: Tokens of a block, l, 1 or more; None takes the square root of each sample's number of real tokens,
            rounded down.
        summary: Columns of a summary, c, from 1 to l; the whole block where l depends on the length and is smaller.
        both_directions: Whether to add the two steps of the mirrored pattern as steps 3 and 4, e.g. as four groups of
            heads of an encoder with `mode: heads`.
        mode: `merged`, where every head sees the union of the steps; `heads`, where heads take the steps in turn; or
            `interleave`, where layers do.
        step: From 1, the only step that this layer uses; None uses all. A plan sets it for `interleave`, step 1 in the
            lowest layer, since the reverse order reaches few tokens; outside a plan it is then 1.

    Raises:
        ApproxError: if `causal` is true, a setting is wrong, or `step` is combined with `mode: heads`.
    """

    supports_causal: ClassVar[bool] = False
    supports_decode: ClassVar[bool] = False
    examples: ClassVar[dict[str, dict[str, Any]]] = {"": {}, "four ways": {"both_directions": True, "mode": "heads"}}
    source: ClassVar[str] = "Daras et al. 2019, Your Local GAN, arXiv 1911.12287"
    exact_when: ClassVar[str] = "summary = stride, with all steps merged."

    _sides: ClassVar[tuple[str, str]] = ("past", "future")

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        causal: bool,
        scale: float,
        stride: int | None = None,
        summary: int = 1,
        both_directions: bool = False,
        mode: Literal["merged", "interleave", "heads"] = "merged",
        step: int | None = None,
    ) -> None:
        super().__init__(heads, head_dim, causal=causal, scale=scale)
        self.stride = None if stride is None else whole_number("stride", stride, 1)
        self.summary = whole_number("summary", summary, 1, self.stride)
        self.both_directions = true_or_false("both_directions", both_directions)
        self._take(mode, step)

    def over(self, length: int) -> Summaries:
        """The part of the own block and the summaries, of one side or of both."""
        inside = ", ".join(self._sides) if self.both_directions else self._sides[0]
        return Summaries(stride=self.stride_over(length), summary=self.summary, inside=inside)

    def stride_over(self, length: int) -> int:
        """The stride l of a sample of `length` real tokens."""
        return self.stride or root_below(length)

    @classmethod
    def exact_settings(cls, length: int) -> dict[str, Any]:
        """Every column is a summary."""
        return {"stride": max(length, 1), "summary": max(length, 1), "mode": "merged", "step": None}

    def _unseen_from(self, step: int | None) -> int | None:
        if step is not None and step % 2:
            return 2
        # Columns of a summary from both ends of a block meet in its middle.
        both = step is None and self.both_directions
        columns = self.summary * (2 if both else 1)
        if self.stride is None:
            return (columns + 1) ** 2
        if columns >= self.stride:
            return None
        return self.stride + 1 if both else columns + (1 if step else 2)

    def flops(self, length: int) -> int:
        """Two products over the pairs of whole blocks and summaries."""
        return 4 * self.heads * length * math.ceil(self._keys(length)) * self.head_dim

    def memory(self, length: int) -> int:
        """The outputs of the blocks before joining, and the keys, values and mask of one block."""
        keys = math.ceil(self._keys(length))
        stride = min(self.stride_over(length), length)
        return 4 * self.heads * (length + 2 * keys) * self.head_dim + stride * keys

    def _keys(self, length: int) -> float:
        """Keys per query, averaged over the steps that the heads use."""
        stride = self.stride_over(length)
        blocks = math.ceil(length / stride) - 1
        one, merged = (stride + min(self.summary * sides, stride) * blocks for sides in (1, 1 + self.both_directions))
        keys = [merged if step is None else one if step % 2 == 0 else stride for step in self._steps]
        return min(sum(keys) / len(keys), length)


class RtlAttention(LtrAttention):
    """Softmax attention to the future inside a query's block and to the first c columns of all blocks: `ltr` mirrored.

    Source: Daras, Odena, Zhang, Dimakis, 2019, Your Local GAN, arXiv 1911.12287; no departures.
    """

    examples: ClassVar[dict[str, dict[str, Any]]] = {"": {}}

    _sides: ClassVar[tuple[str, str]] = ("future", "past")
