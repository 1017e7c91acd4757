"""One sparse pattern at one length: its validated settings and its steps."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from approx.errors import ApproxError, Exit, did_you_mean
from approx.mechanisms import MECHANISMS, Mechanism
from approx.mechanisms.refusals import refusals

# Cost is quadratic: 8,192 tokens take some seconds and about 2 GB.
LONGEST = 8192


@dataclass(frozen=True, eq=False)
class Pattern:
    """The keys that each query sees in each step of a mechanism.

    Attributes:
        name: The mechanism, e.g. `strided`.
        length: Number of tokens, n.
        causal: Whether queries see only keys at or before their own position.
        settings: All settings of the mechanism.
        stride: The stride, even if it is chosen by the length; None for mechanisms without one.
        steps: The steps that the settings select, [p, n, n] bool, rows are queries.
    """

    name: str
    length: int
    causal: bool
    settings: dict[str, Any]
    stride: int | None
    steps: NDArray[np.bool_]

    @property
    def merged(self) -> NDArray[np.bool_]:
        """The union of the steps, [n, n] bool."""
        return np.logical_or.reduce(self.steps)

    @property
    def description(self) -> str:
        """The settings for a title: those that affect the steps."""
        settings = self.settings | ({} if self.stride is None else {"stride": self.stride})
        silent = ("mode", *(name for name, value in settings.items() if value is None or value is False))
        return ", ".join(f"{name} {value}" for name, value in settings.items() if name not in silent)

    @property
    def layers(self) -> list[NDArray[np.bool_]]:
        """The masks of consecutive layers, as many as there are steps, lowest first; each is [n, n] bool.

        If heads take the steps in turn, the output projection mixes them, so information flows as through merged steps.
        """
        return list(self.steps) if self.settings.get("mode") == "interleave" else [self.merged] * len(self.steps)

    def mechanisms(self, heads: int, head_dim: int) -> dict[str, Mechanism]:
        """The mechanisms that compute the pattern, by name: one, or one per layer if layers take the steps in turn."""
        kind, scale = MECHANISMS[self.name], 1 / math.sqrt(head_dim)
        layers = [kind.for_layer(self.settings, rank) for rank in range(len(self.steps))]
        names = [f"{self.name}, layer {rank + 1}" for rank in range(len(layers))]
        if all(settings == layers[0] for settings in layers):
            layers, names = layers[:1], [self.name]
        made = (kind(heads, head_dim, causal=self.causal, scale=scale, **settings) for settings in layers)
        return dict(zip(names, made, strict=True))

    def shrunk(self, length: int) -> "Pattern":
        """The pattern over fewer tokens, for drawing.

        Windows and blocks keep their share of the sequence. A stride l keeps l / sqrt(n) if at least four strides fit,
        and a summary keeps its share of the stride, so that both steps look alike.
        """
        if length >= self.length:
            return self
        settings, share = dict(self.settings), length / self.length
        for name in MECHANISMS[self.name].token_settings:
            if isinstance(settings.get(name), int):
                settings[name] = _times(settings[name], share)
        if isinstance(settings.get("shift"), int):
            settings["shift"] = min(settings["shift"], settings["size"] - 1)
        if isinstance(settings.get("global_tokens"), list):
            settings["global_tokens"] = sorted({int(token * share) for token in settings["global_tokens"]})
        if self.stride is not None:
            most = length // min(4, math.ceil(self.length / self.stride))
            settings["stride"] = max(1, min(_times(self.stride, math.sqrt(share)), most))
            if "summary" in settings:
                summary = min(settings["summary"], self.stride)
                settings["summary"] = _times(summary, settings["stride"] / self.stride)
        return find_pattern(self.name, length, self.causal, settings)


def pattern_names() -> list[str]:
    """The mechanisms that choose keys by position alone."""
    return [name for name, kind in MECHANISMS.items() if kind.sparse and _has_pattern(kind)]


def find_pattern(name: str, length: int, causal: bool, settings: dict[str, Any]) -> Pattern:
    """Make a pattern.

    Args:
        name: Name of a mechanism.
        length: Number of tokens, from 1 to `LONGEST`.
        causal: Whether queries see only keys at or before their own position.
        settings: Settings of the mechanism; the others have their defaults.

    Raises:
        ApproxError: if the mechanism is unknown, has no pattern or no such form, or the length is out of range; with
            all mistakes in the settings at once.
    """
    kind = _kind(name)
    defaults = kind.defaults()
    unknown = [setting for setting in settings if setting not in defaults]
    if unknown:
        allowed = f"Settings of '{name}': {', '.join(defaults)}."
        lines = [f"'{name}' has no setting '{one}'.{did_you_mean(one, defaults)} {allowed}" for one in unknown]
        raise ApproxError("\n".join(lines))
    form = "causal" if causal else "bidirectional"
    if not getattr(kind, f"supports_{form}"):
        remedy = "Leave out --causal" if causal else "Add --causal"
        able = [other for other in pattern_names() if getattr(MECHANISMS[other], f"supports_{form}")]
        raise ApproxError(f"'{name}' has no {form} form. {remedy}, or use one of {', '.join(able)}.", Exit.UNSUPPORTED)
    if not 1 <= length <= LONGEST:
        raise ApproxError(
            f"The length is {length} tokens; allowed is 1 to {LONGEST}, because the cost is quadratic. Patterns repeat: a "
            "shorter length shows the same."
        )
    complete = {**defaults, **settings}
    if wrong := refusals(name, kind, complete, 1, 1, causal=causal, scale=1.0):
        codes = {error.exit_code for error in wrong}
        raise ApproxError("\n".join(map(str, wrong)), codes.pop() if len(codes) == 1 else Exit.USAGE)
    made: Any = kind(1, 1, causal=causal, scale=1.0, **complete)
    if made.reads_tokens:
        raise ApproxError(
            f"With these settings '{name}' chooses keys by the words of each input, so it has no fixed pattern. Give "
            "positions instead, e.g. --set global_tokens=[0,100]."
        )
    try:
        steps = made.pattern(length).numpy()
    except (ValueError, TypeError, OverflowError, RuntimeError, MemoryError) as error:
        raise ApproxError(f"'{name}' cannot be made with these settings: {str(error).splitlines()[0]}") from None
    step, stride = complete.get("step"), made.stride_over(length) if "stride" in complete else None
    return Pattern(name, length, causal, complete, stride, steps if step is None else steps[step - 1 : step])


def _kind(name: str) -> type[Mechanism]:
    patterns = pattern_names()
    if name in patterns:
        return MECHANISMS[name]
    listed = f"Patterns: {', '.join(patterns)}."
    if name in MECHANISMS:
        raise ApproxError(
            f"'{name}' has no pattern: it does not choose keys by position alone. {listed}", Exit.UNSUPPORTED
        )
    raise ApproxError(f"Unknown pattern '{name}'.{did_you_mean(name, patterns)} {listed}")


def _has_pattern(kind: type[Mechanism]) -> bool:
    return kind(1, 1, causal=not kind.supports_bidirectional, scale=1.0).pattern(1) is not None


def _times(count: Any, share: float) -> Any:
    """A count of tokens in proportion; at least 1 unless it is 0."""
    return max(1, round(count * share)) if count else count
