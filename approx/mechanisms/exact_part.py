"""The keys that a cheap mechanism attends to exactly: a window, the first tokens, and tokens chosen by position or content."""

import itertools
from typing import Any, ClassVar

import torch
from torch import Tensor

from approx.errors import ApproxError, Exit, shown
from approx.mechanisms.mechanism import BY_CONTENT, Mechanism, chosen_by_content, positions_of, whole_number
from approx_kernels.ops.exact.api import exact_attention
from approx_kernels.ops.near_keys.api import Exactly, Part, first_keys, joined
from approx_kernels.ops.near_keys.reference import lowest
from approx_kernels.runtime.pytorch import drop_keys
from approx_kernels.tokens import check_shapes

# Values of `global_tokens` that choose no token; conversion replaces `auto`.
NONE = ("auto", "none")
# Width of a window that is not given: last keys of a causal layer, keys on either side of others.
_CAUSAL_WINDOW, _WINDOW = 64, 32
# First tokens that a causal layer keeps: pretrained decoders put their surplus weight on them.
_SINKS = 4
# Logarithms of the factors of far keys that a fit tries; the first is no weight, within rounding.
_FACTORS = (-16.0, *(x / 2 for x in range(-16, 9)))
# Ridge of the fit of a gate, relative to the mean square of the queries' numbers.
_RIDGE = 1e-2


class ExactPart(Mechanism, abstract=True):
    """A mechanism with an exact part: softmax attention to near keys, under one normaliser with its estimate for the others.

    Args:
        heads: Number of heads, H.
        head_dim: Size of a head, D.
        causal: Whether a query sees only keys at or before its own position.
        scale: Factor of the scores.
        window: Keys on either side of a query, or, with `causal`, last keys with its own; 0 for none, None for 32 or 64.
        sinks: First real tokens that every query sees; None for 4 with `causal` and otherwise none.
        global_tokens: More tokens that every query sees, without `causal` only: `none`; `first`; a list of positions; `separator`
            or `question`, see `LongformerAttention`; `auto`, for which conversion puts `question` if the model answers
            questions about a text, and otherwise `none`.
        separator: Id of the separator token, as for `LongformerAttention`.

    Raises:
        ApproxError: if a setting is wrong.
    """

    estimate: ClassVar[str | None] = "estimated part"

    # Logarithms of the factors of heads' far parts; where `joins` keeps them.
    far_weight: Tensor

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        causal: bool,
        scale: float,
        window: int | None,
        sinks: int | None,
        global_tokens: str | list[int],
        separator: int | None,
    ) -> None:
        super().__init__(heads, head_dim, causal=causal, scale=scale)
        usual = _CAUSAL_WINDOW if self.causal else _WINDOW
        self.window = usual if window is None else whole_number("window", window, 0, 2**31 - 1)
        self.sinks = _SINKS * self.causal if sinks is None else whole_number("sinks", sinks, 0)
        self._positions = [] if global_tokens in NONE else positions_of(global_tokens, (*NONE, "first", *BY_CONTENT))
        self.global_tokens = global_tokens
        self.separator = None if separator is None else whole_number("separator", separator, 0)
        if self.causal and global_tokens not in NONE:
            raise ApproxError(
                f"Setting 'global_tokens' is {shown(global_tokens)}, but this layer is causal: it keeps its first tokens. "
                "Say how many with 'sinks'.",
                Exit.UNSUPPORTED,
            )

    @property
    def reads_tokens(self) -> bool:
        """Whether `forward` needs the token ids."""
        return self.global_tokens in BY_CONTENT

    @property
    def has_exact_part(self) -> bool:
        """Whether any key is exact."""
        return bool(self.window or self.sinks or self._positions or self.reads_tokens)

    def exactly(self, k: Tensor, key_mask: Tensor | None, tokens: Tensor | None = None) -> Exactly:
        """The near keys of keys k, [B, G, S, D]; `tokens` are their ids, [B, S], where content chooses some."""
        chosen = first_keys(k, key_mask, self.sinks)
        more = None
        if self.reads_tokens:
            more = chosen_by_content(self.global_tokens, self.separator, tokens, key_mask, (k.shape[0], k.shape[2]))
        elif self._positions:
            rank = torch.ones_like(k[:, 0, :, 0], dtype=torch.long) if key_mask is None else key_mask.long()
            rank = rank.cumsum(1) - 1
            # ONNX has no operator for isin.
            more = (rank[..., None] == torch.tensor(self._positions, device=k.device)).any(-1)
            more = more if key_mask is None else more & key_mask
        chosen = more if chosen is None else chosen if more is None else chosen | more
        most = None if self.reads_tokens else self.sinks + len(self._positions)
        return Exactly(self.causal, self.window, chosen, self.scale, most)

    def joins(self) -> None:
        """Keep the factor of what the exact keys are joined with, of each head, and refuse a causal form without a window.

        Raises:
            ApproxError: if a causal query would not see its own key.
        """
        if not self.has_exact_part:
            return
        if self.causal and not self.window:
            raise ApproxError(
                f"Setting 'sinks' is {self.sinks} and 'window' 0, but where this mechanism has exact keys and is causal, a "
                "query sees itself in its window. Say with 'window' how many of the last keys are exact."
            )
        self.register_buffer("far_weight", torch.zeros(self.heads, device="cpu"))

    def near_and_far(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, tokens: Tensor | None, weight: Tensor
    ) -> tuple[Part, Part]:
        """What `attend_joined` joins; `weight` is the logarithm of each head's factor of the far part, [H]."""
        raise NotImplementedError

    def attend_joined(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, tokens: Tensor | None, dropout: float
    ) -> Tensor:
        """The near and the far part under one normaliser; dropout drops whole keys in the numerator."""
        check_shapes(q, k, v, key_mask)
        v = drop_keys(v, dropout)
        return joined(self.near_and_far(q, k, v, key_mask, tokens, self.far_weight)).to(q.dtype)

    def fit_weight(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, tokens: Tensor | None) -> None:
        """Fit the factor of each head's far part that brings outputs closest to exact ones; 0 is possible."""
        near, far = self.near_and_far(q, k, v, key_mask, tokens, torch.zeros_like(self.far_weight))
        if (far.log > lowest(far.log.dtype) / 2).any():
            real = None if key_mask is None or q.shape[2] != k.shape[2] else key_mask
            exact = exact_attention(q, k, v, key_mask, causal=self.causal, scale=self.scale).to(near.out.dtype)
            self.far_weight.copy_(best_factor(exact, near, [far], real)[0])

    @classmethod
    def exact_settings(cls, length: int) -> dict[str, Any]:
        """A window as wide as the sequence, which leaves no far key."""
        return {"window": max(length, 1)}

    def approximates_from(self) -> int:
        """One key beyond the window of some query and the chosen tokens; two tokens where there are none."""
        return max(self.far_from(1), 2)

    def far_from(self, count: int) -> int:
        """Fewest real tokens of which some query has this many far keys."""

        def position(first: int) -> int:
            """That of the last of so many keys from `first` on that are not chosen."""
            free = (key for key in itertools.count(max(first, self.sinks)) if key not in self._positions)
            return next(itertools.islice(free, count - 1, None))

        if not self.window:
            return position(0) + 1
        if self.causal:
            return position(0) + self.window + 1
        # The first query has the most keys after its window, the last one before it.
        return min(position(self.window + 1) + 1, position(0) + self.window + 2)

    def approximated_pairs(self, length: int) -> float:
        """The pairs outside the window and of other keys than the first; tokens chosen by content are not counted."""
        last = (self.window - self.causal) if self.window else -1
        chosen = {*range(min(self.sinks, length)), *self._positions}

        def outside(key: int) -> int:
            """Queries that see a key, but not in their windows."""
            after = max(length - 1 - last - key, 0)
            return after if self.causal else min(max(key - last, 0) + after, length)

        far = sum(outside(key) for key in range(length) if key not in chosen)
        return far / (length * (length + 1) // 2 if self.causal else length * length)

    def near_pairs(self, length: int) -> int:
        """Keys that the exact part computes for each of `length` queries, rounded up to its blocks."""
        sides = self.window * (1 if self.causal else 2)
        return min((64 + sides) * bool(self.window) + self.sinks + len(self._positions), length)


@torch.no_grad()
def best_factor(exact: Tensor, near: Part, far: list[Part], real: Tensor | None) -> tuple[Tensor, Tensor]:
    """The factor of the far parts of each head that brings outputs closest to the exact ones, and the squared error left.

    Args:
        exact: Exact outputs, [B, H, L, E].
        near: The softmax over the near keys.
        far: Estimates of the others.
        real: [B, L] bool, the queries that count; None for all.

    Returns:
        Logarithm of the factor, [H], and the sum of squares, [H].
    """
    logs = torch.stack([part.log for part in far])
    away = joined(far) - near.out
    missed = near.out - exact
    squares = [(x * y).sum(-1) for x, y in ((missed, missed), (missed, away), (away, away))]
    if real is not None:
        squares = [each.masked_fill(~real[:, None], 0.0) for each in squares]
    apart = logs.logsumexp(0) - near.log
    errors = []
    for factor in _FACTORS:
        share = (apart + factor).sigmoid()
        errors.append((squares[0] + 2 * share * squares[1] + share.square() * squares[2]).sum((0, 2)))
    left, index = torch.stack(errors).min(0)
    return torch.tensor(_FACTORS, dtype=exact.dtype, device=exact.device)[index], left


def fitted_gate(q: Tensor, wanted: Tensor, weight: Tensor) -> Tensor:
    """a and, last, c of each head such that `q.a + c` is closest to the wanted logarithms, [H, D + 1] in float64.

    Args: queries q [B, H, L, D], wanted and the weight of each query, [B, H, L].
    """
    q, wanted, weight = (x.double().transpose(0, 1).flatten(1, 2) for x in (q, wanted, weight))
    rows = torch.cat([q, torch.ones_like(q[..., :1])], -1)
    weight = weight / weight.sum(-1, keepdim=True).clamp(min=1e-30)
    moments = rows.mT @ (rows * weight[..., None])
    ridge = (
        _RIDGE
        * q.square().mean((1, 2)).clamp(min=1e-12)[:, None]
        * torch.ones(q.shape[-1], dtype=q.dtype, device=q.device)
    )
    moments = moments + torch.diag_embed(torch.cat([ridge, torch.full_like(ridge[:, :1], 1e-9)], -1))
    return torch.linalg.solve(moments, (rows.mT @ (weight * wanted)[..., None]))[..., 0]
