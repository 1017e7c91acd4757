"""Adaptive span: exact softmax attention within a soft window whose length each head learns."""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from approx.mechanisms.mechanism import Mechanism, beyond, number_up_to_one, one_of, whole_number
from approx_kernels.ops.adaptive_span.api import adaptive_span_attention, mass_by_distance, window_sizes
from approx_kernels.runtime.pytorch import changes, without_functions


class AdaptiveSpanAttention(Mechanism):
    """Softmax attention under a mask that falls off beyond each head's own span, in O(n (z + R) D) per head.

    A weight at distance x is multiplied by m(x) = clip((R + z - x) / R, 0, 1) before the weights are normalised.
    Distances count in both directions unless causal, and include padding between two tokens. Training learns z, stored
    as a fraction of the longest span so that it suits the learning rate of other parameters; add `penalty`, times a
    weight, to the loss, or spans have no reason to shrink. Training and inference compute the same: each head within
    its own window, heads of similar span together. Heads whose span covers the whole input run exact attention, bit for
    bit.

    Source: Sukhbaatar, Grave, Bojanowski, Joulin, 2019, Adaptive Attention Span in Transformers, arXiv 1905.07799;
    departs from it in keeping the positions of the model instead of relative ones, in the bidirectional form, in
    windows for groups of heads instead of one as long as the layer's longest, in a penalty that is not divided by the
    number of heads, and in spans fitted to inputs instead of learned (`start`).

    Args:
        heads: Number of heads, H.
        head_dim: Size of a head, D.
        causal: Whether a query sees only keys at or before its own position.
        scale: Factor of the scores.
        max_span: Longest span, in tokens, 1 or more; it is the window on longer inputs.
        ramp: R, the tokens over which the mask falls from 1 to 0, 1 or more.
        start: Initial spans: `longest`, or `calibrated`, per head the shortest that keeps the share `keep` of its
            attention on a calibration batch.
        keep: That share, 1 - ε, above 0 and at most 1.

    Raises:
        ApproxError: if a setting is wrong.
    """

    supports_decode: ClassVar[bool] = True
    trainable: ClassVar[bool] = True
    sparse: ClassVar[bool] = True
    compiles: ClassVar[str] = "Shapes depend on the learned spans."
    examples: ClassVar[dict[str, dict[str, Any]]] = {
        "": {"max_span": 3, "ramp": 2},
        "calibrated": {"max_span": 50, "ramp": 3, "start": "calibrated", "keep": 0.5},
    }
    timed: ClassVar[dict[Literal["bidirectional", "causal"], tuple[dict[str, Any], ...]]] = {
        "bidirectional": ({"max_span": 256},),
        "causal": ({"max_span": 256},),
    }
    source: ClassVar[str] = "Sukhbaatar et al. 2019, Adaptive Attention Span in Transformers, arXiv 1905.07799"
    exact_when: ClassVar[str] = "The span of every head >= the length of the sequence - 1."

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        causal: bool,
        scale: float,
        max_span: int = 1024,
        ramp: int = 32,
        start: str = "longest",
        keep: float = 0.99,
    ) -> None:
        super().__init__(heads, head_dim, causal=causal, scale=scale)
        self.max_span = whole_number("max_span", max_span, 1)
        self.ramp = whole_number("ramp", ramp, 1)
        self.start = one_of("start", start, ("longest", "calibrated"))
        self.keep = number_up_to_one("keep", keep)
        self.fraction = nn.Parameter(torch.ones(heads))
        self._read: tuple[Tensor, int, list[float]] | None = None

    @property
    def spans(self) -> Tensor:
        """z, the span of each head in tokens, [H], from 0 to `max_span`, differentiable."""
        fraction = self.fraction.to(torch.promote_types(self.fraction.dtype, torch.float32))
        # Transforms that do not support `_Within` get the gradient of a plain clip.
        within = fraction.clamp(0.0, 1.0) if without_functions() else _Within.apply(fraction)
        return self.max_span * within  # pyright: ignore[reportOperatorIssue]  # what forward returns

    def penalty(self) -> Tensor:
        """Sum of the spans, in tokens."""
        return self.spans.sum()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, *, dropout: float = 0.0
    ) -> Tensor:
        """Attend; dropout acts on the attention weights."""
        return adaptive_span_attention(
            q,
            k,
            v,
            key_mask,
            spans=self.spans,
            known=self._known,
            ramp=self.ramp,
            causal=self.causal,
            scale=self.scale,
            dropout=dropout,
        )

    @property
    def needs_calibration(self) -> bool:
        """Whether a calibration batch sets the initial spans."""
        return self.start == "calibrated"

    @torch.no_grad()
    def calibrate(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> None:
        """Set each head's span to the shortest whole number that keeps its attention, averaged over the real queries.

        A head keeps the longest span if it needs over half of the longest distance in the batch: a shorter one would
        save little, and on longer inputs the head may look farther, as heads do that attend to the first token or a
        separator. The batch should hold inputs as long as those the model will run on.

        Args: as for `forward`.
        """
        mass = mass_by_distance(q, k, key_mask, causal=self.causal, scale=self.scale)
        within = mass.cumsum(1)
        # Mass under the mask of each span z: the mask is the mean of R steps, the last ones at z, …, z + R - 1.
        weights = (
            nn.functional.pad(within[:, None], (0, self.ramp - 1), "replicate").unfold(2, self.ramp, 1).mean(3)[:, 0]
        )
        # Rounding in float32 can leave the whole mass just below 1.
        enough = weights >= self.keep - 1e-6
        shortest = enough.int().argmax(1)
        near = enough.any(1) & (2 * shortest < mass.shape[1]) & (shortest < self.max_span)
        self.fraction.copy_(torch.where(near, shortest / self.max_span, 1.0))

    @classmethod
    def exact_settings(cls, length: int) -> dict[str, Any]:
        """Spans as long as the sequence."""
        return {"max_span": max(length, 1), "start": "longest"}

    def approximates_from(self) -> int:
        """One distance beyond the longest span."""
        return int(max(self._known())) + 2

    def differs_from(self) -> int:
        """One distance beyond the shortest span."""
        return int(min(self._known())) + 2

    def approximated_pairs(self, length: int) -> float:
        """The pairs beyond the span of each head."""
        spans = self._known()
        return sum(beyond(int(span), length, causal=self.causal) for span in spans) / len(spans)

    def flops(self, length: int) -> int:
        """Two products over the pairs of each block of 64 queries and the keys within the head's window."""
        whole = length * (length + 1) // 2 if self.causal else length * length
        pairs = sum(whole if keys is None else length * keys for keys in self._keys(length))
        return 4 * pairs * self.head_dim

    def memory(self, length: int) -> int:
        """The outputs of the heads before joining, and the mask of one block."""
        return 4 * (self.heads * length * self.head_dim + 64 * sum(keys or 0 for keys in self._keys(length)))

    def _keys(self, length: int) -> list[int | None]:
        """Keys per block of 64 queries, for each head; None for heads that run exact attention."""
        sides = 1 if self.causal else 2
        windows = window_sizes(self._known(), self.ramp, length - 1)
        return [None if window is None else min(64 + sides * window, length) for window in windows]

    def _known(self) -> list[float]:
        """The spans as Python numbers.

        Reading them synchronises with an accelerator, so evaluation reads them once per value of the parameter.
        In-place writes to `parameter.data`, which bypass PyTorch's version counter, take effect on a CPU only.
        """
        fraction = self.fraction.detach()
        count = changes(fraction)
        if self.training or self._reads_at_once() or count is None:
            return self.spans.tolist()
        if self._read is not None:
            read, version, known = self._read
            # Holding the tensor prevents reuse of its address.
            if (read.data_ptr(), read.dtype, version) == (fraction.data_ptr(), fraction.dtype, count):
                return known
        self._read = fraction, count, self.spans.tolist()
        return self._read[2]

    def _reads_at_once(self) -> bool:
        return self.fraction.is_cpu

    def __getstate__(self) -> dict[str, Any]:
        # A copy has its own version counter, so values cached for the original do not apply.
        return self.__dict__ | {"_read": None}


class _Within(torch.autograd.Function):
    """Clip to [0, 1], with the gradient of the identity wherever gradient descent leads inwards.

    The gradient of a plain clip is 0 outside, so a parameter that an optimizer step moved there could never return.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(0.0, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]  # named arguments there
        (x,) = ctx.saved_tensors
        outwards = ((x < 0) & (grad > 0)) | ((x > 1) & (grad < 0))
        return grad.masked_fill(outwards, 0.0)
