"""The input lengths at which a conversion is checked: a short one, and one at which its mechanisms approximate."""

from typing import Any, NamedTuple

from approx.checkpoints.families import stock_class, stock_config
from approx.mechanisms.mechanism import latest
from approx.planning import positions
from approx.planning.anatomy import anatomy
from approx.planning.selection import ranges

SHORT = 40
# Limits the time of a check, which is a few forward passes on a CPU.
_LONGEST = 4096
# Tokens beyond the shortest approximated length, so that a block starting there holds more than one token.
_MARGIN = 8


class Trial(NamedTuple):
    """The size of an input.

    Attributes:
        length: Positions of a row: tokens, or frames of speech.
        padded: Number of padded positions in padded rows.
    """

    length: int
    padded: int

    @property
    def real(self) -> int:
        """Number of real positions in padded rows."""
        return self.length - self.padded


class _Layer(NamedTuple):
    number: int
    start: int | None
    fixed: int | None


def trials(model: Any) -> list[Trial]:
    """A short input, and one on which every layer of a converted model approximates, even in padded rows.

    Only one if the short one is long enough, or all inputs have the same size. The longer one has at most the model's
    positions, and at most 4,096.
    """
    layers = _layers(model)
    free = [layer for layer in layers if layer.fixed is None]
    if not free:
        return [Trial(max(layer.fixed or 0 for layer in layers), 0)]
    most = min(positions.limit(model.config) or _LONGEST, _LONGEST)
    short = Trial(min(SHORT, most), min(SHORT, most) // 4)
    start = latest(layer.start for layer in free) or 0
    real = start + _MARGIN
    if real <= short.real:
        return [short]
    padded = max(_MARGIN, real // 8)
    length = min(real + padded, most)
    # With few positions, reduce the padding so that the real tokens are still approximated.
    return [short, Trial(length, min(padded, max(length - start, 1)))]


def unseen(model: Any, tokens: int) -> str:
    """A note about layers that are exact on inputs of this many tokens, the longest tried; empty if there are none."""
    exact = [layer for layer in _layers(model) if layer.start is not None and layer.start > (layer.fixed or tokens)]
    if not exact:
        return ""
    numbers = ranges(layer.number for layer in exact)
    limit = positions.limit(model.config)
    if all(layer.fixed or (limit is not None and limit <= _LONGEST) for layer in exact):
        return f"; exact at every length this model takes: layers {numbers}"
    return f"; not checked where they approximate, from {latest(layer.start for layer in exact)} tokens on: layers {numbers}"


def _layers(model: Any) -> list[_Layer]:
    observed = anatomy(stock_config(model.config), stock_class(type(model))).sites
    fixed = {site.path: site.fixed_length for site in observed}
    return [
        _Layer(site["layer"], model.base_model.get_submodule(path).mechanism.approximates_from(), fixed[path])
        for path, site in model.config.approx["sites"].items()
    ]
