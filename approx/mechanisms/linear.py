"""Linear attention: a feature map in place of the softmax."""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from approx.mechanisms.mechanism import Mechanism, beyond, one_of, positive_number, true_or_false, whole_number
from approx_kernels.ops.linear.api import FEATURE_MAPS, linear_attention, linear_decode

# The logit of 0.1, the initial factor of the softmax part of a window in LoLCATs.
_FIRST_MIX = -2.1972246


class LinearAttention(Mechanism):
    """Sum keys and values once and read the sums with each query, in O(n D E).

    It does not approximate the softmax: without a window a pretrained model is nearly broken until it is fine-tuned.
    With one, a softmax weighs the nearest keys and features weigh the others, under one normaliser.

    Source: Katharopoulos, Vyas, Pappas, Fleuret, 2020, Transformers are RNNs, arXiv 2006.16236; `t2r` is that of
    Kasai et al., 2021, arXiv 2103.13076, `hedgehog` that of Zhang et al., 2024, arXiv 2402.04347, the window that of
    Zhang et al., 2024, LoLCATs, arXiv 2410.10254. Departs from them in starting `t2r` at the identity.

    Args:
        heads: Number of heads, H.
        head_dim: Size of a head, D.
        causal: Whether a query sees only keys at or before its own position.
        scale: Factor of the scores; used only with `scale_inputs` and inside the window.
        feature_map: `elu`, which is elu(x) + 1; `relu`; `softmax`, over the head dimension; or one with learned
            matrices, one for queries and one for keys of each head, initialised to the identity: `t2r`, relu(x W + b),
            and `hedgehog`, softmax(x W) concatenated with softmax(-x W).
        eps: Added to the normaliser, above 0; with a window, the normaliser's lower bound.
        scale_inputs: Whether q and k are multiplied by the root of `scale` first; the papers do not.
        window: Nearest keys that a softmax weighs, w: with `causal` the last w including a query's own, otherwise w on
            either side and its own, counting padding between them. 0 for none. Adds a learned factor of the softmax
            part for each head.

    Raises:
        ApproxError: if a setting is wrong.
    """

    supports_decode: ClassVar[bool] = True
    decode_state: ClassVar[Literal["cache", "ring", "recurrent"]] = "recurrent"
    trainable: ClassVar[bool] = True
    runs_c: ClassVar[bool] = True
    examples: ClassVar[dict[str, dict[str, Any]]] = {
        "": {},
        # All features can be 0; then eps shows in the sum of the weights.
        "t2r": {"feature_map": "t2r", "eps": 1e-12},
        "hedgehog window": {"feature_map": "hedgehog", "window": 4},
    }
    # Feature maps are learned, so a search tries them only if it trains.
    candidates: ClassVar[tuple[dict[str, Any], ...]] = (
        {"feature_map": "hedgehog"},
        {"feature_map": "hedgehog", "window": 64},
    )
    searched: ClassVar[Literal["always", "healed", "named"]] = "healed"
    colour: ClassVar[str | None] = "#d9742b"
    source: ClassVar[str] = "Katharopoulos et al. 2020, Transformers are RNNs, arXiv 2006.16236"
    exact_when: ClassVar[str] = "window >= the length of the sequence."

    query_map: nn.Parameter | None
    key_map: nn.Parameter | None
    mix: nn.Parameter | None

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        causal: bool,
        scale: float,
        feature_map: str = "elu",
        eps: float = 1e-6,
        scale_inputs: bool = False,
        window: int = 0,
    ) -> None:
        super().__init__(heads, head_dim, causal=causal, scale=scale)
        self.feature_map = one_of("feature_map", feature_map, FEATURE_MAPS)
        self.eps = positive_number("eps", eps)
        self.scale_inputs = true_or_false("scale_inputs", scale_inputs)
        self.window = whole_number("window", window, 0, 2**31 - 1)
        self.query_map, self.key_map = self._first_map(), self._first_map()
        self.mix = nn.Parameter(torch.full((heads,), _FIRST_MIX, device="cpu")) if window else None

    def _first_map(self) -> nn.Parameter | None:
        """The identity for each head; the bias of `t2r` is the last row."""
        if self.feature_map not in ("t2r", "hedgehog"):
            return None
        rows = self.head_dim + (self.feature_map == "t2r")
        return nn.Parameter(torch.eye(rows, self.head_dim, device="cpu").repeat(self.heads, 1, 1))

    @property
    def warning(self) -> str | None:
        """Without a window the model needs fine-tuning."""
        if self.window:
            return None
        return (
            f"linear with feature_map '{self.feature_map}' and no window replaces the softmax the checkpoint was "
            "trained with: the model is nearly broken until it is fine-tuned. A window keeps the nearest keys exact."
        )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, *, dropout: float = 0.0
    ) -> Tensor:
        """Attend; dropout drops whole keys in the numerator, since there are no weights of single pairs."""
        return linear_attention(q, k, v, key_mask, causal=self.causal, dropout=dropout, **self._ways())

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, state: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Attend from tokens that follow those in a state: sums over their features, and the keys in the window."""
        return linear_decode(q, k, v, key_mask, state, **self._ways())

    def _ways(self) -> dict[str, Any]:
        return {
            "feature_map": self.feature_map,
            "maps": None if self.query_map is None or self.key_map is None else (self.query_map, self.key_map),
            "window": self.window,
            "mix": None if self.mix is None else self.mix.sigmoid(),
            "scale": self.scale,
            "input_scale": self.scale**0.5 if self.scale_inputs else 1.0,
            "eps": self.eps,
        }

    @classmethod
    def exact_settings(cls, length: int) -> dict[str, Any]:
        """A window as wide as the sequence, which leaves no key to the features."""
        return {"window": max(length, 1)}

    def approximates_from(self) -> int:
        """One key beyond the window; without a window, two tokens."""
        return max(self.window + (1 if self.causal else 2), 2)

    def approximated_pairs(self, length: int) -> float:
        """The pairs outside the window, whose weights are of features."""
        if not self.window:
            return float(length >= 2)
        return beyond(self.window - self.causal, length, causal=self.causal)

    def flops(self, length: int) -> int:
        """Learned maps, sums over keys and products with them, and pairs in causal chunks or windows, rounded up to 64."""
        features = self._features()
        learned = 4 * length * self.head_dim * self.head_dim if self.query_map is not None else 0
        sums = 4 * length * features * self.head_dim
        if self.window:
            pairs = 2 * length * self._stretch(length) * (2 * self.head_dim + features)
        else:
            pairs = 2 * length * (min(length, 64) if self.causal else 0) * (self.head_dim + features)
        return self.heads * (learned + sums + pairs)

    def memory(self, length: int) -> int:
        """Features of queries and keys, the states (one, or one per block of 64), and a block's pairs in a window."""
        features = self._features()
        states = -(-length // 64) * (1 if self.causal else 2) if self.causal or self.window else 1
        pairs = 2 * 64 * self._stretch(length) if self.window else 0
        return 4 * self.heads * (features * (2 * length + states * self.head_dim) + pairs)

    def _features(self) -> int:
        return self.head_dim * (2 if self.feature_map == "hedgehog" else 1)

    def _stretch(self, length: int) -> int:
        """Keys per block of 64 queries."""
        return min(128 + self.window * (1 if self.causal else 2), length)
