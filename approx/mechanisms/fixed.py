"""Fixed attention: a query's own block, and columns that summarise the other blocks."""

import math
from typing import Any, ClassVar, Literal

from approx.mechanisms.mechanism import whole_number
from approx.mechanisms.sparse import SteppedPattern
from approx_kernels.ops.patterns.reference import Summaries
from approx_kernels.tokens import CAUSAL_STRIDE, root_above


class FixedAttention(SteppedPattern):
    """Softmax attention inside blocks of l tokens and to the last c columns of every block, in O(n (l + c n / l) D).

    Step 1 is the query's own block, step 2 the summaries and its own key. With a stride that does not grow with the
    length the cost is a fraction c / l of exact attention. Positions count the real tokens of a sample; its last,
    partial block has a summary too, except in a causal layer, where the block may still grow.

    Source: Child, Gray, Radford, Sutskever, 2019, Generating Long Sequences with Sparse Transformers,
    arXiv 1904.10509; departs from it in the bidirectional form.

    Args:
        heads: Number of heads, H.
        head_dim: Size of a head, D.
        causal: Whether a query sees only keys at or before its own position.
        scale: Factor of the scores.
        stride: Tokens of a block, l, 1 or more. None takes the square root of each sample's number of real tokens,
            rounded up; in a causal layer it takes 32, because a stride that depends on the length would change what
            earlier tokens saw as the sequence grows.
        summary: Columns of a summary, c, from 1 to l; the whole block where l depends on the length and is smaller.
        mode: `merged`, where every head sees the union of the steps; `heads`, where heads take the steps in turn; or
            `interleave`, where layers do.
        step: 1 or 2, the only step that this layer uses; None uses all. A plan sets it for `interleave`, step 1 in the
            lowest layer; outside a plan it is then 1.

    Raises:
        ApproxError: if a setting is wrong, or `step` is combined with `mode: heads`.
    """

    supports_decode: ClassVar[bool] = True
    examples: ClassVar[dict[str, dict[str, Any]]] = {"": {"stride": 6, "summary": 2}}
    timed: ClassVar[dict[Literal["bidirectional", "causal"], tuple[dict[str, Any], ...]]] = {
        "bidirectional": ({"stride": None},),
        "causal": ({"stride": None},),
    }
    source: ClassVar[str] = "Child et al. 2019, Generating Long Sequences with Sparse Transformers, arXiv 1904.10509"
    exact_when: ClassVar[str] = "stride >= the number of real tokens of the sample, with both steps merged."

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        causal: bool,
        scale: float,
        stride: int | None = 128,
        summary: int = 8,
        mode: Literal["merged", "interleave", "heads"] = "merged",
        step: int | None = None,
    ) -> None:
        super().__init__(heads, head_dim, causal=causal, scale=scale)
        self.stride = None if stride is None else whole_number("stride", stride, 1)
        self.summary = whole_number("summary", summary, 1, self.stride)
        self._take(mode, step)

    def over(self, length: int) -> Summaries:
        """The own block and the summaries."""
        inside = "past" if self.causal else "all"
        return Summaries(self.causal, stride=self.stride_over(length), summary=self.summary, inside=inside)

    def stride_over(self, length: int) -> int:
        """The stride l of a sample of `length` real tokens."""
        return self.stride or (CAUSAL_STRIDE if self.causal else root_above(length))

    @classmethod
    def exact_settings(cls, length: int) -> dict[str, Any]:
        """One block for the whole sequence."""
        return {"stride": max(length, 1), "summary": 1, "mode": "merged", "step": None}

    def _unseen_from(self, step: int | None) -> int | None:
        if self.stride is None and not self.causal:
            return 3 if step == 1 else max(self.summary**2 + 1, 2 if step == 2 else 3)
        stride = self.stride_over(1)
        if step == 1:
            return stride + 1
        if self.summary >= stride:
            return None
        if step is None:
            return stride + 1
        # A block that may still grow has no summary before its last columns.
        return 2 if self.causal else self.summary + 1

    def flops(self, length: int) -> int:
        """Two products over the pairs of whole blocks and summaries."""
        return 4 * self.heads * length * math.ceil(self._keys(length)) * self.head_dim

    def memory(self, length: int) -> int:
        """The outputs of the blocks before joining, and the keys, values and mask of one block."""
        keys = math.ceil(self._keys(length))
        return 4 * self.heads * (length + 2 * keys) * self.head_dim + min(self.stride_over(length), length) * keys

    def _keys(self, length: int) -> float:
        """Keys per query, averaged over the steps that the heads use."""
        stride = self.stride_over(length)
        others = min(self.summary, stride) * (math.ceil(length / stride) - 1) / (2 if self.causal else 1)
        keys = {1: stride, 2: stride + others, None: stride + others}
        return min(sum(keys[step] for step in self._steps) / len(self._steps), length)
