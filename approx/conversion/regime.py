"""The lengths that a conversion is checked at: a short one, and one at which its mechanisms approximate."""

from typing import Any, NamedTuple

from approx.checkpoints.families import stock_class, stock_config
from approx.mechanisms.mechanism import latest
from approx.planning import positions
from approx.planning.anatomy import anatomy
from approx.planning.selection import ranges

SHORT = 40
# A check is a few forward passes on a CPU, whatever the settings and the model allow.
_LONGEST = 4096
# Tokens beyond the shortest length: among fewer, a block that begins there would hold but one.
_MARGIN = 8


class Trial(NamedTuple):
    """The size of an input.

    Attributes:
        length: Positions of a row: tokens, or frames of speech.
        padded: How many of them are padding, in rows that are padded.
    """

    length: int
    padded: int

    @property
    def real(self) -> int:
        """Positions that are no padding in rows that are padded."""
        return self.length - self.padded


class _Layer(NamedTuple):
    number: int
    start: int | None
    fixed: int | None


def trials(model: Any) -> list[Trial]:
    """A short input, and one on which every layer of a converted model approximates, padded rows too.

    One will do where the short one is long enough, or all inputs have one size. The longer has as many positions as the
    model takes, or 4,096, where it should have more.
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
    # Where positions are few, rather little padding than a row that is exact for it.
    return [short, Trial(length, min(padded, max(length - start, 1)))]


def unseen(model: Any, tokens: int) -> str:
    """What to say of layers that do not approximate inputs of so many tokens, the longest tried; empty if all do."""
    exact = [layer for layer in _layers(model) if layer.start is not None and layer.start > (layer.fixed or tokens)]
    if not exact:
        return ""
    numbers = ranges(layer.number for layer in exact)
    limit = positions.limit(model.config)
    if all(layer.fixed or (limit is not None and limit <= _LONGEST) for layer in exact):
        return f"; exact at every length this model takes: layers {numbers}"
    return (
        f"; not seen where they approximate, from {latest(layer.start for layer in exact)} tokens on: layers {numbers}"
    )


def _layers(model: Any) -> list[_Layer]:
    observed = anatomy(stock_config(model.config), stock_class(type(model))).sites
    fixed = {site.path: site.fixed_length for site in observed}
    return [
        _Layer(site["layer"], model.base_model.get_submodule(path).mechanism.approximates_from(), fixed[path])
        for path, site in model.config.approx["sites"].items()
    ]
