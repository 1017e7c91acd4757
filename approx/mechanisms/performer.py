"""Performer attention: random features whose products are softmax weights on average."""

import math
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from approx.mechanisms.exact_part import ExactPart, best_factor
from approx.mechanisms.mechanism import (
    number_from_zero_to_one,
    one_of,
    seed_number,
    true_or_false,
    whole_number,
)
from approx_kernels.ops.exact.api import exact_attention
from approx_kernels.ops.exact_part.api import (
    PerformerFar,
    performer_and_exact,
    performer_and_exact_decode,
    performer_parts,
)
from approx_kernels.ops.performer.api import (
    ESTIMATORS,
    KERNELS,
    Fitted,
    draw_projection,
    fit_estimator,
    performer_attention,
    performer_decode,
)
from approx_kernels.tokens import blank_padding, check_shapes, sharing

# Share of uniform attention until one is given or fitted: on real activations the best of 0.3, 0.5 and 0.7 for 64 to
# 1,024 plain features, and always more accurate than the paper's eps.
_UNFITTED = 0.5
# Shares that the fit of an exact part tries.
_SHARES = (0.0, 0.15, 0.3, 0.5, 0.7, 0.9)
# Largest fitted share: at 1, queries and keys would receive no gradient.
_MOST = 0.9


class PerformerAttention(ExactPart):
    """Estimate softmax attention from M positive random features, in O(n M D).

    The relative error falls with the square root of M and grows with the norms of queries and keys: exponentially with
    plain features, far more slowly with features fitted to the layer's inputs. `convert` fits them to its calibration
    batch; until then features are plain. A fitted share of uniform attention replaces the eps that the paper adds to
    features, so that a failed estimate is never worse than uniform attention. A softmax weighs the nearest keys and chosen
    tokens, under one normaliser with the estimates for the others, each head's times a factor that conversion fits.

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
        window: Nearest keys that a softmax weighs, see `ExactPart`; 0 for none, None for 64 with `causal` and 32 without.
        sinks: First real tokens that every query sees exactly, see `ExactPart`.
        global_tokens: More tokens that every query sees exactly, without `causal`, see `ExactPart`.
        separator: Id of the separator token, where global tokens are chosen by content; conversion fills it in.
        learned: Whether the rows, the share and the factor of the estimates are parameters that training changes. Rows that
            are redrawn are not.

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
        "": {"features": 16, "window": 0, "sinks": 0, "learned": False},
        "relu": {"features": 16, "kernel": "relu", "window": 0, "sinks": 0, "learned": False},
        "window": {"features": 16, "window": 4, "sinks": 2},
    }
    searched: ClassVar[Literal["always", "healed", "named"]] = "always"
    source: ClassVar[str] = "Choromanski et al. 2021, Rethinking Attention with Performers, arXiv 2009.14794"
    exact_when: ClassVar[str] = (
        "window >= the length of the sequence; beyond it, with kernel = softmax and floor = 0, the error falls as 1 / root of "
        "features."
    )
    earlier: ClassVar[dict[str, Any]] = {
        "estimator": "positive",
        "floor": 0.0,
        "window": 0,
        "sinks": 0,
        "global_tokens": "none",
        "separator": None,
        "learned": False,
    }
    trainable: ClassVar[bool] = True
    published: ClassVar[dict[str, Any]] = {"features": 256, "window": 0, "sinks": 0, "learned": False}

    projection: Tensor
    share: Tensor
    far_weight: Tensor

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        causal: bool,
        scale: float,
        features: int = 64,
        orthogonal: bool = True,
        kernel: str = "softmax",
        estimator: str = "aderf",
        floor: float | None = None,
        seed: int = 0,
        redraw_every: int = 0,
        window: int | None = None,
        sinks: int | None = None,
        global_tokens: str | list[int] = "auto",
        separator: int | None = None,
        learned: bool = True,
    ) -> None:
        exact = {"window": window, "sinks": sinks, "global_tokens": global_tokens, "separator": separator}
        super().__init__(heads, head_dim, causal=causal, scale=scale, **exact)
        self.features = whole_number("features", features, 1)
        self.orthogonal = true_or_false("orthogonal", orthogonal)
        self.kernel = one_of("kernel", kernel, KERNELS)
        self.estimator = one_of("estimator", estimator, ESTIMATORS)
        self.floor = None if floor is None else number_from_zero_to_one("floor", floor)
        self.seed = seed_number(seed)
        self.redraw_every = whole_number("redraw_every", redraw_every, 0)
        self.learned = true_or_false("learned", learned)
        self._hold("projection", self._draw(self.seed), learned and not redraw_every)
        if self.floor is None:
            share = torch.full((self.heads,), _UNFITTED if kernel == "softmax" else 0.0, device="cpu")
            self._hold("share", share, learned)
        if self.has_exact_part:
            self._hold("far_weight", torch.zeros(self.heads, device="cpu"), learned)
        if self._fits_features:
            for name, value in Fitted.plain(self.heads, self.head_dim)._asdict().items():
                self.register_buffer(name, value)

    def _hold(self, name: str, value: Tensor, learned: bool) -> None:
        """Keep a tensor as a parameter or as a buffer."""
        if learned:
            self.register_parameter(name, nn.Parameter(value))
        else:
            self.register_buffer(name, value)

    @property
    def takes_calibration(self) -> bool:
        """Whether anything is fitted to a calibration batch: features, the share, or the factor of the estimates."""
        return self._fits_features or self.floor is None or self.has_exact_part

    @property
    def _fits_features(self) -> bool:
        return self.kernel == "softmax" and self.estimator != "positive"

    def calibrate(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, *, tokens: Tensor | None = None
    ) -> None:
        """Fit the features, then the share and the factor that bring the outputs of each head closest to exact attention.

        Args: as for `forward`.
        """
        if key_mask is not None and not key_mask.any():
            return
        if self._fits_features:
            fitted = fit_estimator(q, k, key_mask, estimator=self.estimator, scale=self.scale)
            for name, value in fitted._asdict().items():
                self.get_buffer(name).copy_(value)
        real = None if key_mask is None or q.shape[2] != k.shape[2] else key_mask
        exact = exact_attention(q, k, v, key_mask, causal=self.causal, scale=self.scale)
        if self.has_exact_part:
            self._fit_weight(q, k, v, key_mask, exact.float(), real, tokens)
            return
        if self.floor is not None:
            return
        exact = exact.double()
        estimate, uniform = (self._attend(q, k, v, key_mask, share).double() for share in (0.0, 1.0))
        if real is not None:
            # Outputs of padded queries are undefined.
            exact, estimate, uniform = (x * real[:, None, :, None] for x in (exact, estimate, uniform))
        away, across = exact - estimate, uniform - estimate
        best = (away * across).sum((0, 2, 3)) / across.square().sum((0, 2, 3)).clamp(
            min=torch.finfo(torch.float64).tiny
        )
        self.share.copy_(best.clamp(0, _MOST))

    def _fit_weight(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        exact: Tensor,
        real: Tensor | None,
        tokens: Tensor | None,
    ) -> None:
        """Fit the factor of the estimates and, unless `floor` gives it, the share."""
        zero = exact.new_zeros(self.heads)
        mapped, far = self._far(q, k, None)
        form = {"mapped": mapped, "exactly": self.exactly(k, key_mask, tokens)}
        far = far._replace(weight=zero, share=zero)
        near, estimates = performer_parts(q, k, v, key_mask, **form, far=far)
        _, uniform = performer_parts(q, k, v, key_mask, **form, far=far._replace(share=zero + 1))
        if not estimates:
            return
        best, error, shares = zero, torch.full_like(zero, torch.inf), zero
        for share in _SHARES if self.floor is None else (self.floor,):
            pairs = zip(estimates, uniform, strict=True)
            parts = [one._replace(out=one.out + share * (other.out - one.out)) for one, other in pairs]
            factor, left = best_factor(exact, near, parts, real)
            closer = left < error
            best, error = torch.where(closer, factor, best), torch.where(closer, left, error)
            shares = torch.where(closer, share, shares)
        self.far_weight.copy_(best)
        if self.floor is None:
            self.share.copy_(shares)

    @torch.no_grad()
    def redraw(self, seed: int) -> None:
        """Draw new random rows; only this and `after_step` redraw them."""
        self.seed = seed_number(seed)
        self.projection.copy_(self._draw(seed))

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Draw new random rows when due, which depend only on the seed and the step, so that all processes agree; and keep a
        learned share within its limits.
        """
        if self.redraw_every and step % self.redraw_every == 0:
            self.projection.copy_(self._draw((self.seed + step // self.redraw_every) % 2**63))
        if self.learned and self.floor is None:
            self.share.clamp_(0.0, _MOST)

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
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None = None,
        *,
        dropout: float = 0.0,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """Attend; dropout drops whole keys in the numerator, since there are no weights of single pairs.

        `tokens` are the token ids of the keys, [B, S], read where global tokens are chosen by content.
        """
        if not self.has_exact_part:
            return self._attend(q, k, v, key_mask, self.floor, dropout)
        check_shapes(q, k, v, key_mask)
        q, k, v = blank_padding(q, k, v, key_mask)
        mapped, far = self._far(q, k, self._share(self.floor, q))
        exactly = self.exactly(k, key_mask, tokens)
        return performer_and_exact(q, k, v, key_mask, mapped=mapped, exactly=exactly, far=far, dropout=dropout)

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, state: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Attend from tokens that follow those in a state: sums over their features, and over values; and the exact keys."""
        check_shapes(q, k, v, key_mask)
        if not self.has_exact_part:
            q, k, v, ways = self._ways(q, k, v, self.floor)
            return performer_decode(q, k, v, key_mask, state, **ways)
        q, k, v = blank_padding(q, k, v, key_mask)
        share = self._share(self.floor, q)
        exact = {"sinks": self.sinks, "window": self.window, "scale": self.scale}
        _, far = self._far(q, k, share)

        def mapped(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            """Also of the keys that the state holds."""
            return self._far(q, k, share)[0]

        return performer_and_exact_decode(q, k, v, key_mask, state, **exact, mapped=mapped, far=far)

    def _far(self, q: Tensor, k: Tensor, share: Tensor | None) -> tuple[tuple[Tensor, Tensor], PerformerFar]:
        """Queries and keys in the basis of the features, and the estimates."""
        wide = torch.promote_types(q.dtype, torch.float32)
        projection, offsets, constant = self.projection, None, 0.0
        x, shift = q.to(wide) * self.scale**0.5, 0.0
        mapped = q, k.repeat_interleave(sharing(q, k), 1)
        if self._fits_features:
            fitted = Fitted(*(self.get_buffer(name) for name in Fitted._fields))
            projection, offsets = fitted.rows(self.projection)
            mapped = fitted.inputs(q, k, self.scale)
            x = x @ fitted.query_map.to(wide).mT
            shift = (x * fitted.key_shift.to(wide)[:, None]).sum(-1)
            constant = (1 - 4 * fitted.curvature.to(wide)).log().sum(-1, keepdim=True) / 2
        logs = x.square().sum(-1) / -2 + shift + constant - math.log(self.features)
        if self.kernel == "relu":
            logs = torch.zeros_like(logs)
        return mapped, PerformerFar(projection, offsets, share, self.kernel, self.scale, self.far_weight, logs)

    def _share(self, floor: float | None, q: Tensor) -> Tensor | None:
        """The share of uniform attention; a `floor` of None takes the fitted one."""
        if floor is None:
            return self.share
        return torch.full((self.heads,), floor, device=q.device) if floor else None

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
        ways = {
            "projection": self.projection,
            "share": self._share(floor, q),
            "kernel": self.kernel,
            "scale": self.scale,
        }
        if not self._fits_features:
            return q, k, v, ways
        fitted = Fitted(*(self.get_buffer(name) for name in Fitted._fields))
        ways["projection"], ways["offsets"] = fitted.rows(self.projection)
        # Each head has its own basis, so heads cannot share keys.
        v = v.repeat_interleave(sharing(q, v), 1)
        return *fitted.inputs(q, k, self.scale), v, ways

    def flops(self, length: int) -> int:
        """Maps and features of queries and keys, sums over keys and products with them, and pairs in causal chunks of 64."""
        passes = 2 if self.window and not self.causal else 1
        pairs = passes * min(length, 64) if self.causal or self.window else 0
        near = 4 * length * self.near_pairs(length) * self.head_dim
        features = 4 * length * self.head_dim * (self.features + self._fits_features * self.head_dim)
        sums = 4 * length * (passes * self.features * self.head_dim + pairs * self.features)
        return self.heads * (features + sums + near)

    def memory(self, length: int) -> int:
        """Outputs before joining, the features of a chunk and the state, with all heads at once."""
        chunk = 2 * min(length, 64) * self.features + self.features * self.head_dim
        mapped = 2 * length * self.head_dim if self._fits_features else 0
        # Queries, keys and values turned around and moved behind masked keys, and the outputs of the parts.
        parts = 9 * length * self.head_dim if self.has_exact_part else 0
        return 4 * self.heads * (length * self.head_dim + mapped + chunk + parts)
