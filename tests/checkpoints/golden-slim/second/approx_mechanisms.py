# Travels with a checkpoint converted by approx (Apache-2.0); it needs torch and transformers, and nothing else.
"""The attention mechanisms.

Letters in shapes, here and in `approx_kernels`: B batch, H heads, L queries, S keys, D head size,
E value size, C clusters, K kept keys, M random features, G any number of heads, n sequence length where L = S.
"""

import inspect
import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .approx_errors import ApproxError, Exit, shown
from .approx_exact import exact_attention
from .approx_local import local_attention
from .approx_tokens import as_index, content, extended, heads_of, newest

# The base class of all attention mechanisms, and the checks of their settings.


class Mechanism(nn.Module):
    """Attention from queries, keys and values to outputs: what an attention layer does between its projections.

    A subclass names its settings as keyword arguments of its constructor (there is no second list), keeps
    each under its own name as an attribute, and holds all state as parameters or persistent buffers. The
    package explains the letters of the shapes.

    Args:
        heads: Number of heads, H.
        head_dim: Size of a head, D.
        causal: Whether a query sees only keys at or before its own position; with fewer queries than keys,
            query i is at position S - L + i, as when decoding with an ordinary cache.
        scale: Factor of the scores, as the model passes it.

    Raises:
        ApproxError: if the mechanism lacks the requested form, or a setting is wrong.
    """

    supports_causal: ClassVar[bool] = True
    supports_bidirectional: ClassVar[bool] = True
    # What the causal form keeps during decoding: a growing `cache` of all keys and values, which `forward` reads; a `ring` of
    # those in reach; or a `recurrent` state. The last two are bounded and `decode` reads them.
    decode_state: ClassVar[Literal["cache", "ring", "recurrent"]] = "cache"
    # Which key masks are supported; `any` means all of them.
    padding: ClassVar[str] = "any"
    # Whether it is exact attention with any settings on any input.
    always_exact: ClassVar[bool] = False
    # Values of settings that converted folders of earlier versions do not state.
    earlier: ClassVar[dict[str, Any]] = {}
    # Smallest and largest value of buffers and parameters that are limited, by name.
    ranges: ClassVar[dict[str, tuple[float, float]]] = {}
    source: ClassVar[str]
    exact_when: ClassVar[str]

    # Exact attention runs below this number of keys; a plan sets it.
    exact_below: int = 0
    # Whether training recomputes this in the backward pass instead of keeping its intermediates; a plan sets it.
    recompute: bool = False

    def __init__(self, heads: int, head_dim: int, *, causal: bool, scale: float) -> None:
        super().__init__()
        self.heads = whole_number("heads", heads, 1)
        self.head_dim = whole_number("head_dim", head_dim, 1)
        self.causal = true_or_false("causal", causal)
        self.scale = positive_number("scale", scale)
        form = "causal" if causal else "bidirectional"
        if not (self.supports_causal if causal else self.supports_bidirectional):
            raise ApproxError(
                f"{type(self).__name__} has no {form} form yet, and this layer needs one. "
                f"Choose a mechanism that `approx mechanisms` lists as {form}.",
                Exit.UNSUPPORTED,
            )

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The settings and their defaults, read from the constructor."""
        parameters = inspect.signature(cls.__init__).parameters.values()
        return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`forward` with its hooks; with `recompute`, training keeps only the inputs and recomputes the rest."""
        if self.recompute and self.training and torch.is_grad_enabled():
            return checkpoint(super().__call__, *args, use_reentrant=False, **kwargs)
        return super().__call__(*args, **kwargs)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings this mechanism was made with, as the constructor accepts them."""
        return {name: getattr(self, name) for name in self.defaults()}

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, *, dropout: float = 0.0
    ) -> Tensor:
        """Attend.

        Args:
            q: Queries, [B, H, L, D], float.
            k: Keys, [B, G, S, D], where H is a multiple of G: query head h reads key head h // (H / G).
            v: Values, [B, G, S, E].
            key_mask: [B, S] bool, True at real keys; None when all are real. Where L <= S, query i is the token of key S - L + i
                and is padding if that key is. Outputs of padding have no meaning. Padding may hold NaN, except for `exact`,
                `flash`, `sdpa` and on GPUs.
            dropout: Probability of dropping an attention weight; 0 outside training.

        Returns:
            [B, H, L, E] in the dtype of q; 0 for a query with no allowed key.

        Raises:
            ValueError: if shapes or dtypes do not match.
        """
        raise NotImplementedError

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, state: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Attend from tokens that follow those in a state; the outputs equal those of `forward` for the last tokens.

        Only for causal mechanisms whose `decode_state` is not `cache`.

        Args:
            q: Queries of the last tokens, [B, H, L, D], float.
            k: Keys not yet in the state, [B, G, S, D], L <= S; the last L belong to the queries.
            v: Their values, [B, G, S, E].
            key_mask: [B, S] bool, True at real keys; None when all are real.
            state: The state returned by the last call, whose samples may have been reordered, repeated or selected
                along the first dimension of every tensor; None before the first token.

        Returns:
            [B, H, L, E] in the dtype of q, and the state with these tokens added: tensors of first dimension B
            with sizes bounded independently of the number of tokens.
        """
        raise NotImplementedError

    def penalty(self) -> Tensor | None:
        """A scalar that training adds to its loss, times a weight that the trainer sets; None for no penalty."""
        return None

    def after_step(self, step: int) -> None:
        """Update state that changes between training steps; called after each step, counted from 1."""

    @property
    def reads_tokens(self) -> bool:
        """Whether `forward` and `weights` need the token ids of the keys, [B, S], as the keyword `tokens`."""
        return False

    def weights(self, q: Tensor, k: Tensor, key_mask: Tensor | None = None, **tokens: Tensor) -> Tensor:
        """Dense attention weights, [B, H, L, S], for plots: the outputs for identity values."""
        batch, heads, keys, _ = k.shape
        identity = torch.eye(keys, dtype=k.dtype, device=k.device)
        return self(q, k, identity.expand(batch, heads, keys, keys), key_mask, **tokens)

    def extra_repr(self) -> str:
        """The settings, for printing a model."""
        return ", ".join(f"{name}={value!r}" for name, value in self.settings.items())


def whole_number(name: str, value: Any, low: int, high: int | None = None) -> int:
    """The value, if it is an int (and not a bool) of at least `low` and at most `high`; kernels take none beyond 2^48."""
    if high is None and type(value) is int and value > 2**48:
        high = 2**48
    inside = type(value) is int and low <= value and (high is None or value <= high)
    limits = f"of at least {low}" if high is None else f"from {low} to {high}"
    return checked(name, value, inside, f"a whole number {limits}")


def positive_number(name: str, value: Any) -> float:
    """The value as a float, if it is a finite number above 0."""
    inside = type(value) in (int, float) and math.isfinite(value) and value > 0
    return float(checked(name, value, inside, "a finite number above 0"))


def true_or_false(name: str, value: Any) -> bool:
    """The value, if it is a bool."""
    return checked(name, value, type(value) is bool, "true or false")


def checked(name: str, value: Any, inside: bool, allowed: str) -> Any:
    """The value, if `inside` holds; otherwise an error that states what is `allowed`."""
    if not inside:
        raise ApproxError(f"Setting '{name}' is {shown(value)}; allowed is {allowed}. Change it or leave it out.")
    return value


class HeadGroups(Mechanism):
    """Split the heads of a layer into groups, each with its own mechanism, and join the outputs in the order of the heads.

    A plan builds it from rules that name heads; a rule cannot name it. In each call, a group whose `exact_below`
    exceeds the number of keys runs exact attention. Calibration, penalties and the like go to the groups' mechanisms,
    which are modules too.

    Args:
        groups: Pairs of head numbers and a mechanism for that many heads; each head of the layer is in
            exactly one of them.
    """

    def __init__(self, groups: Sequence[tuple[Sequence[int], Mechanism]]) -> None:
        first = groups[0][1]
        order = [head for heads, _ in groups for head in heads]
        super().__init__(len(order), first.head_dim, causal=first.causal, scale=first.scale)
        self.groups = nn.ModuleList(mechanism for _, mechanism in groups)
        self._parts = [as_index(heads) for heads, _ in groups]
        self._back = None if order == sorted(order) else [order.index(head) for head in range(len(order))]
        # Below every limit the whole layer is exact.
        self.exact_below = min(mechanism.exact_below for _, mechanism in groups)

    @property
    def decode_state(self) -> str:
        """Bounded if every group's is; otherwise all groups read the cache that one of them needs."""
        states = {mechanism.decode_state for _, mechanism in self.members()}
        return next(state for state in ("cache", "ring", "recurrent") if state in states)

    @property
    def reads_tokens(self) -> bool:
        """Whether any group does."""
        return any(mechanism.reads_tokens for _, mechanism in self.members())

    def members(self) -> Iterator[tuple[slice | list[int], Mechanism]]:
        """The heads of each group, as an index, and its mechanism."""
        yield from zip(self._parts, self.groups, strict=True)  # type: ignore[misc]  # a ModuleList is typed as holding any modules

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None = None,
        *,
        dropout: float = 0.0,
        **tokens: Tensor,
    ) -> Tensor:
        """Attend; each mechanism applies dropout in its own way."""
        outputs = []
        for heads, mechanism in self.members():
            own = heads_of(q, k, heads)
            parts = q[:, heads], k[:, own], v[:, own]
            if k.shape[-2] < mechanism.exact_below:
                out = exact_attention(*parts, key_mask, causal=self.causal, scale=self.scale, dropout=dropout)
            else:
                more = tokens if mechanism.reads_tokens else {}
                out = mechanism(*parts, key_mask, dropout=dropout, **more)
            outputs.append(out)
        return self._joined(outputs)

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, state: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Attend from one state that holds those of all groups: each tensor's name begins with its group's number."""
        outputs, after = [], {}
        for number, (heads, mechanism) in enumerate(self.members()):
            own, group = f"{number}.", None
            if state is not None:
                group = {name.removeprefix(own): x for name, x in state.items() if name.startswith(own)}
            of_keys = heads_of(q, k, heads)
            out, group = mechanism.decode(q[:, heads], k[:, of_keys], v[:, of_keys], key_mask, group)
            outputs.append(out)
            after |= {own + name: x for name, x in group.items()}
        return self._joined(outputs), after

    def extra_repr(self) -> str:
        """The heads of each group, in their order."""
        return f"heads={[list(range(self.heads))[p] if isinstance(p, slice) else p for p in self._parts]}"

    def _joined(self, parts: list[Tensor]) -> Tensor:
        joined = torch.cat(parts, 1)
        return joined if self._back is None else joined[:, self._back]


class LocalAttention(Mechanism):
    """Softmax attention over the keys around each query, in O(n (left + right) D).

    Distances are measured in input positions, as models number them, and not in real tokens as in the other patterns.
    The two differ only for masks with gaps, where padding inside the window takes the place of keys.

    Source: Beltagy, Peters, Cohan, 2020, Longformer, arXiv 2004.05150; departs from it in having no global
    tokens.

    Args:
        heads: Number of heads, H.
        head_dim: Size of a head, D.
        causal: Whether a query sees only keys at or before its own position; `right` then has no effect.
        scale: Factor of the scores.
        left: Keys seen before a query's own position, 0 or more.
        right: Keys seen after a query's own position, 0 or more.

    Raises:
        ApproxError: if a setting is wrong.
    """

    decode_state: ClassVar[Literal["cache", "ring", "recurrent"]] = "ring"
    source: ClassVar[str] = "Beltagy et al. 2020, Longformer, arXiv 2004.05150"
    exact_when: ClassVar[str] = "left and right >= the length of the sequence - 1."

    def __init__(
        self, heads: int, head_dim: int, *, causal: bool, scale: float, left: int = 128, right: int = 128
    ) -> None:
        super().__init__(heads, head_dim, causal=causal, scale=scale)
        self.left = whole_number("left", left, 0)
        self.right = whole_number("right", right, 0)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, *, dropout: float = 0.0
    ) -> Tensor:
        """Attend; dropout acts on the attention weights."""
        right = 0 if self.causal else self.right
        return local_attention(q, k, v, key_mask, left=self.left, right=right, scale=self.scale, dropout=dropout)

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, state: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Attend from tokens that follow those in a state: a ring of the last `left` keys."""
        ring = extended(state, k, v, key_mask)
        k, v, key_mask = content(ring)
        if q.shape[2] == 1 and k.shape[2] <= self.left + 1:
            out = exact_attention(q, k, v, key_mask, causal=False, scale=self.scale)
        else:
            out = self(q, k, v, key_mask)
        return out, newest(ring, self.left)


def unusable_state(mechanism: Mechanism) -> str | None:
    """Why a mechanism cannot attend with the tensors it holds, naming the first bad one; None if it can.

    Each tensor is compared with one built from the same settings: it needs the same shape, the same dtype (or another
    floating one), finite numbers, and integers within the range of the random draws.
    """
    made = type(mechanism)(
        mechanism.heads, mechanism.head_dim, causal=mechanism.causal, scale=mechanism.scale, **mechanism.settings
    ).state_dict()
    for name, held in mechanism.state_dict().items():
        if name not in made:
            return f"{name} does not belong to a mechanism with these settings"
        if why := _difference(held, made[name]):
            return f"{name} {why}"
    return None


def _difference(held: Tensor, made: Tensor) -> str | None:
    if held.shape != made.shape:
        return f"has shape {list(held.shape)}; its settings make {list(made.shape)}"
    if held.dtype != made.dtype and not (held.is_floating_point() and made.is_floating_point()):
        return f"is {held.dtype}; its settings make {made.dtype}"
    if held.is_floating_point():
        return None if held.isfinite().all() else "holds NaN or infinity"
    if held.numel() and (held.min() < 0 or held.max() >= 2**31):
        return f"holds values from {int(held.min())} to {int(held.max())}; draws lie between 0 and 2^31 - 1"
    return None


MECHANISMS: dict[str, type[Mechanism]] = {
    "local": LocalAttention,
}
