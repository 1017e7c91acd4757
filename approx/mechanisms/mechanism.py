"""The base class of all attention mechanisms, groups of heads, and the checks of settings and of loaded state."""

import inspect
import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from approx.errors import ApproxError, Exit, shown
from approx_kernels.ops.exact.api import exact_attention
from approx_kernels.tokens import as_index, heads_of


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
        TypeError: when a class is defined that leaves out what a mechanism must define, unless it says `abstract=True`.
    """

    supports_causal: ClassVar[bool] = True
    supports_bidirectional: ClassVar[bool] = True
    supports_decode: ClassVar[bool]
    # Whether some settings add parameters; those of an instance are its `parameters()`.
    trainable: ClassVar[bool] = False
    # Whether queries skip keys; the captured mass, exact attention's weight on the keys they keep, then predicts the
    # error.
    sparse: ClassVar[bool] = False
    # What the causal form keeps during decoding: a growing `cache` of all keys and values, which `forward` reads; a
    # `ring` of those in reach; or a `recurrent` state. The last two are bounded and `decode` reads them.
    decode_state: ClassVar[Literal["cache", "ring", "recurrent"]] = "cache"
    # Whether `forward` takes `notes`, a dictionary stored with the KV cache: results about its keys, tensors of first
    # dimension B, that later calls reuse.
    takes_notes: ClassVar[bool] = False
    # Which key masks are supported; `any` means all of them.
    padding: ClassVar[str] = "any"
    # `exact` if everything is differentiated; `through weights, not choices` if the choice of keys or clusters is not.
    gradient: ClassVar[str] = "exact"
    # What its estimate for the keys that it does not weigh exactly is called; None if it weighs or skips each key. Where some
    # keys are exact, `exact_keys.without_estimate` switches it off.
    estimate: ClassVar[str | None] = None
    # Whether it is exact attention with any settings on any input.
    always_exact: ClassVar[bool] = False
    # Whether it computes or sorts all pairs, so that it saves nothing.
    quadratic: ClassVar[bool] = False
    # `whole` if `torch.compile` can trace every step; otherwise the reason why it cannot, and the mechanism is compiled
    # as one operator. An export always traces the steps.
    compiles: ClassVar[str] = "whole"
    # Whether it runs in C on a CPU; that is faster than compiled code, so it is compiled as one operator there.
    runs_c: ClassVar[bool] = False
    # Values of settings that converted folders of earlier versions do not state.
    earlier: ClassVar[dict[str, Any]] = {}
    # Smallest and largest value of buffers and parameters that are limited, by name.
    ranges: ClassVar[dict[str, tuple[float, float]]] = {}
    # The settings that give the form of the paper where the defaults add to it: what kernels compute and benchmarks time.
    published: ClassVar[dict[str, Any]] = {}
    # Settings that count tokens, which shrink with the length when a pattern is drawn over fewer tokens.
    token_settings: ClassVar[tuple[str, ...]] = ()
    # The settings that tests run: small enough to approximate a few dozen tokens. By variant; "" has no name.
    examples: ClassVar[dict[str, dict[str, Any]]] = {"": {}}
    # The settings that benchmarks time, by form.
    timed: ClassVar[dict[Literal["bidirectional", "causal"], tuple[dict[str, Any], ...]]] = {}
    # The settings that a search tries, from cheap to accurate, and when it does: `always`, only if it trains
    # (`healed`), or only if the mechanism is `named`.
    candidates: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    searched: ClassVar[Literal["always", "healed", "named"]] = "named"
    # Its colour in plots, `#rrggbb`, legible on white and on near-black; None takes one that follows from its name.
    colour: ClassVar[str | None] = None
    source: ClassVar[str]
    exact_when: ClassVar[str]

    # Exact attention runs below this number of keys; a plan sets it.
    exact_below: int = 0
    # Whether training recomputes this in the backward pass instead of keeping its intermediates; a plan sets it.
    recompute: bool = False

    def __init_subclass__(cls, *, abstract: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not abstract:
            refuse_incomplete(cls)

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

    @classmethod
    def for_layer(cls, settings: dict[str, Any], rank: int) -> dict[str, Any]:
        """The settings of one layer; `rank` counts, from 0 upwards, the layers that use this mechanism in a plan.

        Settings with a meaning only across layers, such as alternating steps, are resolved here.
        """
        return settings

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`forward` with its hooks; with `recompute`, training keeps only the inputs and recomputes the rest."""
        if (out := self.as_one_operator(*args, **kwargs)) is not None:
            return out
        if self.recompute and self.training and torch.is_grad_enabled():
            return checkpoint(super().__call__, *args, use_reentrant=False, **kwargs)
        return super().__call__(*args, **kwargs)

    def as_one_operator(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """The output as one operator, for observers that cannot follow the steps; None where they can.

        The package replaces this by `attend_as_one_operator`. In a converted folder every step is one of PyTorch's own.
        """
        return None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings this mechanism was made with, as the constructor accepts them."""
        return {name: getattr(self, name) for name in self.defaults()}

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, *, dropout: float = 0.0
    ) -> Tensor:
        """Attend.

        Args:
            q: Queries, [B, H, L, D], float.
            k: Keys, [B, G, S, D], where H is a multiple of G: query head h reads key head h // (H / G).
            v: Values, [B, G, S, E].
            key_mask: [B, S] bool, True at real keys; None when all are real. Where L <= S, query i is the token of key
                S - L + i and is padding if that key is. Outputs of padding have no meaning. Padding may hold NaN,
                except for `exact`, `flash`, `sdpa` and on GPUs.
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

    @property
    def warning(self) -> str | None:
        """A warning to show on conversion with these settings, such as that the model needs fine-tuning."""
        return None

    @property
    def needs_calibration(self) -> bool:
        """Whether `calibrate` must fit the state before the mechanism is usable."""
        return False

    @property
    def takes_calibration(self) -> bool:
        """Whether `calibrate` fits anything, required (`needs_calibration`) or not."""
        return self.needs_calibration

    def calibrate(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> None:
        """Fit the state to a calibration batch, passed as to `forward`; conversion calls it once, without gradients."""
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

    @property
    def averages(self) -> bool:
        """Whether outputs are means of values; otherwise weights may be negative, and their sums differ from 1."""
        return True

    def weights(self, q: Tensor, k: Tensor, key_mask: Tensor | None = None, **tokens: Tensor) -> Tensor:
        """Dense attention weights, [B, H, L, S], for plots: the outputs for identity values."""
        batch, heads, keys, _ = k.shape
        identity = torch.eye(keys, dtype=k.dtype, device=k.device)
        return self(q, k, identity.expand(batch, heads, keys, keys), key_mask, **tokens)

    @classmethod
    @abstractmethod
    def exact_settings(cls, length: int) -> dict[str, Any] | None:
        """Settings that make it exact on up to `length` tokens: {} if it always is, None if it cannot be."""
        raise NotImplementedError

    @abstractmethod
    def approximates_from(self) -> int | None:
        """Fewest real tokens at which every head that can differ from exact attention does; None if none can."""
        raise NotImplementedError

    def differs_from(self) -> int | None:
        """Fewest real tokens at which any head differs from exact attention; None if none can."""
        return self.approximates_from()

    def approximated_pairs(self, length: int) -> float:
        """Share of the pairs of `length` real tokens, averaged over heads, whose weight is not that of exact attention.

        A pair counts if its key is left out, or its score is not computed from its own query and key. By default that
        is every pair from `differs_from` on.
        """
        start = self.differs_from()
        return float(start is not None and length >= start)

    def pattern(self, length: int) -> Tensor | None:
        """Which query sees which key in each step, [steps, n, n] bool; None unless positions alone decide it.

        Raises:
            ValueError: if the pattern is not that of every input.
        """
        return None

    @abstractmethod
    def flops(self, length: int) -> int:
        """FLOPs of the forward pass over one sequence of `length` tokens, all heads; a multiply-add counts as 2."""
        raise NotImplementedError

    @abstractmethod
    def memory(self, length: int) -> int:
        """Bytes of the largest temporaries of the forward pass over one sequence of `length` tokens in float32."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """The settings, for printing a model."""
        return ", ".join(f"{name}={value!r}" for name, value in self.settings.items())


# Those that a converted layer's entry in config.json can name. The package fills this, and so does a converted folder.
MECHANISMS: MutableMapping[str, type[Mechanism]] = {}


def refuse_incomplete(kind: type[Mechanism]) -> None:
    """Refuse a class that leaves out what every mechanism must define.

    Raises:
        TypeError: naming what is missing, and where it is described.
    """
    missing = [name for name in ("source", "exact_when", "supports_decode") if not hasattr(kind, name)]
    missing += [name for name in dir(Mechanism) if getattr(getattr(kind, name), "__isabstractmethod__", False)]
    if missing:
        raise TypeError(
            f'{kind.__name__} does not define {", ".join(missing)}. CONTRIBUTING.md, "Add a mechanism", says what a '
            "mechanism must define."
        )


def beyond(distance: int, length: int, *, causal: bool) -> float:
    """Share of the pairs of `length` tokens that are farther apart than `distance`; causal pairs look back only."""
    apart = max(length - 1 - distance, 0)
    return apart * (apart + 1) / (length * (length + 1 if causal else length))


def latest(lengths: Iterable[int | None]) -> int | None:
    """The largest of several `approximates_from`; None if nothing approximates."""
    return max((length for length in lengths if length is not None), default=None)


def whole_number(name: str, value: Any, low: int, high: int | None = None) -> int:
    """The value, if it is an int (and not a bool) of at least `low` and at most `high`; kernels take none beyond 2^48."""
    if high is None and type(value) is int and value > 2**48:
        high = 2**48
    inside = type(value) is int and low <= value and (high is None or value <= high)
    limits = f"of at least {low}" if high is None else f"from {low} to {high}"
    return checked(name, value, inside, f"a whole number {limits}")


def power_of_two(name: str, value: Any) -> int:
    """The value, if it is an int that is 1, 2, 4, 8 and so on."""
    return checked(name, value, type(value) is int and value.bit_count() == 1 and value > 0, "a power of two")


def positive_number(name: str, value: Any) -> float:
    """The value as a float, if it is a finite number above 0."""
    inside = type(value) in (int, float) and math.isfinite(value) and value > 0
    return float(checked(name, value, inside, "a finite number above 0"))


def number_up_to_one(name: str, value: Any) -> float:
    """The value as a float, if it is a number above 0 and at most 1."""
    inside = type(value) in (int, float) and 0 < value <= 1
    return float(checked(name, value, inside, "a number above 0 and at most 1"))


def number_from_zero_to_one(name: str, value: Any) -> float:
    """The value as a float, if it is a number from 0 to 1."""
    inside = type(value) in (int, float) and 0 <= value <= 1
    return float(checked(name, value, inside, "a number from 0 to 1"))


def seed_number(value: Any) -> int:
    """The value, if a `torch.Generator` takes it as a seed."""
    return whole_number("seed", value, 0, 2**63 - 1)


def true_or_false(name: str, value: Any) -> bool:
    """The value, if it is a bool."""
    return checked(name, value, type(value) is bool, "true or false")


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """The value, if it is among the allowed words."""
    return checked(name, value, value in allowed, f"one of {', '.join(allowed)}")


def checked(name: str, value: Any, inside: bool, allowed: str) -> Any:
    """The value, if `inside` holds; otherwise an error that states what is `allowed`."""
    if not inside:
        message = f"Setting '{name}' is {shown(value)}; allowed is {allowed}. Change it or leave it out."
        raise ApproxError(message, allowed=allowed)
    return value


class HeadGroups(Mechanism, abstract=True):
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
    def supports_decode(self) -> bool:
        """Whether every group does."""
        return all(mechanism.supports_decode for _, mechanism in self.members())

    @property
    def decode_state(self) -> str:
        """Bounded if every group's is; otherwise all groups read the cache that one of them needs."""
        states = {mechanism.decode_state for _, mechanism in self.members()}
        return next(state for state in ("cache", "ring", "recurrent") if state in states)

    @property
    def sparse(self) -> bool:
        """Whether any group is."""
        return any(mechanism.sparse for _, mechanism in self.members())

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
            key_heads = heads_of(q, k, heads)
            parts = q[:, heads], k[:, key_heads], v[:, key_heads]
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
            prefix, group = f"{number}.", None
            if state is not None:
                group = {name.removeprefix(prefix): x for name, x in state.items() if name.startswith(prefix)}
            of_keys = heads_of(q, k, heads)
            out, group = mechanism.decode(q[:, heads], k[:, of_keys], v[:, of_keys], key_mask, group)
            outputs.append(out)
            after |= {prefix + name: x for name, x in group.items()}
        return self._joined(outputs), after

    def approximates_from(self) -> int | None:
        """The value of the group that stays exact the longest."""
        return latest(mechanism.approximates_from() for _, mechanism in self.members())

    def differs_from(self) -> int | None:
        """The value of the group that differs first."""
        return min(filter(None, (mechanism.differs_from() for _, mechanism in self.members())), default=None)

    def flops(self, length: int) -> int:
        """The sum over the groups."""
        return sum(mechanism.flops(length) for _, mechanism in self.members())

    def memory(self, length: int) -> int:
        """The largest of the groups, which attend one after the other, and their outputs before they are joined."""
        largest = max(mechanism.memory(length) for _, mechanism in self.members())
        return largest + 4 * self.heads * length * self.head_dim

    def extra_repr(self) -> str:
        """The heads of each group, in their order."""
        return f"heads={[list(range(self.heads))[p] if isinstance(p, slice) else p for p in self._parts]}"

    def _joined(self, parts: list[Tensor]) -> Tensor:
        joined = torch.cat(parts, 1)
        return joined if self._back is None else joined[:, self._back]


def unusable_state(mechanism: Mechanism) -> str | None:
    """Why a mechanism cannot attend with the tensors it holds, naming the first bad one; None if it can.

    Each tensor is compared with one built from the same settings: it needs the same shape, the same dtype (or another
    floating one), finite numbers, and integers within the range of the random draws.
    """
    made = type(mechanism)(
        mechanism.heads, mechanism.head_dim, causal=mechanism.causal, scale=mechanism.scale, **mechanism.settings
    ).state_dict()
    for name, tensor in mechanism.state_dict().items():
        if name not in made:
            return f"{name} does not belong to a mechanism with these settings"
        if why := _difference(tensor, made[name]):
            return f"{name} {why}"
    return None


def _difference(tensor: Tensor, made: Tensor) -> str | None:
    if tensor.shape != made.shape:
        return f"has shape {list(tensor.shape)}; its settings make {list(made.shape)}"
    if tensor.dtype != made.dtype and not (tensor.is_floating_point() and made.is_floating_point()):
        return f"is {tensor.dtype}; its settings make {made.dtype}"
    if tensor.is_floating_point():
        return None if tensor.isfinite().all() else "holds NaN or infinity"
    if tensor.numel() and (tensor.min() < 0 or tensor.max() >= 2**31):
        return f"holds values from {int(tensor.min())} to {int(tensor.max())}; draws lie between 0 and 2^31 - 1"
    return None


# Global tokens whose positions depend on the token ids of each sample.
BY_CONTENT = ("separator", "question")


def positions_of(global_tokens: Any, words: tuple[str, ...]) -> list[int]:
    """The positions of the global tokens, in order; empty if content chooses them."""
    if isinstance(global_tokens, str) and global_tokens in words:
        return [0] if global_tokens == "first" else []
    whole = isinstance(global_tokens, list) and all(type(token) is int and token >= 0 for token in global_tokens)
    inside = whole and 0 < len(global_tokens) == len(set(global_tokens))
    listed = ", ".join(map(repr, words))
    allowed = f"{listed} or a list of different whole numbers of at least 0"
    return sorted(checked("global_tokens", global_tokens, inside, allowed))


def chosen_by_content(
    which: Any, separator: int | None, tokens: Tensor | None, key_mask: Tensor | None, shape: tuple[int, int]
) -> Tensor:
    """The separators of each sample, or its question, which ends with the first separator, [B, S] bool.

    Args:
        which: One of `BY_CONTENT`.
        separator: Id of the separator token.
        tokens: Token ids, [B, S].
        key_mask: [B, S] bool, True at real keys; None when all are real.
        shape: B and S.

    Raises:
        ApproxError: if the ids or the separator are missing.
        ValueError: if there is not an id for each key.
    """
    if tokens is None or separator is None:
        missing = "the token ids, 'tokens'" if tokens is None else "the setting 'separator', the id of that token"
        raise ApproxError(f"Setting 'global_tokens' is {shown(which)}, which needs {missing}; pass it.")
    if tuple(tokens.shape) != shape:
        raise ValueError(f"tokens has shape {list(tokens.shape)}; expected {list(shape)}, an id for each key.")
    separators = tokens == separator
    if key_mask is not None:
        # Some tokenizers pad with the separator.
        separators = separators & key_mask
    if which == "separator":
        return separators
    ends = separators.cumsum(1)
    question = ((ends == 0) | separators & (ends == 1)) & separators.any(1, keepdim=True)
    return question if key_mask is None else question & key_mask
