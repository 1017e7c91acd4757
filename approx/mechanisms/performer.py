"""Performer attention: random features whose products are softmax weights on average."""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from approx.mechanisms.mechanism import (
    Mechanism,
    number_from_zero_to_one,
    one_of,
    seed_number,
    true_or_false,
    whole_number,
)
from approx_kernels.ops.exact.api import exact_attention
from approx_kernels.ops.performer.api import (
    ESTIMATORS,
    KERNELS,
    Fitted,
    draw_projection,
    fit_estimator,
    performer_attention,
    performer_decode,
)
from approx_kernels.tokens import check_shapes, sharing

# Share of uniform attention until one is given or fitted: on real activations the best of 0.3, 0.5 and 0.7 for 64 to
# 1,024 plain features, and always more accurate than the paper's eps.
_UNFITTED = 0.5
# Largest fitted share: at 1, queries and keys would receive no gradient.
_MOST = 0.9


class PerformerAttention(Mechanism):
    """Estimate softmax attention from M positive random features, in O(n M D).

    The relative error falls with the square root of M and grows with the norms of queries and keys: exponentially with
    plain features, far more slowly with features fitted to the layer's inputs. `convert` fits them to its calibration
    batch; until then features are plain. A fitted share of uniform attention replaces the eps that the paper adds to
    features, so that a failed estimate is never worse than uniform attention.

    Source: Choromanski et al., 2021, Rethinking Attention with Performers, arXiv 2009.14794, Likhosherstov et al.,
    2022, Chefs' Random Tables, arXiv 2205.15317, and 2023, FAVOR#, arXiv 2302.00787; departs from them in redrawing
    only on request, in a causal stabiliser that cancels exactly, in the share, and in moments around the mean.

    Args:
        heads: Number of heads, H.
        head_dim: Size of a head, D.
        causal: Whether a query sees only keys at or before its own position.
        scale: Factor of the scores; q and k are multiplied by its root.
        features: Random features, M; more is closer to exact.
        orthogonal: Whether the random rows are orthogonal in blocks of D, which lowers the error.
        kernel: `softmax`, or `relu`, the generalised attention that does not approximate the softmax and has no
            estimator.
        estimator: Features of the softmax kernel: `positive`, which is not fitted; or fitted to a calibration batch,
            `oprf`, `sderf` or `aderf`, the most accurate, which costs a D x D product per query and key; see
            `fit_estimator`.
        floor: Share of uniform attention in the outputs, from 0 to 1. None fits each head's to the calibration batch,
            up to 0.9; until then it is 0.5, or 0 for the relu kernel.
        seed: Seed of the random rows, which are a buffer and saved with the checkpoint.
        redraw_every: Training steps after which `after_step` draws new rows; 0 for never.

    Raises:
        ApproxError: if a setting is wrong.
    """

    supports_decode: ClassVar[bool] = True
    decode_state: ClassVar[Literal["cache", "ring", "recurrent"]] = "recurrent"
    compiles: ClassVar[str] = (
        "Outside its GPU kernels, how far keys exceed earlier ones decides what the causal form recomputes."
    )
    ranges: ClassVar[dict[str, tuple[float, float]]] = {"share": (0.0, 1.0)}
    examples: ClassVar[dict[str, dict[str, Any]]] = {
        "": {"features": 16},
        "relu": {"features": 16, "kernel": "relu"},
    }
    searched: ClassVar[Literal["always", "healed", "named"]] = "always"
    source: ClassVar[str] = "Choromanski et al. 2021, Rethinking Attention with Performers, arXiv 2009.14794"
    exact_when: ClassVar[str] = "Never: with kernel = softmax and floor = 0 the error falls as 1 / root of features."
    earlier: ClassVar[dict[str, Any]] = {"estimator": "positive", "floor": 0.0}

    projection: Tensor
    share: Tensor

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
        estimator: str = "aderf",
        floor: float | None = None,
        seed: int = 0,
        redraw_every: int = 0,
    ) -> None:
        super().__init__(heads, head_dim, causal=causal, scale=scale)
        self.features = whole_number("features", features, 1)
        self.orthogonal = true_or_false("orthogonal", orthogonal)
        self.kernel = one_of("kernel", kernel, KERNELS)
        self.estimator = one_of("estimator", estimator, ESTIMATORS)
        self.floor = None if floor is None else number_from_zero_to_one("floor", floor)
        self.seed = seed_number(seed)
        self.redraw_every = whole_number("redraw_every", redraw_every, 0)
        self.register_buffer("projection", self._draw(self.seed))
        if self.floor is None:
            self.register_buffer("share", torch.full((self.heads,), _UNFITTED if kernel == "softmax" else 0.0))
        if self._fits_features:
            for name, value in Fitted.plain(self.heads, self.head_dim)._asdict().items():
                self.register_buffer(name, value)

    @property
    def takes_calibration(self) -> bool:
        """Whether features or the share are fitted to a calibration batch; otherwise they are plain and constant."""
        return self._fits_features or self.floor is None

    @property
    def _fits_features(self) -> bool:
        return self.kernel == "softmax" and self.estimator != "positive"

    def calibrate(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> None:
        """Fit the features, then the share that brings the outputs of each head closest to exact attention.

        Args: as for `forward`.
        """
        if key_mask is not None and not key_mask.any():
            return
        if self._fits_features:
            fitted = fit_estimator(q, k, key_mask, estimator=self.estimator, scale=self.scale)
            for name, value in fitted._asdict().items():
                self.get_buffer(name).copy_(value)
        if self.floor is not None:
            return
        exact = exact_attention(q, k, v, key_mask, causal=self.causal, scale=self.scale).double()
        estimate, uniform = (self._attend(q, k, v, key_mask, share).double() for share in (0.0, 1.0))
        if key_mask is not None and q.shape[2] == k.shape[2]:
            # Outputs of padded queries are undefined.
            exact, estimate, uniform = (x * key_mask[:, None, :, None] for x in (exact, estimate, uniform))
        away, across = exact - estimate, uniform - estimate
        best = (away * across).sum((0, 2, 3)) / across.square().sum((0, 2, 3)).clamp(
            min=torch.finfo(torch.float64).tiny
        )
        self.share.copy_(best.clamp(0, _MOST))

    def redraw(self, seed: int) -> None:
        """Draw new random rows; only this and `after_step` redraw them."""
        self.seed = seed_number(seed)
        self.projection.copy_(self._draw(seed))

    def after_step(self, step: int) -> None:
        """Draw new random rows when due; they depend only on the seed and the step, so that all processes agree."""
        if self.redraw_every and step % self.redraw_every == 0:
            self.projection.copy_(self._draw((self.seed + step // self.redraw_every) % 2**63))

    @torch.no_grad()
    def _draw(self, seed: int) -> Tensor:
        return draw_projection(self.head_dim, features=self.features, orthogonal=self.orthogonal, seed=seed)

    @property
    def warning(self) -> str | None:
        """Pretrained attention is sharp in places, and `relu` does not approximate the softmax."""
        why = (
            "does not approximate the softmax"
            if self.kernel == "relu"
            else "is far from the softmax where attention is sharp"
        )
        return (
            f"performer with kernel '{self.kernel}' {why}: the model loses most of its quality until it is fine-tuned."
        )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, *, dropout: float = 0.0
    ) -> Tensor:
        """Attend; dropout drops whole keys in the numerator, since there are no weights of single pairs."""
        return self._attend(q, k, v, key_mask, self.floor, dropout)

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, state: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Attend from tokens that follow those in a state: sums over their features, and over values."""
        check_shapes(q, k, v, key_mask)
        q, k, v, ways = self._ways(q, k, v, self.floor)
        return performer_decode(q, k, v, key_mask, state, **ways)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, floor: float | None, dropout: float = 0.0
    ) -> Tensor:
        check_shapes(q, k, v, key_mask)
        q, k, v, ways = self._ways(q, k, v, floor)
        return performer_attention(q, k, v, key_mask, **ways, causal=self.causal, dropout=dropout)

    def _ways(
        self, q: Tensor, k: Tensor, v: Tensor, floor: float | None
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        """Queries and keys in the basis of the features, values, and the op's arguments; a `floor` of None takes the fitted share."""
        share = self.share if floor is None else torch.full((self.heads,), floor, device=q.device) if floor else None
        ways = {"projection": self.projection, "share": share, "kernel": self.kernel, "scale": self.scale}
        if not self._fits_features:
            return q, k, v, ways
        fitted = Fitted(*(self.get_buffer(name) for name in Fitted._fields))
        ways["projection"], ways["offsets"] = fitted.rows(self.projection)
        # Each head has its own basis, so heads cannot share keys.
        v = v.repeat_interleave(sharing(q, v), 1)
        return *fitted.inputs(q, k, self.scale), v, ways

    @classmethod
    def exact_settings(cls, length: int) -> None:
        """None: it equals softmax attention only on average."""

    def approximates_from(self) -> int:
        """Two tokens, since their weights are estimates."""
        return 2

    def flops(self, length: int) -> int:
        """Maps and features of queries and keys, sums over keys and products with them, and pairs in causal chunks of 64."""
        pairs = min(length, 64) if self.causal else 0
        features = 4 * length * self.head_dim * (self.features + self._fits_features * self.head_dim)
        return self.heads * (features + 4 * length * (self.features * self.head_dim + pairs * self.features))

    def memory(self, length: int) -> int:
        """Outputs before joining, the features of a chunk and the state, with all heads at once."""
        chunk = 2 * min(length, 64) * self.features + self.features * self.head_dim
        mapped = 2 * length * self.head_dim if self._fits_features else 0
        return 4 * self.heads * (length * self.head_dim + mapped + chunk)
