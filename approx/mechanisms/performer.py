"""Performer attention: random features whose products are softmax weights on average."""

from typing import ClassVar, Literal

import torch
from torch import Tensor

from approx.mechanisms.mechanism import Mechanism, one_of, seed_number, true_or_false, whole_number
from approx_kernels.performer import KERNELS, draw_projection, performer_attention, performer_decode


class PerformerAttention(Mechanism):
    """Estimate softmax attention from M positive random features, in O(n M D).

    The relative error falls as the root of M and grows exponentially with the norms of queries and keys, so a
    pretrained model loses much until it is fine-tuned.

    Source: Choromanski et al., 2021, Rethinking Attention with Performers, arXiv 2009.14794; departs from it in
    drawing only when told to, and in a stabiliser that cancels exactly and knows nothing of the future.

    Args:
        heads: Number of heads, H.
        head_dim: Size of a head, D.
        causal: Whether a query sees only keys at or before its own position.
        scale: Factor of the scores; q and k are multiplied by its root.
        features: Random features, M; more is closer to exact.
        orthogonal: Whether the random rows are orthogonal in blocks of D, which lowers the error.
        kernel: `softmax`, or `relu`, the generalised attention that approximates no softmax.
        seed: Seed of the random rows, which are a buffer and saved with the checkpoint.
        redraw_every: Steps of training after which `after_step` draws other rows; 0 for never, as it is outside of training.

    Raises:
        ApproxError: if a setting is wrong.
    """

    supports_decode: ClassVar[bool] = True
    decode_state: ClassVar[Literal["cache", "ring", "recurrent"]] = "recurrent"
    compiles: ClassVar[str] = (
        "On a CPU, how far keys rise above earlier ones decides what the causal form computes again."
    )
    source: ClassVar[str] = "Choromanski et al. 2021, Rethinking Attention with Performers, arXiv 2009.14794"
    exact_when: ClassVar[str] = "Never: with kernel = softmax the error falls as 1 / root of features."

    projection: Tensor

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        causal: bool,
        scale: float,
        features: int = 256,
        orthogonal: bool = True,
        kernel: str = "softmax",
        seed: int = 0,
        redraw_every: int = 0,
    ) -> None:
        super().__init__(heads, head_dim, causal=causal, scale=scale)
        self.features = whole_number("features", features, 1)
        self.orthogonal = true_or_false("orthogonal", orthogonal)
        self.kernel = one_of("kernel", kernel, KERNELS)
        self.seed = seed_number(seed)
        self.redraw_every = whole_number("redraw_every", redraw_every, 0)
        self.register_buffer("projection", self._draw(self.seed))

    def redraw(self, seed: int) -> None:
        """Draw other random rows; nothing but this and `after_step` ever does."""
        self.seed = seed_number(seed)
        self.projection.copy_(self._draw(seed))

    def after_step(self, step: int) -> None:
        """Draw other random rows if it is time; they depend on the seed and the step alone, so that all processes agree."""
        if self.redraw_every and step % self.redraw_every == 0:
            self.projection.copy_(self._draw((self.seed + step // self.redraw_every) % 2**63))

    @torch.no_grad()
    def _draw(self, seed: int) -> Tensor:
        return draw_projection(self.head_dim, features=self.features, orthogonal=self.orthogonal, seed=seed)

    @property
    def warning(self) -> str | None:
        """Queries and keys of pretrained models are long, and `relu` is no softmax."""
        why = "approximates no softmax" if self.kernel == "relu" else "is far from the softmax where attention is sharp"
        return (
            f"performer with kernel '{self.kernel}' {why}: the model loses most of its quality until it is fine-tuned."
        )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, *, dropout: float = 0.0
    ) -> Tensor:
        """Attend; dropout acts on whole keys in the numerator, since no weights of single pairs exist."""
        return performer_attention(
            q,
            k,
            v,
            key_mask,
            projection=self.projection,
            kernel=self.kernel,
            causal=self.causal,
            scale=self.scale,
            dropout=dropout,
        )

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, state: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Attend from tokens that follow those in a state: sums over their features."""
        ways = {"projection": self.projection, "kernel": self.kernel, "scale": self.scale}
        return performer_decode(q, k, v, key_mask, state, **ways)

    @classmethod
    def exact_settings(cls, length: int) -> None:
        """None: it equals softmax attention only on average."""

    def approximates_from(self) -> int:
        """Two tokens, whose weights are estimates."""
        return 2

    def flops(self, length: int) -> int:
        """Features of queries and keys, sums and readings of them, and the pairs inside causal chunks of 64."""
        pairs = min(length, 64) if self.causal else 0
        features = 4 * length * self.head_dim * self.features
        return self.heads * (features + 4 * length * (self.features * self.head_dim + pairs * self.features))

    def memory(self, length: int) -> int:
        """Outputs before they are joined, and the features of a chunk and the state, if all heads come at once."""
        chunk = 2 * min(length, 64) * self.features + self.features * self.head_dim
        return 4 * self.heads * (length * self.head_dim + chunk)
