"""Fixed attention: a query's own block, and columns that summarise the other blocks."""

import math
from typing import Any, ClassVar, Literal

from torch import Tensor

from approx.mechanisms.mechanism import Mechanism, chosen_steps, interleaved, latest, whole_number
from approx_kernels.ops.patterns.reference import left_out, pattern_mask
from approx_kernels.ops.summaries.api import summary_attention
from approx_kernels.tokens import CAUSAL_STRIDE, root_above


class FixedAttention(Mechanism):
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
    sparse: ClassVar[bool] = True
    compiles: ClassVar[str] = "Shapes depend on the number of real tokens."
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
            stride=self.stride_over,
            summary=self.summary,
            inside="past" if self.causal else "all",
            causal=self.causal,
            steps=self._steps,
            scale=self.scale,
            dropout=dropout,
        )

    def stride_over(self, length: int) -> int:
        """The stride l of a sample of `length` real tokens."""
        return self.stride or (CAUSAL_STRIDE if self.causal else root_above(length))

    @classmethod
    def for_layer(cls, settings: dict[str, Any], rank: int) -> dict[str, Any]:
        """With `mode: interleave`, step 1 in the lowest layer, step 2 in the next one, and so on."""
        return interleaved(settings, rank, 2)

    @classmethod
    def exact_settings(cls, length: int) -> dict[str, Any]:
        """One block for the whole sequence."""
        return {"stride": max(length, 1), "summary": 1, "mode": "merged", "step": None}

    def approximates_from(self) -> int | None:
        """The first token in another block and in no summary, for the step that stays exact the longest."""
        return latest(self._unseen_from(step) for step in self._steps[: self.heads])

    def differs_from(self) -> int | None:
        """The same for the step that differs first."""
        return min(filter(None, map(self._unseen_from, self._steps[: self.heads])), default=None)

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

    def pattern(self, length: int) -> Tensor:
        """The pairs that it computes."""
        return pattern_mask("fixed", length, self.causal, self.settings)

    def approximated_pairs(self, length: int) -> float:
        """The pairs that the pattern leaves out."""
        return left_out("fixed", length, self.causal, self.settings, self._steps, self.heads)

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
