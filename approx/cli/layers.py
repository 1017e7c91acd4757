"""Tables of layers; without --verbose, identical adjacent layers share a line."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from rich.table import Table

from approx.cli.tables import table

# What may differ between the layers of one model, besides their attention.
_KIND = ("counted", "head_dim", "causal", "fixed_positions")


def layer_table(
    parts: Sequence[dict[str, Any]], more: dict[str, Callable[[list[dict[str, Any]]], str]], *, verbose: bool
) -> Table:
    """The mechanism of each layer, or of each group of heads where they differ.

    Args:
        parts: One entry per layer or group of its heads, in order, with `layer`, `heads`, `mechanism` (None is exact),
            `settings` and `path`.
        more: Further columns: heading -> function from the entries of a line to its cell.
        verbose: Show a line for each layer, with its module.
    """
    layers = [list(group) for _, group in groupby(parts, key=lambda part: part["layer"])]

    def alike(layer: list[dict[str, Any]]) -> Any:
        return (
            layer[0]["layer"]
            if verbose
            else [[part.get(key) for key in ("heads", "mechanism", "settings", *_KIND)] for part in layer]
        )

    # Adjacent layers with the same groups of heads share one line per group.
    lines = [list(line) for _, run in groupby(layers, key=alike) for line in zip(*run, strict=True)]
    columns = ["layers", "mechanism", "settings", *more, *(["module"] if verbose else [])]
    rows = [
        [
            _span([part["layer"] for part in line]),
            (line[0]["mechanism"] or "exact") + ("" if line[0]["heads"] == "all" else f" (heads {line[0]['heads']})"),
            settings_text(line[0]["settings"]),
            *(cell(line) for cell in more.values()),
            *([line[0]["path"]] if verbose else []),
        ]
        for line in lines
    ]
    return table(columns, rows)


def settings_text(settings: dict[str, Any]) -> str:
    """Settings as typed on the command line; the mechanism chooses those that are `auto` for each input."""
    return ", ".join(f"{name}={'auto' if value is None else value}" for name, value in sorted(settings.items()))


def _span(layers: list[int]) -> str:
    return str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"
