"""Strided attention: a window and every l-th token."""

import math
from typing import Any, ClassVar, Literal

from approx.mechanisms.mechanism import whole_number
from approx.mechanisms.sparse import SteppedPattern
from approx_kernels.ops.patterns.reference import Strided
from approx_kernels.tokens import CAUSAL_STRIDE, root_above


class StridedAttention(SteppedPattern):
    """Softmax attention to the keys nearer than l and to every l-th key, in O(n (l + n / l) D).

    Step 1 is |i - j| < l, step 2 is (i - j) mod l = 0. With step 1 in one layer and step 2 in the next, every token
    can reach every other. Positions count the real tokens of a sample.

    Source: Child, Gray, Radford, Sutskever, 2019, Generating Long Sequences with Sparse Transformers,
    arXiv 1904.10509; departs from it in the bidirectional form.

    Args:
        heads: Number of heads, H.
        head_dim: Size of a head, D.
        causal: Whether a query sees only keys at or before its own position.
        scale: Factor of the scores.
        stride: l, 1 or more. None takes the square root of each sample's number of real tokens, rounded up; in a causal
            layer it takes 32, because a stride that depends on the length would change what earlier tokens saw as the
            sequence grows.
        mode: `merged`, where every head sees the union of the steps; `heads`, where heads take the steps in turn; or
            `interleave`, where layers do.
        step: 1 or 2, the only step that this layer uses; None uses all. A plan sets it for `interleave`, step 1 in the
            lowest layer; outside a plan it is then 1.

    Raises:
        ApproxError: if a setting is wrong, or `step` is combined with `mode: heads`.
    """

    supports_decode: ClassVar[bool] = True
    examples: ClassVar[dict[str, dict[str, Any]]] = {"": {"stride": 3}}
    source: ClassVar[str] = "Child et al. 2019, Generating Long Sequences with Sparse Transformers, arXiv 1904.10509"
    exact_when: ClassVar[str] = "stride >= the number of real tokens of the sample, with both steps merged."

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        causal: bool,
        scale: float,
        stride: int | None = None,
        mode: Literal["merged", "interleave", "heads"] = "merged",
        step: int | None = None,
    ) -> None:
        super().__init__(heads, head_dim, causal=causal, scale=scale)
        self.stride = None if stride is None else whole_number("stride", stride, 1)
        self._take(mode, step)

    def over(self, length: int) -> Strided:
        """The window and the columns."""
        return Strided(self.causal, stride=self.stride_over(length))

    def stride_over(self, length: int) -> int:
        """The stride l of a sample of `length` real tokens."""
        return self.stride or (CAUSAL_STRIDE if self.causal else root_above(length))

    @classmethod
    def exact_settings(cls, length: int) -> dict[str, Any]:
        """A window as wide as the sequence."""
        return {"stride": max(length, 1), "mode": "merged", "step": None}

    def _unseen_from(self, step: int | None) -> int | None:
        if step == 2:
            return None if self.stride == 1 else 2
        if self.stride is None and not self.causal:
            return 3 if step == 1 else 4
        stride = self.stride_over(1)
        return stride + 1 if step == 1 else None if stride == 1 else stride + 2

    def flops(self, length: int) -> int:
        """Two products over the computed pairs: whole rows of l tokens around each query, and columns."""
        return 4 * self.heads * length * math.ceil(self._keys(length)) * self.head_dim

    def memory(self, length: int) -> int:
        """The outputs; about 9 times that with both steps merged, for the scaled inputs and two parts of the outputs."""
        return 4 * self.heads * length * self.head_dim * (9 if None in self._steps else 1)

    def _keys(self, length: int) -> float:
        """Keys per query, averaged over the steps that the heads use."""
        stride = self.stride_over(length)
        near, far = (2 if self.causal else 3) * stride, math.ceil(length / stride)
        keys = {1: near, 2: far, None: near + far}
        return min(sum(keys[step] for step in self._steps) / len(self._steps), length)
