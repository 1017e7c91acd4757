"""What every attention mechanism is, and how its settings are checked."""

import inspect
import math
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.compiler import assume_constant_result
from torch.utils.checkpoint import checkpoint

from approx.errors import ApproxError, Exit
from approx_kernels.dispatch.one_operator import attend_opaquely, is_one_operator
from approx_kernels.dispatch.opaque import name_kind, told


class Mechanism(nn.Module):
    """The thing between the projections of an attention layer.

    A subclass names its settings as keyword arguments of its constructor (there is no second list), keeps
    each under its own name as an attribute, and holds all state as parameters or persistent buffers. The
    letters of the shapes are explained in the package.

    Args:
        heads: Number of heads, H.
        head_dim: Size of a head, D.
        causal: Whether a query sees only keys at or before its own position; with fewer queries than keys,
            query i stands at position S - L + i, which is decoding on top of an ordinary cache.
        scale: Factor of the scores, as the model passes it.

    Raises:
        ApproxError: if the mechanism lacks the form asked for, or a setting is wrong.
    """

    supports_causal: ClassVar[bool] = True
    supports_bidirectional: ClassVar[bool] = True
    supports_decode: ClassVar[bool]
    # Whether any settings bring parameters; what one instance can learn is its `parameters()`.
    trainable: ClassVar[bool] = False
    # Whether a query leaves keys out, so that the weight that exact attention gives to the others, the captured mass,
    # predicts the error.
    sparse: ClassVar[bool] = False
    # What the causal form keeps while tokens are decoded one by one: a `cache` of all keys and values, which grows and is
    # read by `forward`; a `ring` of the ones in reach; or a `recurrent` state. The latter two are bounded and read by `decode`.
    decode_state: ClassVar[Literal["cache", "ring", "recurrent"]] = "cache"
    # Whether `forward` takes, as the keyword `notes`, a dictionary that stays beside a cache: what it has worked out about
    # its keys, tensors of first dimension B, which later calls need not work out again.
    takes_notes: ClassVar[bool] = False
    # Which key masks are honoured; `any` means those of every form.
    padding: ClassVar[str] = "any"
    # `exact` where the gradient is that of all that was computed; `through weights, not choices` where it leaves out how keys
    # or clusters were chosen.
    gradient: ClassVar[str] = "exact"
    # Whether it is exact attention with any settings and on any input.
    always_exact: ClassVar[bool] = False
    # `whole` where a compiler such as `torch.compile` follows every step; otherwise why it cannot, and the compiler takes the
    # mechanism as one operator. An export has the steps in any case.
    compiles: ClassVar[str] = "whole"
    # Whether it runs in C on a CPU, which is faster than what compilers make of it, so that they take one operator there.
    runs_c: ClassVar[bool] = False
    # Values of settings that converted folders of earlier versions do not state, which then had no others.
    earlier: ClassVar[dict[str, Any]] = {}
    source: ClassVar[str]
    exact_when: ClassVar[str]

    # The number of keys below which exact attention takes the place of this; a plan sets it.
    exact_below: int = 0
    # Whether training computes this again in the backward pass instead of keeping what it needs; a plan sets it.
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
        """The names of the settings with their defaults, read from the constructor."""
        parameters = inspect.signature(cls.__init__).parameters.values()
        return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}

    @classmethod
    def for_layer(cls, settings: dict[str, Any], rank: int) -> dict[str, Any]:
        """The settings of one layer among those that a plan gives this mechanism; `rank` counts them from 0, upwards.

        Settings that mean something only across layers, such as steps in turn, are written out here.
        """
        return settings

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`forward` with its hooks; where a plan says so, training keeps its inputs alone and runs it again."""
        q = args[0] if args else kwargs["q"]
        if is_one_operator(q, whole=self.compiles == "whole", runs_c=self.runs_c):
            return self._as_one_operator(*args, **kwargs)
        if self.recompute and self.training and torch.is_grad_enabled():
            return checkpoint(super().__call__, *args, use_reentrant=False, **kwargs)
        return super().__call__(*args, **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        name_kind(cls)

    def _as_one_operator(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None = None,
        *,
        dropout: float = 0.0,
        tokens: Tensor | None = None,
    ) -> Tensor:
        return attend_opaquely(self, self._told(), q, k, v, key_mask, dropout, tokens)

    @assume_constant_result
    def _told(self) -> str:
        form = {"heads": self.heads, "head_dim": self.head_dim, "causal": self.causal, "scale": self.scale}
        return told(type(self), form | self.settings)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings this mechanism was made with; the constructor takes them back."""
        return {name: getattr(self, name) for name in self.defaults()}

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, *, dropout: float = 0.0
    ) -> Tensor:
        """Attend.

        Args:
            q: Queries, [B, H, L, D], float.
            k: Keys, [B, G, S, D], where H is a multiple of G: query head h reads key head h // (H / G).
            v: Values, [B, G, S, E].
            key_mask: [B, S] bool, True at real keys; None when all are real. Where L <= S, query i is the token of key S - L + i and
                as real. Outputs of padding have no meaning. It may hold NaN, but not for `exact`, `flash`, `sdpa` and on GPUs.
            dropout: Probability with which an attention weight is dropped; 0 outside of training.

        Returns:
            [B, H, L, E] in the dtype of q; 0 for a query without any allowed key.

        Raises:
            ValueError: if the shapes or dtypes do not fit together.
        """
        raise NotImplementedError

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, state: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Attend from tokens that follow those in a state; what `forward` gives for the last of all tokens.

        Only where the mechanism is causal and its `decode_state` is not `cache`.

        Args:
            q: Queries of the last tokens, [B, H, L, D], float.
            k: Keys that are not in the state yet, [B, G, S, D], L <= S; the last L belong to the queries.
            v: Their values, [B, G, S, E].
            key_mask: [B, S] bool, True where these are real; None when all are.
            state: What the last call returned, its samples reordered, repeated or chosen at will along the first
                dimension of every tensor; None before the first token.

        Returns:
            [B, H, L, E] in the dtype of q, and the state with these tokens in it: tensors of first dimension B,
            whose sizes have a bound that does not depend on the number of tokens.
        """
        raise NotImplementedError

    @property
    def warning(self) -> str | None:
        """A sentence that whoever converts with these settings must read, such as that fine-tuning has to follow."""
        return None

    @property
    def needs_calibration(self) -> bool:
        """Whether the state must be fitted to inputs, by `calibrate`, before it means anything."""
        return False

    @property
    def takes_calibration(self) -> bool:
        """Whether `calibrate` fits anything; what `needs_calibration` does, and other mechanisms may do without."""
        return self.needs_calibration

    def calibrate(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> None:
        """Fit the state to a calibration batch, given as to `forward`; conversion calls it once, without gradients."""
        raise NotImplementedError

    def penalty(self) -> Tensor | None:
        """What training adds to its loss, times a weight that the trainer chooses, as a scalar; None for nothing."""
        return None

    def after_step(self, step: int) -> None:
        """What training calls once a step is done, counted from 1, for state that changes between steps."""

    @property
    def reads_tokens(self) -> bool:
        """Whether `forward` and `weights` need the token ids of the keys, [B, S], as the keyword `tokens`."""
        return False

    def weights(self, q: Tensor, k: Tensor, key_mask: Tensor | None = None, **tokens: Tensor) -> Tensor:
        """Dense attention weights, [B, H, L, S], for plots: what the mechanism does to identity values."""
        batch, heads, keys, _ = k.shape
        identity = torch.eye(keys, dtype=k.dtype, device=k.device)
        return self(q, k, identity.expand(batch, heads, keys, keys), key_mask, **tokens)

    @classmethod
    def exact_settings(cls, length: int) -> dict[str, Any] | None:
        """Settings with which it equals exact attention on up to `length` tokens: none if it always does, None if it cannot."""
        raise NotImplementedError

    def approximates_from(self) -> int | None:
        """Fewest real tokens with which every head differs from exact attention, those aside that never do; None if none does."""
        raise NotImplementedError

    def differs_from(self) -> int | None:
        """Fewest real tokens with which any head differs from exact attention; None if none does."""
        return self.approximates_from()

    def flops(self, length: int) -> int:
        """Multiply-adds, counted as 2, of one sequence of `length` tokens: all heads, forward."""
        raise NotImplementedError

    def memory(self, length: int) -> int:
        """Bytes of the largest temporaries for one sequence of `length` tokens in float32, forward."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """The settings, for printing a model."""
        return ", ".join(f"{name}={value!r}" for name, value in self.settings.items())


def latest(lengths: Iterable[int | None]) -> int | None:
    """The largest of what `approximates_from` said; None if nothing approximates."""
    return max((length for length in lengths if length is not None), default=None)


def whole_number(name: str, value: Any, low: int, high: int | None = None) -> int:
    """The value, if it is an int (and not a bool) of at least `low` and at most `high`."""
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
    """The value, if it is `inside` of what is `allowed`, in words."""
    if not inside:
        raise ApproxError(f"Setting '{name}' is {value!r}; allowed is {allowed}. Change it or leave it out.")
    return value
