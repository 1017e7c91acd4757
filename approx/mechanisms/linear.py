"""Linear attention: a feature map in place of the softmax."""

import math
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from approx.errors import ApproxError, Exit
from approx.mechanisms.exact_part import ExactPart, best_factor, fitted_gate
from approx.mechanisms.mechanism import one_of, positive_number, true_or_false, whole_number
from approx_kernels.ops.exact.api import exact_attention
from approx_kernels.ops.exact_part.api import (
    LinearFar,
    linear_and_exact,
    linear_and_exact_decode,
    linear_parts,
    near_and_mass,
)
from approx_kernels.ops.linear.api import FEATURE_MAPS, linear_attention, linear_decode
from approx_kernels.ops.linear.reference import FORGETFUL
from approx_kernels.ops.performer.api import draw_projection
from approx_kernels.tokens import blank_padding, check_shapes

# The logit of 0.1, the initial factor of the softmax part of a window in LoLCATs.
_FIRST_MIX = -2.1972246
# Learned features of a head, unless it has more than half as many numbers.
_LEAST_FEATURES = 128
# Half-lives of a state in keys, and shares of a value that a key's own replaces, that a fit tries.
_STARTS = tuple((half_life, rate) for half_life in (512, 64) for rate in (0.5, 0.1))


class LinearAttention(ExactPart):
    """Sum keys and values once and read the sums with each query, in O(n D E), beside exact attention to some keys.

    A softmax weighs the nearest keys and chosen tokens, features weigh the others, under one normaliser. The features do not
    approximate the softmax, but a gate, which conversion fits to a calibration batch, bounds what they may do: they start
    where they help and otherwise with no weight. Without an exact part a pretrained model is nearly broken until it is
    fine-tuned.

    With `update: delta` a state takes the place of the sums: each key that leaves the window first fades it, then replaces what
    the state holds for that key, so that it is rewritten rather than summed up. Decays and rates are learned from the keys, the
    only inputs of a layer that reach a mechanism. What a query reads is no weighted mean, so it joins the exact keys as one more
    value, with the fitted gate and how much the state has written as its weight.

    Source: Katharopoulos, Vyas, Pappas, Fleuret, 2020, Transformers are RNNs, arXiv 2006.16236; `t2r` is that of
    Kasai et al., 2021, arXiv 2103.13076, `hedgehog` that of Zhang et al., 2024, arXiv 2402.04347, the window that of
    Zhang et al., 2024, LoLCATs, arXiv 2410.10254; `gated` is that of Lan et al., 2025, Liger, arXiv 2503.01496, `delta` that of
    Yang, Kautz, Hatamizadeh, 2024, Gated Delta Networks, arXiv 2412.06464. Departs from them in starting `t2r` at the identity, in
    the gate, the first tokens and the chosen ones, and for `delta` in having no convolutions.

    Args:
        heads: Number of heads, H.
        head_dim: Size of a head, D.
        causal: Whether a query sees only keys at or before its own position.
        scale: Factor of the scores of near keys; of inputs only with `scale_inputs`.
        feature_map: `elu`, which is elu(x) + 1; `relu`; `softmax`, over the head dimension; or one with learned
            matrices, one for queries and one for keys of each head, initialised to the identity: `t2r`, relu(x W + b),
            and `hedgehog`, softmax(x W) concatenated with softmax(-x W). With `causal` also `gated`, as `softmax`, whose sums
            fade at each key by sigmoid(k)^(1/16), without a parameter. None for `hedgehog`; `unit`, which only `update: delta`
            has, is silu(x W) divided by its length.
        eps: Added to the normaliser, above 0; without a gate and with a window, the normaliser's lower bound.
        scale_inputs: Whether q and k are multiplied by the root of `scale` first; the papers do not.
        window: Nearest keys that a softmax weighs: with `causal` the last ones with a query's own, otherwise this many on
            either side and its own, counting padding between them. 0 for none; None for 64 or 32, or none without a gate.
        sinks: First real tokens that every query sees exactly; None for 4 with `causal` and a gate, otherwise none.
        global_tokens: More tokens that every query sees exactly, without `causal`, see `ExactPart`.
        separator: Id of the separator token, where global tokens are chosen by content; conversion fills it in.
        features: Features of `hedgehog`, an even number of at least 2 D; 0 for 2 D, None for 128 or 2 D, whichever is more.
        gate: Whether queries and keys have learned gates. Without, a window has one learned factor for each head, as in
            LoLCATs, and there are no other exact keys.
        update: `sum` of features times values, or, with `causal`, `delta`, the gated delta rule.

    Raises:
        ApproxError: if a setting is wrong.
    """

    supports_decode: ClassVar[bool] = True
    decode_state: ClassVar[Literal["cache", "ring", "recurrent"]] = "recurrent"
    trainable: ClassVar[bool] = True
    estimate: ClassVar[str | None] = "linear part"
    runs_c: ClassVar[bool] = True
    earlier: ClassVar[dict[str, Any]] = {
        "sinks": 0,
        "global_tokens": "none",
        "separator": None,
        "features": 0,
        "gate": False,
        "update": "sum",
    }
    published: ClassVar[dict[str, Any]] = {"feature_map": "elu", "window": 0, "features": 0, "gate": False}
    examples: ClassVar[dict[str, dict[str, Any]]] = {
        "": {"feature_map": "elu", "gate": False},
        # All features can be 0; then eps shows in the sum of the weights.
        "t2r": {"feature_map": "t2r", "eps": 1e-12, "gate": False},
        "hedgehog window": {"feature_map": "hedgehog", "window": 4, "features": 0, "gate": False},
        "gated": {"window": 4, "sinks": 2},
        "fading": {"feature_map": "gated", "window": 4, "sinks": 2},
        "delta": {"update": "delta", "window": 4, "sinks": 2},
    }
    # Feature maps are learned, so a search tries them only if it trains.
    candidates: ClassVar[tuple[dict[str, Any], ...]] = (
        {},
        {"window": 64},
    )
    searched: ClassVar[Literal["always", "healed", "named"]] = "healed"
    colour: ClassVar[str | None] = "#d9742b"
    source: ClassVar[str] = "Katharopoulos et al. 2020, Transformers are RNNs, arXiv 2006.16236"
    exact_when: ClassVar[str] = "window >= the length of the sequence."

    query_map: nn.Parameter | None
    key_map: nn.Parameter | None
    mix: nn.Parameter | None
    query_gate: nn.Parameter | None
    key_gate: nn.Parameter | None
    decay: nn.Parameter | None
    rate: nn.Parameter | None

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        causal: bool,
        scale: float,
        feature_map: str | None = None,
        eps: float = 1e-6,
        scale_inputs: bool = False,
        window: int | None = None,
        sinks: int | None = None,
        global_tokens: str | list[int] = "auto",
        separator: int | None = None,
        features: int | None = None,
        gate: bool = True,
        update: str = "sum",
    ) -> None:
        self_gate = true_or_false("gate", gate)
        if not self_gate:
            window, sinks = window or 0, sinks or 0
        exact = {"window": window, "sinks": sinks, "global_tokens": global_tokens, "separator": separator}
        super().__init__(heads, head_dim, causal=causal, scale=scale, **exact)
        self.gate = self_gate
        if not gate and (self.sinks or self._positions or self.reads_tokens):
            raise ApproxError(
                "Settings 'sinks' and 'global_tokens' choose exact keys, which need a gate; 'gate' is false. Leave one of "
                "them out."
            )
        self.update = one_of("update", update, ("sum", "delta"))
        maps = ("unit",) if update == "delta" else (*FEATURE_MAPS, "gated")
        self.feature_map = maps[0] if update == "delta" else "hedgehog"
        if feature_map is not None:
            self.feature_map = one_of("feature_map", feature_map, maps)
        self._refuse_forgetful()
        self.eps = positive_number("eps", eps)
        self.scale_inputs = true_or_false("scale_inputs", scale_inputs)
        self.features = self._checked_features(features)
        self.query_map, self.key_map = self._first_map(), self._first_map()
        self.mix = nn.Parameter(torch.full((heads,), _FIRST_MIX, device="cpu")) if self.window and not gate else None
        gates = [(heads, head_dim + 1), (heads, head_dim)] if gate else []
        made = [nn.Parameter(torch.zeros(shape, device="cpu")) for shape in gates]
        self.query_gate, self.key_gate = (made[0], made[1]) if made else (None, None)
        self.decay = self.rate = None
        if update == "delta":
            self.key_gate = None
            self.decay, self.rate = (nn.Parameter(torch.zeros(heads, head_dim + 1, device="cpu")) for _ in range(2))
            self._start(*_STARTS[0])

    def _refuse_forgetful(self) -> None:
        """Refuse what forgets from key to key where there is no order of keys, or no gate."""
        if self.feature_map not in FORGETFUL or (self.causal and self.gate):
            return
        setting = "'update' is 'delta'" if self.update == "delta" else f"'feature_map' is '{self.feature_map}'"
        if self.causal:
            raise ApproxError(f"Setting {setting}, which needs a gate; 'gate' is false. Leave one of them out.")
        raise ApproxError(
            f"Setting {setting}, which reads keys in their order, but this layer is bidirectional. Leave it out, or choose it for "
            "the causal layers of a decoder.",
            Exit.UNSUPPORTED,
        )

    @torch.no_grad()
    def _start(self, half_life: float, rate: float) -> None:
        """Decays and rates of the delta rule that are the same for all keys."""
        first = {"decay": math.log(2 ** (1 / half_life) - 1), "rate": math.log(rate / (1 - rate))}
        for name, value in first.items():
            getattr(self, name).zero_()[:, -1] = value

    def _checked_features(self, features: int | None) -> int:
        """The features of a head; only `hedgehog` has more or fewer than its size."""
        if self.feature_map != "hedgehog":
            if features:
                raise ApproxError(
                    f"Setting 'features' is {features}, but feature_map '{self.feature_map}' has one for each of the "
                    f"{self.head_dim} numbers of a head. Leave it out, or choose 'hedgehog'."
                )
            return 0
        twice = 2 * self.head_dim
        if not self.gate and features and features != twice:
            raise ApproxError(
                f"Setting 'features' is {features}; without a gate there are {twice}, twice the size of a head. Leave it out."
            )
        features = features if self.gate else 0
        count = max(_LEAST_FEATURES, twice) if features is None else whole_number("features", features, 0) or twice
        if count % 2 or count < twice:
            raise ApproxError(
                f"Setting 'features' is {count}; expected an even number of at least {twice}, twice the size of a head."
            )
        return count

    def _first_map(self) -> nn.Parameter | None:
        """The identity for each head, beside it random rotations; the bias of `t2r` is the last row."""
        if self.feature_map not in ("t2r", "hedgehog", "unit"):
            return None
        rows = self.head_dim + (self.feature_map == "t2r")
        first = torch.eye(rows, self.head_dim, device="cpu")
        more = self._features() // 2 - self.head_dim if self.feature_map == "hedgehog" else 0
        if more:
            drawn = draw_projection(self.head_dim, features=more, orthogonal=True, seed=0)
            first = torch.cat([first, nn.functional.normalize(drawn, dim=1).T], 1)
        return nn.Parameter(first.repeat(self.heads, 1, 1))

    @property
    def warning(self) -> str | None:
        """Without an exact part the model needs fine-tuning."""
        if self.has_exact_part:
            return None
        return (
            f"linear with feature_map '{self.feature_map}' and no exact keys replaces the softmax the checkpoint was "
            "trained with: the model is nearly broken until it is fine-tuned. A window keeps the nearest keys exact."
        )

    @property
    def averages(self) -> bool:
        """Whether outputs are means of values, which those of the delta rule are not."""
        return self.update == "sum"

    @property
    def takes_calibration(self) -> bool:
        """Whether the gate is fitted; before that all weights of features count in full."""
        return self.gate and self.has_exact_part

    def calibrate(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None = None,
        *,
        tokens: Tensor | None = None,
    ) -> None:
        """Fit the gate of each head: how much of a query's attention is far, and no more than brings outputs closer to exact ones.

        Args: as for `forward`.
        """
        if key_mask is not None and not key_mask.any():
            return
        assert self.query_gate is not None, "only a gate is fitted"
        exactly = self.exactly(k, key_mask, tokens)
        real = None if key_mask is None or q.shape[2] != k.shape[2] else key_mask
        exact = exact_attention(q, k, v, key_mask, causal=self.causal, scale=self.scale).float()
        near, mass = near_and_mass(q, k, v, key_mask, exactly)
        scaled = q.float() * self._input_scale()
        names = [name for name in ("query_gate", "decay", "rate") if getattr(self, name) is not None]
        best: dict[str, Tensor] = {}
        error = torch.full_like(self.query_gate[:, 0], torch.inf)
        for start in _STARTS if self.update == "delta" else [None]:
            if start is not None:
                self._start(*start)
            self.query_gate.zero_()
            far = linear_parts(q, k, v, key_mask, exactly=exactly, far=self._far())
            if not far:
                return
            estimates = torch.stack([part.log for part in far]).logsumexp(0)
            weight = mass / (mass + near.log.exp())
            weight = weight if real is None else weight * real[:, None]
            wanted = mass.clamp(min=1e-12).log() - estimates
            weight = weight.masked_fill(estimates < -100, 0.0)
            for gate in (torch.zeros_like(self.query_gate), fitted_gate(scaled, wanted, weight).to(error)):
                logs = (scaled * gate[:, None, :-1]).sum(-1) + gate[:, None, -1]
                shifted = [part._replace(log=part.log + logs) for part in far]
                factor, left = best_factor(exact, near, shifted, real)
                self.query_gate.copy_(torch.cat([gate[:, :-1], (gate[:, -1] + factor)[:, None]], 1))
                closer = (left < error)[:, None]
                tried = {name: getattr(self, name).data.clone() for name in names}
                best = {name: torch.where(closer, x, best[name]) if best else x for name, x in tried.items()}
                error = torch.where(closer[:, 0], left, error)
        for name, x in best.items():
            getattr(self, name).data.copy_(x)

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
        if not self.gate and not (self.window and torch.compiler.is_exporting()):
            return linear_attention(q, k, v, key_mask, causal=self.causal, dropout=dropout, **self._ways())
        check_shapes(q, k, v, key_mask)
        exactly = self.exactly(k, key_mask, tokens)
        return linear_and_exact(q, k, v, key_mask, exactly=exactly, far=self._far(), dropout=dropout)

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, state: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Attend from tokens that follow those in a state: sums over their features, and the exact keys."""
        if not self.gate and not (self.window and torch.compiler.is_exporting()):
            return linear_decode(q, k, v, key_mask, state, **self._ways())
        check_shapes(q, k, v, key_mask)
        q, k, v = blank_padding(q, k, v, key_mask)
        exact = {"sinks": self.sinks, "window": self.window, "scale": self.scale}
        return linear_and_exact_decode(q, k, v, key_mask, state, **exact, far=self._far())

    def _far(self) -> LinearFar:
        gate, of_keys = self.query_gate, self.key_gate
        if gate is None:
            assert self.mix is not None, "only a gate, or a window without one, weighs far keys"
            # The same weights without a loop over blocks, for programs of any length: the window's factor, taken from far keys.
            gate = F.pad(-F.logsigmoid(self.mix)[:, None], (self.head_dim, 0))
            of_keys = torch.zeros_like(gate[:, :-1])
        ways = self._maps(), gate, of_keys, self._input_scale(), self.decay, self.rate
        return LinearFar(self.feature_map, *ways)

    def _maps(self) -> tuple[Tensor, Tensor] | None:
        return None if self.query_map is None or self.key_map is None else (self.query_map, self.key_map)

    def _input_scale(self) -> float:
        return self.scale**0.5 if self.scale_inputs else 1.0

    def _ways(self) -> dict[str, Any]:
        return {
            "feature_map": self.feature_map,
            "maps": self._maps(),
            "window": self.window,
            "mix": None if self.mix is None else self.mix.sigmoid(),
            "scale": self.scale,
            "input_scale": self._input_scale(),
            "eps": self.eps,
        }

    def flops(self, length: int) -> int:
        """Learned maps, sums over keys and products with them, and pairs in causal chunks or windows, rounded up to 64."""
        features = self._features()
        map_columns = features // 2 if self.feature_map == "hedgehog" else features
        learned = 4 * length * self.head_dim * map_columns if self.query_map is not None else 0
        # With a gate and a window, keys on either side have a causal pass each.
        passes = 2 if self.gate and self.window and not self.causal else 1
        # The delta rule reads a state to write to it.
        products = 3 if self.update == "delta" else 2
        sums = passes * 2 * products * length * features * self.head_dim
        if self.gate:
            chunks = passes * min(length, 64) if self.causal or self.window else 0
            # Pairs of keys and a triangular system besides those of queries and keys.
            chunks = 2 * chunks if self.update == "delta" else chunks
            pairs = 2 * length * (2 * self.head_dim * self.near_pairs(length) + chunks * (self.head_dim + features))
        elif self.window:
            pairs = 2 * length * self._stretch(length) * (2 * self.head_dim + features)
        else:
            pairs = 2 * length * (min(length, 64) if self.causal else 0) * (self.head_dim + features)
        return self.heads * (learned + sums + pairs)

    def memory(self, length: int) -> int:
        """Features of queries and keys, the states (one, or one per block of 64), and the outputs or a block's pairs in a window.

        With exact keys it is that of C, for one thread; plain PyTorch, as on GPUs, holds six times as much.
        """
        features = self._features()
        if self.gate and self.has_exact_part and self.update == "sum" and self.feature_map != "gated":
            # In C: outputs of the near keys and of all, and of one head features, values and, for each block of 32, sums.
            sums = 0 if self.causal else -(-length // 32) * features * self.head_dim
            near = self.heads * length * (2 * self.head_dim + 3)
            return 4 * (near + length * (features + self.head_dim) + sums)
        states = -(-length // 64) * (1 if self.causal else 2) if self.causal or self.window else 1
        pairs = 2 * 64 * self._stretch(length) if self.window else 0
        if self.gate:
            # Features turned around and moved behind masked keys, and the outputs of the parts.
            pairs = length * (2 * features * bool(self.window) + 6 * self.head_dim)
            # Products of queries and keys, of keys and keys, and decays, in chunks; the system and its solution.
            pairs += length * (3 * min(length, 64) + 4 * self.head_dim) * (self.update == "delta")
        return 4 * self.heads * (features * (2 * length + states * self.head_dim) + pairs)

    def _features(self) -> int:
        return self.features if self.feature_map == "hedgehog" else self.head_dim

    def _stretch(self, length: int) -> int:
        """Keys per block of 64 queries."""
        return min(128 + self.window * (1 if self.causal else 2), length)
